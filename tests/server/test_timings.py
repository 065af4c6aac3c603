"""`usage.timings`: one schema, whatever the format, streamed or not."""

import openai
import pytest

from luce_core.contracts import Finish
from luce_core.server.timings import Timings, timings_of
from luce_core.testing.toy import ToyLaw

ONLY_A = {str(ord("a")): 100}
"""Answers of one letter come back from their text token by token."""


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def chat(client, messages, **more):
    asked = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 6, "logit_bias": ONLY_A}
    return client.chat.completions.create(**{**asked, **more})


def complete(client, prompt, **more):
    return client.completions.create(**{"model": "m", "prompt": prompt, "temperature": 0, **more})


def say(text):
    return [{"role": "user", "content": text}]


def last_usage(chunks):
    return list(chunks)[-1].usage


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def test_all_forms_carry_the_same_fields(client):
    usages = [
        chat(client, say("one")).usage,
        last_usage(chat(client, say("two"), **STREAMED)),
        complete(client, "three", max_tokens=6, extra_body={"ignore_eos": True}).usage,
        last_usage(complete(client, "four", max_tokens=6, extra_body={"ignore_eos": True}, **STREAMED)),
    ]
    wanted = {field for field in Timings.__annotations__ if field != "accept_rate"}
    for usage in usages:
        timings = usage.timings
        assert set(timings) == wanted
        assert timings["cached_prefix_tokens"] == usage.prompt_tokens_details.cached_tokens
        assert timings["cached_prefix_tokens"] + timings["prefilled_tokens"] == usage.prompt_tokens
        assert timings["agent_turn_cache_hit"] is False
        assert timings["prefill_ms"] > 0
        speed = (usage.completion_tokens - 1) / timings["decode_ms"] * 1e3
        assert timings["decode_tokens_per_sec"] == pytest.approx(speed, rel=1e-2)


def test_one_token_has_no_decoding_and_none_no_timings_at_all(client):
    one = complete(client, "hello", max_tokens=1).usage.timings
    assert set(one) == {"prefill_ms", "cached_prefix_tokens", "prefilled_tokens", "agent_turn_cache_hit"}
    assert complete(client, "hello", max_tokens=0).usage.timings == {}


@pytest.mark.parametrize("form", [{}, STREAMED], ids=["whole", "stream"])
def test_the_next_turn_of_an_agent_hits_and_a_shared_system_prompt_does_not(client, form):
    def ask(messages):
        made = chat(client, messages, **form)
        return last_usage(made) if form else made.usage

    system = {"role": "system", "content": "You and the world, " * 6}
    first = [system, *say("one")]
    assert ask(first).timings["agent_turn_cache_hit"] is False
    other = ask([system, *say("two")])
    assert other.timings["agent_turn_cache_hit"] is False
    second = [*first, {"role": "assistant", "content": "aaaaaa"}, *say("and?")]
    usage = ask(second)
    assert usage.timings["agent_turn_cache_hit"] is True
    assert usage.timings["cached_prefix_tokens"] > other.timings["cached_prefix_tokens"]
    rewritten = [*first, {"role": "assistant", "content": "aaaxaa"}, *say("and?")]
    assert ask(rewritten).timings["agent_turn_cache_hit"] is False
    third = [*second, {"role": "assistant", "content": "aaaaaa"}, *say("more")]
    assert chat(client, third, n=2).usage.timings["agent_turn_cache_hit"] is True


def test_several_prompts_hit_when_all_of_them_do(client, served):
    law = ToyLaw(served.service.face.tokenizer.vocab_size, salt=7)
    one, two = list(range(60, 100)), list(range(70, 120))
    turns = []
    for prompt in (one, two):
        complete(client, [prompt], max_tokens=5, extra_body={"ignore_eos": True})
        turns.append([*prompt, *law.greedy(prompt, 5), 9])
    both = complete(client, turns, max_tokens=2).usage
    assert both.timings["agent_turn_cache_hit"] is True
    mixed = complete(client, [turns[0], [5, 6]], max_tokens=2).usage
    assert mixed.timings["agent_turn_cache_hit"] is False


# --- what finishes add up to


def finish(*, prompt=10, made=5, cached=0, drafted=0, accepted=0, turn=0, prefill_ms=2.0, decode_ms=8.0):
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "cached_tokens": cached,
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
    }
    usage |= {} if turn is None else {"cached_turn": turn}
    return Finish("stop", usage, {"prefill_ms": prefill_ms, "decode_ms": decode_ms})


def test_answers_that_run_together_are_added_up():
    found = timings_of(
        [
            finish(cached=4, made=5, decode_ms=8.0, drafted=6, accepted=3, turn=1),
            finish(cached=6, made=3, decode_ms=4.0, drafted=2, accepted=1, turn=1, prefill_ms=5.0),
            finish(prompt=7, cached=7, made=1, decode_ms=0.0, turn=1),
            finish(prompt=7, cached=1, made=1, decode_ms=0.0, turn=1),
        ],
        per_prompt=2,
    )
    assert found == Timings(
        prefill_ms=5.0,
        decode_ms=8.0,
        decode_tokens_per_sec=6 / 8.0 * 1e3,
        cached_prefix_tokens=4 + 1,
        prefilled_tokens=17 - 5,
        agent_turn_cache_hit=True,
        accept_rate=0.5,
    )


@pytest.mark.parametrize(
    ("turns", "hit"), [([1, 1], True), ([1, 0], False), ([0, 0], False), ([None, 1], None), ([None], None)]
)
def test_a_hit_is_everybodys_and_unknown_where_one_did_not_look(turns, hit):
    assert timings_of([finish(turn=turn) for turn in turns]).agent_turn_cache_hit is hit


def test_what_does_not_apply_is_left_out():
    assert timings_of([finish(made=0, prefill_ms=0.0, decode_ms=0.0, turn=None)]).fields() == {}
    assert timings_of([finish(made=1)]).decode_ms is None
    assert Timings(decode_ms=1.23456789).fields() == {"decode_ms": 1.2346}
