"""Steps that are queued before the one in front is read: the same texts and state, whatever ends them."""

from __future__ import annotations

import pytest
from attrs import evolve

from luce_core.contracts import SamplingParams, Tokens
from luce_core.engine.scheduler import FairScheduler
from luce_core.ops import sampling
from luce_core.ops.newest import MOST_ENDS
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.pipeline import EngineRig
from luce_core.testing.staging import AheadExecutor

PROMPTS = ([5, 9, 2], [7], list(range(1, 30)))


@pytest.fixture(params=[1, 3], ids=["one", "three"])
def at_once(request, monkeypatch):
    """Steps that follow at once, which they can if they are sampled on the device."""
    if request.param > 1:
        monkeypatch.setattr(
            sampling.sample, "stays_on_device", lambda params: not params.waits, raising=False
        )
    return request.param


@pytest.fixture
def rig(toy, at_once):
    """rig(kind, ...) -> (EngineRig that runs ahead, ToyLaw)."""

    def make(kind="slots", **more):
        plain, law = toy(kind, **more)
        return EngineRig(evolve(plain.pipeline, executor=AheadExecutor(at_once))), law

    return make


def steps_until(made, answer, count):
    """Step until so many tokens have come."""
    while len(answer.ids) < count:
        assert made.engine.step()


def followed(made):
    return made.pipeline.executor.followed


def test_the_toys_law_holds(rig, kind):
    made, law = rig(kind)
    answers = made.generate(*PROMPTS, max_tokens=40)
    assert answers == [law.greedy(prompt, 40) for prompt in PROMPTS]
    assert followed(made) > 30
    assert made.engine.counters["emitted_tokens"] == 120


def test_texts_that_end_by_themselves_leave_their_state_for_the_next_turn(rig, kind):
    """A step is under way behind the end: nothing of it may be left in slots, pages or counts."""
    made, law = rig(kind)
    eog = [frozenset({law.greedy(prompt, 20)[9 + n]}) for n, prompt in enumerate(PROMPTS)]
    answers = [made.submit(prompt, 40, eog=ends) for prompt, ends in zip(PROMPTS, eog, strict=True)]
    made.run()
    for prompt, answer, ends in zip(PROMPTS, answers, eog, strict=True):
        assert answer.done.reason == "stop"
        assert answer.ids == law.greedy(prompt, 40, ends)
        assert answer.done.usage["completion_tokens"] == len(answer.ids)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        longer = [*prompt, *answer.ids, 3, 4]
        again = made.submit(longer, 9)
        made.run()
        assert again.done.usage["cached_tokens"] >= len(prompt) + len(answer.ids) - 1
        assert again.ids == law.greedy(longer, 9)


def test_one_that_ends_does_not_disturb_the_others(rig, kind):
    made, law = rig(kind)
    ends = frozenset({law.greedy(PROMPTS[0], 20)[5]})
    short = made.submit(PROMPTS[0], 60, eog=ends)
    lengths = [made.submit(PROMPTS[1], 13), made.submit(PROMPTS[2], 50)]
    made.run()
    assert short.ids == law.greedy(PROMPTS[0], 60, ends)
    assert [one.ids for one in lengths] == [law.greedy(PROMPTS[1], 13), law.greedy(PROMPTS[2], 50)]
    assert {one.done.reason for one in lengths} == {"length"}


def test_a_text_ends_where_the_context_does(rig):
    made, law = rig("slots", ctx_size=64)
    (ids,) = made.generate(PROMPTS[2], max_tokens=500)
    assert ids == law.greedy(PROMPTS[2], 64 - len(PROMPTS[2]))


def test_cancelled_while_a_step_is_under_way(rig, kind):
    made, law = rig(kind)
    gone, stays = made.submit(PROMPTS[0], 100), made.submit(PROMPTS[1], 30)
    steps_until(made, gone, 5)
    assert made.engine.flight is not None
    made.engine.cancel("r0")
    made.run()
    assert gone.done.reason == "cancelled"
    assert gone.ids == law.greedy(PROMPTS[0], len(gone.ids))
    assert stays.ids == law.greedy(PROMPTS[1], 30)
    assert made.generate(PROMPTS[0], max_tokens=20) == [law.greedy(PROMPTS[0], 20)]


