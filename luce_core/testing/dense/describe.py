"""Header -> ModelSpec of the dense model."""

from __future__ import annotations

from luce_core.contracts import CacheOptions, ModelSpec
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    DecoderParams,
    attention_shapes,
    full_attention_layout,
    mlp_shapes,
    model_spec,
    read_decoder,
)


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read the header and check every tensor."""
    params = read_decoder(header)
    for name, shape in tensor_shapes(params).items():
        header.tensor(name, shape)
    return model_spec(header, params, full_attention_layout(params))


def tensor_shapes(params: DecoderParams) -> dict[str, tuple[int, ...]]:
    """Every tensor of a dense file, in torch order."""
    width = params.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (params.vocab, width),
        "output_norm.weight": (width,),
    }
    for layer in range(params.num_layers):
        norms = {"attn_norm": (width,), "ffn_norm": (width,)}
        own = {**norms, **attention_shapes(params, layer), **mlp_shapes(width, params.ffn[layer])}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes
