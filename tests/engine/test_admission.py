"""Admission against the plan: with the smallest cache it accepts, no request fails once it was taken."""

import random

import pytest

from luce_core.contracts import SamplingParams
from luce_core.errors import PlanError
from luce_core.testing.drafters import ScriptedDrafter

CONTEXT = 96
BLOCK_BYTES = 64  # of the toy's state, 8 tokens


def text(length, seed=0):
    return [random.Random(seed * 1000 + length).randrange(1, 280) for _ in range(length)]


@pytest.fixture
def smallest(toy):
    """smallest(kind, **options) -> (EngineRig, ToyLaw) with the least cache one full context fits into."""

    def make(kind, **options):
        for num_blocks in range(CONTEXT // 8, 60):
            try:
                cache_bytes = num_blocks * BLOCK_BYTES
                return toy(kind, ctx_size=CONTEXT, cache_block=8, cache_bytes=cache_bytes, **options)
            except PlanError:
                continue
        raise AssertionError("no cache was large enough")

    return make


def watch(rig):
    """What running sequences were refused is counted; a refusal may cost time, never a request."""
    reserve, refused = rig.engine.blocks.reserve, []

    def watched(handle, tokens):
        there = reserve(handle, tokens)
        if not there:
            refused.append(tokens)
        return there

    rig.engine.blocks.reserve = watched
    return refused


@pytest.mark.parametrize("swap_bytes", [0, 1 << 16])
def test_whatever_was_taken_is_answered_in_full(smallest, kind, swap_bytes):
    refused = preempted = 0
    for seed in range(2):
        dice = random.Random(seed)
        nodes = dice.choice([0, 0, 5])
        guess = ScriptedDrafter(lambda tokens, capacity: ([7] * capacity, [-1] * capacity))
        more = {"drafters": [guess], "draft_nodes": nodes} if nodes else {}
        rig, law = smallest(
            kind, chunk=dice.choice([8, 16]), max_sequences=dice.randint(1, 5), swap_bytes=swap_bytes, **more
        )
        refusals = watch(rig)
        asked = []
        for step in range(40):
            if step < 30 and dice.random() < 0.3:
                prompt = text(dice.choice([1, dice.randint(1, 30), CONTEXT - 1]), seed=step)
                count = dice.choice([1, dice.randint(1, 30), CONTEXT])
                answer = rig.submit(prompt, count, SamplingParams(temperature=0.0), tenant=dice.choice("abc"))
                asked.append((prompt, count, answer))
            rig.engine.step()
            rig.engine.blocks.check_integrity()
        rig.run()
        for prompt, count, answer in asked:
            assert answer.done.reason == "length", answer.done.error
            assert answer.ids == law.greedy(prompt, min(count, CONTEXT - len(prompt)))
        assert rig.engine.counters["failed_steps"] == 0
        refused += len(refusals)
        preempted += rig.engine.counters["preempted"]
    assert refused or kind == "window", "memory was never short: the test is too easy"
    assert preempted or kind == "window"


def test_a_full_context_always_fits_alone(smallest, kind):
    for length in (1, 8, 9, CONTEXT - 2, CONTEXT - 1):
        rig, law = smallest(kind, chunk=8, max_sequences=3)
        answer = rig.submit(text(length), CONTEXT)
        rig.run()
        assert answer.done.reason == "length"
        assert answer.ids == law.greedy(text(length), CONTEXT - length)
