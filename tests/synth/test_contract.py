"""The kit's contract of geometries on the kit's own dense model."""

from typing import ClassVar

from luce_core.testing.dense.geometries import dense
from luce_core.testing.geometry_contract import GeometryContract, Published


class TestDense(GeometryContract):
    hooks = "luce_core.testing.dense.hooks"
    quants = ("q4_k_m", "q4_0", "f16")
    published: ClassVar = {
        # by hand: 32 layers of 256 columns; Q6_K in value and down matrices of sixteen layers and the table
        "dense-small": Published(
            parameters=32 * 590_336 + 256 + 512 * 256,
            num_bytes=32 * (2 * 256 * 4 + 589_824 * 144 // 256)
            + 16 * (128 * 256 + 512 * 256) * 66 // 256
            + 256 * 4
            + 512 * 256 * 210 // 256,
            token_bytes=32 * 2 * 2 * 64 * 2,
        )
    }

    def small(self):
        return [dense("small", layers=48, width=128, ffn=160, vocab=512)]
