"""Logits of the published fixtures, however the text is cut. Reference: Hugging Face, float32, one shot.

The window of every fixture is 24 tokens of 160. A soft cap never changes which token is likeliest.
"""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.recorded_contract import RecordedContract

HOOKS = "luce_arch_gemma.hooks"
FIXTURES = Path(__file__).parent / "fixtures"
CUTS = tuple((cut, 150) for cut in (23, 24, 25, 113))
"""Before, at and behind the window's edge, and far beyond it."""
F16, BF16 = 2e-3, 1.4e-2
"""Measured over nine rows of ten: 5e-5 to 8e-4, and 4e-4 to 7e-3. In the others a rounded router may take
another expert, which is another answer: 0.37 in one row.
"""


class TestGemma3(RecordedContract):
    hooks, file, cuts, singles = HOOKS, FIXTURES / "tiny-gemma3.gguf", CUTS, 80
    f16, bf16, rounded_share = F16, BF16, 0.9


class TestGemma4(RecordedContract):
    hooks, file, cuts, singles = HOOKS, FIXTURES / "tiny-gemma4.gguf", CUTS, 80
    f16, bf16, rounded_share = F16, BF16, 0.9


class TestGemma4E(RecordedContract):
    hooks, file, cuts, singles = HOOKS, FIXTURES / "tiny-gemma4e.gguf", CUTS, 80
    f16, bf16, rounded_share = F16, BF16, 0.9


class TestGemma4Moe(RecordedContract):
    hooks, file, cuts, singles = HOOKS, FIXTURES / "tiny-gemma4moe.gguf", CUTS, 80
    f16, bf16, rounded_share = F16, BF16, 0.9
