"""The core's contract kit on the plugin and on one small model of each kind."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.arch import ArchContract
from luce_core.testing.plugin import PluginContract

FIXTURES = Path(__file__).parent / "fixtures"


class TestPlugin(PluginContract):
    hooks = "luce_arch_llama.hooks"


class TestLlama(ArchContract):
    hooks = "luce_arch_llama.hooks"

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-llama.gguf"


class TestLlama3Rope(ArchContract):
    hooks = "luce_arch_llama.hooks"
    optional_tensors = frozenset({"output.weight", "rope_freqs.weight"})
    tree_nodes = 4

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-llama3rope.gguf"


class TestQwen2(ArchContract):
    hooks = "luce_arch_llama.hooks"
    optional_tensors = frozenset(
        {"output.weight", "blk.0.attn_q.bias", "blk.0.attn_k.bias", "blk.0.attn_v.bias"}
    )
    tree_nodes = 4

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-qwen2.gguf"
