"""The core's contract kit on the plugin and on a small model."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.arch import ArchContract
from luce_core.testing.plugin import PluginContract

FIXTURES = Path(__file__).parent / "fixtures"


class TestPlugin(PluginContract):
    hooks = "luce_arch_bailing.hooks"
    distribution = "luce-arch-bailing"


class TestLing(ArchContract):
    hooks = "luce_arch_bailing.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 4
    # The output of a KDA head is divided by its own size; where that is close to nothing, the order in which
    # float32 adds shows: the chunked form is itself 3e-4 off float64 in Hugging Face's own implementation.
    tolerance = 1e-4

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-bailingmoe3-clamp.gguf"
