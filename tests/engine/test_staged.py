"""Verifying over static buffers: the toy's law, whatever the bucket; what a bucket is, and what is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve

from luce_core.contracts import SamplingParams
from luce_core.engine.staged import LEAST_BLOCKS
from luce_core.model.batch import RowSet, make_batch
from luce_core.ops import sampling
from luce_core.testing.drafters import ScriptedDrafter
from luce_core.testing.pipeline import EngineRig
from luce_core.testing.staging import StagingExecutor

PROMPTS = ([5, 9, 2], [7], list(range(1, 30)))


def children(text, capacity):
    """Two children of the anchor, one of them with a child."""
    last = text[-1]
    return [(last + 1) % 250, (last * 7 + 3) % 250, (last + 2) % 250][:capacity], [-1, -1, 0][:capacity]


@pytest.fixture
def rig(toy):
    """rig(kind, ...) -> (EngineRig whose steps are staged, ToyLaw)."""

    def make(kind="slots", **more):
        plain, law = toy(kind, **more)
        return EngineRig(evolve(plain.pipeline, executor=StagingExecutor())), law

    return make


@pytest.mark.parametrize("kind", ["slots", "pages", "window"])
@pytest.mark.parametrize("drafted", [False, True])
def test_the_toys_law_holds(rig, kind, drafted):
    staged, law = rig(kind, drafters=[ScriptedDrafter(children)] if drafted else ())
    answers = staged.generate(*PROMPTS, max_tokens=12)
    assert answers == [law.greedy(prompt, 12) for prompt in PROMPTS]
    made = staged.pipeline.executor.made
    assert {bucket[0] for bucket in made} <= {1, 2, 3}
    assert max(bucket[1] for bucket in made) == (4 if drafted else 1)


def test_sampled_answers_and_logprobs_are_those_of_plain_calls(toy, rig):
    params = SamplingParams(temperature=0.8, top_k=20, seed=5, logprobs=2)
    answers = []
    for made, _ in (toy("slots"), rig("slots")):
        answer = made.submit(PROMPTS[0], 9, params)
        made.run()
        answers.append((answer.ids, answer.logprobs))
    assert answers[0] == answers[1]


def test_sampling_that_stays_on_the_device_is_part_of_the_captured_work(toy, rig, monkeypatch):
    """Which an implementation says of itself; then there are no logits to leave."""
    monkeypatch.setattr(sampling.sample, "stays_on_device", lambda params: not params.waits, raising=False)
    params = SamplingParams(temperature=0.8, top_k=20, seed=5)
    made, plain = rig("slots")[0], toy("slots")[0]
    answers = [one.generate(*PROMPTS, max_tokens=9, params=params) for one in (made, plain)]
    assert answers[0] == answers[1]
    assert {bucket[2] for bucket in made.pipeline.executor.made} == {frozenset({"noise", "top_k"})}
    for flag, more in (("penalty", {}), (None, {"dry_multiplier": 0.5})):
        penal = SamplingParams(temperature=0.0, presence=1.0, **more)
        answers = [one.generate(*PROMPTS, max_tokens=9, params=penal) for one in (made, plain)]
        assert answers[0] == answers[1]
        wanted = {frozenset({flag})} if flag else {frozenset({"penalty"}), None}
        assert {bucket[2] for bucket in made.pipeline.executor.made} == wanted | {
            frozenset({"noise", "top_k"})
        }


@pytest.mark.parametrize("within", [False, True])
def test_penalties_see_what_was_accepted_whatever_the_rows(toy, rig, monkeypatch, within):
    """Steps of one row are counted on the device, of candidates by the host: always once."""
    if within:
        monkeypatch.setattr(
            sampling.sample, "stays_on_device", lambda params: not params.waits, raising=False
        )
    params = SamplingParams(temperature=0.0, frequency=4.0, repetition=1.2)
    plain = toy("slots")[0]
    wanted = plain.generate(*PROMPTS, max_tokens=25, params=params)

    def foresee(text, capacity):
        """Two right tokens and a wrong one, or nothing, or the wrong one alone."""
        if not len(text) % 3:
            return [], []
        (whole,) = ([*p, *ids] for p, ids in zip(PROMPTS, wanted, strict=True) if text[: len(p)] == [*p])
        right = whole[len(text) :][: len(text) % 3 * 2 - 2]
        return [*right, 7][:capacity], list(range(-1, len(right)))[:capacity]

    made = rig("slots", drafters=[ScriptedDrafter(foresee)])[0]
    assert [made.generate(prompt, max_tokens=25, params=params)[0] for prompt in PROMPTS] == wanted
    assert {bucket[1] for bucket in made.pipeline.executor.made} >= {1, 2, 4}
    assert made.engine.counters["steps"] < 60


def row_of(made, tokens, **more):
    blocks = made.pipeline.blocks
    seq = blocks.open([1, 2], blocks.match([]))
    assert blocks.reserve(seq, len(tokens))
    tables = {key.partition("/")[2]: table for key, table in blocks.tables(seq).items()}
    return RowSet(blocks.slot(seq), 3, tokens, tables, **more)


def test_what_a_bucket_is(rig):
    made, _ = rig("pages")
    staged = made.pipeline.executor.staged["verify"]

    def bucket(*rows):
        return staged.bucket({"rows": rows, "top": [0] * len(rows)})

    one, tree = row_of(made, [8]), row_of(made, [8, 9, 10, 11, 12], parents=[-1, 0, 0, 1, 1])
    assert bucket(one) == (1, 1, frozenset(), tuple((group, LEAST_BLOCKS) for group in one.tables), False, 1)
    assert bucket(one, evolve(one, mask=np.ones((1, 10), np.uint32)))[4]
    assert bucket(one, tree)[:2] == (2, 6)
    assert bucket(evolve(tree, wanted=[4])) is None
    assert bucket(evolve(tree, sure=2)) is None
    assert bucket(evolve(tree, tokens=[8] * 65, parents=None)) is None
    made.engine.table.take(one.slot, SamplingParams(temperature=0.5), [1], [])
    assert bucket(one)[2] is None


def test_masks_are_those_of_plain_calls_beside_padding_and_rows_without(rig):
    made, _ = rig("pages")
    staged, axes = made.pipeline.executor.staged["verify"], made.engine.spec.position_axes
    words = -(-made.engine.spec.vocab // 32)
    masks = np.random.default_rng(1).integers(0, 1 << 32, (3, words), np.uint32)
    rows = [row_of(made, [8, 9, 10], mask=masks), row_of(made, [8])]
    inputs = {"rows": rows, "top": [0, 0]}
    buffers = staged.stage(staged.bucket(inputs))
    for _ in range(2):  # what was there before is no matter
        staged.fill(buffers, inputs)
        buffers.device.copy_(buffers.host)
        got, wanted = buffers.view.batch, make_batch("held", rows, axes=axes)
        assert got.mask[:4].equal(wanted.mask)
        assert got.mask.dtype is torch.int32
        assert bool((got.mask[4:] == -1).all())
        buffers.host.fill_(7)
    assert make_batch("held", rows[1:], axes=axes).mask is None


@pytest.mark.parametrize("parents", [None, [-1, 0, 0]])
def test_the_batch_is_that_of_plain_calls(rig, parents):
    made, _ = rig("pages")
    staged, axes = made.pipeline.executor.staged["verify"], made.engine.spec.position_axes
    row = row_of(made, [8, 9, 10], parents=parents, positions=[[40, 41, 41]] * axes)
    inputs = {"rows": [row], "top": [0]}
    buffers = staged.stage(staged.bucket(inputs))
    staged.fill(buffers, inputs)
    buffers.device.copy_(buffers.host)
    got, wanted = buffers.view.batch, make_batch("held", [row], axes=axes)
    for name in (
        "token",
        "index",
        "position",
        "seq",
        "parent",
        "sees",
        "slot",
        "length",
        "query_start",
        "sure",
    ):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
    assert got.table.keys() == wanted.table.keys()
    for group, theirs in wanted.table.items():
        mine, used = got.table[group], theirs.block.shape[1]
        assert torch.equal(mine.block[:, :used], theirs.block)
        assert torch.equal(mine.first[:, :used], theirs.first)
        assert torch.equal(mine.count, theirs.count)
