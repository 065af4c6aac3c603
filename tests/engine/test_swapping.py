"""Sequences that give way: their state waits in host memory where that pays, and the text is the same anyway.

The toy's state of n tokens takes about 8 n bytes; computing them again in chunks of 8 reads 32 n bytes of
weights, in one chunk of 512 only 256.
"""

import random

import pytest

from luce_core.contracts import DeviceInfo
from luce_core.engine.swapping import HOST_LINK_BYTES_S, SwapRule, swap_rule
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline
from luce_core.testing.toy import ToyLaw, write_toy_model

TIGHT = {"max_sequences": 4, "ctx_size": 256, "cache_block": 8, "chunk": 8}
BLOCK_BYTES = 64
ROOMY = 1 << 20


def text(length, seed=0):
    return [random.Random(seed * 1000 + length).randrange(1, 280) for _ in range(length)]


@pytest.fixture
def tight(toy):
    """tight(kind, swap_bytes, **options) -> (EngineRig, ToyLaw): four requests do not fit together."""

    def make(kind, swap_bytes, **options):
        return toy(kind, swap_bytes=swap_bytes, **{**TIGHT, "cache_bytes": BLOCK_BYTES * 45, **options})

    return make


def swapped(rig):
    return rig.engine.blocks.stats().swap_bytes


def run(rig, budget):
    """To the end, looking at the books after every step."""
    peak = 0
    while rig.engine.step():
        rig.engine.blocks.check_integrity()
        assert swapped(rig) <= budget
        peak = max(peak, swapped(rig))
    rig.check_empty()
    stats = rig.engine.blocks.stats()
    assert (stats.swap_bytes, stats.retained) == (0, 0)
    return peak


PROMPTS = [text(length) for length in (60, 61, 62, 63)]


def load(rig, law, budget, count=60):
    answers = [rig.submit(prompt, count) for prompt in PROMPTS]
    peak = run(rig, budget)
    assert [answer.ids for answer in answers] == [law.greedy(prompt, count) for prompt in PROMPTS]
    return peak


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_with_room_on_the_host_nothing_is_computed_twice(tight, kind):
    rig, law = tight(kind, ROOMY)
    assert load(rig, law, ROOMY) > 0
    counters = rig.engine.counters
    assert counters["preempted"] == counters["retained"] > 0
    assert counters["prompt_tokens"] == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert rig.engine.blocks.stats().swaps > 0


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_without_it_is_computed_again(tight, kind):
    rig, law = tight(kind, 0)
    assert load(rig, law, 0) == 0
    counters = rig.engine.counters
    assert counters["preempted"] > counters["retained"] == 0
    assert counters["prompt_tokens"] > sum(len(prompt) - 1 for prompt in PROMPTS)


@pytest.mark.parametrize("kind", ["slots", "pages"])
@pytest.mark.parametrize("budget", [100, 900, 1300])
def test_a_budget_that_is_full_falls_back_to_computing_again(tight, kind, budget):
    rig, law = tight(kind, budget, cache_bytes=BLOCK_BYTES * 36)
    assert load(rig, law, budget, count=90) <= budget
    counters = rig.engine.counters
    assert counters["retained"] < counters["preempted"]
    assert bool(counters["retained"]) == (budget > 100)


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_a_copy_that_costs_more_than_computing_is_not_made(tight, kind):
    rig, law = tight(kind, ROOMY, chunk=512)
    assert load(rig, law, ROOMY) == 0
    assert rig.engine.counters["preempted"] > rig.engine.counters["retained"] == 0


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_one_that_ends_while_it_waits_gives_the_host_memory_back(tight, kind, end):
    rig, _ = tight(kind, ROOMY, cache_bytes=BLOCK_BYTES * 36)
    for number, prompt in enumerate(PROMPTS):
        rig.submit(prompt, 90, deadline_s=1e6 + number)
    while not swapped(rig):
        assert rig.engine.step()
    stopped = [seq for seq in rig.engine.waiting.values() if seq.retained is not None]
    before = swapped(rig)
    if end == "cancel":
        for seq in stopped:
            rig.engine.cancel(seq.request.request)
        rig.engine._drain()
    elif end == "deadline":
        for seq in stopped:
            seq.deadline_s = 0.0
        rig.engine._end_late()
    else:
        rig.engine.cancel_all()
    assert before > 0
    assert swapped(rig) == rig.engine.blocks.stats().retained == 0
    rig.engine.blocks.check_integrity()
    run(rig, ROOMY)


class Restless:
    """The core's scheduler, but now and then somebody has to give way for no reason at all."""

    def __init__(self, scheduler, dice):
        self.scheduler, self.dice = scheduler, dice

    def plan(self, waiting, running, row_budget, fits):
        work, preempted = self.scheduler.plan(waiting, running, row_budget, fits)
        if running and not preempted and self.dice.random() < 0.15:
            victim = self.dice.choice(running).seq
            return [item for item in work if item.seq != victim], [victim]
        return work, preempted


