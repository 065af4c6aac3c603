"""Scored prompts, against the toy's law in plain Python: every token once, whatever happens on the way."""

import math
import random

import pytest

from luce_core.contracts import Progress, PromptLogprobs, SamplingParams, Tokens
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.pipeline import GREEDY


def text(length, seed=0, vocab=280):
    return [random.Random(seed * 1000 + length).randrange(1, vocab) for _ in range(length)]


def scores(answer):
    """The prompt's entries; their places must be 1, 2, 3, ... and all come before the answer."""
    events = [event for event in answer.events if isinstance(event, PromptLogprobs)]
    entries = [entry for event in events for entry in event.tokens]
    places = [event.first + i for event in events for i in range(len(event.tokens))]
    assert places == list(range(1, len(entries) + 1))
    kinds = [type(event) for event in answer.events if isinstance(event, PromptLogprobs | Tokens)]
    assert kinds == sorted(kinds, key=[PromptLogprobs, Tokens].index)
    return entries


def check(answer, law, prompt, most):
    entries = scores(answer)
    assert [entry.token for entry in entries] == prompt[1:]
    for place, entry in enumerate(entries, start=1):
        logits = law.logits(prompt[:place])
        norm = max(logits) + math.log(sum(math.exp(value - max(logits)) for value in logits))
        ranked = sorted(range(law.vocab), key=lambda token: -logits[token])
        assert entry.logprob == pytest.approx(logits[entry.token] - norm, abs=1e-4)
        assert entry.rank == 1 + sum(value > logits[entry.token] for value in logits)
        assert [logits[token] for token, _ in entry.top] == [logits[token] for token in ranked[:most]]
        assert [value for _, value in entry.top] == pytest.approx(
            [logits[token] - norm for token, _ in entry.top], abs=1e-4
        )


@pytest.mark.parametrize("chunk", [1, 5, 512])
@pytest.mark.parametrize("length", [1, 2, 41])
def test_a_scored_prompt_follows_the_law_however_it_is_cut(toy, kind, chunk, length):
    rig, law = toy(kind, chunk=chunk)
    prompt = text(length)
    answer = rig.submit(prompt, 6, prompt_logprobs=3)
    rig.run()
    check(answer, law, prompt, 3)
    assert answer.ids == law.greedy(prompt, 6)


def test_mates_with_other_wishes_change_nothing(toy, kind):
    rig, law = toy(kind, chunk=16, max_sequences=4)
    wishes = [(20, 0), (7, None), (33, 5), (2, None), (24, 20), (1, 2)]
    answers = [
        rig.submit(text(length), 8, SamplingParams(temperature=0.0, logprobs=2), prompt_logprobs=most)
        for length, most in wishes
    ]
    rig.run()
    for (length, most), answer in zip(wishes, answers, strict=True):
        prompt = text(length)
        assert answer.ids == law.greedy(prompt, 8)
        assert len(answer.logprobs) == 8
        if most is None:
            assert scores(answer) == []
        else:
            check(answer, law, prompt, most)


def test_candidates_change_nothing(toy, kind):
    law = toy(kind)[1]

    def script(tokens, capacity):
        return law.greedy(tokens, min(3, capacity)), range(-1, min(3, capacity) - 1)

    rig, _ = toy(kind, drafters=[ScriptedDrafter(script)], draft_nodes=4, chunk=8)
    answer = rig.submit(text(30), 12, prompt_logprobs=2)
    rig.run()
    check(answer, law, text(30), 2)
    assert answer.ids == law.greedy(text(30), 12)


@pytest.mark.parametrize("length", [1, 2, 50])
def test_without_an_answer_the_request_ends_with_the_last_score(toy, kind, length):
    rig, law = toy(kind, chunk=16)
    answer = rig.submit(text(length), 0, prompt_logprobs=1)
    rig.run()
    check(answer, law, text(length), 1)
    assert (answer.ids, answer.done.reason, answer.done.error) == ([], "length", None)
    assert answer.done.usage["completion_tokens"] == 0


def test_transforms_leave_the_scores_alone(toy):
    rig, law = toy()
    params = SamplingParams(temperature=0.3, top_k=1, repetition=1.9, logit_bias={5: 90.0}, seed=3)
    answer = rig.submit(text(20), 4, params, prompt_logprobs=2)
    rig.run()
    check(answer, law, text(20), 2)


# --- the cache


