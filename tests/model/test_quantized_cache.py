"""A whole model over quantized keys and values: the laws hold as over numbers, and answers stay near."""

import pytest
import torch

from luce_core.contracts import CODECS
from luce_core.testing.dense import write_dense_model
from luce_core.testing.rig import ModelRig

HOOKS = "luce_core.testing.dense.hooks"
TEXT = [int(token) for token in torch.randint(0, 200, (60,), generator=torch.Generator().manual_seed(0))]
"""Of these no number is so near to the bound between two codes that sums in another order cross it."""
NEAR = {"q8_0": 0.02, "fp8": 0.06, "q4_0": 0.2, "tq3_0": 0.4}
"""Of the standard deviation of logits, how far those of random weights move."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_dense_model(tmp_path_factory.mktemp("dense") / "dense.gguf")


@pytest.fixture(scope="module", params=CODECS)
def rig(path, request):
    return ModelRig(path, HOOKS, cache_type=request.param)


def test_answers_are_near_those_over_numbers(rig, path):
    want = ModelRig(path, HOOKS).fresh(TEXT)
    got = rig.fresh(TEXT)
    error = ((got - want).norm() / (want - want.mean()).norm()).item()
    assert NEAR[rig.sizes.k_type] / 50 < error < NEAR[rig.sizes.k_type]


def test_chunks_and_single_steps_answer_as_one_prefill(rig):
    want = rig.fresh(TEXT)
    seq = rig.open()
    rows = [rig.prefill({seq: TEXT[:7]})[seq], rig.prefill({seq: TEXT[7:40]})[seq]]
    rows += [rig.decode(seq, token)[None] for token in TEXT[40:]]
    rig.close_all([seq])
    torch.testing.assert_close(torch.cat(rows), want, rtol=1e-3, atol=2e-3)


def test_accepted_branches_forks_and_reused_prefixes(rig):
    seq = rig.open()
    rig.prefill({seq: TEXT[:20]})
    held = rig.hold({seq: [TEXT[20], 1, TEXT[21], TEXT[22]]}, parents={seq: [-1, 0, 0, 2]})
    rig.commit(held, [[0, 2, 3]])
    other = rig.blocks.fork(seq)
    one, two = rig.decode(seq, TEXT[23]), rig.decode(other, 7)
    want = rig.fresh(TEXT[:24])
    torch.testing.assert_close(one, want[-1], rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(held.logits[0][3], want[22], rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(two, rig.fresh([*TEXT[:23], 7])[-1], rtol=1e-3, atol=2e-3)
    rig.close(seq, other)
    again = rig.open(TEXT[:24], reuse=True)
    have = rig.blocks.length(again)
    assert have > 0
    torch.testing.assert_close(rig.prefill({again: TEXT[have:24]})[again][-1], want[-1], rtol=1e-3, atol=2e-3)
    rig.close_all([again])


def test_keys_and_values_may_differ(path):
    rig = ModelRig(path, HOOKS, cache_type="q8_0", v_type="q4_0")
    pages = rig.model.state.region("blk.0.kv")
    assert {name: how.codec.name for name, how in pages.codecs.items()} == {"k": "q8_0", "v": "q4_0"}
    want = ModelRig(path, HOOKS).fresh(TEXT)
    assert ((rig.fresh(TEXT) - want).norm() / (want - want.mean()).norm()) < NEAR["q4_0"]
