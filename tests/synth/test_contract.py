"""The kit's contract of geometries on the kit's own dense model."""

from luce_core.testing.dense.geometries import dense
from luce_core.testing.geometry_contract import GeometryContract


class TestDense(GeometryContract):
    hooks = "luce_core.testing.dense.hooks"
    quants = ("q4_k_m", "q4_0", "f16")

    def small(self):
        return [dense("small", layers=48, width=128, ffn=160, vocab=512)]
