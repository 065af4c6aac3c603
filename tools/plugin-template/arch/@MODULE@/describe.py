"""Header -> ModelSpec, with every check a bad file must fail. Imports no torch."""

from __future__ import annotations

from luce_core.contracts import CacheOptions, ModelSpec
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    DecoderParams,
    attention_shapes,
    check_ends,
    check_tensors,
    full_attention_layout,
    mlp_shapes,
    model_spec,
    read_decoder,
)


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Raises ModelFormatError naming the key or tensor that is wrong."""
    params = read_decoder(header)
    _check_tensors(header, params)
    return model_spec(header, params, full_attention_layout(params))


def _check_tensors(header: GgufHeader, params: DecoderParams) -> None:
    check_ends(header, params)  # without output.weight, the embedding table is the head
    norms = {"attn_norm": (params.hidden,), "ffn_norm": (params.hidden,)}
    for layer in range(params.num_layers):
        mlp = mlp_shapes(params.hidden, params.ffn[layer])
        check_tensors(header, {**norms, **attention_shapes(params, layer), **mlp}, f"blk.{layer}.")
