"""Logits of the published fixtures, however the text is cut. Reference: Hugging Face, float32, one shot."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.recorded_contract import RecordedContract

HOOKS = "luce_arch_qwen35.hooks"
FIXTURES = Path(__file__).parent / "fixtures"
F16, BF16 = 5e-4, 4e-3
"""K and V of one layer in four, rounded in steps of 2^-11 and 2^-8; measured 5.7e-5 and 3.8e-4."""


class TestQwen35(RecordedContract):
    hooks, file, f16, bf16 = HOOKS, FIXTURES / "tiny-qwen35.gguf", F16, BF16


class TestQwen35Moe(RecordedContract):
    hooks, file, f16, bf16 = HOOKS, FIXTURES / "tiny-qwen35moe.gguf", F16, BF16
