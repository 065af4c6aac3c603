"""The blocks of one group, and the slots: who holds each, and when a free one may be written again."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from luce_core.errors import CapacityError


class BlockPool:
    """Reference counts of one group's blocks, split by who holds them. Engine thread only.

    A block is *used* (some sequence holds it), *cached* (only the prefix cache does), *pending* (nobody
    does, but work submitted up to its fence may still touch it) or *free*.
    """

    __slots__ = (
        "block_bytes", "busy_until", "cache_refs", "cached", "free", "name", "num_blocks", "pending",
        "retired", "seq_refs", "used",
    )

    def __init__(self, name: str, num_blocks: int, block_bytes: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.seq_refs = [0] * num_blocks
        self.cache_refs = [0] * num_blocks
        self.busy_until = [0] * num_blocks
        self.free = list(range(num_blocks - 1, -1, -1))
        self.pending: list[tuple[int, int]] = []
        """Heap of (fence, block)."""
        self.retired = 0
        self.used = 0
        self.cached = 0

    def take(self) -> int:
        """A free block, held by one sequence. The caller has checked that there is one."""
        block = self.free.pop()
        self.seq_refs[block] = 1
        self.used += 1
        return block

    def take_cached(self) -> int:
        """A free block, held by the prefix cache."""
        block = self.free.pop()
        self.cache_refs[block] = 1
        self.cached += 1
        return block

    def hold(self, block: int) -> None:
        """One more sequence holds a block that is used or cached."""
        if not self.seq_refs[block]:
            self.used += 1
            self.cached -= 1
        self.seq_refs[block] += 1

    def drop(self, block: int, after: int = 0) -> None:
        """A sequence lets go; work up to fence `after` may still touch the block."""
        self.busy_until[block] = max(self.busy_until[block], after)
        self.seq_refs[block] -= 1
        if not self.seq_refs[block]:
            self.used -= 1
            if self.cache_refs[block]:
                self.cached += 1
            else:
                self._release(block)

    def keep(self, block: int) -> None:
        """One more cache entry holds a block that is used or cached."""
        self.cache_refs[block] += 1

    def forget(self, block: int, after: int = 0) -> None:
        """A cache entry lets go."""
        self.busy_until[block] = max(self.busy_until[block], after)
        self.cache_refs[block] -= 1
        if not self.cache_refs[block] and not self.seq_refs[block]:
            self.cached -= 1
            self._release(block)

    def sole(self, block: int) -> bool:
        """Whether one sequence, and nothing else, holds the block and no other's work is in flight on it."""
        return (
            self.seq_refs[block] == 1
            and not self.cache_refs[block]
            and self.busy_until[block] <= self.retired
        )

    def retire(self, fence: int) -> None:
        """The device is past `fence`."""
        self.retired = max(self.retired, fence)
        while self.pending and self.pending[0][0] <= self.retired:
            self.free.append(heappop(self.pending)[1])

    def _release(self, block: int) -> None:
        if self.busy_until[block] <= self.retired:
            self.free.append(block)
        else:
            heappush(self.pending, (self.busy_until[block], block))

    def check(self, seq_refs: list[int], cache_refs: list[int]) -> None:
        """Compare with counts made from scratch; AssertionError with the values."""
        name = self.name
        assert self.seq_refs == seq_refs, f"{name}: sequences hold {seq_refs}, counted {self.seq_refs}"
        assert self.cache_refs == cache_refs, f"{name}: cache holds {cache_refs}, counted {self.cache_refs}"
        idle = {b for b in range(self.num_blocks) if not seq_refs[b] and not cache_refs[b]}
        waiting = [block for _, block in self.pending]
        listed = self.free + waiting
        assert len(listed) == len(set(listed)), f"{name}: a block is listed twice in {sorted(listed)}"
        assert set(listed) == idle, f"{name}: free or pending {sorted(listed)}, held by nobody {sorted(idle)}"
        used = sum(1 for refs in seq_refs if refs)
        assert self.used == used, f"{name}: {used} blocks used, counted {self.used}"
        cached = self.num_blocks - used - len(idle)
        assert self.cached == cached, f"{name}: {cached} blocks cached, counted {self.cached}"
        late = [(fence, b) for fence, b in self.pending if fence <= self.retired]
        assert not late, f"{name}: {late} pending although fence {self.retired} retired"


class SlotPool:
    """Rows of the per-sequence tables. Engine thread only."""

    __slots__ = ("free", "num_slots", "pending", "retired")

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.free = list(range(num_slots - 1, -1, -1))
        self.pending: list[tuple[int, int]] = []
        """Heap of (fence, slot)."""
        self.retired = 0

    def need(self, failed: str) -> None:
        """Raise CapacityError, beginning with `failed`, when no slot is free."""
        if not self.free:
            raise CapacityError(
                f"{failed}: got {self.num_slots - len(self.pending)} of {self.num_slots} slots in use and "
                f"{len(self.pending)} waiting for a fence, wanted a free one. Close a sequence first, or "
                "raise --max-sequences."
            )

    def give_back(self, slot: int, after: int) -> None:
        """`slot` is free once `after` has retired."""
        heappush(self.pending, (after, slot))
        self.retire(self.retired)

    def retire(self, fence: int) -> None:
        """The device is past `fence`."""
        self.retired = max(self.retired, fence)
        while self.pending and self.pending[0][0] <= self.retired:
            self.free.append(heappop(self.pending)[1])

    def check(self, used: Sequence[int]) -> None:
        """Every slot is used, free or pending, once; AssertionError with the values."""
        slots = sorted([*used, *self.free, *(slot for _, slot in self.pending)])
        assert slots == list(range(self.num_slots)), (
            f"slots used, free and pending: {slots}, wanted 0..{self.num_slots - 1}"
        )
