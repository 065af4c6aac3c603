"""Published sizes of DeepSeek V4.1: what their files say and hold, without the weights.

Which layers compress and which pick is in no key, so it is given beside them: `sources`, and all that pick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from luce_arch_deepseek4.engram import ROWS_FROM, primes_from
from luce_arch_deepseek4.geometries import (
    VOCAB,
    Shapes,
    expert_shapes,
    full_names,
    near_shapes,
    with_prefix,
)
from luce_core.contracts import Geometry

ARCH = "deepseek41"
COMPRESSED_IDS = 99092
"""Of the published vocabulary; which token has which follows from its words, so that here is made up."""
FORMATS = {"*hc_*": "F32", "*engram_[qk].weight": "F32"}
NATIVE = {
    "*_norm.weight": "F32",
    "*_sinks.weight": "F32",
    "*.bias": "F32",
    "*_exps.weight": "MXFP4",
    "*compressor_kv.weight": "BF16",
    "*compressor_gate.weight": "BF16",
    "*indexer.proj.weight": "BF16",
    "*ffn_gate_inp.weight": "BF16",
    "token_embd.weight": "BF16",
    "output.weight": "BF16",
    "*": "Q8_0",
}
"""What converters make of the published FP8 and FP4 weights."""
RANGES = {"*engram_[qk].weight": (0.7, 1.3)}

_PRIMES = list(primes_from(ROWS_FROM, 48))
FLASH: dict[str, Any] = {
    "block_count": 40,
    "context_length": 1048576,
    "embedding_length": 5120,
    "vocab_size": VOCAB,
    "attention.head_count": 64,
    "attention.head_count_kv": 1,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.q_lora_rank": 1280,
    "attention.sliding_window": 128,
    "attention.compress_ratios": [*[0] * 2, *[2] * 18, *[1] * 20, *[0] * 3],
    "attention.compress_rope_freq_base": 16e4,
    "attention.layer_norm_rms_epsilon": 1e-20,
    "attention.output_group_count": 8,
    "attention.output_lora_rank": 1024,
    "attention.indexer.head_count": 32,
    "attention.indexer.key_length": 128,
    "attention.indexer.top_k": 512,
    "rope.dimension_count": 64,
    "rope.freq_base": 1e4,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 16.0,
    "rope.scaling.original_context_length": 65536,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 20,
    "hyper_connection.epsilon": 1e-6,
    "expert_count": 384,
    "expert_used_count": 6,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 2304,
    "expert_gating_func": 4,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "swiglu_clamp_exp": [10.0] * 40,
    "engram.layer_ids": [1, 14],
    "engram.head_count": 8,
    "engram.key_length": 256,
    "engram.max_ngram_size": 4,
    "engram.pad_id": 2,
    "engram.multipliers": [
        *(76632096046245, 4839876093313, 35959672319349, 73987337458391),
        *(67716810739261, 51510806800915, 30921347202721, 82619226485591),
    ],
    "engram.primes": _PRIMES,
    "engram.offsets": [*accumulate(_PRIMES[:23], initial=0), *accumulate(_PRIMES[24:47], initial=0)],
    "engram.token_map": [token % COMPRESSED_IDS for token in range(VOCAB)],
}
SOURCES = (2, 8, 14, 20)
"""Layers that compress."""
PICKERS = (*SOURCES, 24, 28, 32, 36)


def geometries() -> list[Geometry]:
    """The plugin's `geometries` of deepseek41."""
    return [
        Geometry(
            name="deepseek-v4.1-flash",
            metadata=with_prefix(FLASH, ARCH),
            shapes=shapes_of(FLASH, SOURCES, PICKERS),
            formats=FORMATS,
            native=NATIVE,
            ranges=RANGES,
        )
    ]


def shapes_of(keys: Mapping[str, Any], sources: Sequence[int], pickers: Sequence[int]) -> Shapes:
    """Every tensor of such a file. Torch order."""
    width, vocab = keys["embedding_length"], keys["vocab_size"]
    shapes: Shapes = {"token_embd": (vocab, width), "output_norm": (width,), "output": (vocab, width)}
    for layer in range(keys["block_count"]):
        own = near_shapes(keys) | expert_shapes(keys)
        own |= _far_shapes(keys, layer in sources, layer in pickers, keys["attention.compress_ratios"][layer])
        if layer in keys.get("engram.layer_ids", ()):
            own |= _engram_shapes(keys, layer)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return full_names(shapes)


def _far_shapes(keys: Mapping[str, Any], compresses: bool, picks: bool, ratio: int) -> Shapes:
    width, dim, rank = keys["embedding_length"], keys["attention.key_length"], keys["attention.q_lora_rank"]
    heads, index_dim = keys["attention.indexer.head_count"], keys["attention.indexer.key_length"]
    own: Shapes = {}
    if compresses:
        own |= {"attn_compressor_kv": (dim, width), "attn_compressor_norm": (dim,)}
        own |= {"indexer.attn_k": (index_dim, dim), "indexer.k_norm": (index_dim,)}
        if ratio > 1:
            own["attn_compressor_gate"] = (dim, width)
    if picks:
        own |= {"indexer.attn_q_b": (heads * index_dim, rank), "indexer.proj": (heads, width)}
    return own


def table_rows(keys: Mapping[str, Any], layer: int) -> int:
    """Rows of the n-gram table before this layer."""
    place = list(keys["engram.layer_ids"]).index(layer)
    buckets = (keys["engram.max_ngram_size"] - 1) * keys["engram.head_count"]
    return sum(map(int, keys["engram.primes"][place * buckets : (place + 1) * buckets]))


def _engram_shapes(keys: Mapping[str, Any], layer: int) -> Shapes:
    width, n, size = keys["embedding_length"], keys["hyper_connection.count"], keys["engram.key_length"]
    buckets = (keys["engram.max_ngram_size"] - 1) * keys["engram.head_count"]
    return {
        "engram_embd": (table_rows(keys, layer), size),
        "engram_wkv": ((n + 1) * width, buckets * size),
        "engram_q": (n, width),
        "engram_k": (n, width),
    }
