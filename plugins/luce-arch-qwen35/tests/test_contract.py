"""The core's contract kit on the plugin and on one small model of each variant."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.arch import ArchContract
from luce_core.testing.plugin import PluginContract

FIXTURES = Path(__file__).parent / "fixtures"


class TestPlugin(PluginContract):
    hooks = "luce_arch_qwen35.hooks"
    distribution = "luce-arch-qwen35"


class TestDense(ArchContract):
    hooks = "luce_arch_qwen35.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 4

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-qwen35.gguf"


class TestExperts(ArchContract):
    hooks = "luce_arch_qwen35.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 3

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-qwen35moe.gguf"
