"""A store that holds values one can look at, and an engine that writes into it what a model would.

Every entry of a page holds a hash of the whole text up to its token, so state of any other text shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from luce_core.cache.manager import PagedBlockManager
from luce_core.contracts import Fence, Field, Group, Hit, Pages, SeqId, Slot, StateLayout, StateSizes

GARBAGE = "garbage"


def layout(*groups: Group, slots: bool = False, best_effort: bool = False) -> StateLayout:
    field = Field((1,), "i32")
    pages = tuple(Pages(f"p{g.name}", g.name, 0, {"x": field}) for g in groups)
    slot = (Slot("s", 0, field, {}, "fold"),) if slots else ()
    return StateLayout(groups, pages, slot, best_effort)


LAYOUTS: dict[str, dict[str, StateLayout]] = {
    "pages": {"m": layout(Group("kv"))},
    "window": {"m": layout(Group("kv"), Group("swa", window=6))},
    "only-window": {"m": layout(Group("swa", window=5))},
    "slots": {"m": layout(Group("kv"), slots=True)},
    "only-slots": {"m": layout(slots=True)},
    "strided": {"m": layout(Group("kv"), Group("c4", stride=4), slots=True)},
    "strided-pages": {"m": layout(Group("kv"), Group("c2", stride=2))},
    "everything": {"m": layout(Group("kv"), Group("swa", window=6), Group("c4", stride=4), slots=True)},
    "drafter": {"m": layout(Group("kv")), "d": layout(Group("dkv"), best_effort=True)},
    "hybrid-drafter": {
        "m": layout(Group("kv")),
        "d": layout(Group("dkv"), Group("dswa", window=5), slots=True, best_effort=True),
    },
    "window-drafter": {
        "m": layout(Group("kv"), slots=True),
        "d": layout(Group("dswa", window=5), best_effort=True),
        "n": layout(Group("nkv")),
    },
}


def fold(state: int, keys: Sequence[int]) -> int:
    for key in keys:
        state = hash((state, key))
    return state


class FakeStore:
    """`StateStore` over Python lists."""

    def __init__(
        self,
        layouts: dict[str, StateLayout],
        *,
        blocks: int = 12,
        slots: int = 3,
        block_tokens: int = 4,
        max_held: int = 3,
        block_bytes: int = 10,
        slot_bytes: int = 7,
    ) -> None:
        self.groups = {f"{m}/{g.name}": g for m, lay in layouts.items() for g in lay.groups}
        self.slot_models = [m for m, lay in layouts.items() if lay.slots]
        self.has_slots = bool(self.slot_models)
        self.slot_bytes = slot_bytes if self.has_slots else 0
        self.block_bytes = dict.fromkeys(self.groups, block_bytes)
        self.sizes = StateSizes(block_tokens, dict.fromkeys(self.groups, blocks), slots, max_held)
        self.content = {
            key: [[GARBAGE] * (block_tokens // g.stride) for _ in range(blocks)]
            for key, g in self.groups.items()
        }
        self.slots: list[dict[str, Any]] = [dict.fromkeys(self.slot_models, GARBAGE) for _ in range(slots)]
        self.retired = 0
        self.busy: dict[tuple[str, int], int] = {}
        self.busy_slots: dict[int, int] = {}

    def touch(self, group: str, block: int) -> None:
        """A write: no unretired work of a closed sequence may still touch the block."""
        fence = self.busy.get((group, block), 0)
        assert fence <= self.retired, f"{group} block {block} written before fence {fence}"

    def copy_blocks(self, group: str, source: Sequence[int], target: Sequence[int]) -> None:
        for s, t in zip(source, target, strict=True):
            self.touch(group, t)
            self.content[group][t] = list(self.content[group][s])

    def read_blocks(self, group: str, blocks: Sequence[int]) -> Any:
        return [list(self.content[group][block]) for block in blocks]

    def write_blocks(self, group: str, blocks: Sequence[int], saved: Any) -> None:
        for block, content in zip(blocks, saved, strict=True):
            self.touch(group, block)
            self.content[group][block] = list(content)

    def reset_slot(self, slot: int) -> None:
        assert self.busy_slots.get(slot, 0) <= self.retired, f"slot {slot} reset too early"
        self.slots[slot] = dict.fromkeys(self.slot_models, 0)

    def copy_slot(self, source: int, target: int) -> None:
        self.slots[target] = dict(self.slots[source])

    def save_slot(self, slot: int, length: int) -> Any:
        return dict(self.slots[slot])

    def snapshot_bytes(self, length: int) -> int:
        return self.slot_bytes

    def load_slot(self, slot: int, saved: Any) -> None:
        self.slots[slot] = dict(saved)


class World:
    """Manager, store, and the plain truth: the keys of every open sequence."""

    def __init__(
        self,
        layouts: dict[str, StateLayout],
        *,
        cache_bytes: int = 10_000,
        host_bytes: int | None = None,
        spill: bool = False,
        swap_bytes: int = 0,
        **sizes: int,
    ) -> None:
        self.layouts = layouts
        self.store = FakeStore(layouts, **sizes)
        self.size = self.store.sizes.block_tokens
        self.manager = PagedBlockManager(
            self.store,
            layouts,
            identity="weights",
            cache_bytes=cache_bytes,
            host_bytes=host_bytes,
            spill=spill,
            swap_bytes=swap_bytes,
        )
        self.exact = any(
            lay.slots or any(g.window for g in lay.groups) for lay in layouts.values() if not lay.best_effort
        )
        strict = [g.stride for lay in layouts.values() if not lay.best_effort for g in lay.groups]
        self.granularity = max(strict, default=1)
        self.texts: dict[SeqId, list[int]] = {}
        self.written: dict[SeqId, set[tuple[str, int]]] = {}
        self.closed: list[list[int]] = []
        self.stopped: dict[int, list[int]] = {}
        """What `retain` gave -> the text it was given for."""
        self.checkpoints: list[list[int]] = []
        self.fence = 0

    @staticmethod
    def manager_of(store: FakeStore, layouts: dict[str, StateLayout]) -> PagedBlockManager:
        return PagedBlockManager(store, layouts, identity="weights", cache_bytes=0)

    # --- what an engine does

    def open(self, prompt: Sequence[int], limit: int | None = None) -> SeqId:
        hit = self.manager.match(prompt)
        assert hit.length <= max(0, len(prompt) - 1)
        if limit is not None and limit < hit.length:
            hit = Hit(limit, None)
        seq = self.manager.open(prompt, hit)
        self.texts[seq] = list(prompt[: hit.length])
        self.written[seq] = set()
        assert self.manager.length(seq) == hit.length
        self.verify(seq)
        return seq

    def start(self, prompt: Sequence[int]) -> SeqId:
        """Open and prefill the rest."""
        seq = self.open(prompt)
        assert self.extend(seq, prompt[len(self.texts[seq]) :])
        return seq

    def extend(self, seq: SeqId, keys: Sequence[int], garbage: int = 0) -> bool:
        """A forward of `keys`, and of rows behind them that are not accepted."""
        if not self.manager.reserve(seq, len(keys) + garbage):
            return False
        text = self.texts[seq]
        running = fold(0, text)
        for row, key in enumerate(keys):
            running = hash((running, key))
            for group, spec in self.store.groups.items():
                if (len(text) + row + 1) % spec.stride == 0:
                    self._put(seq, group, (len(text) + row) // spec.stride, running)
        for row in range(len(keys), len(keys) + garbage):
            for group, spec in self.store.groups.items():
                if spec.stride == 1:  # entries of several tokens are kept elsewhere until a row is accepted
                    self._put(seq, group, len(text) + row, GARBAGE)
        self.manager.advance(seq, keys)
        text += keys
        state = self.store.slots[self.manager.slot(seq)]
        for model in state:
            state[model] = fold(state[model], keys)
        return True

    def _put(self, seq: SeqId, group: str, entry: int, value: Any) -> None:
        per_block = self.size // self.store.groups[group].stride
        table = self.manager.tables(seq)[group]
        block = table.blocks[table.firsts.index(entry // per_block * self.size)]
        self.store.touch(group, block)
        self.store.content[group][block][entry % per_block] = value
        self.written[seq].add((group, block))

    def fork(self, seq: SeqId) -> SeqId:
        child = self.manager.fork(seq)
        self.texts[child] = list(self.texts[seq])
        self.written[child] = set()
        return child

    def checkpoint(self, seq: SeqId) -> int:
        self.checkpoints.append(list(self.texts[seq]))
        return self.manager.checkpoint(seq)

    def close(self, seq: SeqId, *, in_flight: bool = False) -> None:
        """in_flight: a step submitted for the sequence has not retired."""
        self.fence += in_flight
        after = Fence(self.fence if in_flight else 0)
        others = {
            (group, block)
            for other in self.texts
            if other != seq
            for group, table in self.manager.tables(other).items()
            for block in table.blocks
        }
        for group, table in self.manager.tables(seq).items():
            for block in table.blocks:
                if (group, block) in self.written[seq] or (group, block) not in others:
                    self.store.busy[group, block] = max(self.store.busy.get((group, block), 0), after)
        slot = self.manager.slot(seq)
        self.store.busy_slots[slot] = max(self.store.busy_slots.get(slot, 0), after)
        self.manager.close(seq, after)
        self.closed.append(self.texts.pop(seq))
        del self.written[seq]

    def stop(self, seq: SeqId, *, in_flight: bool = False, most_bytes: int = 1 << 40) -> int | None:
        """Retain and close."""
        text = list(self.texts[seq])
        kept = self.manager.retain(seq, most_bytes)
        if kept is not None:
            self.stopped[kept] = text
            self.checkpoints.append(text)
        self.close(seq, in_flight=in_flight)
        return kept

    def release(self, kept: int) -> None:
        self.manager.release(kept)
        del self.stopped[kept]

    def retire(self) -> None:
        self.store.retired = self.fence
        self.manager.retire(Fence(self.fence))

    # --- the truth

    def verify(self, seq: SeqId) -> None:
        """Every entry and slot the sequence may read is of exactly its text."""
        text = self.texts[seq]
        truth = list(accumulate(text, lambda state, key: hash((state, key)), initial=0))[1:]
        usable = self.manager.usable_from(seq)
        tables = self.manager.tables(seq)
        for group, spec in self.store.groups.items():
            per_block = self.size // spec.stride
            table = tables[group]
            where = dict(zip(table.firsts, table.blocks, strict=True))
            assert list(table.firsts) == sorted(where)
            needed = usable.get(group.split("/")[0], 0)
            if spec.window is not None:
                needed = max(needed, len(text) - spec.window)
            for entry in range(-(-needed // spec.stride), len(text) // spec.stride):
                block = where[entry // per_block * self.size]
                found = self.store.content[group][block][entry % per_block]
                want = truth[(entry + 1) * spec.stride - 1]
                assert found == want, f"sequence {seq}, {group}, entry {entry}: {found}, wanted {want}"
        for model, state in self.store.slots[self.manager.slot(seq)].items():
            # A drafter's slots may have seen more than its pages still hold.
            wants = [fold(0, text[first:]) for first in range(usable.get(model, 0) + 1)]
            assert state in wants, f"sequence {seq}, slot of {model}: {state}, wanted one of {wants}"

    def verify_all(self) -> None:
        for seq in self.texts:
            self.verify(seq)
        slots = [self.manager.slot(seq) for seq in self.texts]
        assert len(slots) == len(set(slots))
        self.manager.check_integrity()

    def expected_hit(self, prompt: Sequence[int]) -> int:
        """What a cache that never forgets would answer."""
        best = 0
        texts = self.checkpoints if self.exact else [*self.closed, *self.checkpoints]
        if not self.exact:
            texts += [text[: len(text) - len(text) % self.size] for text in self.texts.values()]
        for text in texts:
            shared = next(
                (i for i, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b),
                min(len(text), len(prompt)),
            )
            shared = min(shared, len(prompt) - 1)
            if not self.exact:
                shared -= shared % self.granularity
            elif shared < len(text):
                shared = 0
            best = max(best, shared)
        return best

    def finish(self) -> None:
        """Close everything; nothing may be left."""
        for kept in list(self.stopped):
            self.release(kept)
        assert self.manager.stats().swap_bytes == 0
        for seq in list(self.texts):
            self.close(seq)
        self.retire()
        self.manager.check_integrity()
        self.manager.clear()
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert stats.host_bytes == stats.cached_bytes == 0
        assert not any(stats.used_blocks.values())
        assert not any(stats.cached_blocks.values())
        assert stats.free_blocks == self.store.sizes.num_blocks
        assert stats.free_slots == self.store.sizes.num_slots
