"""A drafter that runs the target's MTP block: state planned, allocated, followed, restored, forked, given
back.

The toy's block answers rightly exactly when its pages hold the text and every final it was given was that
of the token before, so what is accepted says whether all of it survived.
"""

import random
from importlib import import_module

import pytest
import torch
from attrs import evolve

from luce_core.contracts import Hit, PlanPatch
from luce_core.errors import PlanError
from luce_core.gguf import read_header
from luce_core.model.batch import RowSet, make_batch
from luce_core.options import load_options
from luce_core.plan import make_plan
from luce_core.plugins import from_modules
from luce_core.testing.drafter_contract import DrafterContract
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.nextn_drafter import FINAL
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline, make_test_plan
from luce_core.testing.plugin import PluginContract
from luce_core.testing.toy import ToyLaw, write_toy_model

NEXTN_HOOKS = "luce_core.testing.nextn_hooks"
DRAFT_HOOKS = "luce_core.testing.toy.draft_hooks"


class TestPlugin(PluginContract):
    hooks = NEXTN_HOOKS


@pytest.mark.slow
class TestDrafter(DrafterContract):
    hooks = NEXTN_HOOKS
    name = "nextn-chain"

    def make_model(self, folder):
        return write_toy_model(folder / "target.gguf", slots=False, nextn=True)


def text(length, seed=0):
    dice = random.Random(seed * 1000 + length)
    return [dice.randrange(1, 280) for _ in range(length)]


@pytest.fixture
def model(tmp_path):
    return write_toy_model(tmp_path / "t.gguf", salt=7, context=256, slots=False, nextn=True)


@pytest.fixture
def world(model):
    """world(**options) -> (EngineRig, ToyLaw, drafter)."""

    def make(*more_hooks, **options):
        options = {"drafter": ("nextn-chain",), "draft_nodes": 4, **options}
        rig = EngineRig(make_pipeline(model, TOY_HOOKS, NEXTN_HOOKS, *more_hooks, options=options))
        law = ToyLaw(rig.pipeline.target.backend.spec.vocab, salt=7, slots=False)
        return rig, law, rig.pipeline.drafters[0]

    return make


def usage(answer):
    used = answer.done.usage
    return used["drafted_tokens"], used["accepted_tokens"]


# --- planned


def claims(plan, kind):
    return {one.owner: one.num_bytes for one in plan.claims if one.kind == kind}


def test_the_state_of_the_block_is_planned_for_a_drafter_that_needs_it(model):
    options = {"max_sequences": "3", "ctx_size": "200"}
    plain = make_test_plan(model, TOY_HOOKS, NEXTN_HOOKS, options=options)
    drafted = make_test_plan(
        model, TOY_HOOKS, NEXTN_HOOKS, options={**options, "drafter": ("nextn-chain",), "draft_nodes": 4}
    )
    without, spec = plain.models[0].spec, drafted.models[0].spec
    assert (without.runs_nextn, spec.runs_nextn) == (False, True)
    assert [pages.name for pages in without.layout.pages] == ["tokens"]
    assert [pages.name for pages in spec.layout.pages] == ["tokens", "nextn"]
    assert spec.layout.groups == without.layout.groups
    # two f32 an entry without it, and six more with it, in as many blocks
    assert claims(drafted, "state")["state of target"] == 4 * claims(plain, "state")["state of target"]


def test_without_a_drafter_that_needs_it_nothing_is_allocated(model):
    options = {"drafter": ("toy-head",), "draft_nodes": 4}
    rig = EngineRig(make_pipeline(model, TOY_HOOKS, NEXTN_HOOKS, DRAFT_HOOKS, options=options))
    assert rig.pipeline.target.target.nextn is None
    assert list(rig.pipeline.target.state.regions) == ["tokens"]


def test_a_drafter_that_steps_aside_takes_the_state_with_it(model, monkeypatch):
    """A plugin proposes it, and its layout fails: the plan goes on without it."""

    def fails(target, options):
        raise RuntimeError("no layout today")

    monkeypatch.setattr("luce_core.testing.nextn_hooks.layout", fails)
    patch = PlanPatch("parts.drafter", ("nextn-chain",), "tries it")
    eager = make_plugin("eager", luce_extend_plan=lambda: [patch])
    registry = from_modules([*map(import_module, (TOY_HOOKS, NEXTN_HOOKS)), eager])
    plan = make_plan(load_options(registry, {"model": str(model)}, {}, ()), read_header(model), registry)
    assert any("no layout today" in problem.message for problem in plan.problems)
    assert plan.parts["drafter"] == ()
    assert not plan.models[0].spec.runs_nextn
    assert [pages.name for pages in plan.models[0].spec.layout.pages] == ["tokens"]