def restless_load(rig, law, dice, budget):
    """Arrivals, cancels and preemptions in any order. Every text is the law's, as far as it goes."""
    rig.engine.scheduler = Restless(rig.engine.scheduler, dice)
    shared = text(40, seed=9)
    asked = []
    for step in range(90):
        if step < 50 and dice.random() < 0.3:
            prompt = [*shared[: dice.choice([0, 0, 16, 40])], *text(dice.randint(1, 50), seed=step)]
            count = dice.randint(1, 40)
            answer = rig.submit(prompt, count, tenant=dice.choice("ab"))
            asked.append((f"r{len(asked)}", prompt, count, answer))
        if asked and dice.random() < 0.05:
            rig.engine.cancel(dice.choice(asked)[0])
        rig.engine.step()
        rig.engine.blocks.check_integrity()
        assert swapped(rig) <= budget
    run(rig, budget)
    for _, prompt, count, answer in asked:
        assert answer.done.reason in ("length", "cancelled"), answer.done.error
        assert answer.ids == law.greedy(prompt, len(answer.ids))
        assert answer.done.reason == "cancelled" or len(answer.ids) == count


def test_any_order_of_preemptions_keeps_texts_and_books(tight, kind):
    kept = swaps = 0
    for seed in range(4):
        dice = random.Random(seed)
        budget = [ROOMY, 700, 2000, 0][seed]
        tokens = dice.choice([0, 24, 45])
        cache = {"cache_bytes": BLOCK_BYTES * tokens} if kind != "window" else {"cache_bytes": 0}
        rig, law = tight(kind, budget, max_sequences=dice.randint(1, 4), ctx_size=128, **cache)
        restless_load(rig, law, dice, budget)
        kept += rig.engine.counters["retained"]
        swaps += rig.engine.blocks.stats().swaps
    assert kept > 0
    assert swaps > 0 or kind == "window", "windows leave nothing to be evicted here"


def test_state_of_drafters_comes_back_too(tmp_path):
    draft = write_toy_model(tmp_path / "draft.gguf", salt=7, context=256)
    target = write_toy_model(tmp_path / "target.gguf", salt=7, context=256)
    for seed in range(2):
        options = {**TIGHT, "ctx_size": 128, "swap_bytes": ROOMY, "cache_bytes": 24 * 2 * BLOCK_BYTES}
        options |= {"drafter": ("toy-draft",), "draft_nodes": 4, "toy-draft.model": str(draft)}
        rig = EngineRig(
            make_pipeline(target, TOY_HOOKS, "luce_core.testing.toy.draft_hooks", options=options)
        )
        law = ToyLaw(rig.pipeline.target.backend.spec.vocab, salt=7)
        answers = [rig.submit(prompt[:40], 60) for prompt in PROMPTS]
        rig.engine.scheduler = Restless(rig.engine.scheduler, random.Random(seed))
        run(rig, ROOMY)
        assert [answer.ids for answer in answers] == [law.greedy(prompt[:40], 60) for prompt in PROMPTS]
        used = [answer.done.usage for answer in answers]
        assert rig.engine.counters["retained"] > 0
        assert all(one["drafted_tokens"] == one["accepted_tokens"] > 0 for one in used), (
            "a drafter lost state"
        )


# --- the rule


def test_state_may_take_half_of_what_computing_again_reads():
    rule = SwapRule(budget_bytes=1, pass_bytes=1000, chunk=10, link_share=1.0)
    assert [rule.most_bytes(tokens) for tokens in (0, 1, 10, 11, 100)] == [0, 500, 500, 1000, 5000]


def test_a_slow_link_makes_copies_worth_less():
    assert SwapRule(1, 1000, 10, 0.01).most_bytes(100) == 50


def test_without_a_budget_nothing_is_worth_a_copy():
    assert SwapRule(0, 1000, 10, 1.0).most_bytes(100) == 0


@pytest.mark.parametrize(
    ("device", "share"),
    [
        (DeviceInfo("cpu", "", 1, 1e11, frozenset({"cpu"})), 1.0),
        (DeviceInfo("cuda:0", "", 1, 4e12, links={"cpu": 5e10}), 5e10 / 4e12),
        (DeviceInfo("cuda:0", "", 1, 4e12), HOST_LINK_BYTES_S / 4e12),
    ],
)
def test_the_link_of_the_plans_device_counts(toy, device, share):
    from attrs import evolve

    plan = toy("pages", swap_bytes=5)[0].pipeline.plan
    model = evolve(plan.models[0], layer_device=(device.id,))
    rule = swap_rule(evolve(plan, devices=(device,), models=(model,)))
    assert rule.budget_bytes == 5
    assert rule.link_share == pytest.approx(share)
