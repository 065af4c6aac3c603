"""Answers that a constraint narrows: the best of the tokens it allows, whoever runs the step."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from attrs import evolve, frozen

from luce_core.contracts import SamplingParams, Tokens
from luce_core.engine.constraining import narrow_tree
from luce_core.errors import EngineError
from luce_core.speculation.tree import Candidates
from luce_core.testing.constraints import Automaton
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.pipeline import EngineRig
from luce_core.testing.staging import AheadExecutor, StagingExecutor

PROMPT, OTHERS = [5, 9, 2], ([7], list(range(1, 30)))
EOG = frozenset({288})
EVENS, ODDS = range(32, 200, 2), range(1, 288, 2)
TURNS = Automaton({0: dict.fromkeys(EVENS, 1), 1: dict.fromkeys(ODDS, 0)}, frozenset())
"""An even token, an odd one, without end."""
FOUR = Automaton({n: dict.fromkeys(range(40 * n, 40 * n + 40), n + 1) for n in range(4)}, frozenset({4}))
"""Four tokens, the n-th of its own forty."""


@pytest.fixture(params=["plain", "staged", "ahead"])
def rig(request, toy):
    """rig(kind, ...) -> (EngineRig, ToyLaw), with each kind of executor."""

    def make(kind="slots", **more):
        plain, law = toy(kind, **more)
        executor = {"plain": None, "staged": StagingExecutor, "ahead": AheadExecutor}[request.param]
        return (EngineRig(evolve(plain.pipeline, executor=executor())) if executor else plain), law

    return make


def best(law, automaton, prompt, count, ends=frozenset()):
    """By the law and the table of moves alone."""
    text, state = list(prompt), 0
    while len(text) < len(prompt) + count:
        allowed = {**automaton.moves.get(state, {})}
        allowed |= dict.fromkeys(ends, None) if state in automaton.accepting else {}
        if not allowed:
            break
        logits = law.logits(text)
        text.append(max(allowed, key=lambda token: (logits[token], -token)))
        if text[-1] in ends:
            break
        state = allowed[text[-1]]
    return text[len(prompt) :]


def ended(made, *answers):
    made.run()
    return [(answer.done.reason, answer.ids) for answer in answers]


def test_the_best_of_what_is_allowed(rig, kind):
    made, law = rig(kind)
    answer = made.submit(PROMPT, 20, constraint=TURNS)
    assert ended(made, answer) == [("length", best(law, TURNS, PROMPT, 20))]
    assert answer.ids != law.greedy(PROMPT, 20)


def test_others_beside_it_are_answered_as_ever(rig):
    made, law = rig()
    answers = [made.submit(PROMPT, 12, constraint=TURNS), *(made.submit(each, 12) for each in OTHERS)]
    wanted = [best(law, TURNS, PROMPT, 12), *(law.greedy(each, 12) for each in OTHERS)]
    assert ended(made, *answers) == [("length", ids) for ids in wanted]


@pytest.mark.parametrize("ends", [frozenset(), EOG], ids=["no id ends it", "an id ends it"])
def test_a_finished_text_ends(rig, ends):
    made, law = rig()
    wanted = best(law, FOUR, PROMPT, 30, ends)
    assert len(wanted) == 4 + len(ends)
    assert ended(made, made.submit(PROMPT, 30, eog=ends, constraint=FOUR)) == [("stop", wanted)]


def test_sampling_takes_its_noise_among_what_is_allowed(toy, rig):
    params = SamplingParams(temperature=1.5, top_p=0.9, top_k=30, min_p=0.01, repetition=1.2, seed=4)
    asked = {"max_tokens": 25, "params": params, "constraint": TURNS}
    wanted = toy()[0].generate(PROMPT, **asked)[0]
    assert all(token in (ODDS if place % 2 else EVENS) for place, token in enumerate(wanted))
    assert len(set(wanted)) > 5
    assert rig()[0].generate(PROMPT, **asked) == [wanted]


def test_candidates_change_nothing(rig, kind):
    """Right ones, ones that are not allowed, and ones behind those."""
    law = rig(kind)[1]
    wanted = best(law, TURNS, PROMPT, 24)

    def foresee(text, capacity):
        right = wanted[len(text) - len(PROMPT) :][:2]
        tokens, parents = [*right, right[0] + 1, 44, 45], [*range(-1, len(right) - 1), -1, len(right), 0]
        return tokens[:capacity], parents[:capacity]

    made = rig(kind, drafters=[ScriptedDrafter(foresee)])[0]
    answer = made.submit(PROMPT, 24, constraint=TURNS)
    assert ended(made, answer) == [("length", wanted)]
    assert made.engine.counters["steps"] < 14
    assert answer.done.usage["accepted_tokens"] > 10


def test_candidates_that_end_the_text_or_come_behind_its_end_change_nothing(rig):
    law = rig()[1]
    wanted = best(law, FOUR, PROMPT, 30, EOG)

    def foresee(text, capacity):
        right = [*wanted, 7, 8][len(text) - len(PROMPT) :][:capacity]
        return right, range(-1, len(right) - 1)

    made = rig(drafters=[ScriptedDrafter(foresee)])[0]
    assert ended(made, made.submit(PROMPT, 30, eog=EOG, constraint=FOUR)) == [("stop", wanted)]
    assert ended(made, made.submit(PROMPT, 30, constraint=FOUR)) == [("stop", wanted[:4])]


def test_no_step_runs_ahead_of_a_mask(toy):
    made = EngineRig(evolve(toy()[0].pipeline, executor=AheadExecutor()))
    made.generate(PROMPT, max_tokens=9, constraint=TURNS)
    assert not made.pipeline.executor.followed
    made.generate(PROMPT, max_tokens=9)
    assert made.pipeline.executor.followed


def test_a_text_goes_on_within_its_constraint_after_a_preemption(toy):
    plain, law = toy("pages", max_sequences=4, cache_block=8)
    bytes_ = 45 * sum(plain.pipeline.state.block_bytes.values())
    made, _ = toy("pages", max_sequences=4, cache_block=8, cache_bytes=bytes_)
    prompts = [[n + 1] * 60 for n in range(4)]
    answers = [made.submit(prompt, 60, constraint=TURNS) for prompt in prompts]
    assert ended(made, *answers) == [("length", best(law, TURNS, prompt, 60)) for prompt in prompts]
    assert made.engine.counters["preempted"] > 0


def test_where_nothing_is_allowed_the_request_ends_with_the_reason_and_no_other(rig):
    made, law = rig()
    dead = Automaton({0: dict.fromkeys(EVENS, 1), 1: {}}, frozenset())
    answer, other = made.submit(PROMPT, 9, constraint=dead), made.submit(OTHERS[0], 9)
    made.run()
    assert answer.ids == best(law, TURNS, PROMPT, 1)
    assert answer.done.reason == "error"
    assert "allows no token" in answer.done.error
    assert other.ids == law.greedy(OTHERS[0], 9)
    alone = made.submit(PROMPT, 9, constraint=dead)
    made.run()
    assert "allows no token" in alone.done.error


def test_what_a_minimum_length_takes_from_a_constraint_is_an_error_that_says_so(rig):
    made, law = rig()
    params = SamplingParams(temperature=0.0, min_tokens=9)
    answer = made.submit(PROMPT, 30, params, eog=EOG, constraint=FOUR)
    made.run()
    assert answer.ids == best(law, FOUR, PROMPT, 4)
    assert answer.done.reason == "error"
    assert "min_tokens" in answer.done.error


@frozen
class Broken:
    """A spec, and the constraint of any text."""

    where: str
    is_finished = False

    def start(self, vocab, ending):
        return self._fail("start") or self

    def mask(self, path, out):
        out[:] = self._fail("mask") or 0xFFFFFFFF

    def advance(self, token):
        return self._fail("advance") or True

    def _fail(self, where):
        if where == self.where:
            raise KeyError(f"no rule at {where}")


@pytest.mark.parametrize("where", ["start", "mask", "advance"])
def test_a_constraint_that_fails_costs_its_own_request_alone(rig, where):
    made, law = rig()
    answer, other = made.submit(PROMPT, 9, constraint=Broken(where)), made.submit(OTHERS[1], 9)
    made.run()
    assert f"no rule at {where}" in answer.done.error
    assert other.ids == law.greedy(OTHERS[1], 9)
    assert made.generate(PROMPT, max_tokens=9) == [law.greedy(PROMPT, 9)]


def test_a_mask_of_everything_changes_nothing(rig):
    """Bits beyond the vocabulary are nobody's token."""
    made, law = rig()
    assert made.generate(PROMPT, max_tokens=9, constraint=Broken("")) == [law.greedy(PROMPT, 9)]


