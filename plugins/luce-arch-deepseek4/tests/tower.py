"""A small random projector file of Qwen's kind, written from the names and shapes its plugin asks for."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from luce_core.testing.gguf_factory import write_gguf

HIDDEN, FFN, PATCH, MERGE, SIDE = 16, 24, 16, 2, 3
UNIT = PATCH * MERGE
"""Pixels of a side of what becomes one row."""


def write_tower(path, width, **metadata):
    """width: of the rows it makes."""
    draw = np.random.default_rng(21)
    merged = HIDDEN * MERGE * MERGE

    def numbers(*shape, scale=1.0):
        return (draw.standard_normal(shape) * scale / shape[-1] ** 0.5).astype(np.float32)

    tensors = {
        "v.patch_embd.weight": numbers(HIDDEN, 3, PATCH, PATCH, scale=0.3),
        "v.patch_embd.weight.1": numbers(HIDDEN, 3, PATCH, PATCH, scale=0.3),
        "v.patch_embd.bias": numbers(HIDDEN),
        "v.position_embd.weight": numbers(SIDE * SIDE, HIDDEN, scale=4.0),
    }
    pairs = {
        "v.blk.0.attn_qkv": (3 * HIDDEN, HIDDEN),
        "v.blk.0.attn_out": (HIDDEN, HIDDEN),
        "v.blk.0.ffn_up": (FFN, HIDDEN),
        "v.blk.0.ffn_down": (HIDDEN, FFN),
        "mm.0": (merged, merged),
        "mm.2": (width, merged),
    }
    for name, shape in pairs.items():
        tensors[f"{name}.weight"] = numbers(*shape, scale=2.0)
        tensors[f"{name}.bias"] = numbers(shape[0])
    for name in ("v.blk.0.ln1", "v.blk.0.ln2", "v.post_ln"):
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = 1 + numbers(HIDDEN), numbers(HIDDEN)
    keys = {
        "general.architecture": "clip",
        "clip.projector_type": "qwen3vl_merger",
        "clip.vision.patch_size": PATCH,
        "clip.vision.embedding_length": HIDDEN,
        "clip.vision.feed_forward_length": FFN,
        "clip.vision.projection_dim": width,
        "clip.vision.block_count": 1,
        "clip.vision.attention.head_count": 2,
        "clip.vision.spatial_merge_size": MERGE,
    }
    return write_gguf(path, {**keys, **metadata}, tensors)


def picture(height, width, seed=0):
    """Noise over a slope."""
    noise = np.random.default_rng(seed).integers(0, 200, (height, width, 3))
    return (noise + np.linspace(0, 55, width)[None, :, None]).astype(np.uint8)


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()
