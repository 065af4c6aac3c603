"""`Programs.verify` over static buffers, for executors that capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from luce_core.contracts import BlockTable, Commit, ForwardBatch, Tap
from luce_core.contracts.staged import ROW_BUCKETS, Bucket, StageBuffers, padded_rows
from luce_core.engine.programs import Programs, make_commit, make_verdicts
from luce_core.model.batch import ALL_ALLOWED, PADDING, WORD_BITS, RowSet, row_places
from luce_core.ops.newest import AHEAD
from luce_core.ops.sampling import MASK_BITS, StepParams
from luce_core.speculation.tree import accept

ALIGNMENT = 16
"""Bytes, of every input on the device: kernels are compiled for what is known of their pointers."""
LEAST_BLOCKS = 8
"""Columns of a block table grow by doubling from here."""


MOVING = ("token", "index", "position", "length")
"""What differs between steps of one row, each behind the one before. Of the n-th, n > 0, "NAME n"."""


@frozen(eq=False)
class Stage:
    """Views of one bucket's buffers: numpy on the host, batches on the device."""

    host: Mapping[str, np.ndarray]
    batch: ForwardBatch
    commit: Commit
    """Of one row per sequence."""
    behind: tuple[ForwardBatch, ...] = ()
    """Of the steps that come behind the first; what differs is named in MOVING."""


def _moved(there: Mapping[str, Tensor], n: int) -> dict[str, Any]:
    return {name: there[f"{name} {n}"] for name in MOVING}