def test_nothing_is_given_back_that_a_step_under_way_may_touch(rig, monkeypatch):
    made, _ = rig()
    blocks, unread = made.engine.blocks, made.pipeline.executor.unread
    close, retire, closed = blocks.close, blocks.retire, []

    def watched_close(seq, after):
        closed.append((after, *unread))
        close(seq, after)

    def watched_retire(fence):
        assert fence not in unread
        retire(fence)

    monkeypatch.setattr(blocks, "close", watched_close)
    monkeypatch.setattr(blocks, "retire", watched_retire)
    answer = made.submit(PROMPTS[0], 100)
    steps_until(made, answer, 5)
    made.engine.cancel("r0")
    made.run()
    ((after, under_way),) = closed
    assert after == under_way


def test_one_that_arrives_joins_behind_what_is_queued(rig, kind, at_once):
    made, law = rig(kind)
    first = made.submit(PROMPTS[0], 40)
    steps_until(made, first, 6)
    second = made.submit(PROMPTS[2], 10)
    had = len(first.ids)
    steps_until(made, second, 1)
    assert len(first.ids) <= had + 2 * at_once + 2
    made.run()
    assert [first.ids, second.ids] == [law.greedy(PROMPTS[0], 40), law.greedy(PROMPTS[2], 10)]


def test_tokens_are_sent_before_the_step_behind_them_is_read(rig, at_once):
    made, _ = rig()
    answer = made.submit(PROMPTS[0], 20)
    steps_until(made, answer, 4)
    flight, had = made.engine.flight, len(answer.ids)
    assert made.engine.step()
    assert made.engine.flight is not flight
    sent = [len(event.ids) for event in answer.events if isinstance(event, Tokens)]
    assert sent == [1] * (had + at_once)
    made.run()


def asked_for(made, monkeypatch):
    """(steps asked for at once, whether they were queued), as they come."""
    runs, asked = made.pipeline.executor, []
    follow = runs.follow

    def watched(step):
        handle = follow(step)
        asked.append((step.inputs["steps"], handle is not None))
        return handle

    monkeypatch.setattr(runs, "follow", watched)
    return asked


def test_so_many_at_once_as_no_end_is_known_within(rig, at_once, monkeypatch):
    """18 tokens: of the first step, of those at once, and one by one where fewer are left."""
    made, law = rig()
    asked = asked_for(made, monkeypatch)
    assert made.generate(PROMPTS[0], max_tokens=18) == [law.greedy(PROMPTS[0], 18)]
    whole, left = divmod(17, at_once)
    assert asked == [(at_once, True)] * whole + [(1, True)] * left
    assert made.engine.counters["steps"] == 18 + 1  # and the prompt


def test_one_by_one_where_some_that_runs_ends_soon(rig, monkeypatch):
    made, law = rig()
    asked = asked_for(made, monkeypatch)
    long, short = made.submit(PROMPTS[0], 30), made.submit(PROMPTS[0], 3)
    while not short.is_done:
        assert made.engine.step()
    assert asked == [(1, True), (1, True)]
    made.run()
    assert [long.ids, short.ids] == [law.greedy(PROMPTS[0], count) for count in (30, 3)]


def test_one_by_one_while_others_wait_for_a_place(rig, at_once, monkeypatch):
    made, law = rig(max_sequences=1)
    asked = asked_for(made, monkeypatch)
    first, second = made.submit(PROMPTS[0], 9), made.submit(PROMPTS[1], 9)
    while not first.is_done:
        assert made.engine.step()
    assert set(asked) == {(1, True)}
    made.run()
    assert (at_once, True) in asked
    assert [first.ids, second.ids] == [law.greedy(prompt, 9) for prompt in PROMPTS[:2]]


