"""V4.1 against the recorded float64 oracle: every feature alone and all together, however the text is cut.

60 tokens: windows of 6, up to 60 entries of which 3 are picked, 15 blocks of which 3 are candidates.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from luce_core.contracts import Tap
from luce_core.model.batch import make_batch
from luce_core.testing.recorded_contract import RecordedContract
from luce_core.testing.rig import ModelRig

from .models_v41 import CASES, digest, model_of, text_of, written
from .oracle_v41 import Oracle

HOOKS = "luce_arch_deepseek4.hooks"
FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED = np.load(FIXTURES / "v41.npz")
TOLERANCE = 5e-6
"""As a share of the largest logit; 1e-6 is what comes out."""
IDS = text_of()
STREAMS = [name for name in CASES if name not in ("a window of one", "no limits", "one group of heads")]


def rig_of(path, **more):
    torch.set_num_threads(1)
    return ModelRig(path, HOOKS, **{"block_tokens": 12, **more})


def case_rig(folder, name, **more):
    return rig_of(written(folder / "m.gguf", *model_of(name)), **more)


@pytest.fixture
def rig(tmp_path):
    return case_rig(tmp_path, "whole")


def expected(name):
    return torch.from_numpy(EXPECTED[name])


WHOLE_LOGITS = expected("whole")


def assert_close(got, want):
    assert got.shape == want.shape
    worst = float((got - want).abs().max() / want.abs().max())
    assert worst <= TOLERANCE, f"logits differ by {worst:.2g} of the largest"


def test_the_oracle_still_says_what_was_recorded():
    keys, tensors = model_of("whole")
    oracle = Oracle(keys, tensors)
    np.testing.assert_allclose(oracle.run(IDS), EXPECTED["whole"], atol=1e-6)
    assert oracle.margin > 2e-5


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_whole_text(name, tmp_path):
    keys, tensors = model_of(name)
    assert digest(tensors) == EXPECTED[f"{name}: digest"], "numpy draws another model: record again"
    assert_close(rig_of(written(tmp_path / "m.gguf", keys, tensors)).fresh(IDS), expected(name))


@pytest.mark.parametrize("name", ["pairs", "single tokens", "groups of three", "n-grams", "whole"])
def test_chunks_then_single_tokens(name, tmp_path):
    rig = case_rig(tmp_path, name)
    seq, cuts = rig.open(), [0, 1, 2, 5, 16, 17, 40]
    parts = [rig.prefill({seq: IDS[a:b]})[seq] for a, b in pairwise(cuts)]
    parts.append(torch.stack([rig.decode(seq, token) for token in IDS[40:]]))
    assert_close(torch.cat(parts), expected(name))


class TestStored(RecordedContract):
    """MXFP4 experts, Q8_0 matrices and tables of n-grams. A rounded indexer may pick others: half the
    rows stay near.
    """

    hooks, file, tolerance, block_tokens = HOOKS, FIXTURES / "tiny-deepseek41.gguf", TOLERANCE, 12
    cuts, starts, tree_at, prefix = ((1, 2, 5, 16, 17, 40), (13, 41)), (1, 20, 45), 37, 29
    f16, bf16, rounded, rounded_share, wrong = 3e-3, 3e-2, 30, 0.5, 20


# --- every part does something


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({"attention.indexer.top_k": 100}, 3),
        ({"attention.indexer.candidate_source_layer": -1}, 12),
        ({"attention.indexer.candidate_top_k": 2}, 8),
        ({"attention.sliding_window": 7}, 6),
        ({"engram.pad_id": 3}, 0),
        ({"rope.scaling.factor": 1.0}, 1),
        ({"attention.compress_rope_freq_base": 1e4}, 1),
    ],
)
def test_a_changed_key_changes_logits_from_where_it_can(changed, first, tmp_path):
    """The same numbers, so what selection or hashing do not reach stays."""
    keys, tensors = model_of("whole")
    other = rig_of(written(tmp_path / "m.gguf", {**keys, **changed}, tensors)).fresh(IDS)
    differs = (other - WHOLE_LOGITS).abs().amax(1) > 1e-3
    assert not differs[:first].any()
    assert differs[first:].any()


def test_an_n_gram_of_four_reaches_back_three_tokens(tmp_path):
    """A window of one and no streams: a changed token is seen through n-grams alone."""
    keys, tensors = model_of("n-grams", **{"attention.sliding_window": 1})
    rig = rig_of(written(tmp_path / "m.gguf", keys, tensors))
    changed = [*IDS[:20], (IDS[20] + 1) % 61, *IDS[21:]]
    differs = (rig.fresh(changed) - rig.fresh(IDS)).abs().amax(1) > 1e-4
    assert differs.nonzero()[:, 0].tolist() == [20, 21, 22, 23]


# --- one text, cut otherwise


def test_chains_accepted_over_the_end_of_entries(rig):
    seq = rig.open()
    rig.prefill({seq: IDS[:21]})
    for at in range(21, 51, 5):
        held = rig.hold({seq: IDS[at : at + 5]})
        assert_close(held.logits[0], WHOLE_LOGITS[at : at + 5])
        rig.commit(held, [list(range(5))])


@pytest.mark.parametrize("start", [1, 24, 37])
def test_a_tree_whose_branches_close_the_same_entries(rig, start):
    """Both continuations close entries of both streams and name n-grams of their own."""
    seq = rig.open()
    rig.prefill({seq: IDS[:start]})
    right = IDS[start : start + 7]
    wrong = [token ^ 1 for token in right]
    tokens, parents = [right[0], *wrong[1:], *right[1:]], [-1, *range(6), 0, *range(7, 12)]
    held = rig.hold({seq: tokens}, {seq: parents})
    path = [0, *range(7, 13)]
    assert_close(held.logits[0][path], WHOLE_LOGITS[start : start + 7])
    assert float((held.logits[0][1:7] - held.logits[0][7:]).abs().max()) > 0.1
    rig.commit(held, [path])
    rest = range(start + 7, start + 12)
    assert_close(torch.stack([rig.decode(seq, IDS[at]) for at in rest]), WHOLE_LOGITS[start + 7 : start + 12])


def test_rows_not_accepted_leave_nothing(rig):
    seq = rig.open()
    rig.prefill({seq: IDS[:25]})
    for _ in range(2):
        rig.commit(rig.hold({seq: [token ^ 1 for token in IDS[25:33]]}), [[]])
    rig.commit(rig.hold({seq: [*IDS[25:28], *(token ^ 1 for token in IDS[28:34])]}), [[0, 1, 2]])
    assert_close(torch.stack([rig.decode(seq, token) for token in IDS[28:34]]), WHOLE_LOGITS[28:34])


def test_a_prefix_comes_back_with_entries_and_history(rig):
    """At an even and at an odd length: within a pair, and within n-grams."""
    for length in (24, 29):
        first = rig.open(IDS)
        rig.prefill({first: IDS[:length]})
        rig.blocks.checkpoint(first)
        rig.close(first)
        elsewhere, again = rig.open(), rig.open(IDS, reuse=True)
        kept = rig.blocks.length(again)
        assert kept == length
        assert_close(rig.prefill({again: IDS[kept:]})[again], WHOLE_LOGITS[kept:])
        rig.close_all([elsewhere, again])


def test_a_drafter_sees_all_streams_and_the_head_their_collapse(rig):
    last, spec = rig.spec.num_layers - 1, rig.spec
    assert (spec.tap_width, spec.final_width) == (4 * spec.hidden, spec.hidden)
    taps = {
        Tap("residual", last): torch.zeros(40, spec.tap_width),
        Tap("final", last): torch.zeros(40, spec.hidden),
    }
    rig.backend.forward(make_batch("prefill", [rig._rows(rig.open(), IDS[:40])], taps=taps))
    final = taps[Tap("final", last)]
    assert_close(rig.backend.head(final), WHOLE_LOGITS[:40])
    assert taps[Tap("residual", last)].view(40, 4, -1).abs().amax((0, 2)).min() > 0


@pytest.mark.parametrize(("cache_type", "tolerance"), [("f16", 3e-3), ("bf16", 3e-2)])
def test_half_precision_caches_stay_near(cache_type, tolerance, tmp_path):
    """While all that is seen is picked: rounded keys may pick other entries behind it."""
    rounded = case_rig(tmp_path, "more picked than there are", cache_type=cache_type)
    want = expected("more picked than there are")
    worst = float((rounded.fresh(IDS) - want).abs().max() / want.abs().max())
    assert TOLERANCE < worst <= tolerance