def test_every_text_begins_anew(rig):
    made, law = rig()
    crossed = pickle.loads(pickle.dumps(FOUR))
    answers = [made.submit(PROMPT, 30, constraint=crossed) for _ in range(2)]
    assert ended(made, *answers) == [("stop", best(law, FOUR, PROMPT, 4))] * 2
    assert all(isinstance(event, Tokens) for event in answers[0].events[-3:-1])


def test_a_tree_is_kept_as_far_as_it_is_allowed():
    walk = FOUR.start(289, frozenset({3}))
    tree = Candidates((7, 41, 50, 3, 90, 8), (-1, 0, -1, -1, 1, 5), (0.5,) * 6, (0,) * 6)
    kept, masks = narrow_tree(walk, tree, 289, frozenset({3}))
    assert (kept.tokens, kept.parents) == ((7, 41, 90), (-1, 0, 1))
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    allowed = [np.flatnonzero(row).tolist() for row in bits]
    assert allowed == [list(range(40 * n, 40 * n + 40)) for n in range(4)]


def test_only_what_is_beyond_the_vocabulary_is_nothing():
    with pytest.raises(EngineError, match="allows no token"):
        narrow_tree(Beyond(), Candidates(), 289, frozenset())


class Beyond:
    is_finished = False

    def mask(self, path, out):
        out[300 // 32] = 1 << 300 % 32