def test_what_cannot_be_queued_at_once_is_queued_one_by_one(toy, monkeypatch):
    """Here sampling that leaves the device."""
    monkeypatch.setattr(sampling.sample, "stays_on_device", lambda params: False, raising=False)
    params = SamplingParams(temperature=0.8, seed=5)
    plain = toy()[0]
    made = EngineRig(evolve(plain.pipeline, executor=AheadExecutor(3)))
    asked = asked_for(made, monkeypatch)
    assert made.generate(PROMPTS[0], max_tokens=8, params=params) == plain.generate(
        PROMPTS[0], max_tokens=8, params=params
    )
    assert asked[:4] == [(3, False), (1, True)] * 2


def test_nobody_is_asked_for_room_beyond_what_may_be_queued(rig, at_once, monkeypatch):
    """Room for one more, not for all: that one is queued, and the text ends where it must."""
    made, law = rig("pages", cache_block=1)
    reserve, asked = made.engine.blocks.reserve, asked_for(made, monkeypatch)
    limit = len(PROMPTS[0]) + 11

    def tight(seq, rows):
        return made.engine.blocks.length(seq) + rows <= limit and reserve(seq, rows)

    monkeypatch.setattr(made.engine.blocks, "reserve", tight)
    answer = made.submit(PROMPTS[0], 40)
    made.run()
    assert answer.ids == law.greedy(PROMPTS[0], len(answer.ids))
    assert len(answer.ids) == 12
    assert asked[-1] == (1, True)
    assert (at_once, True) in asked


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(temperature=0.8, min_p=0.05, seed=5),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5),
        SamplingParams(temperature=0.8, top_k=20, xtc_probability=0.5, xtc_threshold=0.01, seed=5),
        SamplingParams(temperature=0.0, repetition=1.2, frequency=0.5, presence=0.1),
        SamplingParams(temperature=0.8, top_k=20, repetition=1.5, logit_bias={3: 4.0, 9: -9.0}, seed=5),
    ],
    ids=["temperature", "min_p", "head", "xtc", "penalties", "penalties and bias"],
)
def test_sampled_texts_are_those_of_plain_calls(toy, rig, params):
    made, plain = rig()[0], toy()[0]
    answers = [one.generate(*PROMPTS, max_tokens=20, params=params) for one in (made, plain)]
    assert answers[0] == answers[1]
    assert followed(made) > 10


@pytest.mark.parametrize(
    ("params", "eog"),
    [
        (SamplingParams(temperature=0.0, repetition=1.2, dry_multiplier=0.5), frozenset()),
        (SamplingParams(temperature=0.0, logprobs=2), frozenset()),
        (SamplingParams(temperature=0.8, top_p=0.9, seed=5), frozenset()),
        (SamplingParams(temperature=0.0), frozenset(range(300, 301 + MOST_ENDS))),
    ],
    ids=["dry", "logprobs", "top_p", "many ends"],
)
def test_what_the_host_must_see_first_is_not_run_ahead(toy, rig, params, eog):
    made, plain = rig()[0], toy()[0]
    answers = [one.generate(*PROMPTS, max_tokens=9, params=params, eog=eog) for one in (made, plain)]
    assert answers[0] == answers[1]
    assert not followed(made)


def test_what_a_text_repeats_is_counted_once_whoever_counts(toy, rig, kind):
    """Texts that end, are cut short and go on in the next turn, beside others: penalties see all of each."""
    params = SamplingParams(temperature=0.0, frequency=3.0, repetition=1.3, min_tokens=7)
    answers = []
    for made in (rig(kind)[0], toy(kind)[0]):
        first = made.generate(*PROMPTS, max_tokens=30, params=params)
        ends = frozenset({first[0][4], first[1][9]})
        ended = made.generate(*PROMPTS, max_tokens=30, params=params, eog=ends)
        later = [[*prompt, *text, 4] for prompt, text in zip(PROMPTS, ended, strict=True)]
        answers.append((first, ended, made.generate(*later, max_tokens=12, params=params)))
        assert [len(text) for text in ended] != [30, 30, 30]
    assert answers[0] == answers[1]
    assert answers[0][0] != [toy(kind)[1].greedy(prompt, 30) for prompt in PROMPTS]


