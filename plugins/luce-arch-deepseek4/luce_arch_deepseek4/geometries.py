"""Published sizes of DeepSeek V4: what their files say and hold, without the weights.

Keys here are without their prefix; `with_prefix` makes metadata of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luce_core.contracts import Geometry

ARCH = "deepseek4"
VOCAB = 129280
FORMATS = {"*tid2eid.weight": "I32", "*hc_*": "F32", "*_ape.weight": "F32"}
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
"""What the converter makes of the published FP8 and FP4 weights."""

Shapes = dict[str, tuple[int, ...]]

FLASH: dict[str, Any] = {
    "block_count": 43,
    "context_length": 1048576,
    "embedding_length": 4096,
    "vocab_size": VOCAB,
    "attention.head_count": 64,
    "attention.head_count_kv": 1,
    "attention.key_length": 512,
    "attention.value_length": 512,
    "attention.q_lora_rank": 1024,
    "attention.sliding_window": 128,
    "attention.compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "attention.compress_rope_freq_base": 16e4,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.output_group_count": 8,
    "attention.output_lora_rank": 1024,
    "attention.indexer.head_count": 64,
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
    "hash_layer_count": 3,
    "expert_count": 256,
    "expert_used_count": 6,
    "expert_shared_count": 1,
    "expert_feed_forward_length": 2048,
    "expert_gating_func": 4,
    "expert_weights_norm": True,
    "expert_weights_scale": 1.5,
    "swiglu_clamp_exp": [10.0] * 43,
    "swiglu_clamp_shexp": [10.0] * 43,
}


def geometries() -> list[Geometry]:
    """The plugin's `geometries`."""
    return [
        Geometry(
            name="deepseek-v4-flash",
            metadata=with_prefix(FLASH),
            shapes=shapes_of(FLASH),
            formats=FORMATS,
            native=NATIVE,
            ranges={"*tid2eid.weight": (0, FLASH["expert_count"] - 1)},
        )
    ]


def with_prefix(keys: Mapping[str, Any], arch: str = ARCH) -> dict[str, Any]:
    """Metadata of a file."""
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}


def shapes_of(keys: Mapping[str, Any]) -> Shapes:
    """Every tensor of such a file, as the table of the converter's names has them. Torch order."""
    width, vocab, n = keys["embedding_length"], keys["vocab_size"], keys["hyper_connection.count"]
    shapes: Shapes = {"token_embd": (vocab, width), "output_norm": (width,), "output": (vocab, width)}
    shapes |= {"output_hc_fn": (n, n * width), "output_hc_base": (n,), "output_hc_scale": (1,)}
    for layer in range(keys["block_count"]):
        own = _attention(keys, keys["attention.compress_ratios"][layer])
        own |= expert_shapes(keys, layer < keys["hash_layer_count"])
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return full_names(shapes)


def full_names(shapes: Shapes) -> Shapes:
    """As files spell them."""
    return {name if ".bias" in name else f"{name}.weight": shape for name, shape in shapes.items()}


def _attention(keys: Mapping[str, Any], ratio: int) -> Shapes:
    width, dim, rank = keys["embedding_length"], keys["attention.key_length"], keys["attention.q_lora_rank"]
    own = near_shapes(keys)
    if ratio:
        own |= _compressor("attn_compressor", width, dim, ratio)
    if ratio == 4:
        index_heads, index_dim = keys["attention.indexer.head_count"], keys["attention.indexer.key_length"]
        own |= {"indexer.attn_q_b": (index_heads * index_dim, rank), "indexer.proj": (index_heads, width)}
        own |= _compressor("indexer_compressor", width, index_dim, ratio)
    return own


def near_shapes(keys: Mapping[str, Any]) -> Shapes:
    """Attention to the newest tokens, both norms, what mixes the streams."""
    width, dim, rank = keys["embedding_length"], keys["attention.key_length"], keys["attention.q_lora_rank"]
    heads, groups = keys["attention.head_count"], keys["attention.output_group_count"]
    low = groups * keys["attention.output_lora_rank"]
    n = keys["hyper_connection.count"]
    own: Shapes = {
        "attn_norm": (width,),
        "ffn_norm": (width,),
        "attn_q_a": (rank, width),
        "attn_q_a_norm": (rank,),
        "attn_q_b": (heads * dim, rank),
        "attn_kv": (dim, width),
        "attn_kv_a_norm": (dim,),
        "attn_sinks": (heads,),
        "attn_output_a": (low, heads * dim // groups),
        "attn_output_b": (width, low),
    }
    for name in ("hc_attn", "hc_ffn"):
        mixed = n + n + n * n
        own |= {f"{name}_fn": (mixed, n * width), f"{name}_base": (mixed,), f"{name}_scale": (3,)}
    return own


def _compressor(name: str, width: int, dim: int, ratio: int) -> Shapes:
    rows = dim * (2 if ratio == 4 else 1)
    return {
        f"{name}_kv": (rows, width),
        f"{name}_gate": (rows, width),
        f"{name}_ape": (ratio, rows),
        f"{name}_norm": (dim,),
    }


def expert_shapes(keys: Mapping[str, Any], hashed: bool = False) -> Shapes:
    """Router, routed and shared experts."""
    width, ffn, count = keys["embedding_length"], keys["expert_feed_forward_length"], keys["expert_count"]
    own: Shapes = {"ffn_gate_inp": (count, width)}
    for end, stack in (("_exps", (count,)), ("_shexp", ())):
        own |= {f"ffn_gate{end}": (*stack, ffn, width), f"ffn_up{end}": (*stack, ffn, width)}
        own[f"ffn_down{end}"] = (*stack, width, ffn)
    if hashed:
        return own | {"ffn_gate_tid2eid": (keys["vocab_size"], keys["expert_used_count"])}
    return own | {"exp_probs_b.bias": (count,)}
