"""Ops that apply accepted rows: `commit_slots`, `commit_slot`, `commit_pages`. One launch for all layers
alike.

What was accepted is read on the device. Tables of where tensors lie are made once for a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from luce_backend_triton import state_kernels as kernels
from luce_backend_triton.attention import overlaps
from luce_core.contracts import Commit, ForwardBatch, Region, SlotState
from luce_core.ops import state as reference

COLS = 1024
FOLD_COLS = 64
"""Columns of a state one program folds."""


@lru_cache(maxsize=256)
def _table(places: tuple[int, ...], device: torch.device) -> Tensor:
    """i64 numbers on the device."""
    return torch.tensor(places, dtype=torch.int64, device=device)


def _from_first(tensors: Sequence[Tensor]) -> Tensor:
    """How many 4-byte numbers each tensor lies behind the first."""
    base = tensors[0].data_ptr()
    return _table(tuple((tensor.data_ptr() - base) // 4 for tensor in tensors), tensors[0].device)


def _lies_well(tensor: Tensor) -> bool:
    """Whether its place can be named as `_from_first` does: kernels take 16 bytes for granted."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def _kind(slot: SlotState) -> tuple[Any, ...] | None:
    """Slots of one kind fold in one launch. None: the reference folds it."""
    tensors = (slot.state, *slot.log.values())
    if any(t.dtype is not torch.float32 or not _lies_well(t) for t in tensors):
        return None
    if slot.fold == "delta_fold" or (slot.fold == "shift" and slot.state.dim() == 3):
        return (slot.fold, *(tuple(t.shape) for t in tensors))
    return None


def commit_slots(ops: Any, b: ForwardBatch, commit: Commit, slots: Sequence[SlotState]) -> None:
    """Fold the accepted path's logged rows into the state of every slot."""
    kinds: dict[tuple[Any, ...], list[SlotState]] = {}
    for slot in slots:
        kind = _kind(slot)
        if kind is None:
            reference.commit_slot(ops, b, commit, slot)
        else:
            kinds.setdefault(kind, []).append(slot)
    for kind, alike in kinds.items():
        (_fold if kind[0] == "delta_fold" else _shift)(b, commit, alike)


def commit_slot(ops: Any, b: ForwardBatch, commit: Commit, slot: SlotState) -> None:
    """The same of one slot."""
    commit_slots(ops, b, commit, (slot,))


def _shift(b: ForwardBatch, commit: Commit, slots: Sequence[SlotState]) -> None:
    logs = [next(iter(slot.log.values())) for slot in slots]
    _, rows, width = slots[0].state.shape
    overlap = overlaps(slots[0].state.device)
    grid = (len(slots), commit.count.shape[0], -(-width // COLS))
    kernels.shift_rows[grid](
        slots[0].state, logs[0], _from_first([slot.state for slot in slots]), _from_first(logs), b.slot,
        commit.path, commit.count, commit.path.stride(0), logs[0].shape[1], width, ROWS=rows, COLS=COLS,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip


def _fold(b: ForwardBatch, commit: Commit, slots: Sequence[SlotState]) -> None:
    heads, key_dim, value_dim = slots[0].state.shape[1:]
    logs, overlap = slots[0].log, overlaps(slots[0].state.device)
    cols = min(FOLD_COLS, triton.next_power_of_2(value_dim))
    names = ("k", "u", "g")
    tables = [_from_first([slot.state for slot in slots])]
    tables += [_from_first([slot.log[name] for slot in slots]) for name in names]
    kernels.fold[(len(slots) * heads, commit.count.shape[0], -(-value_dim // cols))](
        slots[0].state, *(logs[name] for name in names), *tables, b.slot, commit.path, commit.count,
        commit.path.stride(0), logs["k"].shape[1], KH=logs["k"].shape[2], VH=heads, DK=key_dim, DV=value_dim,
        DKP=triton.next_power_of_2(key_dim), DVB=cols, KDA=logs["g"].dim() == 4, num_warps=4,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip


def commit_pages(ops: Any, b: ForwardBatch, commit: Commit, regions: Sequence[Region]) -> None:
    """Move the entries of accepted row path[i] of every sequence from length + path[i] to length + i."""
    if not regions or (regions[0].stride == 1 and commit.path.shape[1] <= 1):
        return  # a path begins at row 0, which lies where it belongs
    pages = [page for region in regions for page in region.fields.values()]
    widths = [page[0, 0].numel() * page.element_size() for page in pages]
    if regions[0].stride != 1 or any(width % 4 for width in widths) or not all(map(_lies_well, pages)):
        reference.commit_pages(ops, b, commit, regions)
        return
    table, overlap = b.table[regions[0].group], overlaps(pages[0].device)
    for width in sorted(set(widths)):
        alike = [page for page, its in zip(pages, widths, strict=True) if its == width]
        kernels.move_entries[(len(alike), commit.count.shape[0], -(-width // 4 // COLS))](
            alike[0].view(torch.int32), _from_first(alike), b.length, commit.path, commit.count,
            table.block, table.first, table.count,
            commit.path.stride(0), table.block.stride(0), width // 4, COLS=COLS,
            BLOCK=regions[0].block_entries, OVERLAP=overlap, launch_pdl=overlap,
        )  # fmt: skip


__all__ = ["commit_pages", "commit_slot", "commit_slots"]
