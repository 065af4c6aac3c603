"""The toy keeps the contract of architectures to the bit, and its network is its law."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from luce_core.testing.arch import ArchContract
from luce_core.testing.rig import ModelRig
from luce_core.testing.toy import ToyLaw, write_toy_model

HOOKS = "luce_core.testing.toy.hooks"


class Toy(ArchContract):
    """Integer arithmetic: no tolerance. It is a test double, so not written with ops only."""

    hooks = HOOKS
    layers = ("toy",)
    tolerance = 0.0
    ops_only = False
    shape: ClassVar[dict[str, object]] = {}

    def make_model(self, folder: Path) -> Path:
        return write_toy_model(folder / "toy.gguf", **self.shape)


class TestPages(Toy):
    shape: ClassVar[dict[str, object]] = {"slots": False}


class TestPagesAndSlots(Toy):
    shape: ClassVar[dict[str, object]] = {"slots": True}


class TestWindowAndSlots(Toy):
    shape: ClassVar[dict[str, object]] = {"slots": True, "window": 20}


@pytest.mark.parametrize("shape", [{}, {"slots": False}, {"window": 5}], ids=str)
def test_the_network_follows_the_law(tmp_path, shape):
    rig = ModelRig(write_toy_model(tmp_path / "toy.gguf", salt=3, **shape), HOOKS, layers=("toy",))
    law = ToyLaw(rig.spec.vocab, salt=3, **shape)
    text = [5, 0, 250, 7, 7, 0, 31, 99, 5, 12]
    logits = rig.fresh(text)
    for end in range(1, len(text) + 1):
        assert torch.equal(logits[end - 1], torch.tensor(law.logits(text[:end])))
