"""Requests that have so many seconds: told why, within a step, and nothing is held for them."""

import random

import pytest

from luce_core.contracts import Tokens


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def text(length, seed=0):
    return [random.Random(seed * 1000 + length).randrange(1, 280) for _ in range(length)]


@pytest.fixture
def timed(toy):
    """timed(kind, **options) -> (EngineRig, ToyLaw, Clock)."""

    def make(kind="slots", **options):
        rig, law = toy(kind, **options)
        rig.engine.clock = Clock()
        return rig, law, rig.engine.clock

    return make


def test_a_request_in_time_is_as_any_other(timed, kind):
    rig, law, _ = timed(kind)
    answer = rig.submit(text(30), 9, deadline_s=5.0)
    rig.run()
    assert answer.ids == law.greedy(text(30), 9)
    assert (answer.done.reason, answer.done.late, answer.done.aside) == ("length", False, ())


def test_a_deadline_that_passes_in_the_queue_is_an_error_and_takes_no_memory(timed):
    rig, law, clock = timed(max_sequences=1)
    first = rig.submit(text(20), 30)
    rig.engine.step()
    late = rig.submit(text(21), 5, deadline_s=2.0)
    for _ in range(3):
        rig.engine.step()
    opened = rig.engine.blocks.stats().asked_tokens
    clock.now += 2.0
    rig.engine.step()
    assert late.is_done
    assert (late.done.reason, late.done.late) == ("error", True)
    assert "2 s passed in the queue" in late.done.error
    assert rig.engine.blocks.stats().asked_tokens == opened, "it was opened after its deadline"
    rig.run()
    assert first.ids == law.greedy(text(20), 30)


def test_one_without_time_left_is_never_opened(timed):
    rig, _, _ = timed()
    answer = rig.submit(text(20), 5, deadline_s=0.0)
    assert not rig.engine.step()
    assert answer.done.late
    assert rig.engine.blocks.stats().asked_tokens == 0


def test_a_deadline_that_passes_while_the_prompt_is_processed_is_an_error(timed, kind):
    rig, _, clock = timed(kind, chunk=8)
    answer = rig.submit(text(100), 5, deadline_s=3.0)
    for _ in range(4):
        rig.engine.step()
    assert rig.engine.running
    clock.now += 3.5
    assert not rig.engine.step()
    assert (answer.done.reason, answer.done.late) == ("error", True)
    assert "3 s passed while its prompt was processed" in answer.done.error
    assert answer.done.usage["completion_tokens"] == 0
    rig.check_empty()


def test_a_deadline_that_passes_while_answering_keeps_the_answer_so_far(timed, kind):
    rig, law, clock = timed(kind)
    answer = rig.submit(text(20), 100, deadline_s=3.0)
    for _ in range(12):
        rig.engine.step()
    clock.now += 3.0
    assert not rig.engine.step()
    assert (answer.done.reason, answer.done.late, answer.done.error) == ("length", True, None)
    assert len(answer.ids) == 11
    assert answer.ids == law.greedy(text(20), 11)
    assert answer.done.aside == ("the deadline of 3 s passed: the answer ends early",)
    assert rig.engine.counters["late"] == 1
    rig.check_empty()


def test_what_a_late_answer_computed_stays_for_the_next_one(timed):
    rig, law, clock = timed("pages")
    late = rig.submit(text(64), 100, deadline_s=1.0)
    for _ in range(5):
        rig.engine.step()
    clock.now += 1.0
    rig.engine.step()
    again = rig.submit([*text(64), *late.ids], 5)
    rig.run()
    assert again.done.usage["cached_tokens"] >= 64
    assert again.ids == law.greedy([*text(64), *late.ids], 5)


def test_a_preempted_answer_that_is_late_keeps_what_it_has(timed):
    rig, law, clock = timed("pages", max_sequences=3, cache_block=8, chunk=8, cache_bytes=64 * 40)
    answers = [rig.submit(text(60 + n), 60, deadline_s=9.0) for n in range(3)]
    while not rig.engine.counters["preempted"]:
        rig.engine.step()
    clock.now += 9.0
    rig.engine.step()
    assert all(answer.is_done for answer in answers)
    for number, answer in enumerate(answers):
        assert answer.done.reason == ("length" if answer.ids else "error")
        assert answer.ids == law.greedy(text(60 + number), len(answer.ids))
    rig.check_empty()


def test_no_request_outlives_its_deadline_by_more_than_a_step(timed):
    """Any load, any phase: a step takes 0 to 3 s, and whoever is late at its beginning is gone at its end."""
    ended = set()
    for seed in range(9):
        dice = random.Random(seed)
        kind = dice.choice(["slots", "pages", "window"])
        rig, law, clock = timed(kind, chunk=8, cache_block=8, max_sequences=2)
        answers = []
        for step in range(90):
            if step < 60 and dice.random() < 0.25:
                limit = dice.choice([None, 0.5, 5.0, 30.0, 200.0])
                prompt, count = text(dice.randint(1, 60), seed), dice.randint(1, 30)
                tenant = dice.choice("ab")
                answer = rig.submit(prompt, count, deadline_s=limit, tenant=tenant)
                due = clock.now + limit if limit else float("inf")
                answers.append((answer, prompt, due))
            before = clock.now
            rig.engine.step()
            for answer, _, due in answers:
                assert answer.is_done or due > before, f"due at {due}, still there after the step at {before}"
            clock.now += dice.random() * 3
        rig.run()
        for answer, prompt, _ in answers:
            assert answer.ids == law.greedy(prompt, len(answer.ids))
            tokens = any(isinstance(event, Tokens) for event in answer.events)
            assert answer.done.reason == ("length" if tokens else "error")
            assert tokens or answer.done.late
            ended.add((answer.done.late, tokens))
    assert ended == {(False, True), (True, True), (True, False)}
