"""Logits of the published fixtures, however the text is cut. Reference: Hugging Face, float32, one shot."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.recorded_contract import RecordedContract

HOOKS = "luce_arch_llama.hooks"
FIXTURES = Path(__file__).parent / "fixtures"
F16, BF16 = 2e-3, 2e-2
"""K and V rounded in steps of 2^-11 and 2^-8; measured 5.4e-4 to 8.3e-4 and 3.7e-3 to 5.8e-3."""


class TestLlama(RecordedContract):
    hooks, file, f16, bf16 = HOOKS, FIXTURES / "tiny-llama.gguf", F16, BF16


class TestLlama3Rope(RecordedContract):
    hooks, file, f16, bf16 = HOOKS, FIXTURES / "tiny-llama3rope.gguf", F16, BF16


class TestQwen2(RecordedContract):
    hooks, file, f16, bf16 = HOOKS, FIXTURES / "tiny-qwen2.gguf", F16, BF16
