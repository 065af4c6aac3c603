"""The in-process channel: threads, limits, shutting down."""

import threading

import pytest

from luce_core.contracts import GenerationRequest, SamplingParams, Tokens
from luce_core.engine.local import LocalChannel
from luce_core.errors import CapacityError, UnavailableError
from luce_core.testing.pipeline import Receiver

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def channel(toy):
    """channel(**options) -> (LocalChannel, ToyLaw); closed and checked for leaks at the end."""
    made = []

    def make(max_queue=64, **options):
        rig, law = toy("slots", **options)
        made.append((LocalChannel(rig.engine, max_queue=max_queue), rig))
        return made[-1][0], law

    yield make
    for one, rig in made:
        one.close(0.0)
        rig.check_empty()


def request(name, prompt=(5, 6, 7), count=8):
    return GenerationRequest(name, tuple(prompt), count, GREEDY)


def test_requests_from_many_threads_get_their_own_answers(channel):
    one, law = channel(max_sequences=3)
    sinks = {n: Receiver() for n in range(12)}
    threads = [
        threading.Thread(target=one.submit, args=(request(str(n), (n + 1, 2, 3), 10), sink))
        for n, sink in sinks.items()
    ]
    for thread in threads:
        thread.start()
    for n, sink in sinks.items():
        assert sink.wait().reason == "length"
        assert sink.ids == law.greedy([n + 1, 2, 3], 10)


def test_a_full_queue_refuses_and_room_comes_back(channel):
    one, _ = channel(max_queue=2)
    gate = threading.Event()
    first = Receiver()

    def slow(event):
        gate.wait(30)  # holds the engine's thread, so that the queue stays full for certain
        first(event)

    one.submit(request("a"), slow)
    one.submit(request("b"), second := Receiver())
    with pytest.raises(CapacityError, match="2 requests are unfinished"):
        one.submit(request("c"), Receiver())
    gate.set()
    first.wait()
    second.wait()
    one.submit(request("c"), third := Receiver())
    assert third.wait().reason == "length"


def test_a_tenant_leaves_places_for_the_next(channel):
    one, _ = channel(max_queue=8)
    gate = threading.Event()
    sinks = []

    def submit(name, tenant, sink=None):
        sinks.append(Receiver())
        asked = GenerationRequest(name, (5, 6, 7), 8, GREEDY, tenant=tenant)
        one.submit(asked, sink or sinks[-1])

    def slow(event):
        gate.wait(30)
        sinks[0](event)

    submit("b0", "b", slow)  # holds the engine's thread, so that nothing ends meanwhile
    for number in range(6):
        submit(f"a{number}", "a")
    with pytest.raises(CapacityError, match="6 requests of this API key are unfinished, and 1 of 8"):
        submit("a6", "a")
    sinks.pop()
    submit("c0", "c")
    gate.set()
    assert {sink.wait().reason for sink in sinks} == {"length"}


def test_cancel_ends_a_running_request(channel):
    one, law = channel()
    sink = Receiver()
    begun = threading.Event()

    def watch(event):
        if isinstance(event, Tokens):
            begun.set()
        sink(event)

    one.submit(request("long", count=250), watch)
    assert begun.wait(30)
    one.cancel("long")
    assert sink.wait().reason in {"cancelled", "length"}
    assert sink.ids == law.greedy([5, 6, 7], len(sink.ids))


def test_closing_drains_then_cancels_then_refuses(channel):
    one, law = channel(max_sequences=1)
    short, long = Receiver(), Receiver()
    one.submit(request("short", count=3), short)
    one.submit(request("long", count=250), long)
    short.wait()
    one.close(0.0)
    assert short.ids == law.greedy([5, 6, 7], 3)
    assert long.wait().reason in {"cancelled", "length"}
    with pytest.raises(UnavailableError, match="shutting down"):
        one.submit(request("late"), Receiver())


def test_a_receiver_that_is_gone_does_not_stop_the_others(channel):
    one, law = channel(max_sequences=2)

    def gone(event):
        raise RuntimeError("Event loop is closed")

    one.submit(request("gone"), gone)
    one.submit(request("here"), sink := Receiver())
    assert sink.wait().reason == "length"
    assert sink.ids == law.greedy([5, 6, 7], 8)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_scheduler_ends_every_request_with_its_reason(toy):
    rig, _ = toy("slots")

    class Broken:
        def plan(self, waiting, running, row_budget, fits):
            raise ZeroDivisionError("no policy")

    rig.engine.scheduler = Broken()
    one = LocalChannel(rig.engine)
    one.submit(request("a"), sink := Receiver())
    done = sink.wait()
    assert done.reason == "error"
    assert "no policy" in done.error
    one.close(0.0)
    assert one.stats()["alive"] == 0.0
    health = one.health()
    assert health.status == "stopped"
    assert "no policy" in health.detail
    with pytest.raises(UnavailableError, match="no policy"):
        one.submit(request("b"), Receiver())


def test_stats_are_numbers(channel):
    one, _ = channel()
    one.submit(request("a"), sink := Receiver())
    sink.wait()
    stats = one.stats()
    assert all(isinstance(value, (int, float)) for value in stats.values()), stats
    assert stats["emitted_tokens"] == 8
