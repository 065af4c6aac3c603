"""The core's contract kit on the plugin and on one small model of each variant."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.arch import ArchContract
from luce_core.testing.plugin import PluginContract

FIXTURES = Path(__file__).parent / "fixtures"


class TestPlugin(PluginContract):
    hooks = "luce_arch_gemma.hooks"
    distribution = "luce-arch-gemma"


class TestGemma3(ArchContract):
    hooks = "luce_arch_gemma.hooks"
    tree_nodes = 4

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-gemma3.gguf"


class TestGemma4(ArchContract):
    hooks = "luce_arch_gemma.hooks"
    tree_nodes = 5

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-gemma4.gguf"


class TestGemma4PerLayerInputs(ArchContract):
    hooks = "luce_arch_gemma.hooks"
    tree_nodes = 4

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-gemma4e.gguf"


class TestGemma4Experts(ArchContract):
    hooks = "luce_arch_gemma.hooks"
    tree_nodes = 3

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-gemma4moe.gguf"
