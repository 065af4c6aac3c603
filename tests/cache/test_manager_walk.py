"""Long random walks of the block manager against the plain truth: what short cases reach too rarely."""

from __future__ import annotations

from random import Random

import pytest

from luce_core.contracts import Fence
from luce_core.errors import CapacityError

from .world import LAYOUTS, World


class Walk:
    """Conversations that grow, branch and return, under shortage."""

    def __init__(self, name: str, seed: int) -> None:
        self.random = Random(f"{name} {seed}")
        self.letters = self.random.choice([2, 5])
        """Few: texts meet by chance within a block. More: they part exactly where one ended."""
        self.world = World(
            LAYOUTS[name],
            blocks=self.random.randint(9, 30),
            slots=self.random.randint(2, 4),
            cache_bytes=self.random.choice([0, 80, 300, 10_000]),
            host_bytes=self.random.choice([None, None, 20, 100]),
            spill=self.random.random() < 0.4,
        )

    def keys(self, most: int) -> list[int]:
        return [self.random.randrange(self.letters) for _ in range(self.random.randint(1, most))]

    def prompt(self) -> list[int]:
        closed, running = self.world.closed[-4:], [*self.world.texts.values()]
        text = self.random.choice([[], *closed, *closed, *running, *self.world.checkpoints[-3:]])
        cut = len(text) if self.random.random() < 0.6 else self.random.randint(0, len(text))
        return [*text[: min(cut, 30)], *self.keys(6)]

    def open(self) -> None:
        world, prompt = self.world, self.prompt()
        if not world.manager.stats().free_slots:
            if world.texts and self.random.random() < 0.5:
                self.close()
            world.retire()
        try:
            seq = world.open(prompt)
        except CapacityError:
            stats = world.manager.stats()
            assert not stats.free_slots or stats.host_bytes
            return
        world.extend(seq, prompt[len(world.texts[seq]) :])

    def close(self) -> None:
        seq = self.random.choice(sorted(self.world.texts))
        if self.random.random() < 0.3:
            self.world.checkpoint(seq)
        self.world.close(seq, in_flight=self.random.random() < 0.4)

    def extend(self) -> None:
        seq = self.random.choice(sorted(self.world.texts))
        if len(self.world.texts[seq]) > 32:
            self.world.close(seq)
        elif self.random.random() < 0.5:
            self.world.extend(seq, self.keys(9))
        else:
            accepted = self.keys(3)[: self.random.randint(0, 3)]
            self.world.extend(seq, accepted, garbage=3 - len(accepted))

    def step(self) -> None:
        world, dice = self.world, self.random.random()
        if not world.texts or dice < 0.3:
            self.open()
            return
        seq = self.random.choice(sorted(world.texts))
        if dice < 0.55:
            self.extend()
        elif dice < 0.62:
            world.checkpoint(seq)
        elif dice < 0.68:
            if world.manager.stats().free_slots:
                world.fork(seq)
        elif dice < 0.88:
            self.close()
        elif dice < 0.95:
            world.retire()
        else:
            self.move()

    def move(self) -> None:
        blocks = self.world.manager.cached_blocks(self.prompt())[-self.random.randint(1, 3) :]
        tier = self.random.choice(["host", "device"])
        try:
            self.world.manager.move(blocks, tier, Fence(self.world.fence))  # type: ignore[arg-type]
        except ValueError:
            assert self.world.texts
        except CapacityError:
            assert tier == "device"


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_sequence_always_reads_its_own_text(name: str) -> None:
    hits = copies = evictions = 0
    for seed in range(3):
        walk = Walk(name, seed)
        for _ in range(250):
            walk.step()
            walk.world.verify_all()
        stats = walk.world.manager.stats()
        hits, copies, evictions = hits + stats.hit_tokens, copies + stats.copies, evictions + stats.evictions
        walk.world.finish()
    assert hits
    assert evictions or name == "only-slots"
    assert copies or name == "only-slots"
