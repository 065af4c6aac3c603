"""Where the rows of a batch and the entries they read lie: what attention and selection walk.

What a row sees. prefill: every entry of its sequence whose index is at most its own, those of its own
chunk included, since K and V are written before any row reads. held: committed entries (index < length),
then the held rows its `sees` bits name. A window hides entries whose index is at most the row's index -
window; of a held row that index is its place in the text (`b.index`), not the place its entry happens to
lie at.

Compressed entries: a row at index t sees entry w where w < (t + 1) // stride, so also the one it closes
itself. Held, those closed before `length` lie in pages, later ones in the region's log, at the row that
closed them (stride 1: in pages, at length + row): seen by that row and its descendants.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import torch
from attrs import frozen
from torch import Tensor

from luce_core.contracts import ForwardBatch, Region
from luce_core.errors import PluginError

SCORE_ELEMENTS = 1 << 24
"""Scores held at once (64 MiB of f32): longer chunks are worked off in blocks of rows."""


def row_blocks(rows: SequenceRows, elements_per_row: int) -> Iterator[slice]:
    """Rows in blocks of at most SCORE_ELEMENTS elements."""
    size = max(1, SCORE_ELEMENTS // max(1, elements_per_row))
    for start in range(rows.start, rows.stop, size):
        yield slice(start, min(start + size, rows.stop))


def sequence_rows(b: ForwardBatch) -> Iterator[SequenceRows]:
    """The sequences of a batch that have rows."""
    bounds, lengths = b.query_start.tolist(), b.length.tolist()
    for s, length in enumerate(lengths):
        if bounds[s] < bounds[s + 1]:
            yield SequenceRows(
                number=s, held=b.phase == "held", start=bounds[s], stop=bounds[s + 1], length=length
            )


@frozen(eq=False, kw_only=True)
class SequenceRows:
    """The rows of one sequence of a batch. Read from the device: it synchronizes."""

    number: int
    """Of the sequence, in the batch."""
    held: bool
    start: int
    stop: int
    """Rows start..stop of the batch."""
    length: int


@frozen(eq=False, kw_only=True)
class SequenceView(SequenceRows):
    """And where its entries lie, in a group with one entry per token."""

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
                # A sequence may have nothing but padding; an empty list would be a tensor of floats.
                return torch.tensor([self.start + j for j in kept], dtype=torch.int64), self.entry[places]
        else:
            first, count = int(b.index[self.start]), self.stop - self.start
        low, high = self.place(first), self.place(first + count - 1)
        if high - low != count - 1:
            raise IndexError(f"tokens {first}..{first + count - 1} are not in adjacent blocks: {self.firsts}")
        return rows, self.entry[low : high + 1]

    def row_blocks(self, heads: int, more: int = 0) -> Iterator[slice]:
        """Rows in blocks small enough that their scores, and `more` numbers per row, fit SCORE_ELEMENTS."""
        return row_blocks(self, heads * self.entry.shape[0] + more)

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
        return mask if window is None else mask & (self.index_of(b, seen) > index - window)

    def index_of(self, b: ForwardBatch, seen: slice) -> Tensor:
        """i64[places] index in the text: an entry of a held row lies elsewhere, at length + row."""
        token = self.token[seen]
        if not self.held:
            return token
        row = (token - self.length).clamp(0, self.stop - self.start - 1)
        return torch.where(token < self.length, token, b.index[self.start : self.stop].long()[row])

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
    counts = table.count.tolist()
    block = region.block_entries * region.stride
    if region.stride != 1:
        raise PluginError(
            f"The reference of op 'attention' reads one entry per token; region {region.name!r} has one per "
            f"{region.stride}."
        )
    within = torch.arange(block, device=table.block.device)
    for rows in sequence_rows(b):
        s, count = rows.number, counts[rows.number]
        blocks, first = table.block[s, :count], table.first[s, :count]
        yield SequenceView(
            number=s,
            held=rows.held,
            start=rows.start,
            stop=rows.stop,
            length=rows.length,
            firsts=first.tolist(),
            block=block,
            entry=(blocks[:, None] * block + within).flatten(),
            token=(first[:, None] + within).flatten(),
        )


# --- compressed entries


@frozen(eq=False)
class ClosedEntries:
    """Compressed entries of one sequence: committed ones by number, then those its held rows closed."""

    pages: Tensor
    """[N, D] of all sequences."""
    entry: Tensor
    """i64 where the first of them lie in `pages`: the committed ones; stride 1: all."""
    held: Tensor
    """[m, D] the others, out of the log."""
    number: Tensor
    """i64[n]."""
    committed: int
    """Number k has place k below it."""
    closer: Tensor
    """i64[n - committed] row of the batch, from the sequence's first, that closed each of the others."""
    stride: int

    def values(self) -> Tensor:
        """f32[n, D]: all of them."""
        return torch.cat((self.pages[self.entry], self.held)).float()

    def picked(self, place: Tensor) -> Tensor:
        """f32[rows, k, D] of places i64[rows, k]; anything where there is none, -1."""
        first, place = self.entry.shape[0], place.clamp(min=0)
        if not self.number.numel():
            return torch.zeros(*place.shape, self.pages.shape[1], device=self.pages.device)
        if not self.held.shape[0]:
            return self.pages[self.entry[place]].float()
        late = self.held[(place - first).clamp(min=0)]
        if first:
            early = self.pages[self.entry[place.clamp(max=first - 1)]]
            late = torch.where((place < first)[:, :, None], early, late)
        return late.float()

    def visible(self, b: ForwardBatch, rows: slice) -> Tensor:
        """bool[rows, n]."""
        past = self.number[: self.committed] < (b.index[rows].long()[:, None] + 1) // self.stride
        return torch.cat((past, self._sees(b, rows)), 1)

    def places(self, b: ForwardBatch, rows: slice, numbers: Tensor) -> Tensor:
        """i64[rows, k] place of entry numbers i32[rows, k] as each row sees them, -1 where there is none."""
        numbers = numbers.long()
        place = torch.where(numbers < self.committed, numbers, -1)
        if self.closer.numel():
            named = numbers[:, :, None] == self.number[self.committed :]
            found, which = (named & self._sees(b, rows)[:, None]).to(torch.int8).max(-1)
            place = torch.where(found > 0, self.committed + which, place)
        return place

    def _sees(self, b: ForwardBatch, rows: slice) -> Tensor:
        """bool[rows, n - committed]."""
        if not self.closer.numel():
            return torch.zeros(rows.stop - rows.start, 0, dtype=torch.bool, device=self.number.device)
        return (b.sees[rows][:, self.closer >> 6] >> (self.closer & 63)) & 1 != 0


