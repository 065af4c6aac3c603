"""The block manager: which sequence holds which blocks and slot, and what of it outlives the sequence.

It decides; a `StateStore` moves the bytes. No tensor passes through here.

    match(keys) -> Hit        what is cached of a prompt
    open(keys, hit) -> seq    shares the cached blocks, restores slots
    reserve(seq, n)           room for n more rows; copies a shared block before it is written
    advance(seq, keys)        n rows became text; a block that filled up enters the prefix index
    retain(seq, most_bytes)   it comes back: what is evicted of it goes to host memory, until release
    close(seq, after)         full blocks stay as cached prefix until room or budget runs out

Full blocks are shared by everybody; the partly filled block behind them has one writer, and whoever opened
a hit or forked takes a private copy at its first `reserve`. Writers only ever append, so others may go on
reading what lies below their own length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from luce_core.cache import integrity
from luce_core.cache.groups import GroupInfo, check_store, read_groups
from luce_core.cache.index import Entry, Found, Node, PrefixIndex
from luce_core.cache.pool import BlockPool, SlotPool
from luce_core.cache.prefix import PrefixCache
from luce_core.cache.restore import found_table, found_usable
from luce_core.cache.retained import Retained
from luce_core.cache.sequence import GroupTable, SeqState
from luce_core.contracts import CacheStats, Fence, Hit, SeqId, SeqTable, StateLayout, StateStore
from luce_core.errors import CapacityError, UsageError


class PagedBlockManager:
    """`contracts.BlockManager` over any state layouts. Engine thread only; nothing here blocks or allocates
    state.

    layouts: by model name; a prefix hit must restore all but the `best_effort` ones. identity: hash of
    weights, tokenizer and rope of those models; salts every cached block. cache_bytes: budget of everything
    kept for later (device blocks no sequence holds, slot snapshots, spilled blocks). host_bytes: the most of
    it that may lie in host memory (snapshots, spilled blocks); without, all of it. spill: copy evicted blocks
    to host memory before forgetting them. swap_bytes: host memory beside that, for `retain` alone.
    """

    def __init__(
        self,
        store: StateStore,
        layouts: Mapping[str, StateLayout],
        *,
        identity: str,
        cache_bytes: int,
        host_bytes: int | None = None,
        spill: bool = False,
        swap_bytes: int = 0,
    ) -> None:
        self._store = store
        self._block_tokens = store.sizes.block_tokens
        groups = read_groups(layouts)
        check_store(store, groups)
        self._groups = groups.every
        self._whole = groups.whole
        self._windowed = groups.windowed
        self._best_effort = groups.best_effort
        sizes = store.sizes
        self._pools = tuple(
            BlockPool(g.key, sizes.num_blocks[g.key], store.block_bytes[g.key]) for g in self._groups
        )
        self._index = PrefixIndex(
            identity,
            len(self._groups),
            self._block_tokens,
            exact=groups.exact,
            granularity=groups.granularity,
        )
        self._cache = PrefixCache(
            self._index,
            store,
            self._groups,
            self._pools,
            cache_bytes=cache_bytes,
            host_limit=cache_bytes if host_bytes is None else host_bytes,
            spill=spill,
            swap_limit=swap_bytes,
        )
        self._retained = Retained(self._cache, self._groups, self._pools, store.slot_bytes)
        self._seqs: dict[SeqId, SeqState] = {}
        self._next_seq = 0
        self._slots = SlotPool(sizes.num_slots)
        self._asked_tokens = self._hit_tokens = self._copies = 0

    # --- prefix hits

    def match(self, keys: Sequence[int]) -> Hit:
        """The longest cached prefix of `keys`, at most all but the last: the engine needs that one's logits.

        Nothing is pinned: open it before anything else is reserved, or match again.
        """
        found = self._index.find(keys, len(keys) - 1)
        return Hit(found.length, found.checkpoint.id if found.checkpoint else None)

    def open(self, keys: Sequence[int], hit: Hit) -> SeqId:
        """A new sequence holding `keys[: hit.length]`.

        `Hit(0, None)` starts from nothing; a shorter length than `match` gave is fine where it ends at no
        checkpoint. Raises CapacityError when no slot is free or spilled blocks find no room, KeyError when
        the hit is no longer cached.
        """
        self._slots.need("No sequence can be opened")
        found = self._index.find(keys, hit.length) if hit.length else Found(0, ())
        if found.length != hit.length or hit.length >= max(1, len(keys)):
            raise KeyError(f"a hit of {hit.length} tokens is not cached, {found.length} are: match again")
        for node in found.chain:
            self._index.pin(node)
        sources = [entry for entry in {found.source: 0, found.checkpoint: 0} if entry is not None]
        if not self._cache.to_device([*sources, *reversed(found.chain)]):
            self._cache.unpin(found.chain)
            raise CapacityError(
                f"A cached prefix of {hit.length} tokens cannot come back from the host: every device block "
                "is in use. Open it later, or open with Hit(0, None)."
            )
        state = self._restore(keys, found)
        self._asked_tokens += len(keys)
        self._hit_tokens += found.length
        return self._enter(state)

    def _restore(self, keys: Sequence[int], found: Found) -> SeqState:
        """The state of a sequence that starts with `found`, its blocks held and its slots loaded."""
        full = len(found.chain) * self._block_tokens
        state = SeqState(self._slots.free.pop(), [], list(found.chain))
        state.length = found.length
        state.tail = list(keys[full : found.length])
        state.shared = bool(state.tail)
        size = self._block_tokens
        state.usable = {model.name: found_usable(model, found, size) for model in self._best_effort}
        state.tables = [found_table(g, found, state.usable.get(g.model, 0), size) for g in self._groups]
        for pool, table in zip(self._pools, state.tables, strict=True):
            for block in table.blocks:
                pool.hold(block)
        state.set_capacity(size)
        if self._store.has_slots:
            self._store.reset_slot(state.slot)
            if found.checkpoint is not None and found.checkpoint.snapshot is not None:
                self._store.load_slot(state.slot, found.checkpoint.snapshot)
        return state

    # --- running

    def reserve(self, seq: SeqId, tokens: int) -> bool:
        """Blocks for `tokens` more rows in every group, or nothing and False. Makes shared blocks private.

        An entry that covers several tokens needs no more: those that held rows close are kept in a log.
        """
        state = self._seqs[seq]
        if state.length + tokens <= state.capacity:
            return True
        new = [max(0, self._blocks_for(state.length + tokens) - table.end) for table in state.tables]
        copies = self._copies_due(state)
        if not self._cache.make_room([n + c for n, c in zip(new, copies, strict=True)]):
            return False
        self._make_private(state)
        for pool, table, count in zip(self._pools, state.tables, new, strict=True):
            table.blocks.extend(pool.take() for _ in range(count))
        state.set_capacity(self._block_tokens)
        return True

    def fits(self, seq: SeqId, tokens: int, *, step_tokens: int | None = None) -> bool:
        """Whether there is room for `tokens` more, fences aside; changes nothing.

        step_tokens: they come in steps of at most so many, so that windowed groups let go in between: what
        admission asks before it takes a whole prompt.
        """
        state = self._seqs[seq]
        needs = self._copies_due(state)
        for group, table in zip(self._groups, state.tables, strict=True):
            ahead = self._within_window(group, tokens, step_tokens)
            needs[group.index] += max(0, self._blocks_for(state.length + ahead) - table.end)
        return self._cache.has_room(needs)

    def room(self, tokens: int, *, step_tokens: int | None = None) -> bool:
        """Whether a new sequence of `tokens` tokens would find a slot and blocks; `fits` before `open`."""
        needs = [self._blocks_for(self._within_window(g, tokens, step_tokens)) for g in self._groups]
        return bool(self._slots.free) and self._cache.has_room(needs)

    def _within_window(self, group: GroupInfo, tokens: int, step_tokens: int | None) -> int:
        """Of `tokens` to come in steps, those that hold blocks of `group` at once."""
        if group.window is None or step_tokens is None:
            return tokens
        return min(tokens, group.window + self._block_tokens + step_tokens)

    def _blocks_for(self, tokens: int) -> int:
        """Where a table must end to hold so many tokens."""
        return -(-tokens // self._block_tokens)

    def _copies_due(self, state: SeqState) -> list[int]:
        """By group: 1 where the partly filled block must be copied before this sequence may write it."""
        due = [0] * len(self._groups)
        for group, pool, table in zip(self._groups, self._pools, state.tables, strict=True):
            tail = state.length // self._block_tokens - table.start
            if state.shared and tail < len(table.blocks):
                due[group.index] = int(not pool.sole(table.blocks[tail]))
        return due

    def _make_private(self, state: SeqState) -> None:
        """Copy the partly filled blocks that others hold too. There is room."""
        for pool, table, due in zip(self._pools, state.tables, self._copies_due(state), strict=True):
            if due:
                tail = state.length // self._block_tokens - table.start
                source, target = table.blocks[tail], pool.take()
                self._store.copy_blocks(pool.name, [source], [target])
                pool.drop(source)
                table.blocks[tail] = target
                self._copies += 1
        state.shared = False
        self._cache.trim()

    def advance(self, seq: SeqId, keys: Sequence[int]) -> None:
        """`keys` are committed; entries at index >= length are garbage.

        Blocks that left their window are free at once: devices run steps in the order they were submitted.
        """
        state = self._seqs[seq]
        length = state.length + len(keys)
        if length > state.capacity:
            raise ValueError(
                f"sequence {seq} has room for {state.capacity} tokens, not {length}: reserve first"
            )
        state.tail.extend(keys)
        state.length = length
        if len(state.tail) >= self._block_tokens:
            self._fill(state)

    def _fill(self, state: SeqState) -> None:
        """Full blocks enter the index; blocks that left their window go."""
        size = self._block_tokens
        while len(state.tail) >= size:
            chunk = tuple(state.tail[:size])
            del state.tail[:size]
            parent = state.nodes[-1] if state.nodes else self._index.root
            node = self._index.extend(parent, chunk)
            self._index.pin(node)
            self._cache.back_on_device(node, self._own_blocks(state, len(state.nodes)))
            self._drop_covered(parent, chunk)
            state.nodes.append(node)
        for group in self._windowed:
            table = state.tables[group.index]
            dead = max(0, state.length - (group.window or 0)) // size - table.start
            for block in table.blocks[: max(0, dead)]:
                self._pools[group.index].drop(block)
            del table.blocks[: max(0, dead)]
            table.start += max(0, dead)
        if self._windowed:
            self._cache.trim()
        state.view = None

    def _own_blocks(self, state: SeqState, position: int) -> dict[int, tuple[int, ...]]:
        """The blocks of token block `position` that hold valid state, in groups without a window."""
        blocks: dict[int, tuple[int, ...]] = {}
        for group in self._whole:
            table = state.tables[group.index]
            valid = state.usable.get(group.model, 0) <= position * self._block_tokens
            if valid and table.start <= position < table.end:
                blocks[group.index] = (table.blocks[position - table.start],)
        return blocks

    def _drop_covered(self, parent: Node, keys: tuple[int, ...]) -> None:
        """Partly filled blocks kept behind `parent` of which `keys` says the same and more."""
        if not self._index.exact:
            for tail, checkpoint in list(parent.checkpoints.items()):
                bare = checkpoint.snapshot is None and not any(
                    checkpoint.blocks[group.index] for group in self._windowed
                )
                if bare and tail and tail == keys[: len(tail)] and not checkpoint.wanted:
                    self._cache.drop(checkpoint)

    def length(self, seq: SeqId) -> int:
        """Committed tokens."""
        return self._seqs[seq].length

    def slot(self, seq: SeqId) -> int:
        """The sequence's row of every per-sequence table."""
        return self._seqs[seq].slot

    def usable_from(self, seq: SeqId) -> Mapping[str, int]:
        """Best-effort model -> first index with state; a windowed group may have let go of more by now."""
        return dict(self._seqs[seq].usable)

    def tables(self, seq: SeqId) -> Mapping[str, SeqTable]:
        """The sequence's blocks, by "model/group"; the same object until a block comes or goes."""
        state = self._seqs[seq]
        if state.view is None:
            size = self._block_tokens
            state.view = {
                group.key: SeqTable(
                    tuple(table.blocks), tuple(range(table.start * size, table.end * size, size))
                )
                for group, table in zip(self._groups, state.tables, strict=True)
            }
        return state.view

    # --- copies that outlive

    def fork(self, seq: SeqId) -> SeqId:
        """A second sequence with the same content, sharing blocks until one writes. Settle the slot first.

        Raises CapacityError when no slot is free.
        """
        parent = self._seqs[seq]
        self._slots.need(f"Sequence {seq} cannot be forked")
        end = -(-parent.length // self._block_tokens)
        tables = [GroupTable(t.start, t.blocks[: max(0, end - t.start)]) for t in parent.tables]
        child = SeqState(self._slots.free.pop(), tables, list(parent.nodes))
        child.tail = list(parent.tail)
        child.length = parent.length
        child.shared = bool(child.tail)
        child.usable = dict(parent.usable)
        for node in child.nodes:
            self._index.pin(node)
        for pool, table in zip(self._pools, tables, strict=True):
            for block in table.blocks:
                pool.hold(block)
        child.set_capacity(self._block_tokens)
        if self._store.has_slots:
            self._store.copy_slot(parent.slot, child.slot)
        return self._enter(child)

    def checkpoint(self, seq: SeqId) -> int:
        """Keep slots and window blocks at this length; returns the checkpoint's id. Settle the slot first.

        A cache entry like any other: it goes when room or budget runs out, at once when the budget cannot
        even hold one snapshot. Copies of slots may still be under way when it returns: see `StateStore`.
        """
        state = self._seqs[seq]
        if self._store.has_slots and self._store.snapshot_bytes(state.length) > self._cache.host_limit:
            return self._index.new_id()
        made = self._keep(state, with_slots=True)
        self._cache.trim()
        return made.id

    def retain(self, seq: SeqId, most_bytes: int) -> int | None:
        """Before `close`, of a sequence that comes back: what is evicted of it meanwhile goes to host memory,
        and returns with the hit. Settle the slot first; `release` what this returns.

        None, and nothing is done, where it takes more than `most_bytes` or than `swap_bytes` still has
        room for.
        """
        state = self._seqs[seq]
        if not self._retained.fits(state, most_bytes):
            return None
        exact_end = self._index.exact or self._store.has_slots or self._windowed
        end = self._keep(state, with_slots=True) if exact_end or state.tail else None
        return self._retained.keep(state, end)

    def release(self, retained: int) -> None:
        """The sequence is back, or never will be."""
        self._retained.release(retained)

    def _keep(self, state: SeqState, *, with_slots: bool) -> Entry:
        anchor = state.nodes[-1] if state.nodes else self._index.root
        keys = tuple(state.tail)
        with_slots = with_slots and self._store.has_slots
        usable = {
            model.name: state.length if model.slots and not with_slots else state.usable[model.name]
            for model in self._best_effort
        }
        known = anchor.checkpoints.get(keys)
        if known is not None:
            if known.wanted or all(known.usable[name] <= usable[name] for name in usable):
                self._index.touch(known)
                return known
            self._cache.drop(known)
        made = self._index.add_checkpoint(anchor, keys, state.length, usable)
        self._cache.attach(made, self._checkpoint_blocks(state))
        if with_slots:
            self._cache.save_slots(made, state.slot)
        return made

    def _checkpoint_blocks(self, state: SeqState) -> dict[int, tuple[int, ...]]:
        blocks = self._own_blocks(state, len(state.nodes)) if state.tail else {}
        end = -(-state.length // self._block_tokens)
        for group in self._windowed:
            table = state.tables[group.index]
            first = max(table.start, (state.length - (group.window or 0)) // self._block_tokens)
            blocks[group.index] = tuple(table.blocks[first - table.start : max(0, end - table.start)])
        return blocks

    def close(self, seq: SeqId, after: Fence) -> None:
        """Give blocks and slot back once `after` has retired; fence 0 is always past.

        What a later hit can use stays cached: full blocks, and the partly filled one where hits may end
        anywhere; where hits need a checkpoint, what lies before the last one.
        """
        state = self._seqs.pop(seq)
        if state.tail and not self._index.exact and not self._covered(state):
            self._keep(state, with_slots=False)
        for pool, table in zip(self._pools, state.tables, strict=True):
            for block in table.blocks:
                pool.drop(block, after)
        self._cache.unpin(state.nodes)
        self._slots.give_back(state.slot, after)

    def _covered(self, state: SeqState) -> bool:
        """Whether another cached block holds the tail of `state` and more."""
        anchor = state.nodes[-1] if state.nodes else self._index.root
        tail = tuple(state.tail)
        longer = [*anchor.children.get(tail[0], ()), *anchor.checkpoints.values()]
        return any(other.keys[: len(tail)] == tail for other in longer)

    def retire(self, fence: Fence) -> None:
        """The device is past `fence`: what was closed with it, or before, may be written again."""
        self._slots.retire(fence)
        for pool in self._pools:
            pool.retire(fence)

    # --- tiers and upkeep

    def cached_blocks(self, keys: Sequence[int]) -> tuple[int, ...]:
        """Ids of the cached full blocks at the start of `keys`: what `move` takes."""
        return tuple(node.id for node in self._index.walk(keys, len(keys)))

    def move(self, blocks: Sequence[int], tier: Literal["device", "host", "disk"], after: Fence) -> Fence:
        """Change the tier of cached blocks (ids of `cached_blocks`); `after`: work that may still touch them.

        Copies through the store, which queues behind submitted work, so they are there at once: returns
        `after`. Raises KeyError for an unknown id, ValueError for a block a sequence uses, CapacityError when
        the device has no room.
        """
        if tier == "disk":
            raise UsageError(
                "Cached blocks cannot be moved to tier 'disk': no disk store is part of this engine. "
                "Use 'device' or 'host'."
            )
        nodes = [node for node in (self._index.entries[block] for block in blocks) if isinstance(node, Node)]
        busy = [node.id for node in nodes if node.users]
        if busy:
            raise ValueError(f"cached blocks {busy} are used by running sequences: only idle ones move")
        if tier == "host":
            for node in nodes:
                if node.saved is None:
                    self._cache.to_host(node, after)
            self._cache.trim()
        elif not self._cache.move_in(nodes):
            raise CapacityError(
                f"{len(nodes)} cached blocks cannot move to the device: every block is in use. "
                "Move fewer, or later."
            )
        return after

    def reclaim(self, num_bytes: int) -> int:
        """Forget cached state in host memory until `num_bytes` are free; returns the bytes freed."""
        return self._cache.reclaim(num_bytes)

    def clear(self) -> None:
        """Forget everything cached: the state behind it is gone (a parked model)."""
        self._retained.clear()
        while (entry := self._index.oldest("nodes", "checkpoints", "host")) is not None:
            self._cache.drop(entry)

    def start_over(self) -> None:
        """As new: nothing cached, nothing counted. Called when no sequence is open."""
        self.clear()
        self._asked_tokens = self._hit_tokens = self._copies = 0
        self._cache.evictions = self._cache.spills = self._cache.swaps = 0

    def stats(self) -> CacheStats:
        """Figures now."""
        return CacheStats(
            used_blocks={pool.name: pool.used for pool in self._pools},
            cached_blocks={pool.name: pool.cached for pool in self._pools},
            free_blocks={pool.name: len(pool.free) + len(pool.pending) for pool in self._pools},
            cached_bytes=self._cache.held_bytes,
            host_bytes=self._cache.host_bytes,
            checkpoints=sum(not isinstance(entry, Node) for entry in self._index.entries.values()),
            asked_tokens=self._asked_tokens,
            hit_tokens=self._hit_tokens,
            evictions=self._cache.evictions,
            spills=self._cache.spills,
            copies=self._copies,
            retained=len(self._retained),
            swap_bytes=self._cache.swap_bytes,
            swaps=self._cache.swaps,
            sequences=len(self._seqs),
            free_slots=len(self._slots.free),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError with the values when counts, tables and index disagree."""
        integrity.check_pools(self._groups, self._pools, self._seqs, self._index)
        integrity.check_sequences(self._groups, self._pools, self._seqs, self._index)
        integrity.check_index(self._index, self._seqs, self._cache, self._store.snapshot_bytes)
        integrity.check_retained(self._index, self._cache, self._retained)
        self._slots.check([state.slot for state in self._seqs.values()])

    def _enter(self, state: SeqState) -> SeqId:
        seq = SeqId(self._next_seq)
        self._next_seq += 1
        self._seqs[seq] = state
        return seq
