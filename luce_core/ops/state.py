"""State of sequences, reference: logs of held rows, folds of accepted rows, pages of accepted rows.

A held row changes no committed state. It leaves what a later commit needs: page entries at `length + row`,
slot logs at [slot, row]. A commit takes the accepted rows, root to last, and makes them the new state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from luce_core.contracts import Commit, ForwardBatch, Region, SlotState
from luce_core.ops.namespace import Layer

WINDOW_ELEMENTS = 1 << 25
"""Numbers of gathered windows held at once (128 MiB of f32)."""


def commit_pages(ops: Any, b: ForwardBatch, commit: Commit, regions: Sequence[Region]) -> None:
    """Move the entries of accepted row path[i] of every sequence from length + path[i] to length + i.

    regions: all of one group. Paths rise, so path[i] >= i and a row on its place stays. Of a group with a
    stride, the entries that accepted rows closed come out of the log.
    """
    if not regions:
        return
    if regions[0].stride != 1:
        _commit_closed(b, commit, regions)
        return
    if commit.path.shape[1] <= 1:
        return  # a path begins at row 0, which lies where it belongs
    steps = torch.arange(commit.path.shape[1], device=commit.path.device)
    path = commit.path.long()
    moved = (steps < commit.count[:, None]) & (path != steps)
    seq, step = moved.nonzero(as_tuple=True)
    if seq.numel() == 0:
        return
    length = b.length.long()[seq]
    source = entry_of(b, regions[0], seq, length + path[seq, step])
    target = entry_of(b, regions[0], seq, length + step)
    for region in regions:
        for pages in region.fields.values():
            flat = pages.view(-1, *pages.shape[2:])
            flat[target] = flat[source]


def _commit_closed(b: ForwardBatch, commit: Commit, regions: Sequence[Region]) -> None:
    """Compressed entries that accepted rows closed: from the log into pages."""
    stride = regions[0].stride
    steps = torch.arange(commit.path.shape[1], device=commit.path.device)
    index = b.length.long()[:, None] + steps
    seq, step = ((steps < commit.count[:, None]) & ((index + 1) % stride == 0)).nonzero(as_tuple=True)
    if seq.numel() == 0:
        return
    target = entry_of(b, regions[0], seq, index[seq, step] // stride * stride)
    slot, row = b.slot.long()[seq], commit.path.long()[seq, step]
    for region in regions:
        for name, pages in region.fields.items():
            pages.view(-1, *pages.shape[2:])[target] = region.log[name][slot, row]


def entry_of(b: ForwardBatch, region: Region, seq: Tensor, token: Tensor) -> Tensor:
    """i64[n] flat entry of token index `token` i64[n] of sequence `seq` i64[n] of the batch."""
    table = b.table[region.group]
    used = torch.arange(table.first.shape[1], device=token.device) < table.count[seq][:, None]
    column = ((table.first[seq] <= token[:, None]) & used).sum(1) - 1
    offset = (token - table.first[seq, column]) // region.stride
    return table.block[seq, column].long() * region.block_entries + offset


def commit_slots(ops: Any, b: ForwardBatch, commit: Commit, slots: Sequence[SlotState]) -> None:
    """`commit_slot` of every slot of a model: one call, so that a layer may fold them in one launch."""
    for slot in slots:
        ops.commit_slot(b, commit, slot)


def commit_slot(ops: Any, b: ForwardBatch, commit: Commit, slot: SlotState) -> None:
    """Fold the accepted path's logged rows into the state of every sequence with a count above 0.

    The op named by `slot.fold`: (state [S, ...], log by field [S, P, ...], count i32[S]) -> state [S, ...].
    """
    seq = commit.count.nonzero()[:, 0]
    rows = b.slot.long()[seq]
    path = commit.path.long()[seq].clamp(min=0)  # beyond the count a path may hold anything
    log = {name: field[rows[:, None], path] for name, field in slot.log.items()}
    slot.state[rows] = getattr(ops, slot.fold)(slot.state[rows], log, commit.count[seq]).to(slot.state.dtype)


def shift(ops: Any, state: Tensor, log: Mapping[str, Tensor], count: Tensor) -> Tensor:
    """The fold of windows: append the rows, keep the newest. state [S, n, ...], log one field [S, P, ...].

    count i32[S]: rows of the path that were accepted. -> [S, n, ...]
    """
    (row,) = log.values()
    both = torch.cat((state, row.to(state.dtype)), dim=1)
    newest = count.long()[:, None] + torch.arange(state.shape[1], device=state.device)
    return both[torch.arange(state.shape[0], device=state.device)[:, None], newest]


def write_log(ops: Any, b: ForwardBatch, slot: SlotState, field: str, value: Tensor) -> None:
    """Log value [T, *shape] of every held row at [slot of its sequence, row within its sequence]."""
    seq = b.seq.long()
    row = torch.arange(b.token.shape[0], device=seq.device) - b.query_start.long()[seq]
    slot.log[field][b.slot.long()[seq], row] = value.to(slot.log[field].dtype)


def conv_window(ops: Any, b: ForwardBatch, x: Tensor, weight: Tensor, slot: SlotState) -> Tensor:
    """Causal depthwise convolution along every row's path: y[t] = Σ weight[:, i] · row(t - kernel + 1 + i).

    x [T, C], weight f32[C, kernel]; slot state [slots, kernel - 1, C]: the newest rows, oldest first. prefill
    writes the state, held rows leave themselves in the log's one field; their path goes by `b.parent`.
    """
    kernel = weight.shape[1]
    path = path_windows(b, kernel - 1)
    past = slot.state[b.slot.long()].to(x.dtype)
    rows = torch.cat((past.flatten(0, 1), x))
    size = max(1, WINDOW_ELEMENTS // (kernel * x.shape[1]))
    parts = [torch.einsum("tkc,ck->tc", rows[part], weight) for part in torch.split(path, size)]
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    advance_window(ops, b, x, slot)
    return y


def advance_window(ops: Any, b: ForwardBatch, x: Tensor, slot: SlotState) -> None:
    """What a "shift" slot [slots, n, C] keeps of rows x [T, C]: prefill its newest rows, held the log."""
    if b.phase == "held":
        (field,) = slot.log
        write_log(ops, b, slot, field, x)
        return
    for s, (start, stop) in enumerate(pairwise(b.query_start.tolist())):
        if stop > start:
            state = slot.state[b.slot[s]]
            newest = torch.cat((state, x[max(start, stop - state.shape[0]) : stop].to(state.dtype)))
            slot.state[b.slot[s]] = newest[-state.shape[0] :]


def path_windows(b: ForwardBatch, before: int, rows: Tensor | None = None) -> Tensor:
    """i64[n, before + 1]: places of `rows` (None = all) and of the `before` rows ahead of each on its path.

    Places are those in (`before` rows of state of every sequence, rows of the batch).
    """
    row = torch.arange(b.token.shape[0], device=b.token.device) if rows is None else rows
    return _held_windows(b, before, row) if b.phase == "held" else _chunk_windows(b, before, row)


def _chunk_windows(b: ForwardBatch, before: int, row: Tensor) -> Tensor:
    shift_by = torch.arange(-before, 1, device=row.device)
    seq = b.seq.long()[row]
    since = row - b.query_start.long()[seq]
    back = since[:, None] + shift_by
    state = seq[:, None] * before + before + back
    return torch.where(back >= 0, b.slot.shape[0] * before + row[:, None] + shift_by, state)


def _held_windows(b: ForwardBatch, before: int, row: Tensor) -> Tensor:
    """A window goes up the row's ancestors, then into the state."""
    seq = b.seq.long()[row]
    start = b.query_start.long()[seq]
    states = b.slot.shape[0] * before
    window = []
    above = torch.zeros_like(row)  # steps taken beyond the root
    for _ in range(before + 1):
        window.append(torch.where(above > 0, seq * before + before - above, states + row))
        parent = b.parent.long()[row]
        above = above + (parent < 0)
        row = torch.where(parent < 0, row, start + parent)
    return torch.stack(window[::-1], dim=1)


OPS: Layer = {
    "commit_pages": commit_pages,
    "commit_slots": commit_slots,
    "commit_slot": commit_slot,
    "shift": shift,
    "write_log": write_log,
    "conv_window": conv_window,
}
