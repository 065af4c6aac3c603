"""The core's contract kit, and what this scheduler adds."""

from __future__ import annotations

from @MODULE@.scheduler import @CLASS@

from luce_core.contracts import SeqId, SeqView
from luce_core.testing.plugin import PluginContract
from luce_core.testing.schedulers import NO_BARRIER, SchedulerContract

HOOKS = "@MODULE@.hooks"


class TestPlugin(PluginContract):
    hooks = HOOKS


class TestScheduler(SchedulerContract):
    hooks = HOOKS
    scheduler = "@NAME@"


def test_who_came_first_is_served_first() -> None:
    waiting = [
        SeqView(SeqId(number), 0, 20, arrived_s, False, NO_BARRIER, 0)
        for number, arrived_s in enumerate([3.0, 1.0, 2.0])
    ]
    work, preempted = @CLASS@(2).plan(waiting, [], 100, lambda _seq, _rows: True)
    assert [item.seq for item in work] == [1, 2]
    assert not preempted
