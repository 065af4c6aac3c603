"""The engine over the toy architecture, against its law in plain Python."""

import random

import pytest

from luce_core.contracts import Done, Progress, SamplingParams, Tokens, Work
from luce_core.errors import PluginError
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.pipeline import GREEDY


def text(length, seed=0, vocab=280):
    return [random.Random(seed * 1000 + length).randrange(1, vocab) for _ in range(length)]


# --- one text, whatever happens around it


@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_greedy_text_follows_the_law(toy, kind, chunk):
    rig, law = toy(kind, chunk=chunk)
    for prompt in ([3], text(2), text(33), text(100)):
        assert rig.generate(prompt, max_tokens=20) == [law.greedy(prompt, 20)]


def test_requests_together_give_the_texts_they_give_alone(toy, kind):
    rig, law = toy(kind, chunk=16, max_sequences=4)
    prompts = [text(length) for length in (1, 40, 7, 64, 90, 2, 31, 32, 33)]
    assert rig.generate(*prompts, max_tokens=12) == [law.greedy(prompt, 12) for prompt in prompts]


def test_requests_that_arrive_later_join_without_disturbing(toy, kind):
    rig, law = toy(kind, chunk=8, max_sequences=3)
    prompts = [text(length) for length in (30, 5, 50, 12)]
    answers = []
    for prompt in prompts:
        answers.append(rig.submit(prompt, 15))
        for _ in range(3):
            rig.engine.step()
    rig.run()
    assert [answer.ids for answer in answers] == [law.greedy(prompt, 15) for prompt in prompts]


def test_sampled_text_depends_on_the_seed_alone(toy, kind):
    def sampled(rig, prompt, mates):
        own = SamplingParams(temperature=0.9, top_p=0.95, seed=77)
        answer = rig.submit(prompt, 20, own)
        for mate in range(mates):
            rig.submit(text(10 + mate), 9, SamplingParams(seed=mate))
        rig.run()
        return answer.ids

    prompt = text(37)
    alone = sampled(toy(kind, chunk=512)[0], prompt, 0)
    assert sampled(toy(kind, chunk=4)[0], prompt, 0) == alone
    assert sampled(toy(kind, chunk=16, max_sequences=4)[0], prompt, 3) == alone
    other = toy(kind)[0]
    assert other.generate(
        prompt, max_tokens=20, params=SamplingParams(temperature=0.9, top_p=0.95, seed=78)
    ) != [alone]


# --- candidates


def oracle_script(law, error_every):
    """Trees that hold the true continuation, with wrong siblings, and now and then a wrong turn."""
    calls = 0

    def script(tokens, capacity):
        nonlocal calls
        calls += 1
        true = law.greedy(tokens, 4)
        nodes, parents, above = [], [], -1
        for depth, token in enumerate(true):
            for candidate in ((token + 1) % 250, token, (token + 9) % 250):
                if len(nodes) == capacity:
                    return nodes, parents
                wrong = error_every and (calls + depth) % error_every == 0
                nodes.append((candidate + 3) % 250 if wrong else candidate)
                parents.append(above)
            if len(nodes) >= 2:
                above = len(nodes) - 2 if len(nodes) % 3 == 0 else above
        return nodes, parents

    return script


@pytest.mark.parametrize("error_every", [0, 2, 3])
@pytest.mark.parametrize("capacity", [1, 4, 9])
def test_candidates_change_the_speed_and_never_the_text(toy, kind, error_every, capacity):
    law = toy(kind)[1]
    drafter = ScriptedDrafter(oracle_script(law, error_every))
    rig, _ = toy(kind, drafters=[drafter], draft_nodes=capacity, max_sequences=3)
    prompts = [text(length) for length in (2, 33, 61)]
    answers = [rig.submit(prompt, 24) for prompt in prompts]
    rig.run()
    assert [answer.ids for answer in answers] == [law.greedy(prompt, 24) for prompt in prompts]
    assert drafter.rounds > 0
    if not error_every and capacity == 9:
        assert drafter.rounds < 24, "the true continuation was proposed, and nothing was accepted"
        assert all(answer.done.usage["accepted_tokens"] > 6 for answer in answers)