def test_a_model_without_a_block_is_no_target(tmp_path):
    bare = write_toy_model(tmp_path / "bare.gguf")
    with pytest.raises(PlanError, match=r"Drafter 'nextn-chain' of plugin 'nextn-chain' needs nextn; this "):
        make_test_plan(bare, TOY_HOOKS, NEXTN_HOOKS, options={"drafter": ("nextn-chain",)})


def test_what_was_claimed_is_what_was_allocated(world):
    rig, _, _ = world(max_sequences=3)
    pipeline = rig.pipeline
    state = claims(pipeline.plan, "state")
    assert state["state of target"] == sum(t.nbytes for t in pipeline.target.state.tensors())
    held = pipeline.plan.number("engine.max_held_rows")
    assert state["state of nextn-chain"] == 3 * (1 + held) * 4 * 4  # a final, and one for each held row
    assert pipeline.target.state.regions["nextn"].fields["v"].shape[-1] == 5


# --- following the text


def test_every_candidate_of_a_block_that_saw_everything_is_right(world):
    rig, law, drafter = world(chunk=16, max_sequences=3)
    prompts = [text(length) for length in (1, 2, 33, 61, 40)]
    answers = [rig.submit(prompt, 21) for prompt in prompts]
    rig.run()
    assert [answer.ids for answer in answers] == [law.greedy(prompt, 21) for prompt in prompts]
    for answer in answers:
        drafted, accepted = usage(answer)
        assert drafted == accepted > 10
    assert drafter.rounds


def test_two_drafters_share_a_round(world):
    rig, law, right = world(DRAFT_HOOKS, drafter=("nextn-chain", "toy-head"), draft_nodes=6)
    answer = rig.submit(text(30), 20)
    rig.run()
    assert answer.ids == law.greedy(text(30), 20)
    assert usage(answer)[1] > 10
    assert right.rounds


def test_a_wrong_final_spoils_what_follows(world):
    """The oracle itself."""
    rig, law, drafter = world()
    observe = drafter.observe
    shifted = {FINAL: 1}

    def wrong(batch, commit):
        taps = {tap: buffer + shifted.get(tap, 0) for tap, buffer in batch.taps.items()}
        observe(evolve(batch, taps=taps), commit)

    drafter.observe = wrong
    answer = rig.submit(text(30), 12)
    rig.run()
    assert answer.ids == law.greedy(text(30), 12)
    assert usage(answer)[0] > usage(answer)[1] == 0


@pytest.mark.parametrize("moved", [True, False])
def test_entries_of_accepted_rows_are_moved_behind_the_text(world, tmp_path, moved):
    """A second drafter guesses wrong and first, so the right rows of a tree lie apart."""
    other = write_toy_model(tmp_path / "other.gguf", salt=8, context=256, slots=False)
    names = ("toy-draft", "nextn-chain")
    rig, law, _ = world(DRAFT_HOOKS, drafter=names, draft_nodes=8, **{"toy-draft.model": str(other)})
    target = rig.pipeline.target.target
    if not moved:
        target.commit_nextn = lambda batch, commit: None
    answer = rig.submit(text(30), 24)
    rig.run()
    assert answer.ids == law.greedy(text(30), 24)
    accepted = usage(answer)[1]
    assert accepted > 10 if moved else accepted < 5


def test_a_block_that_knows_too_little_costs_candidates_only(tmp_path):
    """The toy's block knows nothing of slots."""
    path = write_toy_model(tmp_path / "slots.gguf", salt=7, context=256, slots=True, nextn=True)
    options = {"drafter": ("nextn-chain",), "draft_nodes": 4}
    rig = EngineRig(make_pipeline(path, TOY_HOOKS, NEXTN_HOOKS, options=options))
    law = ToyLaw(rig.pipeline.target.backend.spec.vocab, salt=7, slots=True)
    answer = rig.submit(text(30), 12)
    rig.run()
    assert answer.ids == law.greedy(text(30), 12)
    assert usage(answer)[0] > usage(answer)[1]


