"""Write a small random glimmer model that can be served: it answers nonsense, but by all the rules.

    python make_model.py glimmer.gguf
    luce-core serve glimmer.gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from luce_arch_glimmer.describe import tensor_shapes

from luce_core.model.metadata import DecoderParams, RopeParams
from luce_core.testing.gguf_factory import write_gguf
from luce_core.testing.toy_vocab import toy_vocabulary


def write_model(path: Path, *, layers: int = 2, seed: int = 0, quant: str | None = None) -> Path:
    """A model of `layers` layers, 64 wide, with the toy vocabulary. quant: block format of its matrices."""
    vocabulary = toy_vocabulary("bpe")
    params = DecoderParams(
        num_layers=layers,
        hidden=64,
        vocab=len(vocabulary["tokenizer.ggml.tokens"]),
        context=2048,
        heads=(4,) * layers,
        kv_heads=(2,) * layers,
        head_dim=16,
        value_dim=16,
        ffn=(96,) * layers,
        eps=1e-5,
        rope=RopeParams(theta=1e4, num_rotated=16),
    )
    kernel = 4
    metadata = {
        "general.architecture": "glimmer",
        "general.name": "Glimmer, random",
        "glimmer.block_count": layers,
        "glimmer.context_length": params.context,
        "glimmer.embedding_length": params.hidden,
        "glimmer.feed_forward_length": params.ffn[0],
        "glimmer.attention.head_count": params.heads[0],
        "glimmer.attention.head_count_kv": params.kv_heads[0],
        "glimmer.attention.layer_norm_rms_epsilon": params.eps,
        "glimmer.conv_kernel": kernel,
        **vocabulary,
    }
    rng = np.random.default_rng(seed)
    tensors = {name: _random(rng, name, shape) for name, shape in tensor_shapes(params, kernel).items()}
    small = ("norm.weight", "conv.weight")
    formats = {name: quant for name in tensors if quant and not name.endswith(small)}
    return write_gguf(path, metadata, tensors, quant=formats or None)


def _random(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms around 1, embeddings of size 1, other matrices so that they keep the size of their input."""
    noise = rng.standard_normal(shape)
    if name.endswith("norm.weight"):
        numbers = 1.0 + 0.2 * noise
    elif name == "token_embd.weight":
        numbers = noise
    else:
        numbers = noise / np.sqrt(shape[-1])
    return np.asarray(numbers, np.float32)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quant", help="block format of the matrices, e.g. Q8_0 (default: F32)")
    options = parser.parse_args()
    write_model(options.path, layers=options.layers, seed=options.seed, quant=options.quant)


if __name__ == "__main__":
    main()
