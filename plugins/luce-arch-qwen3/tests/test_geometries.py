"""The kit's contract of published sizes; small ones have as many layers as 30B-A3B."""

from typing import ClassVar

from luce_arch_qwen3.geometries import metadata, shapes_of

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract, Published

SIZES = {"layers": 48, "width": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "dim": 32, "vocab_size": 400}
EXPERTS = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 32}


class TestQwen3(GeometryContract):
    hooks = "luce_arch_qwen3.hooks"
    published: ClassVar = {
        "qwen3-0.6b": Published(596_049_920, 390_753_280, 114_688),
        "qwen3-30b-a3b": Published(30_532_122_624, 18_550_716_416, 98_304),
    }

    def small(self):
        for arch, more in (("qwen3", {}), ("qwen3moe", EXPERTS)):
            keys = metadata(arch, **SIZES, **more)
            yield Geometry(f"small-{arch}", keys, shapes_of(keys, 400, tied=not more))
