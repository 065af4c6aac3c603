"""Sequences that were stopped and come back: what of them is evicted meanwhile waits in host memory.

Nothing is copied when a sequence stops: its blocks stay in the prefix cache, where they are evicted last.
Room in host memory is set aside beforehand, so whatever is evicted of it finds a place.
"""

from __future__ import annotations

from collections.abc import Sequence

from luce_core.cache.groups import GroupInfo
from luce_core.cache.index import Entry
from luce_core.cache.pool import BlockPool
from luce_core.cache.prefix import PrefixCache
from luce_core.cache.sequence import SeqState


class Retained:
    """Which entries are kept for whom. Engine thread only."""

    def __init__(
        self, cache: PrefixCache, groups: Sequence[GroupInfo], pools: Sequence[BlockPool], slot_bytes: int
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._pools = pools
        self._slot_bytes = slot_bytes
        self._kept: dict[int, tuple[Entry, ...]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._kept)

    def entries(self) -> list[Entry]:
        """Every entry as often as it is kept, but for those that are forgotten by now."""
        alive = self._cache.index.entries
        return [entry for kept in self._kept.values() for entry in kept if entry.id in alive]

    def node_bytes(self) -> int:
        """The most one full block takes over all groups."""
        return sum(self._block_bytes(group) for group in self._groups if group.window is None)

    def end_bytes(self, state: SeqState) -> int:
        """The most that takes which is restored at the end of `state` only: its tail, windows and slots."""
        size = self._cache.index.block_tokens
        tail = self.node_bytes() if state.tail else 0
        windows = sum(
            self._block_bytes(group) * min(-(-group.window // size) + 1, -(-state.length // size))
            for group in self._groups
            if group.window is not None
        )
        return tail + windows + self._slot_bytes

    def fits(self, state: SeqState, most_bytes: int) -> bool:
        """Whether `state` takes at most `most_bytes` and there is room in host memory for it."""
        fresh = sum(not node.wanted for node in state.nodes)
        cost = fresh * self.node_bytes() + self.end_bytes(state)
        return cost <= min(most_bytes, self._cache.swap_limit - self._cache.swap_reserved)

    def keep(self, state: SeqState, end: Entry | None) -> int:
        """Keep the full blocks of `state` and the entry of its end; returns what `release` takes. It fits."""
        kept: list[Entry] = [] if end is None else [end]
        if end is not None:
            self._cache.want(end, self.end_bytes(state))
        for node in reversed(state.nodes):
            if node.saved is None:  # one on the host lacks what only this sequence has; it stays as it is
                self._cache.want(node, self.node_bytes())
                kept.append(node)
        self._next += 1
        self._kept[self._next] = tuple(kept)
        return self._next

    def release(self, kept: int) -> None:
        """The sequence came back, or never will. Copies in host memory nobody waits for are forgotten."""
        for entry in self._kept.pop(kept, ()):
            if entry.id in self._cache.index.entries:
                self._cache.unwant(entry)
        self._cache.trim()

    def clear(self) -> None:
        """Nobody comes back for anything."""
        for kept in list(self._kept):
            self.release(kept)

    def _block_bytes(self, group: GroupInfo) -> int:
        return self._pools[group.index].block_bytes
