"""The core's contracts of plugins and op layers; without a GPU, in Triton's interpreter."""

from pathlib import Path
from typing import ClassVar

import torch

from luce_core.testing.dense import write_dense_model
from luce_core.testing.op_layer import OpLayerContract
from luce_core.testing.plugin import PluginContract


class TestPlugin(PluginContract):
    hooks = "luce_backend_triton.hooks"
    distribution = "luce-backend-triton"


class Dense(OpLayerContract):
    """A dense model of one block format. Not collected itself: its name does not begin with Test.

    On the CPU `triton` and `triton-portable` are the same code; test_ops.py calls both by name.
    """

    hooks = "luce_backend_triton.hooks"
    arch_hooks = "luce_core.testing.dense.hooks"
    layer: ClassVar[str] = "triton"
    quant: ClassVar[str | None] = None
    tolerance = 4e-3
    device = "cuda:0" if torch.cuda.is_available() else "cpu"

    def make_model(self, folder: Path) -> Path:
        return write_dense_model(folder / "dense.gguf", quant=self.quant, layers=1)


class TestQ4_K(Dense):
    quant = "Q4_K"
    op_formats = ("Q8_0",)


class TestInvariantQ4_K(TestQ4_K):
    layer = "triton-invariant"


class TestInvariantF16(Dense):
    layer = "triton-invariant"
    quant = "F16"
    op_formats = ()


class TestF32(Dense):
    tolerance = 1e-4
    op_formats = ()  # the interpreter takes its time; what has no matrices is compared above too
