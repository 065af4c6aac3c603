"""The kit's contract of published sizes; small ones have as many layers as 27B."""

from typing import ClassVar

from luce_arch_qwen35.geometries import RANGES, metadata_of, shapes_of

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract, Published

SIZES = {"layers": 64, "width": 96, "heads": 4, "kv_heads": 2, "value_heads": 6, "key_heads": 2, "dim": 32}
SIZES |= {"state": 32, "sections": (2, 1, 1, 0), "turning": 8, "vocab": 400}


class TestQwen35(GeometryContract):
    hooks = "luce_arch_qwen35.hooks"
    published: ClassVar = {
        # state: 2 heads of 256, keys and values, in each of six layers; 18 with matrices and a convolution
        "qwen3.5-0.8b": Published(752_393_024, 518_335_744, 12_288, 20_201_472),
        "qwen3.5-27b": Published(26_895_998_464, 16_536_406_016, 65_536, 156_893_184),
        "qwen3.6-35b-a3b": Published(34_660_610_688, 21_155_768_832, 20_480, 65_863_680),
    }

    def small(self):
        for number, more in enumerate(({"ffn": 160}, {"experts": (6, 2, 32, 64)})):
            keys = metadata_of(**SIZES, **more)
            yield Geometry(f"small-{number}", keys, shapes_of(keys), ranges=RANGES)
