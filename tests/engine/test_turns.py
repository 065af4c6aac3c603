"""Which prompts go on where an earlier answer ended, and what of that was cached."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luce_core.contracts import SamplingParams
from luce_core.engine.turns import AnsweredTexts


def text(length, seed=0, vocab=280):
    return [random.Random(seed * 1000 + length).randrange(1, vocab) for _ in range(length)]


def turn(rig, prompt, max_tokens=12, **more):
    """(the answer's ids, whether it says that a cached turn was continued)."""
    answer = rig.submit(prompt, max_tokens, **more)
    rig.run()
    assert answer.done.error is None
    return answer.ids, answer.done.usage.get("cached_turn")


def test_the_next_turn_of_a_conversation_hits(toy, kind):
    rig, _ = toy(kind)
    first, hit = turn(rig, text(40))
    assert hit == 0
    longer = [*text(40), *first, *text(9, seed=1)]
    second, hit = turn(rig, longer)
    assert hit == 1
    assert turn(rig, [*longer, *second, *text(3, seed=2)])[1] == 1


def test_branches_of_one_turn_hit_as_often_as_they_come(toy, kind):
    rig, _ = toy(kind)
    first, _ = turn(rig, text(40))
    hits = [turn(rig, [*text(40), *first, *text(20, seed=seed)])[1] for seed in range(4)]
    assert hits == [1] * 4


def test_a_turn_that_ended_by_itself_hits(toy, kind):
    rig, law = toy(kind)
    ending = law.greedy(text(40), 20)[9]
    first, _ = turn(rig, text(40), 30, eog=frozenset({ending}))
    assert first[-1] == ending
    assert turn(rig, [*text(40), *first, *text(6, seed=1)])[1] == 1


def test_a_shared_system_prompt_is_no_turn(toy, kind):
    rig, _ = toy(kind)
    system = text(64)
    turn(rig, [*system, *text(10, seed=1)])
    assert turn(rig, [*system, *text(10, seed=2)])[1] == 0


def test_the_same_prompt_again_is_no_turn(toy, kind):
    rig, _ = toy(kind)
    turn(rig, text(64))
    again = rig.submit(text(64), 4)
    rig.run()
    assert again.done.usage["cached_tokens"] > 0
    assert again.done.usage["cached_turn"] == 0


def test_an_answer_that_was_changed_is_no_turn(toy):
    rig, _ = toy("pages")
    first, _ = turn(rig, text(40), 20)
    first[12] = (first[12] + 1) % 280
    changed = rig.submit([*text(40), *first, *text(5, seed=1)], 4)
    rig.run()
    assert changed.done.usage["cached_tokens"] == 52
    assert changed.done.usage["cached_turn"] == 0


def test_a_turn_that_left_the_cache_is_no_hit(toy, kind):
    rig, _ = toy(kind)
    first, _ = turn(rig, text(40))
    rig.engine.blocks.clear()
    assert turn(rig, [*text(40), *first, *text(9, seed=1)])[1] == 0


def test_a_cancelled_answer_is_no_turn(toy):
    rig, law = toy("pages")
    cancelled = rig.submit(text(40), 100)
    while len(cancelled.ids) < 8:
        rig.engine.step()
    rig.engine.cancel("r0")
    rig.run()
    assert turn(rig, [*text(40), *law.greedy(text(40), 30), 5])[1] == 0


def test_a_scored_prompt_looks_for_nothing_and_says_nothing(toy):
    rig, _ = toy()
    first, _ = turn(rig, text(40))
    assert turn(rig, [*text(40), *first, 9, 8], prompt_logprobs=1)[1] is None


def test_a_preempted_request_counts_what_was_there_when_it_came(toy):
    """What it computed itself and found again is no hit."""
    rig, law = toy("pages", max_sequences=4, cache_block=8)
    small = rig.pipeline.state.block_bytes
    options = {"max_sequences": 4, "ctx_size": 256, "cache_block": 8}
    rig, law = toy("pages", **options, cache_bytes=sum(small.values()) * 45)
    answers = [rig.submit(text(length), 60, SamplingParams(temperature=0.0)) for length in (60, 61, 62, 63)]
    rig.run()
    assert rig.engine.counters["preempted"] > 0
    for length, answer in zip((60, 61, 62, 63), answers, strict=True):
        assert answer.ids == law.greedy(text(length), 60)
        assert answer.done.usage["cached_tokens"] == 0
        assert answer.done.usage["cached_turn"] == 0


# --- the index by itself


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8),
    st.lists(st.integers(0, 2), max_size=9),
    st.integers(0, 9),
)
def test_within_says_whether_a_text_is_a_prefix(texts, keys, length):
    index = AnsweredTexts()
    for one in texts:
        index.add(one, 0)
    expected = any(keys[: len(one)] == one and len(one) <= length for one in texts)
    assert index.within(keys, length) == (expected and any(len(one) <= len(keys) for one in texts))


def test_prompts_without_an_answer_are_not_remembered():
    index = AnsweredTexts()
    index.add([1, 2, 3], 3)
    assert not index.within([1, 2, 3, 4], 4)


def test_the_oldest_texts_are_forgotten_first():
    index = AnsweredTexts(most=2)
    for number in (1, 2, 1, 3):
        index.add([number, number], 0)
    assert [index.within([number, number, 9], 3) for number in (1, 2, 3)] == [True, False, True]


@pytest.mark.parametrize("wide", [2**62, 2**63 + 5, 2**200])
def test_wide_content_hashes_are_keys_too(wide):
    index = AnsweredTexts()
    index.add([4, wide, 6], 1)
    assert index.within([4, wide, 6, 7], 4)
    assert not index.within([4, wide + 1, 6, 7], 4)
