"""The core's contract kit on the plugin and on one small model of each architecture."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.arch import ArchContract
from luce_core.testing.plugin import PluginContract

FIXTURES = Path(__file__).parent / "fixtures"


class TestPlugin(PluginContract):
    hooks = "luce_arch_qwen3.hooks"
    distribution = "luce-arch-qwen3"


class TestQwen3(ArchContract):
    hooks = "luce_arch_qwen3.hooks"
    tree_nodes = 5

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-qwen3.gguf"


class TestQwen3Moe(ArchContract):
    hooks = "luce_arch_qwen3.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 4

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-qwen3moe.gguf"
