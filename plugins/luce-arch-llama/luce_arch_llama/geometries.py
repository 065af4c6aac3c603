"""Published sizes of Llama, SmolLM2 and Qwen 2.5: what their files say and hold, without the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from luce_core.contracts import Geometry

Shapes = dict[str, tuple[int, ...]]
LLAMA3_THETA = 5e5
"""Of the models whose files have factors on the rotary frequencies."""


def geometries() -> list[Geometry]:
    """The plugin's `geometries`."""
    smol: dict[str, Any] = {"vocab": 49152, "theta": 1e5, "context": 8192, "tied": True}
    three: dict[str, Any] = {"vocab": 128256, "theta": 5e5, "context": 131072}
    two: dict[str, Any] = {"arch": "qwen2", "theta": 1e6, "context": 32768, "eps": 1e-6}
    small: dict[str, Any] = {"vocab": 151936, "tied": True}
    return [
        _geometry("smollm2-135m", layers=30, width=576, heads=9, kv_heads=3, ffn=1536, **smol),
        _geometry("smollm2-360m", layers=32, width=960, heads=15, kv_heads=5, ffn=2560, **smol),
        _geometry("qwen2.5-0.5b", layers=24, width=896, heads=14, kv_heads=2, ffn=4864, **small, **two),
        _geometry("llama-3.2-1b", layers=16, width=2048, heads=32, kv_heads=8, ffn=8192, tied=True, **three),
        _geometry("llama-3.2-3b", layers=28, width=3072, heads=24, kv_heads=8, ffn=8192, tied=True, **three),
        _geometry("llama-3.1-8b", layers=32, width=4096, heads=32, kv_heads=8, ffn=14336, **three),
        _geometry("llama-3.1-70b", layers=80, width=8192, heads=64, kv_heads=8, ffn=28672, **three),
    ]


def _geometry(name: str, *, tied: bool = False, **sizes: Any) -> Geometry:
    keys = metadata(**sizes)
    factors = {"rope_freqs.weight": (1.0, 1.0)}
    return Geometry(name, keys, shapes_of(keys, tied=tied), ranges=factors)


def metadata(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    theta: float,
    context: int,
    arch: str = "llama",
    eps: float = 1e-5,
) -> dict[str, Any]:
    """What such a file says."""
    keys = {
        "block_count": layers,
        "context_length": context,
        "embedding_length": width,
        "feed_forward_length": ffn,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_rms_epsilon": eps,
        "rope.freq_base": theta,
        "vocab_size": vocab,
    }
    if arch == "llama":
        keys["rope.dimension_count"] = width // heads
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}


def shapes_of(keys: Mapping[str, Any], *, tied: bool) -> Shapes:
    """Every tensor of such a file, as the table of the converters' names has them. Torch order."""
    arch = keys["general.architecture"]
    found = {key.removeprefix(f"{arch}."): value for key, value in keys.items()}
    width, ffn, vocab = found["embedding_length"], found["feed_forward_length"], found["vocab_size"]
    kv = width // found["attention.head_count"] * found["attention.head_count_kv"]
    layer: Shapes = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (width, width),
        "attn_k.weight": (kv, width),
        "attn_v.weight": (kv, width),
        "attn_output.weight": (width, width),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (ffn, width),
        "ffn_up.weight": (ffn, width),
        "ffn_down.weight": (width, ffn),
    }
    if arch == "qwen2":
        layer |= {"attn_q.bias": (width,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    shapes: Shapes = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    if not tied:
        shapes["output.weight"] = (vocab, width)
    if found["rope.freq_base"] == LLAMA3_THETA:
        shapes["rope_freqs.weight"] = (width // found["attention.head_count"] // 2,)
    for number in range(found["block_count"]):
        shapes |= {f"blk.{number}.{name}": shape for name, shape in layer.items()}
    return shapes