def test_what_a_text_repeats_is_counted_anew_where_it_gave_way(toy, rig):
    """Short memory: texts go on in other slots, after steps that counted for those they had."""
    params = SamplingParams(temperature=0.0, frequency=3.0, repetition=1.3)
    prompts = [[n + 1] * 60 for n in range(4)]
    sizes = {"max_sequences": 4, "ctx_size": 256, "cache_block": 8}
    plain = toy("pages", **sizes)[0]
    bytes_ = 45 * sum(plain.pipeline.state.block_bytes.values())
    short = rig("pages", **sizes, cache_bytes=bytes_)[0]
    answers = [one.generate(*prompts, max_tokens=60, params=params) for one in (short, plain)]
    assert answers[0] == answers[1]
    assert short.engine.counters["preempted"] > 0
    assert followed(short) > 10


def test_a_minimum_length_is_kept_running_ahead(toy, rig):
    made, law = rig("slots")
    params = SamplingParams(temperature=0.0, min_tokens=6)
    ends = frozenset({law.greedy(PROMPTS[0], 9)[2]})
    answers = [one.generate(PROMPTS[0], max_tokens=20, params=params, eog=ends) for one in (made, toy()[0])]
    assert answers[0] == answers[1]
    assert len(answers[0][0]) > 6 or not ends & set(answers[0][0][:6])
    assert followed(made)


def test_candidates_are_not_run_ahead(rig):
    drafter = ScriptedDrafter(lambda text, capacity: ([9][:capacity], [-1][:capacity]))
    made, law = rig("slots", drafters=[drafter])
    assert made.generate(*PROMPTS, max_tokens=9) == [law.greedy(prompt, 9) for prompt in PROMPTS]
    assert not followed(made)


def test_a_full_house_runs_ahead_though_others_wait(rig):
    made, law = rig("slots", max_sequences=2)
    prompts = [[n + 1, 4] for n in range(5)]
    assert made.generate(*prompts, max_tokens=20) == [law.greedy(prompt, 20) for prompt in prompts]
    assert followed(made) > 30


class Turns(FairScheduler):
    """One sequence a step, in turn."""

    def plan(self, waiting, running, row_budget, fits):
        work, preempted = super().plan(waiting, running, row_budget, fits)
        decoding = [item for item in work if item.phase == "held"]
        if len(decoding) < 2 or len(decoding) < len(work):
            return work, preempted
        shortest = min(running, key=lambda view: view.length - view.prompt % 7)
        return [item for item in work if item.seq == shortest.seq], preempted


def test_the_scheduler_decides(toy):
    plain, law = toy()
    made = EngineRig(evolve(plain.pipeline, executor=AheadExecutor(), scheduler=Turns(4)))
    assert made.generate(*PROMPTS, max_tokens=12) == [law.greedy(prompt, 12) for prompt in PROMPTS]


def test_a_step_that_fails_behind_another_ends_its_requests_with_the_reason(rig):
    made, law = rig()
    answer = made.submit(PROMPTS[0], 30)
    steps_until(made, answer, 4)

    def broken(step):
        raise RuntimeError("no such kernel")

    made.pipeline.executor.follow = broken
    made.run()
    assert answer.done.reason == "error"
    assert "no such kernel" in answer.done.error
    del made.pipeline.executor.follow
    assert made.generate(PROMPTS[0], max_tokens=12) == [law.greedy(PROMPTS[0], 12)]


def test_results_that_cannot_be_read_end_what_is_under_way_and_nothing_else(rig):
    made, law = rig()
    answer = made.submit(PROMPTS[0], 30)
    steps_until(made, answer, 4)
    handle = made.engine.flight.handle

    def broken():
        made.pipeline.executor.unread.pop(0)
        raise RuntimeError("an illegal address")

    handle.outputs = broken
    made.run()
    assert "an illegal address" in answer.done.error
    assert made.generate(PROMPTS[1], max_tokens=12) == [law.greedy(PROMPTS[1], 12)]
