"""Copies of a slot's states in host memory, made while the device goes on."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from luce_core.cache.host_room import MOST_UNDER_WAY, pieces

States = tuple[Tensor, ...]
Pieces = list[Tensor]
PIN = True
"""Whether pieces are pinned: without a device there is no pinning."""


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
        self._pinned = PinnedPieces()
        self._under_way: deque[Future[States]] = deque()

    def save(self, states: Sequence[Tensor]) -> SavedSlot:
        """Copies of `states`, all of one device or of several."""
        if any(state.device.type != "cuda" for state in states) or not states:
            return SavedSlot(tuple(state.to("cpu", copy=True) for state in states))
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, "luce-snapshots")
        while len(self._under_way) >= MOST_UNDER_WAY:
            self._under_way.popleft().exception()  # whoever reads the snapshot meets it
        taken, pinned = self._pinned.take(states)
        done = []
        for device in {state.device for state in states}:
            with torch.cuda.device(device):
                for state, room in zip(states, pinned, strict=True):
                    if state.device == device:
                        room.copy_(state, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                done.append(event)
        moved = self._mover.submit(self._move, taken, pinned, done)
        self._under_way.append(moved)
        return SavedSlot(moved)

    def _move(self, taken: Pieces, pinned: States, done: Sequence[torch.cuda.Event]) -> States:
        try:
            for event in done:
                event.synchronize()
            kept = host_room(pinned)
            for target, source in zip(kept, pinned, strict=True):
                target.copy_(source)
            return kept
        finally:
            self._pinned.give_back(taken)


class PinnedPieces:
    """Pinned memory of snapshots under way, kept for the next: to pin takes longer than to copy, and torch
    gives up what nobody holds whenever a graph is captured.
    """

    def __init__(self) -> None:
        self._spare: dict[int, Pieces] = {}
        self._most: Counter[int] = Counter()
        self._lock = threading.Lock()

    def take(self, like: Sequence[Tensor]) -> tuple[Pieces, States]:
        """Pieces, and tensors of these shapes within. Engine thread."""
        sizes = _sizes(like)
        wanted, places = pieces(sizes, pinned=True)
        with self._lock:
            self._most = Counter({size: MOST_UNDER_WAY * count for size, count in Counter(wanted).items()})
            self._spare = {size: spare for size, spare in self._spare.items() if size in self._most}
            taken = [self._piece(size) for size in wanted]
        return taken, _within(taken, places, like, sizes)

    def _piece(self, size: int) -> Tensor:
        spare = self._spare.get(size)
        return spare.pop() if spare else torch.empty(size, dtype=torch.uint8, pin_memory=PIN)

    def give_back(self, taken: Pieces) -> None:
        """Any thread, when nobody reads them any more."""
        with self._lock:
            for piece in taken:
                spare = self._spare.setdefault(piece.numel(), [])
                if len(spare) < self._most[piece.numel()]:
                    spare.append(piece)


def host_room(like: Sequence[Tensor]) -> States:
    """(host) Tensors of the same shapes, in few pieces of ordinary memory."""
    sizes = _sizes(like)
    taken, places = pieces(sizes, pinned=False)
    return _within([torch.empty(size, dtype=torch.uint8) for size in taken], places, like, sizes)


def _sizes(like: Sequence[Tensor]) -> list[int]:
    return [one.numel() * one.element_size() for one in like]


def _within(
    rooms: Pieces, places: Sequence[tuple[int, int]], like: Sequence[Tensor], sizes: Sequence[int]
) -> States:
    return tuple(
        rooms[piece][start : start + size].view(one.dtype).view(one.shape)
        for one, size, (piece, start) in zip(like, sizes, places, strict=True)
    )
