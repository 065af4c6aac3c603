"""Prompts over static buffers: filled up to a bucket's rows, which change nothing; what is not staged."""

from __future__ import annotations

import sys

import pytest
import torch
from attrs import evolve
from torch import nn

from luce_core.contracts import Equivalence, OpImpl, OpLayer
from luce_core.contracts.staged import takes_padding
from luce_core.engine.staged_prefill import StagedPrefill, is_paddable
from luce_core.ops import attention as reference
from luce_core.testing.dense import write_dense_model
from luce_core.testing.fake_plugins import make_plugin
from luce_core.testing.pipeline import TOY_HOOKS, EngineRig, make_pipeline

from .test_staged import StagingExecutor

PROMPTS = ([5, 9, 2, 8], list(range(1, 40)), list(range(3, 74)), [7])
CHUNK = 48
asked = []


def takes(ops, b, q, k, v, region, spec, gate=None, extra=None):
    asked.append(region.name)
    return True


@takes_padding(takes)
def attention(ops, b, q, k, v, region, spec, gate=None, extra=None):
    """The reference over the rows that are there; what stands behind them is looked at by nobody."""
    if not b.padded:
        return reference.attention(ops, b, q, k, v, region, spec, gate, extra)
    used = int(b.query_start[-1])
    lacking = b.token.shape[0] - used
    rows = {name: getattr(b, name)[:used] for name in ("token", "index", "seq", "parent", "sees")}
    own = evolve(b, **rows, position=b.position[:, :used], padded=False)
    parts = (None if part is None else part[:used] for part in (q, k, v))
    got = reference.attention(ops, own, *parts, region, spec, None if gate is None else gate[:used], extra)
    return nn.functional.pad(got, (0, 0, 0, lacking), value=3.0)


@pytest.fixture
def rig(tmp_path, monkeypatch):
    """rig(executor) -> EngineRig over the dense model; marked: its attention takes padding."""
    path = write_dense_model(tmp_path / "dense.gguf", layers=2)

    def make(executor=None, marked=True, **more):
        layer = OpLayer("mine", (OpImpl("attention", f"{__name__}:attention"),), Equivalence.BITS)
        hooks = [TOY_HOOKS, "luce_core.testing.dense.hooks"]
        options = {"ctx_size": 128, "chunk": CHUNK}
        if marked:
            module = make_plugin("mine", luce_register_ops=[layer])
            monkeypatch.setitem(sys.modules, module.__name__, module)
            hooks.append(module.__name__)
            options["op_layer"] = ("mine",)
        pipeline = make_pipeline(path, *hooks, options=options, **more)
        return EngineRig(evolve(pipeline, executor=executor) if executor else pipeline)

    return make


def test_answers_are_those_of_plain_calls(rig):
    executor = StagingExecutor()
    wanted = [rig().generate(prompt, max_tokens=6)[0] for prompt in PROMPTS]
    made = rig(executor)
    assert [made.generate(prompt, max_tokens=6)[0] for prompt in PROMPTS] == wanted
    staged = [bucket[0] for bucket in executor.made if len(bucket) == 2]
    assert staged == [16, 48, 32], "3 rows; 38, for which 48 is the whole step; 48 and then 22"
    assert asked


def test_what_is_not_staged(rig):
    executor = StagingExecutor()
    made = rig(executor)
    made.generate(*PROMPTS, max_tokens=2)  # together
    assert all(len(bucket) != 2 or bucket[0] != 16 for bucket in executor.made)
    plain = rig(StagingExecutor(), marked=False)
    plain.generate(PROMPTS[1], max_tokens=2)
    assert not [bucket for bucket in plain.pipeline.executor.made if len(bucket) == 2]
    assert not is_paddable(plain.pipeline.target.backend.programs()[0], plain.pipeline.target.ops)


def test_sizes_end_with_a_whole_step(rig):
    programs = rig().engine.programs
    assert StagedPrefill(programs, 48).sizes == [16, 32, 48]
    assert StagedPrefill(programs, 2048).sizes[-2:] == [1536, 2048]
    assert StagedPrefill(programs, 5).sizes == [5]


def test_every_number_is_written_again(rig):
    """A bucket that held a longer chunk holds nothing of it."""
    made, executor = rig(), StagingExecutor()
    other = rig(executor)
    for prompt in (PROMPTS[1], PROMPTS[1][:35], PROMPTS[1][1:36]):
        assert other.generate(prompt, max_tokens=4) == made.generate(prompt, max_tokens=4)
    assert torch.isfinite(other.pipeline.target.state.regions[asked[0]].fields["k"]).all()
