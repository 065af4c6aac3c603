"""The kit's contract of published sizes; a small one has as many layers as V4 Flash."""

from luce_arch_deepseek4.geometries import FLASH, FORMATS, NATIVE, shapes_of, with_prefix

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract

SMALL = FLASH | {
    "embedding_length": 64,
    "vocab_size": 400,
    "attention.head_count": 4,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.q_lora_rank": 32,
    "attention.output_group_count": 2,
    "attention.output_lora_rank": 32,
    "attention.indexer.head_count": 4,
    "attention.indexer.key_length": 32,
    "attention.indexer.top_k": 4,
    "rope.dimension_count": 8,
    "expert_count": 16,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}


class TestDeepSeek4(GeometryContract):
    hooks = "luce_arch_deepseek4.hooks"
    quants = ("q4_k_m", "native")

    def small(self):
        yield Geometry(
            name="small",
            metadata=with_prefix(SMALL),
            shapes=shapes_of(SMALL),
            formats=FORMATS,
            native=NATIVE,
            ranges={"*tid2eid.weight": (0, 15)},
        )
