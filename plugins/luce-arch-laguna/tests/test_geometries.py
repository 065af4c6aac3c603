"""The kit's contract of published sizes; a small one has as many layers as XS 2.1."""

from typing import ClassVar

from luce_arch_laguna.geometries import metadata, shapes_of

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract, Published


class TestLaguna(GeometryContract):
    hooks = "luce_arch_laguna.hooks"
    published: ClassVar = {
        "laguna-xs-2.1": Published(33_442_617_088, 20_270_574_592, 40_960, 0, {512: 122_880}),
    }

    def small(self):
        keys = metadata(layers=40, width=64, heads=[8, 16] * 20, ffn=96, experts=(6, 2, 32), vocab_size=400)
        yield Geometry("small", keys, shapes_of(keys, 400))
