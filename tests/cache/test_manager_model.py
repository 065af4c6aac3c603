"""The block manager against the plain truth, over every kind of layout: any order of calls, any shortage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from luce_core.contracts import Fence, Hit
from luce_core.errors import CapacityError

from .world import LAYOUTS, World

KEYS = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class ManagerMachine(RuleBasedStateMachine):
    """Small pools, small budgets, two-letter texts: everything collides with everything."""

    world: World
    roomy = False
    spill = False

    @initialize(
        name=st.sampled_from(sorted(LAYOUTS)),
        blocks=st.integers(8, 16),
        slots=st.integers(1, 4),
        cache_bytes=st.sampled_from([0, 60, 150, 10_000]),
        spill=st.booleans(),
        swap_bytes=st.sampled_from([0, 40, 120, 1000]),
    )
    def start(
        self, name: str, blocks: int, slots: int, cache_bytes: int, spill: bool, swap_bytes: int
    ) -> None:
        self.world = World(
            LAYOUTS[name],
            blocks=blocks,
            slots=slots,
            cache_bytes=cache_bytes,
            spill=spill,
            swap_bytes=swap_bytes,
        )
        self.spill = spill

    def sequence(self, data: Any) -> Any:
        return data.draw(st.sampled_from(sorted(self.world.texts)), label="sequence")

    def prompt(self, data: Any) -> list[int]:
        """The beginning of some text seen before, and something behind it."""
        known = [[], *self.world.closed[-6:], *self.world.texts.values(), *self.world.checkpoints[-6:]]
        text = data.draw(st.sampled_from(known), label="known text")
        cut = data.draw(st.integers(max(0, len(text) - 9), len(text)), label="cut")
        return [*text[:cut], *data.draw(KEYS, label="new keys")]

    @rule(data=st.data(), shorter=st.integers(0, 3))
    def open(self, data: Any, shorter: int) -> None:
        world, prompt = self.world, self.prompt(data)
        if self.roomy:
            assert world.manager.match(prompt).length == world.expected_hit(prompt)
        limit = None
        if shorter and not world.exact:
            limit = max(0, world.manager.match(prompt).length - shorter)
            limit -= limit % world.granularity
        try:
            seq = world.open(prompt, limit)
        except CapacityError:
            stats = world.manager.stats()
            assert not stats.free_slots or stats.host_bytes or stats.swap_bytes
            return
        world.extend(seq, prompt[len(world.texts[seq]) :])

    @precondition(lambda self: self.world.texts)
    @rule(data=st.data(), keys=KEYS)
    def prefill(self, data: Any, keys: list[int]) -> None:
        seq = self.sequence(data)
        fits = self.world.manager.fits(seq, len(keys))
        before = self.world.manager.tables(seq)
        done = self.world.extend(seq, keys)
        assert fits or not done
        assert done or self.world.manager.tables(seq) == before

    @precondition(lambda self: self.world.texts)
    @rule(data=st.data(), keys=st.lists(st.integers(0, 1), max_size=3))
    def held(self, data: Any, keys: list[int]) -> None:
        self.world.extend(self.sequence(data), keys, garbage=3 - len(keys))

    @precondition(lambda self: self.world.texts)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        seq = self.sequence(data)
        if self.world.manager.stats().free_slots:
            self.world.fork(seq)
        else:
            with pytest.raises(CapacityError, match="forked"):
                self.world.fork(seq)

    @precondition(lambda self: self.world.texts)
    @rule(data=st.data())
    def checkpoint(self, data: Any) -> None:
        self.world.checkpoint(self.sequence(data))

    @precondition(lambda self: self.world.texts)
    @rule(data=st.data(), in_flight=st.booleans())
    def close(self, data: Any, in_flight: bool) -> None:
        seq = self.sequence(data)
        self.world.close(seq, in_flight=in_flight)
        with pytest.raises(KeyError):
            self.world.manager.length(seq)

    @precondition(lambda self: self.world.texts)
    @rule(data=st.data(), in_flight=st.booleans(), most_bytes=st.sampled_from([20, 10_000]))
    def stop(self, data: Any, in_flight: bool, most_bytes: int) -> None:
        self.world.stop(self.sequence(data), in_flight=in_flight, most_bytes=most_bytes)

    @precondition(lambda self: self.world.stopped)
    @rule(data=st.data(), key=st.integers(0, 1), comes_back=st.booleans())
    def release(self, data: Any, key: int, comes_back: bool) -> None:
        world = self.world
        kept = data.draw(st.sampled_from(sorted(world.stopped)), label="stopped")
        if comes_back:
            prompt = [*world.stopped[kept], key]
            try:
                seq = world.open(prompt)
            except CapacityError:
                return
            world.extend(seq, prompt[len(world.texts[seq]) :])
        world.release(kept)

    @invariant()
    def nothing_of_a_stopped_sequence_is_lost(self) -> None:
        if hasattr(self, "world") and not self.spill:
            unit = 1 if self.world.exact else self.world.granularity
            for text in self.world.stopped.values():
                assert self.world.manager.match([*text, 9]).length == len(text) - len(text) % unit

    @rule()
    def retire(self) -> None:
        self.world.retire()

    @rule(data=st.data(), tier=st.sampled_from(["host", "device"]), part=st.integers(1, 3))
    def move(self, data: Any, tier: Any, part: int) -> None:
        world = self.world
        blocks = world.manager.cached_blocks(self.prompt(data))[-part:]
        try:
            world.manager.move(blocks, tier, Fence(world.fence))
        except ValueError:
            assert world.texts  # running sequences pin them
        except CapacityError:
            assert tier == "device"

    @rule(num_bytes=st.integers(1, 50))
    def reclaim(self, num_bytes: int) -> None:
        before = self.world.manager.stats().host_bytes
        freed = self.world.manager.reclaim(num_bytes)
        assert before - self.world.manager.stats().host_bytes == freed
        assert freed >= min(num_bytes, before) or self.world.manager.stats().host_bytes

    @rule()
    def stale_hits_are_refused(self) -> None:
        with pytest.raises((KeyError, CapacityError)):
            self.world.manager.open([7] * 9, Hit(8, None))

    @invariant()
    def all_is_true(self) -> None:
        if hasattr(self, "world"):
            self.world.verify_all()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.finish()


class RoomyMachine(ManagerMachine):
    """Nothing runs out, so every hit must be as long as a cache that never forgets would give."""

    roomy = True

    @initialize(name=st.sampled_from(sorted(LAYOUTS)))
    def start(self, name: str) -> None:  # type: ignore[override]
        self.world = World(LAYOUTS[name], blocks=400, slots=40, cache_bytes=1_000_000, swap_bytes=1_000_000)

    @rule()
    def reclaim(self) -> None:  # type: ignore[override]
        """Would forget on purpose."""


COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))
TestManager = ManagerMachine.TestCase
TestManager.settings = settings(COMMON, max_examples=150, stateful_step_count=30)
TestRoomy = RoomyMachine.TestCase
TestRoomy.settings = settings(COMMON, max_examples=50, stateful_step_count=30)