class StaticNumbers:
    """The integers of a step, i64 where named "sees", else i32: views of one buffer here and of one there."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        sizes = {name: int(np.prod(shape)) * (8 if name == "sees" else 4) for name, shape in shapes.items()}
        places = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
        total = sum(places.values())
        self.host = torch.zeros(total, dtype=torch.uint8)
        self.device = torch.zeros(total, dtype=torch.uint8, device=device)
        self.on_host: dict[str, np.ndarray] = {}
        self.there: dict[str, Tensor] = {}
        at = 0
        for name, size in sizes.items():
            kind, shape = (torch.int64 if name == "sees" else torch.int32), shapes[name]
            self.on_host[name] = self.host[at : at + size].view(kind).view(shape).numpy()
            self.there[name] = self.device[at : at + size].view(kind).view(shape)
            at += places[name]


class StagedVerify:
    """Held rows in buckets: (sequences, rows of each, what is sampled with or None, blocks by group, whether
    some are masked, steps). Rows that are lacking are padding.

    Steps that are sampled on the device alone pick within `compute`; one row per sequence is committed there
    too. Others, and those that want log-probabilities, leave logits, and are sampled behind it. All buckets
    leave them in one place: what captured work gives back is kept as long as the capture. Steps of one row
    per sequence remember what they picked, so that the next can be queued before this one is read; several
    such steps, which pick within `compute`, are one bucket's work.
    """

    fetch: tuple[str, ...] = ("picks",)

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.device = torch.device(programs.table.device)
        self._logits = torch.empty(0, 0)

    @property
    def generation(self) -> int:
        """Of the target."""
        return self.programs.generation

    def bucket(self, inputs: Mapping[str, Any]) -> Bucket | None:
        """None where not all rows are wanted, some are decided, or there are too many; where several steps
        cannot pick within.
        """
        rows, steps = inputs["rows"], inputs.get("steps", 1)
        most = max(len(row.tokens) for row in rows)
        if most > ROW_BUCKETS[-1] or not all(map(_ordinary, rows)):
            return None
        count = padded_rows(most)
        params = self.programs.table.step(row.slot for row in rows)
        within = not any(inputs["top"]) and self._stays_on_device(params)
        if steps > 1 and not (within and count == 1):
            return None
        masked = any(row.mask is not None for row in rows)
        blocks = table_sizes(rows, self.programs.least_blocks)
        return len(rows), count, params.flags if within else None, blocks, masked, steps

    def _stays_on_device(self, params: StepParams) -> bool:
        """Whether sampling neither waits nor takes more memory than logits do: always so without flags."""
        check = getattr(self.programs.ops.sample.func, "stays_on_device", None)
        return not params.flags or (check is not None and bool(check(params)))

    def stage(self, bucket: Bucket) -> StageBuffers:
        """One buffer for all of a step's numbers: one copy takes them to the device."""
        num_seqs, count, flags, blocks, masked, steps = bucket
        rows, words = num_seqs * count, -(-count // WORD_BITS)
        if flags is None and self._logits.shape[0] < rows:
            self._logits = torch.empty(rows, self.programs.table.vocab, device=self.device)
        shapes: dict[str, tuple[int, ...]] = {"sees": (rows, words)}
        shapes |= dict.fromkeys(("token", "index", "parent"), (rows,))
        shapes["position"] = (self.programs.axes, rows)
        shapes |= dict.fromkeys(("slot", "length"), (num_seqs,))
        shapes |= {f"{name} {n}": shapes[name] for n in range(1, steps) for name in MOVING}
        shapes |= table_shapes(num_seqs, blocks)
        if masked:
            shapes["mask"] = (rows, -(-self.programs.table.vocab // MASK_BITS))
        numbers = StaticNumbers(shapes, self.device)
        there = numbers.there
        batch = self._batch(there, bucket)
        behind = [evolve(batch, **_moved(there, n)) for n in range(1, steps)]
        one = torch.ones(num_seqs, dtype=torch.int32, device=self.device)
        commit = Commit(torch.zeros(num_seqs, 1, dtype=torch.int32, device=self.device), one)
        stage = Stage(numbers.on_host, batch, commit, tuple(behind))
        return StageBuffers(bucket, numbers.host, numbers.device, stage)

    def _batch(self, there: Mapping[str, Tensor], bucket: Bucket) -> ForwardBatch:
        num_seqs, count, _, blocks, *_ = bucket
        rows = num_seqs * count
        every = torch.arange(rows, dtype=torch.int32, device=self.device)
        programs = self.programs
        taps: dict[Tap, Tensor] = {
            tap: torch.zeros(rows, width, dtype=torch.bfloat16, device=self.device)
            for tap, width in programs.tap_widths.items()
        }
        return ForwardBatch(
            phase="held",
            token=there["token"],
            index=there["index"],
            position=there["position"],
            seq=every // count,
            query_start=torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device) * count,
            slot=there["slot"],
            length=there["length"],
            sure=torch.ones(num_seqs, dtype=torch.int32, device=self.device),
            parent=there["parent"],
            sees=there["sees"],
            table=static_tables(there, blocks),
            wanted=every,
            taps=taps,
            mask=there.get("mask"),
        )

    def fill(self, buffers: StageBuffers, inputs: Mapping[str, Any]) -> None:
        """Every number a step has, padding included."""
        host, (_, count, _, blocks, masked, steps) = buffers.view.host, buffers.bucket
        rows: Sequence[RowSet] = inputs["rows"]
        host["slot"][:] = [row.slot for row in rows]
        host["length"][:] = [row.length for row in rows]
        if count == 1:
            host["token"][:] = [row.tokens[0] for row in rows]
            host["index"][:], host["parent"][:], host["sees"][:] = host["length"], -1, 1
        else:
            padded = [_padded(row, count) for row in rows]
            host["token"][:] = [token for row in padded for token in row.tokens]
            host["index"][:], host["parent"][:], host["sees"][:] = row_places("held", padded)
        host["position"][:] = host["index"]
        for s, row in enumerate(rows):
            if row.positions is not None:
                host["position"][:, s * count : s * count + len(row.tokens)] = row.positions
        fill_tables(host, rows, blocks)
        if masked:
            _fill_masks(host["mask"].view(np.uint32), rows, count)
        for n in range(1, steps):
            host[f"token {n}"][:] = AHEAD
            for name in MOVING[1:]:
                host[f"{name} {n}"][:] = host[name] + n

    def compute(self, buffers: StageBuffers) -> Mapping[str, Tensor]:
        """Forward; with flags: the picks too, i64[steps * rows]; one row each: the commit too."""
        stage = buffers.view
        first = self._compute(stage.batch, stage.commit, buffers.bucket)
        if not stage.behind:
            return first
        others = [self._compute(batch, stage.commit, buffers.bucket) for batch in stage.behind]
        return {"picks": torch.cat([one["picks"] for one in (first, *others)])}

    def _compute(self, batch: ForwardBatch, commit: Commit, bucket: Bucket) -> Mapping[str, Tensor]:
        _, count, flags, *_ = bucket
        backend, ops, table = self.programs.backend, self.programs.ops, self.programs.table
        alive = commit.count
        if count == 1:
            token, alive = ops.newest_tokens(batch.token, batch.slot, table.newest)
            batch = evolve(batch, token=token)
        logits = backend.forward(batch).logits
        if logits is None:
            raise AssertionError("a held batch returned no logits")
        if count == 1:
            backend.commit(batch, Commit(commit.path, alive))
        if flags is None:
            return {"logits": self._logits[: logits.shape[0]].copy_(logits), "alive": alive}
        return {"picks": self._picks(logits, alive, batch, StepParams(table, flags), count)}

    def _picks(
        self, logits: Tensor, alive: Tensor, batch: ForwardBatch, params: StepParams, count: int
    ) -> Tensor:
        ops = self.programs.ops
        picks: Tensor = ops.sample(ops.process_logits(logits, batch, params), batch, params)
        if count > 1:
            return picks
        noted: Tensor = ops.note_picks(picks, alive, batch.slot, params.table.newest, params.counted)
        return noted

    def behind(
        self, buffers: StageBuffers, results: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> Mapping[str, Tensor]:
        """Sampling, where `compute` left logits."""
        if "picks" in results:
            return results
        params = self.programs.table.step(row.slot for row in inputs["rows"])
        given = results["logits"], results["alive"], buffers.view.batch, params, buffers.bucket[1]
        return {**results, "picks": self._picks(*given)}

    def can_follow(self, inputs: Mapping[str, Any]) -> bool:
        """One row per sequence, and sampling that needs no more of a text than the device knows: no mask."""
        rows: Sequence[RowSet] = inputs["rows"]
        table = self.programs.table
        params = table.step(row.slot for row in rows)
        return (
            all(
                len(row.tokens) == 1 and row.mask is None and table.newest.tells_ends(row.slot)
                for row in rows
            )
            and not (self.programs.drafters or any(inputs["top"]))
            and (self._stays_on_device(params) or not params.waits)
        )

    def finish(
        self, buffers: StageBuffers, results: Mapping[str, Tensor], inputs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Accept, commit, report; what `compute` left of it. Verdicts of all steps, the first's first."""
        programs, stage, (_, count, *_, steps) = self.programs, buffers.view, buffers.bucket
        rows, top = [*inputs["rows"]] * steps, [*inputs["top"]] * steps
        picks = results["picks"]
        picked: list[int] = picks.tolist()
        paths = [
            [0]
            if len(row.tokens) == 1
            else accept(row.tokens, _parents(row), picked[s * count : (s + 1) * count], row.sure)
            for s, row in enumerate(rows)
        ]
        commit = stage.commit
        if count > 1:
            commit = make_commit(paths, programs.table.device)
            programs.backend.commit(stage.batch, commit)
        for drafter in programs.drafters:
            drafter.observe(stage.batch, commit)
        logprobs = programs.logprobs(results["logits"], picks, max(top)) if any(top) else None
        starts = range(0, count * len(rows), count)
        verdicts = make_verdicts(paths, starts, picked, logprobs, top)
        programs.count(rows, verdicts, noted=count == 1)
        return {"verdicts": verdicts}


# --- block tables, by group


TableSizes = tuple[tuple[str, int], ...]
"""(group, columns)."""


def table_sizes(rows: Sequence[RowSet], least: int = 1) -> TableSizes:
    """Columns for the tables of these sequences, and not below `least`."""
    return tuple(
        (group, _power(max(least, *(len(row.tables[group].blocks) for row in rows))))
        for group in rows[0].tables
    )


def table_shapes(num_seqs: int, sizes: TableSizes) -> dict[str, tuple[int, ...]]:
    """Of the numbers of the tables."""
    shapes: dict[str, tuple[int, ...]] = {}
    for group, columns in sizes:
        shapes |= {f"block {group}": (num_seqs, columns), f"first {group}": (num_seqs, columns)}
        shapes[f"count {group}"] = (num_seqs,)
    return shapes


def static_tables(there: Mapping[str, Tensor], sizes: TableSizes) -> dict[str, BlockTable]:
    """The tables on the device."""
    return {
        group: BlockTable(there[f"block {group}"], there[f"first {group}"], there[f"count {group}"])
        for group, _ in sizes
    }


def fill_tables(host: Mapping[str, np.ndarray], rows: Sequence[RowSet], sizes: TableSizes) -> None:
    """Write the tables of these sequences."""
    for group, _ in sizes:
        for s, row in enumerate(rows):
            table = row.tables[group]
            used = len(table.blocks)
            host[f"block {group}"][s, :used] = table.blocks
            host[f"first {group}"][s, :used] = table.firsts
            host[f"count {group}"][s] = used


def _fill_masks(host: np.ndarray, rows: Sequence[RowSet], count: int) -> None:
    """host: u32[sequences * count, words]."""
    host[:] = ALL_ALLOWED
    for s, row in enumerate(rows):
        if row.mask is not None:
            host[s * count : s * count + len(row.mask)] = row.mask


def _ordinary(row: RowSet) -> bool:
    return row.sure == 1 and (row.wanted is None or len(row.wanted) == len(row.tokens))


def _parents(row: RowSet) -> Sequence[int]:
    return range(-1, len(row.tokens) - 1) if row.parents is None else row.parents


def _padded(row: RowSet, count: int) -> RowSet:
    """With rows that stand for nothing behind its own."""
    lacking = count - len(row.tokens)
    if not lacking:
        return row
    parents = (*_parents(row), *(PADDING,) * lacking)
    return evolve(row, tokens=[*row.tokens, *(0,) * lacking], parents=parents)


def _power(count: int) -> int:
    """The power of two not below count, and not below LEAST_BLOCKS."""
    return max(LEAST_BLOCKS, 1 << (count - 1).bit_length())
