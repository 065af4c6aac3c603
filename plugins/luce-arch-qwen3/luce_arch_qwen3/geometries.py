"""Published sizes of Qwen 3: what their files say and hold, without the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luce_core.contracts import Geometry

VOCAB = 151936

Shapes = dict[str, tuple[int, ...]]


def geometries() -> list[Geometry]:
    """The plugin's `geometries`."""
    experts = {"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768}
    return [
        _dense("qwen3-0.6b", layers=28, width=1024, heads=16, ffn=3072, tied=True),
        _dense("qwen3-1.7b", layers=28, width=2048, heads=16, ffn=6144, tied=True),
        _dense("qwen3-4b", layers=36, width=2560, heads=32, ffn=9728, tied=True),
        _dense("qwen3-8b", layers=36, width=4096, heads=32, ffn=12288, tied=False),
        _geometry(
            "qwen3-30b-a3b",
            metadata(
                "qwen3moe",
                layers=48,
                width=2048,
                heads=32,
                kv_heads=4,
                ffn=6144,
                vocab_size=VOCAB,
                **experts,
            ),
            tied=False,
        ),
    ]


def _dense(name: str, *, layers: int, width: int, heads: int, ffn: int, tied: bool) -> Geometry:
    keys = metadata("qwen3", layers=layers, width=width, heads=heads, kv_heads=8, ffn=ffn, vocab_size=VOCAB)
    return _geometry(name, keys, tied=tied)


def _geometry(name: str, keys: Mapping[str, Any], *, tied: bool) -> Geometry:
    return Geometry(name, keys, shapes_of(keys, VOCAB, tied=tied))


def metadata(
    arch: str, *, layers: int, width: int, heads: int, kv_heads: int, ffn: int, dim: int = 128, **more: Any
) -> dict[str, Any]:
    """more: further keys, without the architecture; or another value of one."""
    keys = {
        "block_count": layers,
        "context_length": 40960,
        "embedding_length": width,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
        **more,
    }
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}


def shapes_of(keys: Mapping[str, Any], vocab: int, *, tied: bool) -> Shapes:
    """Every tensor of such a file, as the table of the converters' names has them. Torch order."""
    arch = keys["general.architecture"]
    found = {key.removeprefix(f"{arch}."): value for key, value in keys.items()}
    width, ffn, dim = found["embedding_length"], found["feed_forward_length"], found["attention.key_length"]
    queries, keys_width = found["attention.head_count"] * dim, found["attention.head_count_kv"] * dim
    layer: Shapes = {
        "attn_norm": (width,),
        "attn_q": (queries, width),
        "attn_k": (keys_width, width),
        "attn_v": (keys_width, width),
        "attn_q_norm": (dim,),
        "attn_k_norm": (dim,),
        "attn_output": (width, queries),
        "ffn_norm": (width,),
    }
    if experts := found.get("expert_count", 0):
        size = found["expert_feed_forward_length"]
        layer |= {
            "ffn_gate_inp": (experts, width),
            "ffn_gate_exps": (experts, size, width),
            "ffn_up_exps": (experts, size, width),
            "ffn_down_exps": (experts, width, size),
        }
    else:
        layer |= {"ffn_gate": (ffn, width), "ffn_up": (ffn, width), "ffn_down": (width, ffn)}
    shapes: Shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (vocab, width)
    for number in range(found["block_count"]):
        shapes |= {f"blk.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes
