"""Published sizes of Laguna: what their files say and hold, without the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from luce_core.contracts import Geometry

VOCAB = 100352

Shapes = dict[str, tuple[int, ...]]


def geometries() -> list[Geometry]:
    """The plugin's `geometries`."""
    keys = metadata(
        layers=40,
        width=2048,
        heads=[48 if layer % 4 == 0 else 64 for layer in range(40)],
        ffn=8192,
        experts=(256, 8, 512),
        vocab_size=VOCAB,
    )
    return [Geometry("laguna-xs-2.1", keys, shapes_of(keys, VOCAB), aliases=("laguna-xs",))]


def metadata(
    *, layers: int, width: int, heads: Sequence[int], ffn: int, experts: tuple[int, int, int], **more: Any
) -> dict[str, Any]:
    """experts: count, used, width. more: further keys, without the architecture; or another value of one."""
    keys = {
        "block_count": layers,
        "context_length": 262144,
        "embedding_length": width,
        "feed_forward_length": ffn,
        "attention.head_count": list(heads),
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 512,
        "rope.freq_base": 5e5,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 128,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 32.0,
        "rope.scaling.original_context_length": 8192,
        "rope.scaling.yarn_beta_fast": 64.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": experts[0],
        "expert_used_count": experts[1],
        "expert_feed_forward_length": experts[2],
        "expert_shared_feed_forward_length": experts[2],
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
        "leading_dense_block_count": 1,
        **more,
    }
    return {"general.architecture": "laguna", **{f"laguna.{key}": value for key, value in keys.items()}}


def shapes_of(keys: Mapping[str, Any], vocab: int, *, gate_per_head: bool = True) -> Shapes:
    """Every tensor of such a file, as the table of the converters' names has them. Torch order."""
    found = {key.removeprefix("laguna."): value for key, value in keys.items()}
    width, dim, ffn = found["embedding_length"], found["attention.key_length"], found["feed_forward_length"]
    kv = found["attention.head_count_kv"] * dim
    count, size = found["expert_count"], found["expert_feed_forward_length"]
    shared = found["expert_shared_feed_forward_length"]
    shapes: Shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    shapes["output.weight"] = (vocab, width)
    for layer in range(found["block_count"]):
        heads = found["attention.head_count"][layer]
        own: Shapes = {
            "attn_norm.weight": (width,),
            "attn_q.weight": (heads * dim, width),
            "attn_k.weight": (kv, width),
            "attn_v.weight": (kv, width),
            "attn_q_norm.weight": (dim,),
            "attn_k_norm.weight": (dim,),
            "attn_gate.weight": (heads if gate_per_head else heads * dim, width),
            "attn_output.weight": (width, heads * dim),
            "ffn_norm.weight": (width,),
        }
        if layer < found["leading_dense_block_count"]:
            own |= {
                "ffn_gate.weight": (ffn, width),
                "ffn_up.weight": (ffn, width),
                "ffn_down.weight": (width, ffn),
            }
        else:
            own |= {
                "ffn_gate_inp.weight": (count, width),
                "exp_probs_b.bias": (count,),
                "ffn_gate_exps.weight": (count, size, width),
                "ffn_up_exps.weight": (count, size, width),
                "ffn_down_exps.weight": (count, width, size),
                "ffn_gate_shexp.weight": (shared, width),
                "ffn_up_shexp.weight": (shared, width),
                "ffn_down_shexp.weight": (width, shared),
            }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return shapes
