"""From host rows to a `ForwardBatch`. On the path of every step: cheap for one sequence with one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from attrs import Factory, frozen
from torch import Tensor

from luce_core.contracts import BlockTable, ForwardBatch, Round, SeqTable, Tap, tables_of

WORD_BITS = 64
WORDS_ALIGNED = 4
"""Numbers of 4 bytes that 16 bytes hold."""
ALL_ALLOWED = 0xFFFFFFFF
"""A word of a mask in which every token may be picked."""
PADDING = -2
"""`parent` of a row that stands for nothing."""


@frozen(eq=False)
class RowSet:
    """(host) The rows of one sequence in a batch."""

    slot: int
    length: int
    """Committed tokens; the first row's index."""
    tokens: Sequence[int]
    tables: Mapping[str, SeqTable]
    """By group name, without the model's."""
    sure: int = 1
    """held: decided rows, a chain; candidates follow."""
    parents: Sequence[int] | None = None
    """held: row within the sequence, -1 root, -2 padding, per row; None = one chain."""
    wanted: Sequence[int] | None = None
    """Rows whose logits are wanted; None = all when held, none in prefill."""
    positions: Sequence[Sequence[int]] | None = None
    """RoPE positions [axes][rows]; None = the index on every axis."""
    embeds: Sequence[tuple[int, Tensor]] = ()
    """Rows that take embeddings in place of their token's: (place of the first, f32[n, E])."""
    mask: np.ndarray | None = None
    """held: u32[wanted rows, (V + 31) // 32], see `ForwardBatch.mask`; None = every token may be picked."""


def make_batch(
    phase: Literal["held", "prefill"],
    rows: Sequence[RowSet],
    *,
    axes: int = 1,
    device: str = "cpu",
    taps: Mapping[Tap, Tensor] | None = None,
    least_blocks: int = 1,
) -> ForwardBatch:
    """The batch of these rows. Its tensors are its own, but for constants that one-row batches share.

    least_blocks: columns that tables have at least.
    """
    if phase == "held" and len(rows) == 1 and len(rows[0].tokens) == 1 and _plain(rows[0]):
        return _single_row(rows[0], axes, device, taps, least_blocks)
    counts = [len(row.tokens) for row in rows]
    starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    index, parents, sees = row_places(phase, rows)
    tensor = _Tensors(device)
    token = [token for row in rows for token in row.tokens]
    index_tensor = tensor.i32(index)
    embeds, embed_rows = _embeds(rows, starts.tolist(), tensor)
    return ForwardBatch(
        phase=phase,
        token=tensor.i32(token),
        index=index_tensor,
        position=_positions(rows, index_tensor, axes, tensor),
        seq=tensor.i32(np.repeat(np.arange(len(rows)), counts)),
        query_start=tensor.i32(starts),
        slot=tensor.i32([row.slot for row in rows]),
        length=tensor.i32([row.length for row in rows]),
        sure=tensor.i32([row.sure if phase == "held" else len(row.tokens) for row in rows]),
        parent=tensor.i32(parents),
        sees=tensor.i64(sees),
        table=make_tables([row.tables for row in rows], device, least_blocks),
        wanted=tensor.i32(_wanted(phase, rows, starts.tolist())),
        taps=taps or {},
        embeds=embeds,
        embed_rows=embed_rows,
        mask=_mask(rows, tensor),
    )


def make_tables(
    rows: Sequence[Mapping[str, SeqTable]], device: str = "cpu", least_blocks: int = 1
) -> dict[str, BlockTable]:
    """The block tables of these sequences, by the names of the first's. least_blocks: as of `make_batch`."""
    tensor, names = _Tensors(device), rows[0] if rows else ()
    return {key: _block_table([row[key] for row in rows], tensor, least_blocks) for key in names}


