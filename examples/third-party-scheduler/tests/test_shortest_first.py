"""The core's contract kit, and what this scheduler adds."""

from __future__ import annotations

from luce_shortest_first.hooks import Options
from luce_shortest_first.scheduler import ShortestFirst

from luce_core.contracts import SchedulerContext, SeqId, SeqView
from luce_core.testing.plugin import PluginContract
from luce_core.testing.schedulers import NO_BARRIER, SchedulerContract


class TestPlugin(PluginContract):
    hooks = "luce_shortest_first.hooks"


class TestScheduler(SchedulerContract):
    hooks = "luce_shortest_first.hooks"
    scheduler = "shortest-first"


def first(patience: float, *prompts: tuple[float, int]) -> int:
    """The number of the prompt served first, of (arrived_s, tokens)."""
    scheduler = ShortestFirst(SchedulerContext(Options(patience=patience), 4, 16))
    waiting = [
        SeqView(SeqId(n), 0, tokens, arrived, False, NO_BARRIER, 0)
        for n, (arrived, tokens) in enumerate(prompts)
    ]
    work, _ = scheduler.plan(waiting, [], 16, lambda _seq, _rows: True)
    return work[0].seq


def test_the_shortest_prompt_is_served_first() -> None:
    assert first(0.01, (0.0, 900), (0.5, 20), (0.1, 300)) == 1


def test_a_long_prompt_loses_patience() -> None:
    assert first(0.01, (0.0, 900), (9.0, 20)) == 0
    assert first(0.1, (0.0, 900), (9.0, 20)) == 1
