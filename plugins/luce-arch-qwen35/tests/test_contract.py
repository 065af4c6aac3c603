"""The core's contract kit on the plugin and on one small model of each variant."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.arch import ArchContract
from luce_core.testing.encoder_contract import EncoderContract, Pair
from luce_core.testing.plugin import PluginContract

from .vision import files_of, projector, seeing_model

FIXTURES = Path(__file__).parent / "fixtures"
TOLERANCE = 1e-4
"""Each value head's output is divided by its own size. One in a few hundred is close to nothing in a model
this small, and there float32 itself differs from float64 by 3e-5 of the largest logit, however it is cut.
"""


class TestPlugin(PluginContract):
    hooks = "luce_arch_qwen35.hooks"
    distribution = "luce-arch-qwen35"


class TestDense(ArchContract):
    hooks = "luce_arch_qwen35.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 4
    tolerance = TOLERANCE

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-qwen35.gguf"


class TestExperts(ArchContract):
    hooks = "luce_arch_qwen35.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 3
    tolerance = TOLERANCE

    def make_model(self, folder: Path) -> Path:
        return FIXTURES / "tiny-qwen35moe.gguf"


class TestImages(EncoderContract):
    hooks = "luce_arch_qwen35.hooks"

    def make_files(self, folder: Path) -> Pair:
        files = files_of(folder)
        return Pair(files.text, files.projector)

    def make_wrong(self, folder: Path) -> Path:
        return projector(folder / "wrong.gguf", seeing_model(hidden_size=64))
