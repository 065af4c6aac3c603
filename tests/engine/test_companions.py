"""Drafters with a model, or state, of their own: allocated, followed, restored, forked, given back.

The toy drafters propose the true continuation exactly when their own pages and slots are right, so what is
accepted says whether state survived.
"""

import random

import numpy as np
import pytest
import torch

from luce_core.contracts import Hit, Work
from luce_core.errors import PluginError
from luce_core.model.batch import RowSet, make_batch
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline
from luce_core.testing.toy import ToyLaw, write_toy_model
from luce_core.testing.toy_vocab import toy_vocabulary

DRAFT_HOOKS = "luce_core.testing.toy.draft_hooks"
SHAPES = {"slots": {}, "pages": {"slots": False}, "window": {"slots": True, "window": 24}}
OWNER = {"toy-draft": "draft", "toy-head": "toy-head"}


def text(length, seed=0):
    return [random.Random(seed * 1000 + length).randrange(1, 280) for _ in range(length)]


@pytest.fixture(params=["toy-draft", "toy-head"])
def name(request):
    """A drafter with a model, and one with a layout."""
    return request.param


@pytest.fixture
def world(tmp_path):
    """world(name, kind, draft_salt=..., **options) -> (EngineRig, ToyLaw, drafter)."""

    def make(name, kind="slots", *, salt=7, draft_kind=None, **options):
        target = write_toy_model(tmp_path / f"{kind}.gguf", salt=7, context=256, **SHAPES[kind])
        draft_kind = draft_kind or kind
        draft = write_toy_model(tmp_path / "draft.gguf", salt=salt, context=256, **SHAPES[draft_kind])
        options = {"drafter": (name,), "draft_nodes": 4, "toy-draft.model": str(draft), **options}
        rig = EngineRig(make_pipeline(target, TOY_HOOKS, DRAFT_HOOKS, options=options))
        shape = SHAPES[kind]
        law = ToyLaw(
            rig.pipeline.target.backend.spec.vocab,
            salt=7,
            slots=shape.get("slots", True),
            window=shape.get("window", 0),
        )
        return rig, law, rig.pipeline.drafters[0]

    return make


def usage(answer):
    used = answer.done.usage
    return used["drafted_tokens"], used["accepted_tokens"]


# --- following the text


def test_a_drafter_whose_state_is_right_is_always_right(world, name, kind):
    rig, law, drafter = world(name, kind, chunk=16, max_sequences=3)
    prompts = [text(length) for length in (1, 2, 33, 61, 40)]
    answers = [rig.submit(prompt, 21) for prompt in prompts]
    rig.run()
    assert [answer.ids for answer in answers] == [law.greedy(prompt, 21) for prompt in prompts]
    for answer in answers:
        drafted, accepted = usage(answer)
        assert drafted == accepted > 10
    assert drafter.rounds


def test_a_drafter_of_another_law_costs_candidates_and_changes_nothing(world, kind):
    rig, law, _ = world("toy-draft", kind, salt=8, max_sequences=2)
    prompts = [text(length) for length in (3, 50)]
    answers = [rig.submit(prompt, 12) for prompt in prompts]
    rig.run()
    assert [answer.ids for answer in answers] == [law.greedy(prompt, 12) for prompt in prompts]
    drafted, accepted = map(sum, zip(*map(usage, answers), strict=True))
    assert accepted < drafted / 4


def test_two_drafters_with_state_share_a_round(world, kind):
    rig, law, _ = world("toy-draft", kind, salt=8, drafter=("toy-draft", "toy-head"), draft_nodes=6)
    wrong, right = rig.pipeline.drafters
    answer = rig.submit(text(30), 20)
    rig.run()
    assert answer.ids == law.greedy(text(30), 20)
    assert len(wrong.rounds) == len(right.rounds) < 15, "the right one's candidates were not accepted"


