"""Allocated state: regions and slots of a model, and the store that moves their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from luce_core.cache.layout import (
    alive_rows,
    block_bytes,
    coded,
    misfits,
    resolve_dtype,
    slot_bytes,
    snapshot_bytes,
    state_bytes,
    stored_shape,
)
from luce_core.contracts import Field, Group, Region, SlotState, StateLayout, StateSizes
from luce_core.errors import CapacityError, EngineError, UsageError
from luce_core.model.snapshots import SavedSlot, SlotSaver

DTYPES: Mapping[str, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "u8": torch.uint8,
}


class ModelState:
    """The state of all sequences of one model, zero at first. Addresses change only in `park`, `unpark`."""

    def __init__(self, model: str, layout: StateLayout, sizes: StateSizes, device: str) -> None:
        self.model = model
        self.layout = layout
        self.sizes = sizes
        self.device = device
        self.regions: dict[str, Region] = {}
        self.slots: dict[str, SlotState] = {}
        self.by_group: dict[str, tuple[Region, ...]] = {}
        if wrong := misfits(layout, sizes):
            raise UsageError(
                f"The state of model {model!r} does not go into a cache of {sizes.k_type} and "
                f"{sizes.v_type}: {'; '.join(wrong)}. Choose another cache type."
            )
        self._allocate(device)
        self._check_bytes()

    def region(self, name: str) -> Region:
        """The allocated Pages called `name` in the layout."""
        return self.regions[name]

    def slot(self, name: str) -> SlotState:
        """The allocated Slot called `name` in the layout."""
        return self.slots[name]

    def tensors(self) -> list[Tensor]:
        """Every tensor of the state, in layout order."""
        return [
            *(t for region in self.regions.values() for t in (*region.fields.values(), *region.log.values())),
            *(t for slot in self.slots.values() for t in (slot.state, *slot.log.values())),
        ]

    def park(self) -> None:
        """Move to host memory; on the CPU there is nothing to give back."""
        if torch.device(self.device).type != "cpu":
            self._move("cpu")

    def unpark(self) -> None:
        """Move back to the device, at new addresses."""
        if torch.device(self.device).type != "cpu":
            self._move(self.device)

    def _move(self, device: str) -> None:
        saved = self.tensors()
        self._allocate(device)
        for target, source in zip(self.tensors(), saved, strict=True):
            target.copy_(source)

    def _allocate(self, device: str) -> None:
        groups = {group.name: group for group in self.layout.groups}
        for pages in self.layout.pages:
            group = groups[pages.group]
            entries = self.sizes.block_tokens // group.stride
            shape = (self.sizes.num_blocks[f"{self.model}/{group.name}"], entries)
            fields = {name: self._zeros(shape, field, device) for name, field in pages.fields.items()}
            rows = (self.sizes.num_slots, self.sizes.max_held_rows)
            logged = pages.fields if group.stride > 1 else {}
            log = {name: self._zeros(rows, field, device) for name, field in logged.items()}
            codecs = {name: how for name, field in pages.fields.items() if (how := coded(field, self.sizes))}
            self.regions[pages.name] = Region(
                pages.name, group.name, fields, entries, group.stride, group.window, log, codecs
            )
        for slot in self.layout.slots:
            rows = (self.sizes.num_slots, self.sizes.max_held_rows)
            log = {name: self._zeros(rows, field, device) for name, field in slot.log.items()}
            state = self._zeros(rows[:1], slot.state, device)
            self.slots[slot.name] = SlotState(slot.name, state, log, slot.fold, slot.period)
        for name in groups:
            self.by_group[name] = tuple(r for r in self.regions.values() if r.group == name)

    def _zeros(self, leading: tuple[int, ...], field: Field, device: str) -> Tensor:
        dtype = DTYPES.get(resolve_dtype(field.dtype, self.sizes), torch.uint8)
        try:
            return zeros((*leading, *stored_shape(field, self.sizes)), dtype, device)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "memory" in str(error):
                raise CapacityError(
                    f"State of model {self.model!r} does not fit {device!r}: {error}. Ask for a shorter "
                    "context, fewer sequences or a smaller cache type."
                ) from error
            raise

    def _check_bytes(self) -> None:
        """What was allocated is what the plan counted."""
        got = sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())
        wanted = state_bytes(self.model, self.layout, self.sizes)
        if got != wanted:
            raise EngineError(
                f"State of model {self.model!r} takes {got} bytes; the plan counted {wanted}. This is a bug "
                "in luce_core.cache.layout or luce_core.model.state."
            )


@frozen(eq=False)
class SavedBlocks:
    """(host) Copies of blocks: every region's fields, [n, entries, *shape], in layout order."""

    fields: tuple[Tensor, ...]