def chain_batch(round: Round, tokens: Tensor, owner: str, *, axes: int = 1) -> ForwardBatch:
    """A held batch for the state of `owner`, in a drafter's `propose`: one chain behind each sequence.

    tokens: (dev) i32[S, n], the anchor first; logits are wanted of every row. Rows beyond a sequence's room
    are padding. Does not synchronize.
    """
    count, rows = tokens.shape
    place = torch.arange(rows, dtype=torch.int32, device=tokens.device)
    index = (round.length[:, None] + place).reshape(-1)
    position = index if round.shift is None else index + round.shift.repeat_interleave(rows)
    padding = (place > round.room[:, None]).reshape(-1)
    bits = torch.zeros(rows, -(-rows // WORD_BITS), dtype=torch.int64)
    for row in range(rows):
        bits[row : rows, row // WORD_BITS] |= 1 << row % WORD_BITS if row % WORD_BITS < 63 else -(1 << 63)
    sees = bits.to(tokens.device).repeat(count, 1).masked_fill(padding[:, None], 0)
    every = torch.arange(count * rows, dtype=torch.int32, device=tokens.device)
    return ForwardBatch(
        phase="held",
        token=tokens.reshape(-1),
        index=index,
        position=position.expand(axes, -1),
        seq=every // rows,
        query_start=torch.arange(count + 1, dtype=torch.int32, device=tokens.device) * rows,
        slot=round.slot,
        length=round.length,
        sure=torch.ones_like(round.slot),
        parent=(place - 1).repeat(count).masked_fill(padding, PADDING),
        sees=sees,
        table=tables_of(round.table, owner),
        wanted=every,
    )


# --- one decoded row, the common case


def _plain(row: RowSet) -> bool:
    return (
        row.positions is None
        and (row.parents is None or row.parents[0] == -1)
        and (row.wanted is None or len(row.wanted) == 1)
    )


@frozen(eq=False)
class _Constants:
    """What is the same in every batch of one sequence and one row."""

    zero: Tensor = Factory(lambda: torch.zeros(1, dtype=torch.int32))
    one: Tensor = Factory(lambda: torch.ones(1, dtype=torch.int32))
    bounds: Tensor = Factory(lambda: torch.tensor([0, 1], dtype=torch.int32))
    root: Tensor = Factory(lambda: torch.tensor([-1], dtype=torch.int32))
    itself: Tensor = Factory(lambda: torch.ones(1, 1, dtype=torch.int64))


_CPU_CONSTANTS = _Constants()


def _single_row(
    row: RowSet, axes: int, device: str, taps: Mapping[Tap, Tensor] | None, least_blocks: int
) -> ForwardBatch:
    tensor = _Tensors(device)
    same = _CPU_CONSTANTS
    numbers = tensor.i32([row.tokens[0], row.length, row.slot])
    token, index, slot = numbers[:1], numbers[1:2], numbers[2:]
    return ForwardBatch(
        phase="held",
        token=token,
        index=index,
        position=index.expand(axes, 1),
        seq=tensor.here(same.zero),
        query_start=tensor.here(same.bounds),
        slot=slot,
        length=index,
        sure=tensor.here(same.one),
        parent=tensor.here(same.root),
        sees=tensor.here(same.itself),
        table={group: _block_table([table], tensor, least_blocks) for group, table in row.tables.items()},
        wanted=tensor.here(same.zero),
        taps=taps or {},
        mask=_mask([row], tensor),
    )


# --- pieces


class _Tensors:
    """Makes tensors on one device."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.on_cpu = device == "cpu"

    def here(self, tensor: Tensor) -> Tensor:
        return tensor if self.on_cpu else tensor.to(self.device)

    def i32(self, values: Sequence[int] | Sequence[Sequence[int]] | np.ndarray) -> Tensor:
        return self.here(torch.from_numpy(np.array(values, np.int32)))

    def i64(self, values: np.ndarray) -> Tensor:
        return self.here(torch.from_numpy(values))


def row_places(
    phase: Literal["held", "prefill"], rows: Sequence[RowSet]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """index i32[T], parent i32[T], sees i64[T, words]."""
    if phase == "prefill":
        index = np.concatenate([np.arange(row.length, row.length + len(row.tokens)) for row in rows])
        chain = np.concatenate([np.arange(-1, len(row.tokens) - 1) for row in rows])
        return index, chain, np.zeros((len(index), 0), np.int64)
    most = max(len(row.tokens) for row in rows)
    words = -(-most // WORD_BITS)
    indexes: list[int] = []
    parents: list[int] = []
    bits: list[bytes] = []
    for row in rows:
        tree = range(-1, len(row.tokens) - 1) if row.parents is None else row.parents
        above: list[int] = []
        for place, parent in enumerate(tree):
            if not -2 <= parent < place:
                raise ValueError(f"row {place} has the parent {parent}; rows follow parents: {list(tree)}")
            own = 1 << place
            above.append(0 if parent == PADDING else own | (above[parent] if parent >= 0 else 0))
            indexes.append(row.length + above[-1].bit_count() - 1 if above[-1] else row.length)
            bits.append(above[-1].to_bytes(8 * words, "little"))
        parents += tree
    sees = np.frombuffer(bytearray(b"".join(bits)), "<i8").reshape(len(parents), words)
    return np.array(indexes), np.array(parents), sees


def _positions(rows: Sequence[RowSet], index: Tensor, axes: int, tensor: _Tensors) -> Tensor:
    if all(row.positions is None for row in rows):
        return index.expand(axes, -1)
    columns = []
    for row in rows:
        own = range(row.length, row.length + len(row.tokens))
        columns.append(np.array([own] * axes if row.positions is None else row.positions))
    return tensor.i32(np.concatenate(columns, axis=1))


def _embeds(
    rows: Sequence[RowSet], starts: list[int], tensor: _Tensors
) -> tuple[Tensor | None, Tensor | None]:
    given = [(start + at, one) for row, start in zip(rows, starts, strict=False) for at, one in row.embeds]
    if not given:
        return None, None
    places = np.concatenate([np.arange(at, at + one.shape[0]) for at, one in given])
    return tensor.here(torch.cat([one for _, one in given])), tensor.i32(places)


def _mask(rows: Sequence[RowSet], tensor: _Tensors) -> Tensor | None:
    words = next((row.mask.shape[1] for row in rows if row.mask is not None), None)
    if words is None:
        return None
    every = np.concatenate([_words(row, words) for row in rows])
    return tensor.i32(every.view(np.int32))


def _words(row: RowSet, words: int) -> np.ndarray:
    if row.mask is not None:
        return row.mask
    count = len(row.tokens if row.wanted is None else row.wanted)
    return np.full((count, words), ALL_ALLOWED, np.uint32)


def _block_table(tables: Sequence[SeqTable], tensor: _Tensors, least: int) -> BlockTable:
    """One copy to the device for both halves. The second begins where kernels may take 16 bytes for granted,
    as they may of a tensor of its own: else each of them would be there twice.
    """
    counts = [len(table.blocks) for table in tables]
    seqs, columns = len(tables), max(least, *counts)
    words = -(-seqs * columns // WORDS_ALIGNED) * WORDS_ALIGNED
    if seqs == 1:  # of every token: no arrays that are filled step by step
        halves = (tables[0].blocks, tables[0].firsts)
        if words == counts[0]:
            both = tensor.i32(halves)
            return BlockTable(block=both[:1], first=both[1:], count=tensor.i32(counts))
        filler = (0,) * (words - counts[0])
        both = tensor.i32([(*half, *filler) for half in halves])
        return BlockTable(block=both[:1, :columns], first=both[1:, :columns], count=tensor.i32(counts))
    both_host = np.zeros((2, words), np.int32)
    block, first = (half[: seqs * columns].reshape(seqs, columns) for half in both_host)
    for s, table in enumerate(tables):
        block[s, : counts[s]] = table.blocks
        first[s, : counts[s]] = table.firsts
    both = tensor.here(torch.from_numpy(both_host))
    block_there, first_there = (half[: seqs * columns].view(seqs, columns) for half in both)
    return BlockTable(block=block_there, first=first_there, count=tensor.i32(counts))


def _wanted(phase: str, rows: Sequence[RowSet], starts: list[int]) -> list[int]:
    wanted: list[int] = []
    for row, start in zip(rows, starts, strict=False):
        chosen = row.wanted
        if chosen is None:
            chosen = range(len(row.tokens)) if phase == "held" else ()
        wanted += [start + place for place in chosen]
    return wanted