def test_a_row_budget_narrower_than_the_drafter_is_kept(world, name):
    rig, law, drafter = world(name, "slots", chunk=6, max_sequences=4, draft_nodes=5)
    prompts = [text(length) for length in (5, 6, 7, 8)]
    assert rig.generate(*prompts, max_tokens=15) == [law.greedy(prompt, 15) for prompt in prompts]
    rooms = [room for seen in drafter.rounds for room in seen.room.tolist()]
    assert min(rooms) < max(rooms), "sequences of one round never differed in room: the test is too easy"
    assert all(seen.room.max() <= seen.capacity for seen in drafter.rounds)


# --- prefix hits


def test_a_hit_brings_the_drafters_state_along(world, name, kind):
    rig, law, drafter = world(name, kind)
    prompt = text(70)
    (first,) = rig.generate(prompt, max_tokens=20)
    longer = [*prompt, *first, *text(9, seed=4)]
    drafter.rounds.clear()
    answer = rig.submit(longer, 12)
    rig.run()
    assert answer.ids == law.greedy(longer, 12)
    assert answer.done.usage["cached_tokens"] >= 64
    assert {int(seen.usable_from[0]) for seen in drafter.rounds} == {0}
    drafted, accepted = usage(answer)
    assert drafted == accepted > 0


def test_a_hit_without_the_drafters_state_says_from_where_there_is_some(world):
    """The target has pages only and is restored anywhere; the drafter's slots only where a snapshot is."""
    rig, law, drafter = world("toy-draft", "pages", draft_kind="slots")
    prompt = text(70)
    rig.generate(prompt, max_tokens=4)
    drafter.rounds.clear()
    branch = [*prompt[:50], *text(20, seed=9)]
    answer = rig.submit(branch, 10)
    rig.run()
    assert answer.ids == law.greedy(branch, 10)
    cached = answer.done.usage["cached_tokens"]
    assert cached == 50
    assert {int(seen.usable_from[0]) for seen in drafter.rounds} == {cached}
    assert usage(answer) == (0, 0), "a drafter that lacks 50 tokens stayed silent"


def test_a_sequence_with_and_one_without_drafter_state_run_together(world):
    rig, law, drafter = world("toy-draft", "pages", draft_kind="slots", max_sequences=2)
    prompt = text(70)
    rig.generate(prompt, max_tokens=4)
    drafter.rounds.clear()
    prompts = [[*prompt[:50], *text(20, seed=9)], text(71, seed=3)]
    answers = [rig.submit(one, 10) for one in prompts]
    rig.run()
    assert [answer.ids for answer in answers] == [law.greedy(one, 10) for one in prompts]
    assert usage(answers[0])[0] == 0
    assert usage(answers[1])[0] > 0, "wrong candidates, since the draft model has another law; but candidates"
    assert {tuple(seen.usable_from.tolist()) for seen in drafter.rounds} >= {(50, 0)}


# --- preempted, cancelled, failed


@pytest.mark.parametrize("kind", ["slots", "pages"])
def test_short_memory_preempts_drafters_too_and_the_texts_stay(world, name, kind):
    rig, _, _ = world(name, kind, max_sequences=4, cache_block=8)
    budget = sum(rig.pipeline.state.block_bytes.values()) * 45
    rig, law, _ = world(name, kind, max_sequences=4, cache_block=8, cache_bytes=budget)
    prompts = [text(length) for length in (60, 61, 62, 63)]
    assert rig.generate(*prompts, max_tokens=60) == [law.greedy(prompt, 60) for prompt in prompts]
    assert rig.engine.counters["preempted"] > 0


@pytest.mark.parametrize("steps", [1, 6, 9])
def test_a_cancelled_request_leaves_nothing_of_its_drafter(world, name, kind, steps):
    rig, law, _ = world(name, kind, chunk=8, max_sequences=2)
    answers = [rig.submit(text(20 + n), 30) for n in range(3)]
    for _ in range(steps):
        rig.engine.step()
    rig.engine.cancel("r0")
    rig.engine.cancel("r2")
    rig.run()
    assert answers[1].ids == law.greedy(text(21), 30)
    assert rig.generate(text(22), max_tokens=5) == [law.greedy(text(22), 5)]


