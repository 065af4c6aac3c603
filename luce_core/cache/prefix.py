"""The prefix cache: which blocks stay when no sequence needs them, for how long, and on which tier.

One byte budget covers cached device blocks, slot snapshots and spilled blocks, another the part of it in
host memory; least recently used goes first, over blocks and checkpoints together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from luce_core.cache.groups import GroupInfo
from luce_core.cache.index import Checkpoint, Entry, Node, PrefixIndex
from luce_core.cache.pool import BlockPool
from luce_core.contracts import StateStore


class PrefixCache:
    """Holds blocks on behalf of the index. Engine thread only."""

    def __init__(
        self,
        index: PrefixIndex,
        store: StateStore,
        groups: Sequence[GroupInfo],
        pools: Sequence[BlockPool],
        *,
        cache_bytes: int,
        host_limit: int,
        spill: bool,
    ) -> None:
        self.index = index
        self.cache_bytes = cache_bytes
        self.host_limit = min(host_limit, cache_bytes)
        self.host_bytes = 0
        self.evictions = 0
        self.spills = 0
        self._store = store
        self._groups = groups
        self._pools = pools
        self._spill = spill

    @property
    def held_bytes(self) -> int:
        """Bytes the cache alone holds, on every tier."""
        return self.host_bytes + sum(pool.cached * pool.block_bytes for pool in self._pools)

    # --- what stays

    def attach(self, entry: Entry, blocks: Mapping[int, tuple[int, ...]]) -> None:
        """Keep these device blocks (group index -> ids) with `entry`, where it has none."""
        for group, ids in blocks.items():
            if not entry.blocks[group]:
                entry.blocks[group] = ids
                for block in ids:
                    self._pools[group].keep(block)

    def back_on_device(self, node: Node, blocks: Mapping[int, tuple[int, ...]]) -> None:
        """A sequence computed a spilled block again: its copy takes the place of the one on the host."""
        if node.saved is not None and node.saved.keys() <= blocks.keys():
            self._forget_saved(node)
            self.index.relist(node)
        self.attach(node, blocks if node.saved is None else {})

    def save_slots(self, checkpoint: Checkpoint, slot: int) -> None:
        """Snapshot the slots of a sequence; synchronizes."""
        checkpoint.snapshot = self._store.save_slot(slot)
        self._add_host_bytes(checkpoint, self._store.slot_bytes)

    # --- what goes

    def drop(self, entry: Entry) -> None:
        """Forget `entry` and, for a block, everything behind it. No sequence runs through it."""
        members = list(self.index.subtree(entry)) if isinstance(entry, Node) else [entry]
        for member in members:
            self.index.unlink(member)
            self._forget_blocks(member)
            self._add_host_bytes(member, -member.host_bytes)
            self.evictions += 1
        above = entry.anchor if isinstance(entry, Checkpoint) else None
        if isinstance(entry, Node):
            above = entry.parent
        if above is not None:
            self.prune(above)

    def prune(self, node: Node) -> None:
        """Where hits need checkpoints, blocks with no checkpoint behind them are of no use."""
        while (
            self.index.exact
            and node.parent is not None
            and not node.users
            and not node.children
            and not node.checkpoints
        ):
            parent = node.parent
            self.index.unlink(node)
            self._forget_blocks(node)
            self._add_host_bytes(node, -node.host_bytes)
            node = parent

    def trim(self) -> None:
        """Back under the budgets."""
        self.reclaim(self.host_bytes - self.host_limit)
        while self.held_bytes > self.cache_bytes:
            entry = self.index.oldest("nodes", "checkpoints", "host")
            if entry is None:
                return
            self.drop(entry)

    def reclaim(self, num_bytes: int) -> int:
        """Give host memory back: for `MemoryBroker.offer`. Device blocks are allocated once and stay."""
        before = self.host_bytes
        while before - self.host_bytes < num_bytes:
            entry = self.index.oldest("host", "checkpoints")
            if entry is None:
                break
            self.drop(entry)
        return before - self.host_bytes

    def has_room(self, needs: Sequence[int]) -> bool:
        """Whether `needs[group]` blocks are free or could be made so by evicting."""
        return all(
            len(pool.free) + pool.cached >= need for pool, need in zip(self._pools, needs, strict=True)
        )

    def make_room(self, needs: Sequence[int]) -> bool:
        """Evict until `needs[group]` blocks are free in every group; False when that cannot be."""
        lacking = self._lacking(needs)
        if lacking and not self.has_room(needs):
            return False
        while lacking:
            # Blocks of a windowed group are kept by checkpoints only.
            windowed = all(self._groups[group].window is not None for group in lacking)
            entry = self.index.oldest("checkpoints", *(() if windowed else ("nodes",)))
            if entry is None or self._in_flight(entry):
                return False
            if self._spill:
                self.to_host(entry)
                self.spills += 1
                self.trim()
            else:
                self.drop(entry)
            lacking = self._lacking(needs)
        return True

    def _lacking(self, needs: Sequence[int]) -> list[int]:
        return [i for i, need in enumerate(needs) if len(self._pools[i].free) < need]

    def _in_flight(self, entry: Entry) -> bool:
        return any(
            pool.busy_until[block] > pool.retired
            for pool, ids in zip(self._pools, entry.blocks, strict=True)
            for block in ids
        )

    # --- tiers

    def to_host(self, entry: Entry, after: int = 0) -> None:
        """Copy the device blocks of `entry` to the host and give them back; synchronizes."""
        saved: dict[int, tuple[int, Any]] = {}
        num_bytes = 0
        for info, pool, ids in zip(self._groups, self._pools, entry.blocks, strict=True):
            if ids:
                saved[info.index] = (len(ids), self._store.read_blocks(info.key, ids))
                num_bytes += len(ids) * pool.block_bytes
        self._forget_blocks(entry, after)
        entry.saved = saved
        self._add_host_bytes(entry, num_bytes)
        self.index.relist(entry)

    def to_device(self, entries: Sequence[Entry]) -> bool:
        """Have all of `entries` on the device, used just now; False when there is no room.

        Nodes among them are pinned, or their parent is: making room for one evicts none of the others.
        """
        needs = [0] * len(self._pools)
        for entry in entries:
            self.index.hide(entry)
            for group, (count, _) in (entry.saved or {}).items():
                needs[group] += count
        there = self.make_room(needs)
        for entry in entries:
            if there and entry.saved is not None:
                self._write_back(entry)
            self.index.touch(entry)
        return there

    def _write_back(self, entry: Entry) -> None:
        saved = entry.saved or {}
        self._forget_saved(entry)
        for group, (count, content) in saved.items():
            pool = self._pools[group]
            ids = tuple(pool.take_cached() for _ in range(count))
            self._store.write_blocks(pool.name, ids, content)
            entry.blocks[group] = ids

    def _forget_blocks(self, entry: Entry, after: int = 0) -> None:
        for group, ids in enumerate(entry.blocks):
            for block in ids:
                self._pools[group].forget(block, after)
            entry.blocks[group] = ()

    def _forget_saved(self, entry: Entry) -> None:
        for group, (count, _) in (entry.saved or {}).items():
            self._add_host_bytes(entry, -count * self._pools[group].block_bytes)
        entry.saved = None

    def _add_host_bytes(self, entry: Entry, num_bytes: int) -> None:
        entry.host_bytes += num_bytes
        self.host_bytes += num_bytes
