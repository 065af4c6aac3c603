"""The prefix cache: which blocks stay when no sequence needs them, for how long, and on which tier.

One byte budget covers cached device blocks, slot snapshots and spilled blocks, another the part of it in
host memory; least recently used goes first, over blocks and checkpoints together. What a stopped sequence
comes back for goes last, and to host memory set aside for it, which is a budget of its own.
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
        swap_limit: int = 0,
    ) -> None:
        self.index = index
        self.cache_bytes = cache_bytes
        self.host_limit = min(host_limit, cache_bytes)
        self.host_bytes = 0
        self.evictions = 0
        self.spills = 0
        self.swap_limit = swap_limit
        self.swap_reserved = 0
        self.swap_bytes = 0
        self.swaps = 0
        self._store = store
        self._groups = groups
        self._pools = pools
        self._spill = spill

    @property
    def held_bytes(self) -> int:
        """Bytes the cache alone holds, on every tier, but for what is set aside for stopped sequences."""
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
        if node.saved is not None and (node.wanted or node.saved.keys() <= blocks.keys()):
            self._forget_saved(node)
            self.index.relist(node)
        self.attach(node, blocks if node.saved is None else {})

    def save_slots(self, checkpoint: Checkpoint, slot: int) -> None:
        """Snapshot the slots of a sequence; synchronizes."""
        checkpoint.snapshot = self._store.save_slot(slot, checkpoint.length)
        self._add_host_bytes(checkpoint, self._store.snapshot_bytes(checkpoint.length))

    # --- what goes

    def drop(self, entry: Entry) -> None:
        """Forget `entry` and, for a block, everything behind it. No sequence runs through it."""
        members = list(self.index.subtree(entry)) if isinstance(entry, Node) else [entry]
        for member in members:
            self._discard(member)
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
            self._discard(node)
            node = parent

    def _discard(self, entry: Entry) -> None:
        self.index.unlink(entry)
        self._forget_blocks(entry)
        self._add_host_bytes(entry, -entry.host_bytes)
        if entry.wanted:
            self.swap_reserved -= entry.reserved
            entry.wanted = 0

    def trim(self) -> None:
        """Back under the budgets."""
        self.reclaim(self.host_bytes - self.host_limit)
        while self.held_bytes > self.cache_bytes:
            entry = self.index.oldest("nodes", "checkpoints", "host")
            if entry is not None:
                self.drop(entry)
            elif (entry := self.index.oldest("wanted")) is not None:
                self._swap(entry)
            else:
                return

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
            entry = entry or self.index.oldest("wanted")
            if entry is None or self._in_flight(entry):
                return False
            if entry.wanted:
                self._swap(entry)
            elif self._spill:
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

    # --- stopped sequences

    def want(self, entry: Entry, reserve: int) -> None:
        """One more stopped sequence comes back for `entry`; it takes at most `reserve` bytes on the host."""
        if not entry.wanted:
            num_bytes = entry.host_bytes
            self._add_host_bytes(entry, -num_bytes)
            entry.wanted, entry.reserved = 1, reserve
            self._add_host_bytes(entry, num_bytes)
            self.swap_reserved += reserve
        else:
            entry.wanted += 1
        self.index.touch(entry)

    def unwant(self, entry: Entry) -> None:
        """One less. A copy on the host that nobody wants and nobody's cache budget asked for is forgotten."""
        if entry.wanted > 1:
            entry.wanted -= 1
            self.index.touch(entry)  # what lies behind it was touched just now, and must stay older
            return
        num_bytes = entry.host_bytes
        self._add_host_bytes(entry, -num_bytes)
        entry.wanted = 0
        self._add_host_bytes(entry, num_bytes)
        self.swap_reserved -= entry.reserved
        used = isinstance(entry, Node) and entry.users
        if entry.saved is not None and not self._spill and not used:
            self.drop(entry)
        else:
            self.index.touch(entry)

    def _swap(self, entry: Entry) -> None:
        self.to_host(entry)
        self.swaps += 1

    def move_in(self, nodes: Sequence[Node]) -> bool:
        """Have `nodes`, which no sequence uses, on the device; False when there is no room."""
        chain: dict[Node, None] = {}
        for node in nodes:
            above: Node | None = node
            while above is not None and above.parent is not None and above not in chain:
                chain[above] = None
                above = above.parent
        deepest_last = sorted(chain, key=lambda node: node.depth)
        for node in deepest_last:
            self.index.pin(node)
        there = self.to_device(nodes)
        self.unpin(deepest_last)
        return there

    def unpin(self, nodes: Sequence[Node]) -> None:
        """A sequence less runs through this chain."""
        for node in reversed(nodes):
            self.index.unpin(node)
        if nodes:
            self.prune(nodes[-1])
        self.trim()

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
        if entry.wanted:
            self.swap_bytes += num_bytes
        else:
            self.host_bytes += num_bytes
