"""The core's contract kit on the plugin and on one small model of each kind."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.arch import ArchContract
from luce_core.testing.plugin import PluginContract

from .hugging_face import NO_WINDOW, random_model, written

FIXTURES = Path(__file__).parent / "fixtures"


class TestPlugin(PluginContract):
    hooks = "luce_arch_laguna.hooks"
    distribution = "luce-arch-laguna"


class TestLaguna(ArchContract):
    hooks = "luce_arch_laguna.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 4

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-laguna.gguf"


class TestLagunaWithoutWindows(ArchContract):
    """As M.1: every layer sees the whole text, a gate per feature. Experts from the first layer on."""

    hooks = "luce_arch_laguna.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 3

    def make_model(self, folder: Path) -> Path:
        config, model = random_model({**NO_WINDOW, "mlp_layer_types": ["sparse"] * 3})
        return written(folder / "m.gguf", config, model)