def closed_entries(b: ForwardBatch, rows: SequenceRows, region: Region) -> ClosedEntries:
    """All entries any of `rows` may see. Pages are read where the text was before a held batch."""
    pages = only_field(region)
    stride, width = region.stride, pages.shape[-1]
    end = rows.length if rows.held else int(b.index[rows.stop - 1]) + 1
    committed = end // stride
    number = torch.arange(committed, device=pages.device)
    flat, closer = pages.view(-1, width), number[:0]
    held = flat[:0]
    if not rows.held:
        entry = entry_places(b, rows, region, committed)
        return ClosedEntries(flat, entry, held, number, committed, closer, stride)
    index = b.index[rows.start : rows.stop].long()
    closer = (((index + 1) % stride == 0) & (b.parent[rows.start : rows.stop] != -2)).nonzero()[:, 0]
    if stride == 1:
        last = int(closer[-1]) + 1 if closer.numel() else 0
        entry = entry_places(b, rows, region, committed + last)
        entry = torch.cat((entry[:committed], entry[committed + closer]))
    else:
        (log,) = region.log.values()
        entry = entry_places(b, rows, region, committed)
        held = log[int(b.slot[rows.number]), closer].reshape(-1, width)
    number = torch.cat((number, index[closer] // stride))
    return ClosedEntries(flat, entry, held, number, committed, closer, stride)


def entry_places(b: ForwardBatch, rows: SequenceRows, region: Region, count: int) -> Tensor:
    """i64[count] flat entries 0..count of a sequence. Raises IndexError where no block holds one."""
    table = b.table[region.group]
    used = int(table.count[rows.number])
    first = table.first[rows.number, :used].tolist()
    tokens = region.block_entries * region.stride
    if first != list(range(0, used * tokens, tokens)) or count > used * region.block_entries:
        raise IndexError(
            f"entries 0..{count} of region {region.name!r} are not all in blocks; they begin at {first}"
        )
    block = table.block[rows.number, :used].long()
    within = torch.arange(region.block_entries, device=block.device)
    return (block[:, None] * region.block_entries + within).flatten()[:count]


def only_field(region: Region) -> Tensor:
    """[num_blocks, block_entries, ..., D] of a region of compressed entries."""
    if len(region.fields) != 1:
        raise PluginError(
            f"Region {region.name!r} has the fields {', '.join(region.fields)}; compressed entries are one "
            "field."
        )
    if region.codecs:
        (how,) = region.codecs.values()
        kept = f"Region {region.name!r} is kept in {how.codec.name}"
        raise PluginError(f"{kept}; compressed entries are numbers.")
    (pages,) = region.fields.values()
    return pages