def test_candidates_leave_sampled_text_alone(toy, kind):
    def sampled(**more):
        params = SamplingParams(temperature=0.8, seed=5, frequency=0.3, repetition=1.2, top_k=40)
        rig, _ = toy(kind, **more)
        return rig.generate(text(20), max_tokens=30, params=params)

    rng = random.Random(3)

    def noise(tokens, capacity):
        parents = [rng.randrange(-1, node) for node in range(capacity)]
        return [rng.randrange(300 - 30) for _ in range(capacity)], parents

    plain = sampled()
    assert sampled(drafters=[ScriptedDrafter(noise)], draft_nodes=12) == plain

    truth = dict(enumerate(plain[0]))

    def perfect(tokens, capacity):
        rest = [truth[i] for i in range(len(tokens) - 20, 30)][:capacity]
        return rest, list(range(-1, len(rest) - 1))

    perfect_drafter = ScriptedDrafter(perfect)
    assert sampled(drafters=[perfect_drafter], draft_nodes=12) == plain
    assert perfect_drafter.rounds <= 4


def test_drafters_observe_every_committed_row_once_in_order(toy, kind):
    law = toy(kind)[1]
    drafter = ScriptedDrafter(oracle_script(law, 3))
    rig, _ = toy(kind, drafters=[drafter], draft_nodes=5, chunk=16, max_sequences=1)
    prompt = text(40)
    (answer,) = rig.generate(prompt, max_tokens=20)
    seen = drafter.observed[0]
    assert seen == [*prompt, *answer][: len(seen)]
    assert len(seen) >= len(prompt) + 18


@pytest.mark.parametrize("bad", [([999], [-1]), ([1], [0]), ([1, 2], [-1, 5])])
def test_a_broken_drafter_fails_the_request_and_not_the_engine(toy, bad):
    drafter = ScriptedDrafter(lambda tokens, capacity: bad)
    rig, law = toy("slots", drafters=[drafter], draft_nodes=4)
    answer = rig.submit(text(10), 8)
    rig.run()
    assert "scripted" in (answer.done.error or "")
    drafter.script = lambda tokens, capacity: ([], [])
    assert rig.generate(text(10), max_tokens=8) == [law.greedy(text(10), 8)]


# --- ends


def test_a_text_ends_at_an_ending_token_which_is_reported(toy, kind):
    rig, law = toy(kind)
    prompt = text(12)
    whole = law.greedy(prompt, 30)
    ending = whole[11]
    expected = law.greedy(prompt, 30, eog=frozenset({ending}))
    answer = rig.submit(prompt, 30, eog=frozenset({ending}))
    by_id = rig.submit(prompt, 30, SamplingParams(temperature=0.0, stop_ids=(ending,)))
    rig.run()
    assert answer.ids == by_id.ids == expected
    assert answer.done.reason == by_id.done.reason == "stop"


def test_min_tokens_holds_the_ending_back(toy):
    rig, law = toy()
    prompt = text(12)
    first = law.greedy(prompt, 1)[0]
    params = SamplingParams(temperature=0.0, min_tokens=3)
    answer = rig.submit(prompt, 10, params, eog=frozenset({first}))
    rig.run()
    assert len(answer.ids) >= 4 or answer.done.reason == "length"
    assert first not in answer.ids[:3]


@pytest.mark.parametrize("count", [0, 1, 2, 17])
def test_a_text_has_max_tokens_and_no_more(toy, count):
    rig, law = toy()
    answer = rig.submit(text(9), count)
    rig.run()
    assert answer.ids == law.greedy(text(9), count)
    assert answer.done.reason == "length"


