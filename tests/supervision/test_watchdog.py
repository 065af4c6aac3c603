"""When an engine counts as stuck: time is an argument, so nothing here waits."""

import pytest

from luce_core.contracts import Progress
from luce_core.supervision.child import Watchdog
from luce_core.supervision.messages import Beat, Events


def beat(turns, busy=True):
    return Beat(turns, busy, {})


def test_a_busy_engine_whose_turns_do_not_end_is_stuck():
    dog = Watchdog(limit_s=10, moved_s=0)
    for second in range(10):
        dog.see(beat(5), second)
    assert not dog.stuck(10)
    assert dog.stuck(10.1)


@pytest.mark.parametrize(
    "sign", [beat(6), beat(5, busy=False), Events((Progress("a", "prefill", 1, 2),))], ids=str
)
def test_a_turn_an_idle_beat_or_an_event_is_a_sign_of_life(sign):
    dog = Watchdog(limit_s=10, moved_s=0)
    dog.see(beat(5), 0)
    dog.see(sign, 9)
    assert not dog.stuck(19)
    assert dog.stuck(19.1)


def test_silence_is_being_stuck_whatever_was_said_last():
    dog = Watchdog(limit_s=10, moved_s=0)
    dog.see(beat(1, busy=False), 3)
    assert dog.stuck(13.1)


def test_no_limit_no_dog():
    assert not Watchdog(limit_s=0, moved_s=0).stuck(1e9)
