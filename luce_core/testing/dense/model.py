"""A dense GGUF file with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from luce_core.model.metadata import DecoderParams, RopeParams
from luce_core.testing.dense.describe import tensor_shapes
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.toy_vocab import toy_vocabulary


def write_dense_model(path: Path, *, quant: str | None = None, layers: int = 2, seed: int = 0) -> Path:
    """`layers` layers, 256 wide: rows every block format divides. quant: block format of the matrices;
    None = F32.
    """
    vocabulary = toy_vocabulary("bpe")
    params = DecoderParams(
        num_layers=layers,
        hidden=256,
        vocab=len(vocabulary["tokenizer.ggml.tokens"]),
        context=1024,
        heads=(4,) * layers,
        kv_heads=(2,) * layers,
        head_dim=64,
        value_dim=64,
        ffn=(512,) * layers,
        eps=1e-5,
        rope=RopeParams(theta=1e4, num_rotated=64),
    )
    metadata = {
        "general.architecture": "dense",
        "general.name": path.stem,
        "dense.block_count": layers,
        "dense.context_length": params.context,
        "dense.embedding_length": params.hidden,
        "dense.feed_forward_length": params.ffn[0],
        "dense.attention.head_count": params.heads[0],
        "dense.attention.head_count_kv": params.kv_heads[0],
        "dense.attention.layer_norm_rms_epsilon": params.eps,
        **vocabulary,
    }
    rng = np.random.default_rng(seed)
    tensors = {name: _random(rng, shape) for name, shape in tensor_shapes(params).items()}
    formats = {name: quant for name, weights in tensors.items() if quant and weights.ndim == 2}
    return write_gguf(path, metadata, tensors, quant=formats or None)


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Vectors are norms around 1; matrices keep the size of their input."""
    noise = rng.standard_normal(shape)
    numbers = 1.0 + 0.2 * noise if len(shape) == 1 else noise / np.sqrt(shape[-1])
    return np.asarray(numbers, np.float32)