@pytest.mark.parametrize("nodes", [0, 6])
def test_a_text_ends_with_the_context(toy, kind, nodes):
    law = toy(kind, context=64)[1]
    drafters = [ScriptedDrafter(oracle_script(law, 0))] if nodes else []
    rig, _ = toy(kind, context=64, drafters=drafters, draft_nodes=nodes)
    answer = rig.submit(text(50), 1000)
    rig.run()
    assert answer.ids == law.greedy(text(50), 14)
    assert answer.done.reason == "length"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": text(300)}, "300 tokens"),
        ({"prompt": [5, 99999]}, "99999"),
        ({"prompt": [-1]}, "-1"),
        ({"prompt": [1, 2], "keys": (1,)}, "1 cache keys"),
        ({"prompt": [1], "max_tokens": -4}, "-4"),
    ],
)
def test_an_impossible_request_is_told_why(toy, request_, words):
    rig, law = toy()
    answer = rig.submit(**request_)
    rig.run()
    assert answer.done.reason == "error"
    assert words in answer.done.error
    assert rig.generate(text(5), max_tokens=3) == [law.greedy(text(5), 3)]


# --- the cache


def test_a_second_turn_reuses_the_first(toy, kind):
    rig, law = toy(kind)
    prompt = text(70)
    (first,) = rig.generate(prompt, max_tokens=20)
    longer = [*prompt, *first, *text(10, seed=4)]
    answer = rig.submit(longer, 12)
    rig.run()
    assert answer.ids == law.greedy(longer, 12)
    assert answer.done.usage["cached_tokens"] >= 64


def test_a_shared_prefix_serves_different_texts(toy, kind):
    rig, law = toy(kind, max_sequences=3)
    shared = text(64)
    rig.generate(shared, max_tokens=4)
    prompts = [[*shared, *text(9, seed=seed)] for seed in range(5)]
    assert rig.generate(*prompts, max_tokens=10) == [law.greedy(prompt, 10) for prompt in prompts]


def test_cache_keys_separate_equal_tokens_with_different_content(toy):
    rig, _ = toy("pages")
    prompt = text(64)
    rig.generate(prompt, max_tokens=2)
    answer = rig.submit(prompt, 2, keys=tuple(token + 10_000 for token in prompt))
    rig.run()
    assert answer.done.usage["cached_tokens"] == 0


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_short_memory_preempts_and_the_texts_stay(toy, kind):
    rig, law = toy(kind, max_sequences=4, ctx_size=256, cache_block=8)
    small = rig.pipeline.state.block_bytes
    budget = sum(small.values()) * 45
    rig, law = toy(kind, max_sequences=4, ctx_size=256, cache_block=8, cache_bytes=budget)
    prompts = [text(length) for length in (60, 61, 62, 63)]
    assert rig.generate(*prompts, max_tokens=60) == [law.greedy(prompt, 60) for prompt in prompts]
    assert rig.engine.counters["preempted"] > 0


def test_a_scheduler_that_never_works_ends_requests_instead_of_spinning(toy):
    rig, _ = toy()
    idle = type("Idle", (), {"plan": staticmethod(lambda waiting, running, budget, fits: ([], []))})()
    rig.engine.scheduler = idle
    answers = [rig.submit(text(5), 3), rig.submit(text(9), 3)]
    rig.run(most_steps=10)
    assert all("cannot hold" in answer.done.error for answer in answers)


# --- cancelling and failing


@pytest.mark.parametrize("steps", [0, 1, 3, 8, 20])
def test_a_cancelled_request_ends_within_one_step_and_leaves_nothing(toy, kind, steps):
    rig, law = toy(kind, chunk=8, max_sequences=2)
    answers = [rig.submit(text(40 + n), 50) for n in range(4)]
    for _ in range(steps):
        rig.engine.step()
    for number in (0, 2, 3):
        rig.engine.cancel(f"r{number}")
    rig.engine.step()
    for number in (0, 2, 3):
        assert answers[number].done.reason == "cancelled"
    rig.run()
    assert answers[1].ids == law.greedy(text(41), 50)


def test_cancelling_what_never_was_or_is_over_is_ignored(toy):
    rig, _ = toy()
    answer = rig.submit(text(5), 3)
    rig.run()
    rig.engine.cancel("r0")
    rig.engine.cancel("nobody")
    rig.run()
    assert answer.done.reason == "length"


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on(toy, kind):
    rig, law = toy(kind, max_sequences=2)
    backend = rig.pipeline.target.backend
    forward = type(backend).forward
    calls = 0

    def failing(batch):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("the device says no")
        return forward(backend, batch)

    backend.forward = failing
    answers = [rig.submit(text(20), 10), rig.submit(text(21), 10), rig.submit(text(22), 10)]
    rig.run()
    failed = [answer for answer in answers if answer.done.reason == "error"]
    assert 1 <= len(failed) <= 2
    assert all("the device says no" in answer.done.error for answer in failed)
    kept = [(answer, n) for n, answer in enumerate(answers) if answer.done.reason != "error"]
    assert kept
    for answer, number in kept:
        assert answer.ids == law.greedy(text(20 + number), 10)


