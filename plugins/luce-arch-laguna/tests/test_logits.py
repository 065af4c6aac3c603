"""Logits of the fixture, however the text is cut. Reference: a second implementation in float64.

The window is 5 tokens of 150. Logits are compared, within 1e-4 (the largest is 2.7): argmax agreement
survives gross errors. Rows turned as adjacent pairs differ by 2.3, a window one too wide by more than
0.1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from luce_core.contracts import Tap
from luce_core.model.batch import make_batch
from luce_core.testing.rig import ModelRig

FIXTURES = Path(__file__).parent / "fixtures"
HOOKS = "luce_arch_laguna.hooks"
TOLERANCE = 1e-4


@pytest.fixture
def case():
    """(rig, ids, logits of every row)"""
    expected = np.load(FIXTURES / "tiny-laguna.npz")
    rig = ModelRig(FIXTURES / "tiny-laguna.gguf", HOOKS)
    return rig, expected["input_ids"].tolist(), torch.tensor(expected["logits_fp64"])


def assert_close(got, want):
    assert got.shape == want.shape
    worst = float((got - want).abs().max())
    assert worst <= TOLERANCE, f"logits differ by {worst:.2g}"


def test_both_references_agree():
    expected = np.load(FIXTURES / "tiny-laguna.npz")
    np.testing.assert_allclose(expected["logits_hf_fp32"], expected["logits_fp64"], atol=2e-5)


def test_one_prefill(case):
    rig, ids, logits = case
    assert_close(rig.fresh(ids), logits)


@pytest.mark.parametrize("cut", [4, 5, 6, 113])
def test_two_chunks_then_single_tokens(case, cut):
    """Cut before, at and behind the window's edge, and far beyond it."""
    rig, ids, logits = case
    seq = rig.open()
    parts = [rig.prefill({seq: ids[:cut]})[seq], rig.prefill({seq: ids[cut:140]})[seq]]
    parts.append(torch.stack([rig.decode(seq, token) for token in ids[140:]]))
    assert_close(torch.cat(parts), logits)


def test_token_by_token(case):
    rig, ids, logits = case
    seq = rig.open()
    assert_close(torch.stack([rig.decode(seq, token) for token in ids[:80]]), logits[:80])


def test_decided_rows_and_a_tree_behind_them(case):
    """Three decided rows, then both a wrong and the right continuation; the right one is accepted."""
    rig, ids, logits = case
    seq = rig.open()
    rig.prefill({seq: ids[:100]})
    wrong = [(token + 1) % 101 for token in ids]
    tokens = [*ids[100:103], wrong[103], ids[103], wrong[104], ids[104]]
    held = rig.hold({seq: tokens}, {seq: [-1, 0, 1, 2, 2, 4, 4]}, sure=3)
    path = [0, 1, 2, 4, 6]
    assert_close(held.logits[0][path], logits[100:105])
    rig.commit(held, [path])
    assert_close(torch.stack([rig.decode(seq, token) for token in ids[105:110]]), logits[105:110])


def test_a_rejected_tree_costs_the_window_nothing(case):
    """20 candidates, more than the window is wide, are all rejected: what they could hide is still there."""
    rig, ids, logits = case
    seq = rig.open()
    rig.prefill({seq: ids[:60]})
    held = rig.hold({seq: [ids[60], *([7] * 20)]})
    assert_close(held.logits[0][:1], logits[60:61])
    rig.commit(held, [[0]])
    assert_close(torch.stack([rig.decode(seq, token) for token in ids[61:64]]), logits[61:64])


def test_beside_other_sequences_at_other_places(case):
    rig, ids, logits = case
    starts = {rig.open(): start for start in (1, 40, 97)}
    chunks = {seq: ids[:start] for seq, start in starts.items()}
    for seq, got in rig.prefill(chunks).items():
        assert_close(got, logits[: starts[seq]])
    for step in range(4):
        held = rig.hold({seq: [ids[start + step]] for seq, start in starts.items()})
        for start, got in zip(starts.values(), held.logits, strict=True):
            assert_close(got, logits[start + step : start + step + 1])
        rig.commit(held, [[0]] * 3)


def test_a_cached_prefix_longer_than_the_window(case):
    rig, ids, logits = case
    first = rig.open(ids)
    rig.prefill({first: ids[:88]})
    rig.blocks.checkpoint(first)
    rig.close(first)
    again = rig.open(ids, reuse=True)
    kept = rig.blocks.length(again)
    assert kept == 88
    assert_close(rig.prefill({again: ids[kept:]})[again], logits[kept:])


@pytest.mark.parametrize(("cache_type", "tolerance"), [("f16", 1.5e-3), ("bf16", 1e-2)])
def test_half_precision_caches_stay_near(case, cache_type, tolerance):
    """Measured over three rows of four: 5.4e-4 and 4.7e-3. In others a rounded router takes another expert,
    which is another answer: up to 0.26.
    """
    full, ids, logits = case
    rig = ModelRig(full.plan.path, HOOKS, cache_type=cache_type)
    rows = (rig.fresh(ids[:120]) - logits[:120]).abs().amax(1) / logits.abs().max()
    assert 1e-5 < float(rows.quantile(0.75)) <= tolerance


def test_the_compiled_program_gives_the_same_bits(case):
    direct, ids, _ = case
    compiled = ModelRig(direct.plan.path, HOOKS, overlay={"*": lambda program, ops: program})
    assert torch.equal(compiled.fresh(ids[:60]), direct.fresh(ids[:60]))
    seqs = {rig: rig.open() for rig in (direct, compiled)}
    for token in ids[:3]:
        ours, theirs = (rig.decode(seq, token) for rig, seq in seqs.items())
        assert torch.equal(ours, theirs)


def test_a_drafter_sees_taps_and_the_head(case):
    rig, ids, logits = case
    final = Tap("final", rig.spec.num_layers - 1)
    taps = {final: torch.zeros(len(ids), rig.spec.final_width)}
    rig.backend.forward(make_batch("prefill", [rig._rows(rig.open(), ids)], taps=taps))
    assert_close(rig.backend.head(taps[final]), logits)
    assert_close(rig.backend.head(taps[final], torch.tensor([7, 0, 99])), logits[:, [7, 0, 99]])
