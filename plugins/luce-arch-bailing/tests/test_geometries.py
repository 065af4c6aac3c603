"""The kit's contract of published sizes; a small one has as many layers as Flash."""

from luce_arch_bailing.geometries import FLASH, RANGES, shapes_of, with_prefix

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract

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

    def small(self):
        yield Geometry("small", with_prefix(SMALL), shapes_of(SMALL), ranges=RANGES)