def test_a_drafter_that_fails_fails_its_requests_and_leaves_nothing(world, name):
    rig, law, drafter = world(name, "slots")
    forward = drafter.runner.forward

    def failing(batch):
        raise RuntimeError("the draft model says no")

    drafter.runner.forward = failing
    answer = rig.submit(text(20), 8)
    rig.run()
    assert "the draft model says no" in answer.done.error
    drafter.runner.forward = forward
    assert rig.generate(text(20), max_tokens=8) == [law.greedy(text(20), 8)]


# --- forks


def test_a_fork_takes_the_drafters_pages_and_slots_along(world, name, kind):
    """Driven without the engine: one sequence is followed, forked, and both go on with different tokens."""
    rig, law, drafter = world(name, kind)
    blocks, owner = rig.pipeline.blocks, OWNER[name]

    def rows(seq, tokens):
        assert blocks.reserve(seq, len(tokens))
        return RowSet(blocks.slot(seq), blocks.length(seq), tokens, blocks.tables(seq))

    def follow(seq, tokens):
        drafter.observe(make_batch("prefill", [rows(seq, tokens)]), None)
        blocks.advance(seq, tokens)

    def drafted(seq, token):
        batch = make_batch("held", [rows(seq, [token])])
        return int(drafter.runner.forward(batch.of(owner))[0].argmax())

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


# --- barriers


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_no_row_reaches_the_barrier(world, name, kind, max_tokens):
    """Neither of the target nor of the drafter, in pages or in index, whatever the room in the step."""
    rig, law, drafter = world(name, kind, chunk=16, max_sequences=3)
    prompts = {length: text(length) for length in (2, 17, 50)}
    seen = []

    def watched(forward):
        def call(batch):
            starts, rows = batch.query_start.tolist(), (batch.parent != -2).tolist()
            for s, (slot, length) in enumerate(zip(batch.slot.tolist(), batch.length.tolist(), strict=True)):
                real = sum(rows[starts[s] : starts[s + 1]])
                last = max(batch.index[starts[s] : starts[s + 1]].tolist()[:real])
                owners = [q for q in rig.engine.running.values() if rig.engine.blocks.slot(q.handle) == slot]
                (seq,) = owners
                seen.append((max(last, length + real - 1), seq.prompt + seq.request.max_tokens - 1))
            return forward(batch)

        return call

    plan = rig.engine.scheduler.plan
    barriers = {length - 1: length + max_tokens - 1 for length in prompts}
    planned = []

    def watched_plan(waiting, running, row_budget, fits):
        work, preempted = plan(waiting, running, row_budget, fits)
        views = {view.seq: view for view in (*waiting, *running)}
        planned.extend((views[w.seq].length + w.rows, barriers[views[w.seq].prompt]) for w in work
                       if views[w.seq].prompt in barriers)  # fmt: skip
        assert all(view.barrier in barriers.values() for view in views.values())
        return work, preempted

    rig.engine.scheduler = type("Watched", (), {"plan": staticmethod(watched_plan)})()
    backend = rig.pipeline.target.backend
    backend.forward = watched(backend.forward)
    drafter.runner.forward = watched(drafter.runner.forward)
    answers = [rig.submit(prompt, max_tokens) for prompt in prompts.values()]
    rig.run()
    assert [answer.ids for answer in answers] == [law.greedy(p, max_tokens) for p in prompts.values()]
    assert seen
    assert all(last < barrier for last, barrier in seen), [pair for pair in seen if pair[0] >= pair[1]]
    assert any(last == barrier - 1 for last, barrier in seen), "rows stop short of what is allowed"
    assert planned
    assert all(end <= barrier for end, barrier in planned), planned


