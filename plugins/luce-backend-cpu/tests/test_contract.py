"""The core's contract of op layers, for every tier and the block formats each treats in a way of its own."""

from pathlib import Path
from typing import ClassVar

import pytest

from luce_core.testing.dense import write_dense_model
from luce_core.testing.op_layer import OpLayerContract


class Dense(OpLayerContract):
    """A dense model of one block format. Not collected itself: its name does not begin with Test."""

    hooks = "luce_backend_cpu.hooks"
    arch_hooks = "luce_core.testing.dense.hooks"
    layer: ClassVar[str] = "cpu-c"
    quant: ClassVar[str | None] = None

    def make_model(self, folder: Path) -> Path:
        return write_dense_model(folder / "dense.gguf", quant=self.quant)


def tier(layer: str, quant: str | None, tolerance: float) -> type[Dense]:
    return type(
        "TestTier", (Dense,), {"layer": layer, "quant": quant, "tolerance": tolerance, "__module__": __name__}
    )


# Chunks of more than 16 rows go through bf16 panels where the processor has AMX: 2^-8 of each product.
TestCF32 = tier("cpu-c", None, 2e-2)
TestCQ4_1 = tier("cpu-c", "Q4_1", 2e-2)
TestCQ4_K = tier("cpu-c", "Q4_K", 2e-2)
TestCQ6_K = tier("cpu-c", "Q6_K", 2e-2)
TestCQ8_0 = tier("cpu-c", "Q8_0", 2e-2)
TestRowsQ4_1 = tier("cpu-c-rows", "Q4_1", 4e-4)
TestRowsQ6_K = tier("cpu-c-rows", "Q6_K", 4e-4)
TestTorchQ4_0 = tier("cpu-torch", "Q4_0", 5e-2)
TestTorchQ6_K = tier("cpu-torch", "Q6_K", 1e-4)


@pytest.mark.parametrize("layer", ["cpu-c", "cpu-c-rows", "cpu-torch"])
def test_every_layer_is_under_contract(layer):
    assert any(value.layer == layer for name, value in globals().items() if name.startswith("Test"))
