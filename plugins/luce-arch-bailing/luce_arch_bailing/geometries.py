"""Published sizes of Ling 3.0: what their files say and hold, without the weights.

Keys here are without their prefix; `with_prefix` makes metadata of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luce_core.contracts import Geometry

ARCH = "bailingmoe3"
VOCAB = 157184
RANGES = {"*.ssm_a": (1.0, 4.0), "*.ssm_dt.bias": (-4.0, 0.0)}
"""The decay of a channel is a sigmoid of a · (f + dt), and a is stored after its exponential."""

Shapes = dict[str, tuple[int, ...]]

FLASH: dict[str, Any] = {
    "block_count": 42,
    "context_length": 262144,
    "embedding_length": 2560,
    "feed_forward_length": 6144,
    "vocab_size": VOCAB,
    "attention.head_count": 32,
    "attention.head_count_kv": [int((layer + 1) % 6 == 0) for layer in range(42)],
    "attention.key_length": 576,
    "attention.value_length": 128,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "attention.kv_lora_rank": 512,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.dimension_count": 64,
    "rope.freq_base": 6e6,
    "ssm.conv_kernel": 4,
    "kda.head_dim": 128,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
    "expert_count": 512,
    "expert_used_count": 8,
    "expert_shared_count": 1,
    "expert_group_count": 8,
    "expert_group_used_count": 4,
    "expert_feed_forward_length": 768,
    "expert_shared_feed_forward_length": 768,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "expert_weights_scale": 2.5,
    "leading_dense_block_count": 2,
    "swiglu_clamp_exp": [0.0] * 40 + [10.0] * 2,
    "swiglu_clamp_shexp": [0.0] * 40 + [10.0] * 2,
}


def geometries() -> list[Geometry]:
    """The plugin's `geometries`."""
    shapes = shapes_of(FLASH)
    return [Geometry("ling-3.0-flash", with_prefix(FLASH), shapes, aliases=("ling-flash",), ranges=RANGES)]


def with_prefix(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of a file."""
    return {"general.architecture": ARCH, **{f"{ARCH}.{key}": value for key, value in keys.items()}}


def shapes_of(keys: Mapping[str, Any]) -> Shapes:
    """Every tensor of such a file, as the table of the converter's names has them. Torch order."""
    width, vocab, heads = keys["embedding_length"], keys["vocab_size"], keys["attention.head_count"]
    shapes: Shapes = {"token_embd": (vocab, width), "output_norm": (width,), "output": (vocab, width)}
    for layer in range(keys["block_count"]):
        own: Shapes = {"attn_norm": (width,), "ffn_norm": (width,)}
        latent = keys["attention.head_count_kv"][layer] > 0
        own |= _latent(keys, width, heads) if latent else _kda(keys, width, heads)
        if layer < keys["leading_dense_block_count"]:
            own |= _mlp(width, keys["feed_forward_length"])
        else:
            count = keys["expert_count"]
            own |= {"ffn_gate_inp": (count, width), "exp_probs_b.bias": (count,)}
            own |= _mlp(width, keys["expert_feed_forward_length"], "_exps", (count,))
            own |= _mlp(width, keys["expert_shared_feed_forward_length"], "_shexp")
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    bare = ("ssm_a", ".bias")
    return {name if name.endswith(bare) else f"{name}.weight": shape for name, shape in shapes.items()}


def _kda(keys: Mapping[str, Any], width: int, heads: int) -> Shapes:
    inner = heads * keys["kda.head_dim"]
    conv: Shapes = {f"ssm_conv1d_{name}": (1, inner, 1, keys["ssm.conv_kernel"]) for name in "qkv"}
    names = ("attn_q", "attn_k", "attn_v", "ssm_f_a", "ssm_g_a")
    rest: Shapes = {"ssm_dt.bias": (inner,), "ssm_a": (heads, 1), "ssm_beta": (heads, width)}
    return {**dict.fromkeys(names, (inner, width)), **conv, **rest} | {
        "ssm_norm": (keys["kda.head_dim"],),
        "attn_output": (width, inner),
    }


def _latent(keys: Mapping[str, Any], width: int, heads: int) -> Shapes:
    latent, dim = keys["attention.kv_lora_rank"], keys["attention.key_length_mla"]
    value, rope = keys["attention.value_length_mla"], keys["rope.dimension_count"]
    queries: Shapes
    if rank := keys.get("attention.q_lora_rank", 0):
        queries = {
            "attn_q_a": (rank, width),
            "attn_q_a_norm": (rank,),
            "attn_q_b": (heads * dim, rank),
        }
    else:
        queries = {"attn_q": (heads * dim, width)}
    return queries | {
        "attn_kv_a_mqa": (latent + rope, width),
        "attn_kv_a_norm": (latent,),
        "attn_k_b": (heads, latent, dim - rope),
        "attn_v_b": (heads, value, latent),
        "attn_gate": (heads, width),
        "attn_output": (width, heads * value),
    }


def _mlp(width: int, ffn: int, end: str = "", stack: tuple[int, ...] = ()) -> Shapes:
    return {
        f"ffn_gate{end}": (*stack, ffn, width),
        f"ffn_up{end}": (*stack, ffn, width),
        f"ffn_down{end}": (*stack, width, ffn),
    }
