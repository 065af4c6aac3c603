"""Logits of the published fixtures, however the text is cut. Reference: Hugging Face, float32, one shot."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.recorded_contract import RecordedContract

HOOKS = "luce_arch_qwen3.hooks"
FIXTURES = Path(__file__).parent / "fixtures"
CUTS = ((1, 150), (8, 150), (113, 150))


class TestQwen3(RecordedContract):
    """Rounded caches: measured 2.9e-4 and 9.1e-3 at most over nine rows of ten."""

    hooks, file, cuts, singles = HOOKS, FIXTURES / "tiny-qwen3.gguf", CUTS, 80
    f16, bf16, rounded_share = 1e-3, 2e-2, 0.9


class TestQwen3Moe(RecordedContract):
    """In the other rows a rounded router may take another expert, which is another answer: up to 0.19."""

    hooks, file, cuts, singles = HOOKS, FIXTURES / "tiny-qwen3moe.gguf", CUTS, 80
    f16, bf16, rounded_share = 1e-3, 2e-2, 0.9