@pytest.mark.parametrize(
    "plan",
    [
        lambda waiting, running, budget, fits: ([Work(v.seq, "prefill", budget + 1) for v in waiting], []),
        lambda waiting, running, budget, fits: ([Work(v.seq, "prefill", 1) for v in waiting] * 2, []),
        lambda waiting, running, budget, fits: ([Work(12345, "held", 1)], []),
        lambda waiting, running, budget, fits: ([Work(v.seq, "prefill", 0) for v in waiting], []),
        lambda waiting, running, budget, fits: ([Work(v.seq, "held", v.barrier + 1) for v in waiting], []),
    ],
)
def test_a_scheduler_that_breaks_its_contract_is_named(toy, plan):
    rig, _ = toy()
    rig.engine.scheduler = type("Broken", (), {"plan": staticmethod(plan)})()
    rig.submit(text(4), 2)
    with pytest.raises(PluginError, match="scheduler"):
        rig.engine.step()


# --- events


def test_every_request_reports_progress_tokens_and_one_end(toy):
    rig, _ = toy("pages", chunk=16)
    answer = rig.submit(text(50), 5)
    rig.run()
    kinds = [type(event) for event in answer.events]
    assert kinds[0] is Progress
    assert answer.events[0].phase == "queued"
    done = [event.done for event in answer.events if isinstance(event, Progress) and event.phase == "prefill"]
    assert done == [0, 16, 32, 48, 49]
    assert kinds[-6:] == [Tokens] * 5 + [Done]
    usage = answer.done.usage
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (50, 5)
    assert all(value >= 0 for value in answer.done.timings.values())


def test_logprobs_are_those_of_the_law(toy):
    import math

    rig, law = toy()
    prompt = text(8)
    answer = rig.submit(prompt, 3, SamplingParams(temperature=0.0, logprobs=4))
    plain = rig.submit(prompt, 3)
    rig.run()
    assert plain.logprobs == []
    tokens = list(prompt)
    for entry in answer.logprobs:
        logits = law.logits(tokens)
        norm = max(logits) + math.log(sum(math.exp(v - max(logits)) for v in logits))
        ranked = sorted(range(law.vocab), key=lambda i: -logits[i])[:3]
        assert entry.logprob == pytest.approx(logits[entry.token] - norm, abs=1e-4)
        assert [token for token, _ in entry.top] == ranked
        tokens.append(entry.token)
    assert len(answer.logprobs) == 3


def test_priority_goes_first(toy):
    rig, _ = toy("pages", max_sequences=1)
    late = [rig.submit(text(10), 4, GREEDY, priority=priority) for priority in (0, 0, 5)]
    order = []
    while not all(answer.is_done for answer in late):
        rig.engine.step()
        order += [n for n, answer in enumerate(late) if answer.is_done and n not in order]
    assert order[0] == 2


BEYOND = [{"top_k": 10**30}, {"seed": -(2**70)}, {"logit_bias": {2**40: 1.0}}]


@pytest.mark.parametrize("bad", BEYOND, ids=str)
def test_parameters_no_table_holds_cost_their_own_request_only(toy, bad):
    """Callers check before they submit; the engine trusts nobody."""
    rig, law = toy("pages", max_sequences=2)
    good = rig.submit((5, 6, 7), 8)
    answer = rig.submit((5, 6, 7), 8, SamplingParams(**{"temperature": 1.0, **bad}))
    rig.run()
    assert answer.done.reason == "error"
    assert good.ids == law.greedy([5, 6, 7], 8)
    assert rig.generate((9, 9)) == [law.greedy([9, 9], 16)]