def test_work_that_reaches_a_barrier_is_refused_by_name(world):
    rig, _, _ = world("toy-head")

    class Greedy:
        def plan(self, waiting, running, row_budget, fits):
            views = [*waiting, *running]
            return [
                Work(v.seq, "held", v.barrier - v.length + 1)
                if v.length >= v.prompt
                else Work(v.seq, "prefill", v.prompt)
                for v in views
            ], []

    rig.engine.scheduler = Greedy()
    rig.submit(text(4), 3)
    with pytest.raises(PluginError, match="beyond barrier"):
        rig.run()


def test_every_model_is_settled_before_a_snapshot(world):
    rig, _, _ = world("toy-draft")
    settled = {name: [] for name in rig.pipeline.models}
    saved = []
    for name, model in rig.pipeline.models.items():
        model.backend.settle = settled[name].extend
    save_slot = rig.pipeline.state.save_slot

    def save(slot, length):
        saved.append(slot)
        assert all(slots and slots[-1] == slot for slots in settled.values())
        return save_slot(slot, length)

    rig.pipeline.state.save_slot = save
    rig.generate(text(40), max_tokens=6)
    assert saved


# --- bytes


def test_what_was_claimed_is_what_was_allocated(world, name, kind):
    rig, _, drafter = world(name, kind, max_sequences=3)
    pipeline, owner = rig.pipeline, OWNER[name]
    claims = {claim.owner: claim.num_bytes for claim in pipeline.plan.claims if claim.kind == "state"}
    if name == "toy-draft":
        tensors = pipeline.models["draft"].state.tensors()
    else:
        handles = [*drafter.runner.regions, *drafter.runner.slots]
        tensors = [t for h in handles for t in (h.fields.values() if hasattr(h, "fields") else
                                                (h.state, *h.log.values()))]  # fmt: skip
    assert tensors
    assert set(claims) == {"state of target", f"state of {owner}"}
    assert claims[f"state of {owner}"] == sum(tensor.nbytes for tensor in tensors)
    assert claims["state of target"] == sum(t.nbytes for t in pipeline.target.state.tensors())


def test_the_broker_holds_every_claim_of_its_device(world):
    rig, _, _ = world("toy-draft")
    plan = rig.pipeline.plan
    own = {claim.owner: claim.num_bytes for claim in plan.claims if claim.device == "cpu"}
    held = {item.owner: item.num_bytes for item in rig.pipeline.brokers["cpu"].holdings()}
    assert held == own
    assert {"weights of draft", "state of draft", "weights of target"} <= set(own)
    assert plan.number("memory.limit_bytes") - sum(own.values()) == rig.pipeline.brokers["cpu"].free_bytes


def test_a_draft_model_needs_no_tokenizer(tmp_path):
    metadata = {
        "general.architecture": "toy", "toy.context_length": 256, "toy.salt": 7, "toy.slots": True,
        "toy.window": 0, **toy_vocabulary("bpe"),
    }  # fmt: skip
    del metadata["tokenizer.ggml.model"]
    draft = write_gguf(tmp_path / "d.gguf", metadata, {"toy.weight": np.zeros((8, 8), np.float32)})
    target = write_toy_model(tmp_path / "t.gguf", salt=7, context=256)
    options = {"drafter": ("toy-draft",), "draft_nodes": 4, "toy-draft.model": str(draft)}
    rig = EngineRig(make_pipeline(target, TOY_HOOKS, DRAFT_HOOKS, options=options))
    assert rig.pipeline.models["draft"].tokenizer is None
    assert rig.pipeline.target.tokenizer is not None
    answer = rig.submit(text(20), 10)
    rig.run()
    assert usage(answer)[1] > 5


def test_only_its_own_models_are_given_to_a_drafter(world):
    rig, _, _ = world("toy-draft", drafter=("toy-draft", "toy-head"))
    models = rig.pipeline.models
    assert list(models) == ["target", "draft"]
    with_model, head = rig.pipeline.drafters
    assert with_model.runner.backend is models["draft"].backend
    assert head.runner.owner == "toy-head"
    assert models["draft"].plan.part == "drafter.toy-draft"
    assert torch.is_tensor(models["draft"].backend.region("tokens").fields["k"])