# --- restored, preempted, forked


def test_a_hit_brings_the_blocks_pages_along(world):
    """Of the drafter's own slot there is a snapshot only where a turn ended."""
    rig, law, drafter = world()
    prompt = text(70)
    (first,) = rig.generate(prompt, max_tokens=20)
    longer = [*prompt, *first, *text(9, seed=4)]
    drafter.rounds.clear()
    answer = rig.submit(longer, 12)
    rig.run()
    assert answer.ids == law.greedy(longer, 12)
    assert answer.done.usage["cached_tokens"] >= 64
    usable = {int(seen.usable_from[0]) for seen in drafter.rounds}
    drafted, accepted = usage(answer)
    if usable == {0}:
        assert drafted == accepted > 0
    else:
        assert (drafted, accepted) == (0, 0)


def test_short_memory_preempts_the_block_too_and_the_texts_stay(world):
    rig, _, _ = world(max_sequences=4, cache_block=8)
    budget = sum(rig.pipeline.state.block_bytes.values()) * 45
    rig, law, _ = world(max_sequences=4, cache_block=8, cache_bytes=budget)
    prompts = [text(length) for length in (60, 61, 62, 63)]
    assert rig.generate(*prompts, max_tokens=60) == [law.greedy(prompt, 60) for prompt in prompts]
    assert rig.engine.counters["preempted"] > 0


@pytest.mark.parametrize("steps", [1, 6, 9])
def test_a_cancelled_request_leaves_nothing(world, steps):
    rig, law, _ = world(chunk=8, max_sequences=2)
    answers = [rig.submit(text(20 + n), 30) for n in range(3)]
    for _ in range(steps):
        rig.engine.step()
    rig.engine.cancel("r0")
    rig.engine.cancel("r2")
    rig.run()
    assert answers[1].ids == law.greedy(text(21), 30)
    assert rig.generate(text(22), max_tokens=5) == [law.greedy(text(22), 5)]


def test_a_fork_takes_the_blocks_pages_along(world):
    """Driven without the engine: one sequence is followed, forked, and both go on with different tokens."""
    rig, law, drafter = world()
    blocks, target = rig.pipeline.blocks, rig.pipeline.target

    def rows(seq, tokens):
        assert blocks.reserve(seq, len(tokens))
        tables = {key.removeprefix("target/"): table for key, table in blocks.tables(seq).items()}
        return RowSet(blocks.slot(seq), blocks.length(seq), tokens, tables)

    def run(phase, seq, tokens):
        taps = {FINAL: torch.empty(len(tokens), 4, dtype=torch.bfloat16)}
        batch = make_batch(phase, [rows(seq, tokens)], taps=taps)
        target.backend.forward(batch)
        return batch

    def follow(seq, tokens):
        drafter.observe(run("prefill", seq, tokens), None)
        blocks.advance(seq, tokens)

    def drafted(seq, token):
        batch = run("held", seq, [token])
        before = drafter.kept.state[batch.slot.long(), 0]
        block = target.target.nextn
        return int(block.logits(block.trunk(evolve(batch, taps={}), before))[0].argmax())

    one = blocks.open(text(40), Hit(0, None))
    follow(one, text(40))
    two = blocks.fork(one)
    follow(one, text(10, seed=1))
    follow(two, text(11, seed=2))
    assert drafted(one, 5) == law.greedy([*text(40), *text(10, seed=1), 5], 1)[0]
    assert drafted(two, 5) == law.greedy([*text(40), *text(11, seed=2), 5], 1)[0]
    blocks.close(one, rig.engine._fence)
    assert drafted(two, 6) == law.greedy([*text(40), *text(11, seed=2), 6], 1)[0]
    blocks.close(two, rig.engine._fence)
    blocks.retire(rig.engine._fence)
    rig.check_empty()


# --- parked


def test_the_block_is_there_again_after_parking(world):
    rig, law, _ = world()
    rig.generate(text(20), max_tokens=4)
    target = rig.pipeline.target
    target.park()
    target.unpark()
    answer = rig.submit(text(25), 10)
    rig.run()
    assert answer.ids == law.greedy(text(25), 10)
    drafted, accepted = usage(answer)
    assert drafted == accepted > 0
