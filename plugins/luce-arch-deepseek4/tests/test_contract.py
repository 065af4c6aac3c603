"""The core's contract kit on the plugin and on two small models."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.arch import ArchContract
from luce_core.testing.plugin import PluginContract

from .hugging_face import random_model, written

FIXTURES = Path(__file__).parent / "fixtures"


class TestPlugin(PluginContract):
    hooks = "luce_arch_deepseek4.hooks"
    distribution = "luce-arch-deepseek4"


class TestPublishedRatios(ArchContract):
    """No entry of 128 tokens closes in the kit's short texts; see `test_logits.py`."""

    hooks = "luce_arch_deepseek4.hooks"
    optional_tensors = frozenset({"output.weight"})
    block_tokens = 128
    tree_nodes = 3

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-deepseek4-f32.gguf"


class TestShortRatios(ArchContract):
    """Entries close every 4 and every 8 tokens, inside the kit's trees too; the indexer has to choose."""

    hooks = "luce_arch_deepseek4.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 5

    def make_model(self, folder: Path) -> Path:
        return written(folder / "short.gguf", *random_model({}))
