"""Sizes of the dense model, as an architecture plugin declares those that were published."""

from __future__ import annotations

from typing import Any

from luce_core.contracts import Geometry


def geometries() -> list[Geometry]:
    """One that fits into a test, as deep as real ones."""
    return [dense("dense-small", layers=32, width=256, ffn=512, vocab=512)]


def dense(name: str, *, layers: int, width: int, ffn: int, vocab: int) -> Geometry:
    """Four query heads on two key-value heads."""
    keys: dict[str, Any] = {
        "block_count": layers,
        "context_length": 4096,
        "embedding_length": width,
        "feed_forward_length": ffn,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": vocab,
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (width,),
        "attn_q": (width, width),
        "attn_k": (width // 2, width),
        "attn_v": (width // 2, width),
        "attn_output": (width, width),
        "ffn_norm": (width,),
        "ffn_gate": (ffn, width),
        "ffn_up": (ffn, width),
        "ffn_down": (width, ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab, width), "output_norm.weight": (width,)}
    for number in range(layers):
        shapes |= {f"blk.{number}.{part}.weight": shape for part, shape in layer.items()}
    metadata = {"general.architecture": "dense", **{f"dense.{key}": value for key, value in keys.items()}}
    return Geometry(name, metadata, shapes)
