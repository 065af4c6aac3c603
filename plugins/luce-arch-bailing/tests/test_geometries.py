"""The kit's contract of published sizes; a small one has as many layers as Flash."""

from typing import ClassVar

from luce_arch_bailing.geometries import FLASH, RANGES, shapes_of, with_prefix

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract, Published

SMALL = FLASH | {
    "embedding_length": 64,
    "feed_forward_length": 96,
    "vocab_size": 400,
    "attention.head_count": 4,
    "attention.key_length": 40,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 32,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8,
    "kda.head_dim": 16,
    "expert_count": 16,
    "expert_used_count": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
}


class TestBailing(GeometryContract):
    hooks = "luce_arch_bailing.hooks"
    published: ClassVar = {
        # 7 layers of 576 values; 35 with matrices of 32 heads and three rows of a convolution
        "ling-flash": Published(
            124_414_211_552, 75_270_677_376, 8_064, 35 * (32 * 128 * 128 + 3 * 12288) * 4
        ),
    }

    def small(self):
        yield Geometry("small", with_prefix(SMALL), shapes_of(SMALL), ranges=RANGES)
