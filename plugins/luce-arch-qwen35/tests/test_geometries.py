"""The kit's contract of published sizes; small ones have as many layers as 27B."""

from luce_arch_qwen35.geometries import RANGES, metadata_of, shapes_of

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract

SIZES = {"layers": 64, "width": 96, "heads": 4, "kv_heads": 2, "value_heads": 6, "key_heads": 2, "dim": 32}
SIZES |= {"state": 32, "sections": (2, 1, 1, 0), "turning": 8, "vocab": 400}


class TestQwen35(GeometryContract):
    hooks = "luce_arch_qwen35.hooks"

    def small(self):
        for number, more in enumerate(({"ffn": 160}, {"experts": (6, 2, 32, 64)})):
            keys = metadata_of(**SIZES, **more)
            yield Geometry(f"small-{number}", keys, shapes_of(keys), ranges=RANGES)
