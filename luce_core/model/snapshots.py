"""Copies of a slot's states in host memory, made while the device goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from luce_core.cache.host_room import MOST_UNDER_WAY, pieces

States = tuple[Tensor, ...]


class SavedSlot:
    """(host) A copy of one slot's committed states, in layout order: of windows, the rows still alive."""

    def __init__(self, states: States | Future[States]) -> None:
        self._states = states

    @property
    def states(self) -> States:
        """Waits for copies that are still under way; raises what went wrong with them."""
        if isinstance(self._states, Future):
            self._states = self._states.result()
        return self._states


class SlotSaver:
    """Takes states off a CUDA device without waiting for it; those of the CPU are copied at once.

    They go to pinned memory in the order of the device's work, so whatever is queued later may overwrite
    them. A thread moves them on to ordinary memory: pinning takes longer than copying, and the cache may
    keep many. Engine thread only.
    """

    def __init__(self) -> None:
        self._mover: ThreadPoolExecutor | None = None
        self._under_way: deque[Future[States]] = deque()

    def save(self, states: Sequence[Tensor]) -> SavedSlot:
        """Copies of `states`, all of one device or of several."""
        if any(state.device.type != "cuda" for state in states) or not states:
            return SavedSlot(tuple(state.to("cpu", copy=True) for state in states))
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, "luce-snapshots")
        while len(self._under_way) >= MOST_UNDER_WAY:
            self._under_way.popleft().exception()  # whoever reads the snapshot meets it
        pinned = host_room(states, pin=True)
        done = []
        for device in {state.device for state in states}:
            with torch.cuda.device(device):
                for state, room in zip(states, pinned, strict=True):
                    if state.device == device:
                        room.copy_(state, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                done.append(event)
        moved = self._mover.submit(_move, pinned, done)
        self._under_way.append(moved)
        return SavedSlot(moved)


def _move(pinned: States, done: Sequence[torch.cuda.Event]) -> States:
    for event in done:
        event.synchronize()
    kept = host_room(pinned, pin=False)
    for target, source in zip(kept, pinned, strict=True):
        target.copy_(source)
    return kept


def host_room(like: Sequence[Tensor], *, pin: bool) -> States:
    """(host) Tensors of the same shapes, in few pieces of memory."""
    sizes = [one.numel() * one.element_size() for one in like]
    taken, places = pieces(sizes, pinned=pin)
    rooms = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in taken]
    return tuple(
        rooms[piece][start : start + size].view(one.dtype).view(one.shape)
        for one, size, (piece, start) in zip(like, sizes, places, strict=True)
    )