def test_a_cached_prefix_is_not_used_for_a_scored_prompt_which_is_cached_itself(toy, kind):
    rig, law = toy(kind)
    prompt = text(90)
    rig.generate(prompt, max_tokens=4)
    scored = rig.submit(prompt, 4, prompt_logprobs=0)
    rig.run()
    check(scored, law, prompt, 0)
    assert scored.done.usage["cached_tokens"] == 0

    other, again = text(88, seed=1), [*text(88, seed=1), 7]
    rig.submit(other, 1, prompt_logprobs=0)
    rig.run()
    plain = rig.submit(again, 4)
    rig.run()
    assert plain.ids == law.greedy(again, 4)
    assert plain.done.usage["cached_tokens"] >= 64


# --- preempted


class Preempting:
    """The engine's own scheduler, but every sequence that runs is preempted after each of `steps`."""

    def __init__(self, engine, steps, *, forget=False):
        self.engine, self.inner = engine, engine.scheduler
        self.steps, self.step, self.met, self.forget = steps, 0, [], forget

    def plan(self, waiting, running, row_budget, fits):
        self.step += 1
        if self.forget:
            self.engine.blocks.clear()
        if self.step in self.steps and running:
            self.met += [(view.length, view.prompt) for view in running]
            return [], [view.seq for view in running]
        return self.inner.plan(waiting, running, row_budget, fits)


@pytest.mark.parametrize(("cache", "swap_bytes"), [(True, 0), (False, 0), (True, 1 << 20)])
def test_a_preemption_in_the_middle_repeats_no_row_and_loses_none(toy, kind, cache, swap_bytes):
    rig, law = toy(kind, chunk=8, max_sequences=2, swap_bytes=swap_bytes)
    # In the prompts of 45 tokens, again there, and in the answers.
    rig.engine.scheduler = Preempting(rig.engine, {3, 6, 14, 20, 24}, forget=not cache)
    prompts = [text(45), text(45, seed=1)]
    answers = [rig.submit(prompt, 10, prompt_logprobs=2) for prompt in prompts]
    rig.run()
    met = rig.engine.scheduler.met
    assert any(0 < length < 44 for length, _ in met)
    assert any(length > 44 for length, _ in met)
    for prompt, answer in zip(prompts, answers, strict=True):
        check(answer, law, prompt, 2)
        assert answer.ids == law.greedy(prompt, 10)
        assert answer.done.usage["cached_tokens"] == 0


def test_a_prompt_that_is_only_scored_survives_preemption(toy, kind):
    rig, law = toy(kind, chunk=8)
    rig.engine.scheduler = Preempting(rig.engine, {2, 4, 6})
    answer = rig.submit(text(30), 0, prompt_logprobs=1)
    rig.run()
    check(answer, law, text(30), 1)
    assert len(rig.engine.scheduler.met) == 3


# --- ends


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_a_cancelled_scoring_leaves_nothing(toy, kind, steps):
    rig, law = toy(kind, chunk=8)
    answer = rig.submit(text(60), 5, prompt_logprobs=1)
    for _ in range(steps):
        rig.engine.step()
    rig.engine.cancel("r0")
    rig.run()
    assert answer.done.reason == "cancelled"
    scores(answer)
    assert rig.generate(text(60), max_tokens=5) == [law.greedy(text(60), 5)]


def test_a_failing_head_fails_the_request_and_not_the_engine(toy):
    rig, law = toy()
    head = rig.engine.programs.head

    def failing(rows):
        raise ValueError("the head says no")

    rig.engine.programs.head = failing
    answer = rig.submit(text(20), 3, prompt_logprobs=1)
    rig.run()
    assert "the head says no" in answer.done.error
    rig.engine.programs.head = head
    again = rig.submit(text(20), 3, prompt_logprobs=1)
    rig.run()
    check(again, law, text(20), 1)


def test_only_a_block_of_rows_has_logits_at_a_time(toy):
    rig, law = toy(chunk=512)
    asked = []
    head = rig.engine.programs.head

    def counting(rows):
        asked.append(len(rows))
        return head(rows)

    rig.engine.programs.head, rig.engine.programs.score_rows = counting, 7
    answer = rig.submit(text(80), 1, prompt_logprobs=1)
    rig.run()
    check(answer, law, text(80), 1)
    assert max(asked) == 7
    assert sum(asked) == 79


def test_rows_nobody_scores_get_no_logits(toy):
    rig, _ = toy()
    rig.engine.programs.head = None  # would be called
    rig.generate(text(40), text(9), max_tokens=3)


def test_progress_comes_before_the_scores_of_its_rows(toy):
    """Whoever sees scores knows that the request was begun: it may not be begun again."""
    rig, _ = toy(chunk=16)
    answer = rig.submit(text(40), 1, GREEDY, prompt_logprobs=0)
    rig.run()
    reached = 0
    for event in answer.events:
        if isinstance(event, Progress):
            reached = event.done
        elif isinstance(event, PromptLogprobs):
            assert event.first + len(event.tokens) <= reached + 1
