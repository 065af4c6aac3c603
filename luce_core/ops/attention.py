"""Paged attention, reference: head norms, RoPE, append, masked softmax over pages, gates.

What a row sees. prefill: every entry of its sequence whose index is at most its own, those of its own chunk
included, since K and V are written before any row reads. held: committed entries (index < length), then the
held rows its `sees` bits name. A window hides entries whose index is at most the row's index - window; of a
held row that index is its place in the text (`b.index`), not the place its entry happens to lie at.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from luce_core.contracts import AttentionSpec, ForwardBatch, Region
from luce_core.errors import PluginError
from luce_core.ops.namespace import Layer

SCORE_ELEMENTS = 1 << 24
"""Scores held at once (64 MiB of f32): longer chunks are worked off in blocks of rows."""


def attention(
    ops: Any,
    b: ForwardBatch,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    region: Region,
    spec: AttentionSpec,
    gate: Tensor | None = None,
    extra: Any = None,
) -> Tensor:
    """q [T, H·D], k [T, Hk·D], v [T, Hk·Dv] before norm and rope -> [T, H·Dv]; see the contract."""
    if extra is not None:
        raise PluginError(
            f"The reference of op 'attention' reads no extra entries (layer {spec.layer}). "
            "Use an op layer that does."
        )
    query = _turned(ops, b, q.view(-1, spec.heads, spec.head_dim), spec.q_norm, spec)
    if k is not None and v is not None:
        key = _turned(ops, b, k.view(-1, spec.kv_heads, spec.head_dim), spec.k_norm, spec)
        value = v.view(-1, spec.kv_heads, spec.value_dim)
        if spec.v_norm is not None:
            value = ops.head_rms(value, spec.v_norm)
        ops.append(b, key, value, region)
    y = ops.attend(b, query, region, spec)
    if spec.inverse_output_rope and spec.rope is not None:
        y = ops.rope(y, b.position, spec.rope, inverse=True)
    y = y.reshape(-1, spec.heads * spec.value_dim)
    if spec.gate == "sigmoid":
        y = ops.mul(y, ops.act(gate, "sigmoid"))
    return y  # type: ignore[no-any-return]


def _turned(ops: Any, b: ForwardBatch, x: Tensor, norm: Any, spec: AttentionSpec) -> Tensor:
    """Head norm, then RoPE."""
    if norm is not None:
        x = ops.head_rms(x, norm)
    return x if spec.rope is None else ops.rope(x, b.position, spec.rope)


# --- writing


def append(ops: Any, b: ForwardBatch, key: Tensor, value: Tensor, region: Region) -> None:
    """Write key [T, Hk, D] and value [T, Hk, Dv] of every row to its entry, rounded to the cache type."""
    k_pages, v_pages = _pages(region)
    for seq in sequences(b, region):
        rows, entries = seq.written(b, region)
        k_pages[entries] = key[rows].to(k_pages.dtype)
        v_pages[entries] = value[rows].to(v_pages.dtype)


def _pages(region: Region) -> tuple[Tensor, Tensor]:
    """Both fields as [num_blocks · block_entries, Hk, D]."""
    if set(region.fields) != {"k", "v"}:
        raise PluginError(
            f"The reference of op 'attention' reads regions with the fields k and v; region {region.name!r} "
            f"has {', '.join(region.fields)}. Use an op layer that reads those."
        )
    k, v = region.fields["k"], region.fields["v"]
    return k.view(-1, *k.shape[2:]), v.view(-1, *v.shape[2:])


# --- reading


def attend(ops: Any, b: ForwardBatch, query: Tensor, region: Region, spec: AttentionSpec) -> Tensor:
    """query [T, H, D] over the pages of `region` -> [T, H, Dv]."""
    k_pages, v_pages = _pages(region)
    out = query.new_zeros(query.shape[0], spec.heads, spec.value_dim)
    for seq in sequences(b, region):
        for rows in seq.row_blocks(spec.heads):
            seen = seq.entries_seen(b, rows, spec.window)
            mask = seq.visible(b, rows, seen, spec.window)
            entries = seq.entry[seen]
            out[rows] = masked_attention(
                ops, query[rows], k_pages[entries].float(), v_pages[entries].float(), mask, spec
            )
    return out


def masked_attention(
    ops: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """q [T, H, D], k [n, Hk, D], v [n, Hk, Dv], mask bool[T, n] (None = all seen) -> [T, H, Dv].

    A row that sees nothing (padding) gives zeros.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)  # [Hk, G·T, D]
    scores = torch.bmm(grouped, k.permute(1, 2, 0)).view(kv_heads, -1, rows, k.shape[0]) * spec.scale
    if spec.softcap:
        scores = ops.softcap(scores, spec.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    highest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    weight = torch.exp(scores - highest)
    total = weight.sum(-1, keepdim=True)
    if spec.sinks is not None:  # where this overflows, the right answer is 0, and x / inf is
        total = total + torch.exp(spec.sinks.view(kv_heads, -1, 1, 1) - highest)
    weight = weight / total.clamp(min=torch.finfo(torch.float32).tiny)
    y = torch.bmm(weight.view(kv_heads, -1, v.shape[0]), v.permute(1, 0, 2))
    return y.view(kv_heads, -1, rows, v.shape[2]).permute(2, 0, 1, 3).reshape(rows, heads, -1)


# --- one sequence of a batch


@frozen(eq=False)
class SequenceView:
    """Where the rows and entries of one sequence of a batch lie. Read from the device: it synchronizes."""

    held: bool
    start: int
    stop: int
    """Rows start..stop of the batch."""
    length: int
    firsts: list[int]
    """First token index of every block, rising."""
    block: int
    """Tokens per block."""
    entry: Tensor
    """i64[n] flat entry of every token the blocks can hold, in order of index."""
    token: Tensor
    """i64[n] index of that token."""

    def place(self, index: int) -> int:
        """Place in `entry` of token `index`. Raises IndexError when no block holds it."""
        column = bisect_right(self.firsts, index) - 1
        offset = index - self.firsts[column] if column >= 0 else self.block
        if offset >= self.block:
            raise IndexError(f"token {index} is in no block of its sequence; blocks begin at {self.firsts}")
        return column * self.block + offset

    def written(self, b: ForwardBatch, region: Region) -> tuple[slice | Tensor, Tensor]:
        """Rows that write, and the entries they write to."""
        rows: slice | Tensor = slice(self.start, self.stop)
        if self.held:
            first, count = self.length, self.stop - self.start
            padding = (b.parent[rows] == -2).tolist()
            if any(padding):
                kept = [j for j in range(count) if not padding[j]]
                places = [self.place(first + j) for j in kept]
                return torch.tensor([self.start + j for j in kept]), self.entry[places]
        else:
            first, count = int(b.index[self.start]), self.stop - self.start
        low, high = self.place(first), self.place(first + count - 1)
        if high - low != count - 1:
            raise IndexError(f"tokens {first}..{first + count - 1} are not in adjacent blocks: {self.firsts}")
        return rows, self.entry[low : high + 1]

    def row_blocks(self, heads: int) -> Iterator[slice]:
        """Rows in blocks small enough that their scores fit SCORE_ELEMENTS."""
        size = max(1, SCORE_ELEMENTS // max(1, heads * self.entry.shape[0]))
        for start in range(self.start, self.stop, size):
            yield slice(start, min(start + size, self.stop))

    def entries_seen(self, b: ForwardBatch, rows: slice, window: int | None) -> slice:
        """A range of places that holds all that any of `rows` sees."""
        index = b.index[rows]
        if self.held:
            end = self.length + self.stop - self.start
        elif b.span is not None:
            end = int(b.index[self.stop - 1]) + 1
        else:
            end = int(index.max()) + 1
        begin = 0 if window is None else int(index.min()) - window + 1
        # A held row's entry lies at length + row, never before its index: nothing seen is cut off here.
        return slice(self._count_below(begin), self._count_below(end))

    def _count_below(self, index: int) -> int:
        """How many places hold a token index below `index`."""
        column = bisect_left(self.firsts, index) - 1
        return 0 if column < 0 else column * self.block + min(self.block, index - self.firsts[column])

    def visible(self, b: ForwardBatch, rows: slice, seen: slice, window: int | None) -> Tensor | None:
        """bool[rows, places]; None where one row sees all of them."""
        token = self.token[seen]
        index = b.index[rows].long()[:, None]
        if not self.held:
            if rows.stop - rows.start == 1 and b.span is None:
                return None
            mask = token <= index
            if b.span is not None:
                mask = mask | self._same_span(b, b.span, rows, token)
            return mask if window is None else mask & (token > index - window)
        if rows.stop - rows.start == 1 and self.stop - self.start == 1 and not self._blind(b):
            return None
        committed = token < self.length
        row = (token - self.length).clamp(0, self.stop - self.start - 1)
        bits = (b.sees[rows][:, row >> 6] >> (row & 63)) & 1
        mask = committed | (bits != 0)
        if window is None:
            return mask
        place = torch.where(committed, token, b.index[self.start : self.stop].long()[row])
        return mask & (place > index - window)

    def _blind(self, b: ForwardBatch) -> bool:
        """Whether the only row does not see itself: padding."""
        return int(b.sees[self.start, 0]) & 1 == 0

    def _same_span(self, b: ForwardBatch, span: Tensor, rows: slice, token: Tensor) -> Tensor:
        """bool[rows, places]: a row of the same bidirectional span."""
        own = span[rows].long()[:, None]
        first = int(b.index[self.start])
        row = token - first
        inside = (row >= 0) & (row < self.stop - self.start)
        theirs = span[self.start : self.stop].long()[row.clamp(0, self.stop - self.start - 1)]
        return inside & (own >= 0) & (theirs == own)


def sequences(b: ForwardBatch, region: Region) -> Iterator[SequenceView]:
    """The sequences of a batch that have rows, with their entries in the group of `region`."""
    table = b.table[region.group]
    bounds = b.query_start.tolist()
    lengths, counts = b.length.tolist(), table.count.tolist()
    block = region.block_entries * region.stride
    if region.stride != 1:
        raise PluginError(
            f"The reference of op 'attention' reads one entry per token; region {region.name!r} has one per "
            f"{region.stride}."
        )
    within = torch.arange(block, device=table.block.device)
    for s, count in enumerate(counts):
        if bounds[s] == bounds[s + 1]:
            continue
        blocks, first = table.block[s, :count], table.first[s, :count]
        yield SequenceView(
            held=b.phase == "held",
            start=bounds[s],
            stop=bounds[s + 1],
            length=lengths[s],
            firsts=first.tolist(),
            block=block,
            entry=(blocks[:, None] * block + within).flatten(),
            token=(first[:, None] + within).flatten(),
        )


OPS: Layer = {"attention": attention, "append": append, "attend": attend}
