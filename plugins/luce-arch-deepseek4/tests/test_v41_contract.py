"""The core's contract kit on V4.1 models: everything together, and others whose entries close otherwise."""

from __future__ import annotations

from pathlib import Path

from luce_core.testing.arch import ArchContract

from .models_v41 import model_of, written


class TestWhole(ArchContract):
    """Streams of pairs and of single tokens, candidates, n-gram tables."""

    hooks = "luce_arch_deepseek4.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 3

    def make_model(self, folder: Path) -> Path:
        return written(folder / "whole.gguf", *model_of("whole"))


class TestGroupsOfThree(ArchContract):
    """The first layer compresses; blocks of 12 tokens hold four entries."""

    hooks = "luce_arch_deepseek4.hooks"
    optional_tensors = frozenset({"output.weight"})
    block_tokens = 12
    tree_nodes = 4

    def make_model(self, folder: Path) -> Path:
        return written(folder / "three.gguf", *model_of("groups of three"))


class TestCandidates(ArchContract):
    """Single tokens in every layer, picked within blocks of four that the first chose."""

    hooks = "luce_arch_deepseek4.hooks"
    optional_tensors = frozenset({"output.weight"})
    tree_nodes = 4

    def make_model(self, folder: Path) -> Path:
        return written(folder / "candidates.gguf", *model_of("fewer candidates than are picked"))