class TorchStateStore:
    """`StateStore` over the states of all models of one engine. Engine thread only."""

    def __init__(self, sizes: StateSizes, models: Sequence[ModelState]) -> None:
        self.sizes = sizes
        self._saver = SlotSaver()
        self._models = {state.model: state for state in models}
        self._owner: dict[str, tuple[ModelState, str]] = {}
        self.groups: Mapping[str, Group] = {}
        self.block_bytes: Mapping[str, int] = {}
        for state in models:
            for group in state.layout.groups:
                name = f"{state.model}/{group.name}"
                self._owner[name] = (state, group.name)
                self.groups = {**self.groups, name: group}
                size = block_bytes(state.layout, group.name, sizes)
                self.block_bytes = {**self.block_bytes, name: size}
        self.slot_bytes = sum(slot_bytes(state.layout, sizes) for state in models)
        self.has_slots = any(state.layout.slots for state in models)

    def copy_blocks(self, group: str, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole blocks, in order: a target that is a source later is read as written."""
        steps = list(zip(source, target, strict=True))
        chained = set(source) & set(target)
        for pages in self._pages(group):
            if chained:
                for one, other in steps:
                    pages[other].copy_(pages[one])
            else:
                pages[list(target)] = pages[list(source)]

    def read_blocks(self, group: str, blocks: Sequence[int]) -> SavedBlocks:
        """(host) A copy of these blocks."""
        return SavedBlocks(tuple(pages[list(blocks)].cpu() for pages in self._pages(group)))

    def write_blocks(self, group: str, blocks: Sequence[int], saved: SavedBlocks) -> None:
        """Put back what `read_blocks` returned, into these blocks."""
        for pages, field in zip(self._pages(group), saved.fields, strict=True):
            pages[list(blocks)] = field.to(pages.device)

    def reset_slot(self, slot: int) -> None:
        """Zeros: the state before the first token."""
        for state in self._slot_states():
            state[slot].zero_()

    def copy_slot(self, source: int, target: int) -> None:
        """Copy the committed states of a slot; logs are not copied."""
        for state in self._slot_states():
            state[target].copy_(state[source])

    def save_slot(self, slot: int, length: int) -> SavedSlot:
        """(host) A snapshot of the committed states after `length` tokens; later work may overwrite them."""
        states = []
        for one in self._slots():
            state = one.state[slot]
            if one.period > 1:
                state = state[state.shape[0] - alive_rows(state.shape[0], one.period, length) :]
            states.append(state)
        return self._saver.save(states)

    def snapshot_bytes(self, length: int) -> int:
        """Bytes of a snapshot after `length` tokens, over all models."""
        return sum(snapshot_bytes(state.layout, self.sizes, length) for state in self._models.values())

    def load_slot(self, slot: int, saved: SavedSlot) -> None:
        """Put back a snapshot; rows that were not kept are zero."""
        for one, copy in zip(self._slots(), saved.states, strict=True):
            state = one.state[slot]
            if one.period > 1:
                dead = state.shape[0] - copy.shape[0]
                state[:dead].zero_()
                state = state[dead:]
            state.copy_(copy)

    def _pages(self, group: str) -> list[Tensor]:
        state, name = self._owner[group]
        return [pages for region in state.by_group[name] for pages in region.fields.values()]

    def _slots(self) -> list[SlotState]:
        return [slot for state in self._models.values() for slot in state.slots.values()]

    def _slot_states(self) -> list[Tensor]:
        return [slot.state for slot in self._slots()]


CACHE_LINE_BYTES = 64


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """A zeroed tensor. On the CPU its pages are only taken from the system when something writes to them.

    torch.zeros writes its zeros; a cache planned for full contexts would then be resident from the start.
    """
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + CACHE_LINE_BYTES, np.uint8)  # calloc: fresh pages are zero as they are
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
