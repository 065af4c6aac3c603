"""The kit's contract of published sizes; small ones have as many layers as V4 and V4.1 Flash."""

from typing import ClassVar

from luce_arch_deepseek4 import v41_geometries as v41
from luce_arch_deepseek4.geometries import FLASH, FORMATS, NATIVE, shapes_of, with_prefix

from luce_core.contracts import Geometry
from luce_core.testing.geometry_contract import GeometryContract, Published

SHRUNK = {
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
SMALL = FLASH | SHRUNK
SMALL_V41 = (
    v41.FLASH
    | SHRUNK
    | {
        "engram.key_length": 32,
        "engram.head_count": 1,
        "engram.primes": [11, 13, 17, 19, 23, 29],
        "engram.offsets": [0, 11, 24, 0, 19, 42],
        "engram.token_map": list(range(400)),
    }
)


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
        # entries and index keys of three layers every 2 tokens, of one every token; the newest 128 of all 40;
        # pairs not closed yet, three tokens. Without the tables of n-grams.
        "deepseek-v4.1-flash": Published(
            551_880_819_824, 334_429_002_176, 3_200, 3 * 2 * 1024 * 4 + 3 * 4, {128: 40_960}
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
        yield Geometry(
            name="small",
            metadata=with_prefix(SMALL_V41, v41.ARCH),
            shapes=v41.shapes_of(SMALL_V41, v41.SOURCES, v41.PICKERS),
            formats=v41.FORMATS,
            native=v41.NATIVE,
            ranges=v41.RANGES,
        )
