"""Published sizes of Qwen 3.5 and its successors: what their files say and hold, without the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luce_core.contracts import Geometry

VOCAB = 248320
RANGES = {"*.ssm_a": (-16.0, -1.0), "*.ssm_dt.bias": (-6.0, -2.0)}
"""The decay of a step is exp(a · softplus(dt)): a is never positive."""

Shapes = dict[str, tuple[int, ...]]


SMALL: dict[str, Any] = {"layers": 24, "width": 1024, "heads": 8, "kv_heads": 2, "value_heads": 16}
NINE: dict[str, Any] = {"layers": 32, "width": 4096, "heads": 16, "kv_heads": 4, "value_heads": 32}
DENSE: dict[str, Any] = {"layers": 64, "width": 5120, "heads": 24, "kv_heads": 4, "value_heads": 48}
MOE: dict[str, Any] = {"layers": 40, "width": 2048, "heads": 16, "kv_heads": 2, "value_heads": 32}
LARGE: dict[str, Any] = {"layers": 60, "width": 4096, "heads": 32, "kv_heads": 2, "value_heads": 64}
SMALL["ffn"], NINE["ffn"], DENSE["ffn"] = 3584, 12288, 17408
MOE["experts"], LARGE["experts"] = (256, 8, 512, 512), (512, 10, 1024, 1024)


def geometries() -> list[Geometry]:
    """The plugin's `geometries`."""
    dense, moe = ("qwen3.6-27b", "qwen3.8-27b"), ("qwen3.6-35b-a3b",)
    return [
        _geometry("qwen3.5-0.8b", metadata_of(**SMALL), tied=True),
        _geometry("qwen3.5-9b", metadata_of(**NINE)),
        _geometry("qwen3.5-27b", metadata_of(**DENSE), *dense),
        _geometry("qwen3.5-27b-mtp", metadata_of(**DENSE, nextn=1), *(f"{name}-mtp" for name in dense)),
        _geometry("qwen3.5-35b-a3b", metadata_of(**MOE), *moe),
        _geometry("qwen3.5-35b-a3b-mtp", metadata_of(**MOE, nextn=1), *(f"{name}-mtp" for name in moe)),
        _geometry("qwen3.5-397b-a17b", metadata_of(**LARGE)),
    ]


def _geometry(name: str, metadata: Mapping[str, Any], *aliases: str, tied: bool = False) -> Geometry:
    return Geometry(name, metadata, shapes_of(metadata, tied=tied), aliases=aliases, ranges=RANGES)


def metadata_of(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    value_heads: int,
    key_heads: int = 16,
    dim: int = 256,
    state: int = 128,
    ffn: int = 0,
    experts: tuple[int, int, int, int] | None = None,
    sections: tuple[int, ...] = (11, 11, 10, 0),
    turning: int = 64,
    nextn: int = 0,
    vocab: int = VOCAB,
) -> dict[str, Any]:
    """experts: how many, how many for a token, their width, the shared one's. layers: of the trunk."""
    found: dict[str, Any] = {
        "block_count": layers + nextn,
        "context_length": 262144,
        "embedding_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": 4,
        "rope.dimension_count": turning,
        "rope.dimension_sections": list(sections),
        "rope.freq_base": 1e7,
        "ssm.conv_kernel": 4,
        "ssm.state_size": state,
        "ssm.group_count": key_heads,
        "ssm.time_step_rank": value_heads,
        "ssm.inner_size": value_heads * state,
        "vocab_size": vocab,
    }
    if nextn:
        found["nextn_predict_layers"] = nextn
    if experts is None:
        found["feed_forward_length"] = ffn
    else:
        keys = ("count", "used_count", "feed_forward_length", "shared_feed_forward_length")
        found |= {f"expert_{key}": value for key, value in zip(keys, experts, strict=True)}
    arch = "qwen35" if experts is None else "qwen35moe"
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in found.items()}}


def shapes_of(metadata: Mapping[str, Any], *, tied: bool = False) -> Shapes:
    """Every tensor of such a file, as the table of the converters' names has them. Torch order."""
    keys = {key.partition(".")[2]: value for key, value in metadata.items()}
    width, vocab, total = keys["embedding_length"], keys["vocab_size"], keys["block_count"]
    trunk = total - keys.get("nextn_predict_layers", 0)
    shapes: Shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (vocab, width)
    for layer in range(total):
        own: Shapes = {"attn_norm.weight": (width,), "post_attention_norm.weight": (width,)}
        if layer < trunk and (layer + 1) % keys["full_attention_interval"]:
            own |= _delta_shapes(keys, width)
        else:
            own |= _attention_shapes(keys, width)
        own |= _ffn_shapes(keys, width)
        if layer >= trunk:
            own |= {f"nextn.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head_norm")}
            own["nextn.eh_proj.weight"] = (width, 2 * width)
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def _delta_shapes(keys: Mapping[str, Any], width: int) -> Shapes:
    values, inner = keys["ssm.time_step_rank"], keys["ssm.inner_size"]
    channels = 2 * keys["ssm.group_count"] * keys["ssm.state_size"] + inner
    return {
        "attn_qkv.weight": (channels, width),
        "attn_gate.weight": (inner, width),
        "ssm_beta.weight": (values, width),
        "ssm_alpha.weight": (values, width),
        "ssm_a": (values,),
        "ssm_dt.bias": (values,),
        "ssm_conv1d.weight": (channels, keys["ssm.conv_kernel"]),
        "ssm_norm.weight": (inner // values,),
        "ssm_out.weight": (width, inner),
    }


def _attention_shapes(keys: Mapping[str, Any], width: int) -> Shapes:
    dim = keys["attention.key_length"]
    queries, rows = keys["attention.head_count"] * dim, keys["attention.head_count_kv"] * dim
    return {
        "attn_q.weight": (2 * queries, width),
        "attn_k.weight": (rows, width),
        "attn_v.weight": (rows, width),
        "attn_q_norm.weight": (dim,),
        "attn_k_norm.weight": (dim,),
        "attn_output.weight": (width, queries),
    }


def _ffn_shapes(keys: Mapping[str, Any], width: int) -> Shapes:
    if "expert_count" not in keys:
        ffn = keys["feed_forward_length"]
        up = (ffn, width)
        return {"ffn_gate.weight": up, "ffn_up.weight": up, "ffn_down.weight": (width, ffn)}
    count, ffn, shared = (
        keys[f"expert_{key}"] for key in ("count", "feed_forward_length", "shared_feed_forward_length")
    )
    return {
        "ffn_gate_inp.weight": (count, width),
        "ffn_gate_exps.weight": (count, ffn, width),
        "ffn_up_exps.weight": (count, ffn, width),
        "ffn_down_exps.weight": (count, width, ffn),
        "ffn_gate_shexp.weight": (shared, width),
        "ffn_up_shexp.weight": (shared, width),
        "ffn_down_shexp.weight": (width, shared),
        "ffn_gate_inp_shexp.weight": (1, width),
    }
