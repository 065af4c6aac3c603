"""Logits of the fixture, however the text is cut. Reference: a second implementation in float64.

The window is 5 tokens of 150. Rows turned as adjacent pairs differ by 2.3 (the largest logit is 2.7), a
window one too wide by more than 0.1.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from luce_core.testing.recorded_contract import RecordedContract

FIXTURES = Path(__file__).parent / "fixtures"


class TestLaguna(RecordedContract):
    """Cut before, at and behind the window's edge, and far beyond it. Rounded caches, measured over three
    rows of four: 5.4e-4 and 4.7e-3; in others a rounded router takes another expert, which is another
    answer: up to 0.26.
    """

    hooks, file, key = "luce_arch_laguna.hooks", FIXTURES / "tiny-laguna.gguf", "logits_fp64"
    tolerance, wrong, singles = 4e-5, 20, 80
    cuts = tuple((cut, 140) for cut in (4, 5, 6, 113))
    f16, bf16, rounded_share = 1.5e-3, 1e-2, 0.75


def test_both_references_agree():
    expected = np.load(FIXTURES / "tiny-laguna.npz")
    np.testing.assert_allclose(expected["logits_hf_fp32"], expected["logits_fp64"], atol=2e-5)
