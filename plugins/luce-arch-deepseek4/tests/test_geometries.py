"""The kit's contract of published sizes; a small one has as many layers as V4 Flash."""

from typing import ClassVar

from luce_arch_deepseek4.geometries import FLASH, FORMATS, NATIVE, shapes_of, with_prefix

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract, Published

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
    published: ClassVar = {
        # entries of 21 layers every 4 tokens with an index, of 20 every 128; the newest 128 of all 43
        "deepseek-v4-flash": Published(
            284_334_567_511,
            172_032_663_900,
            6_880,
            21 * 8 * (2048 + 512) * 4 + 20 * 128 * 1024 * 4,
            {128: 44_032},
        ),
    }
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
