"""Header -> ModelSpec of the dense model."""

from __future__ import annotations

from luce_core.contracts import CacheOptions, ModelSpec
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    DecoderParams,
    full_attention_layout,
    read_decoder,
    special_tokens,
    weight_totals,
)


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read the header and check every tensor."""
    params = read_decoder(header)
    for name, shape in tensor_shapes(params).items():
        header.tensor(name, shape)
    totals = weight_totals(header)
    return ModelSpec(
        arch="dense",
        identity="",
        num_layers=params.num_layers,
        hidden=params.hidden,
        vocab=params.vocab,
        context=params.context,
        position_axes=1,
        tap_width=params.hidden,
        final_width=params.hidden,
        layout=full_attention_layout(params),
        nextn_layout=None,
        tree="any",
        tokens=special_tokens(header),
        parameters=totals.parameters,
        weight_bytes=totals.weight_bytes,
        active_bytes=totals.active_bytes,
        details={"decoder": params},
    )


def tensor_shapes(params: DecoderParams) -> dict[str, tuple[int, ...]]:
    """Every tensor of a dense file, in torch order."""
    width, dim = params.hidden, params.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (params.vocab, width),
        "output_norm.weight": (width,),
    }
    for layer in range(params.num_layers):
        queries, keys = params.heads[layer] * dim, params.kv_heads[layer] * dim
        for name, shape in (
            ("attn_norm", (width,)),
            ("attn_q", (queries, width)),
            ("attn_k", (keys, width)),
            ("attn_v", (keys, width)),
            ("attn_output", (width, queries)),
            ("ffn_norm", (width,)),
            ("ffn_gate", (params.ffn[layer], width)),
            ("ffn_up", (params.ffn[layer], width)),
            ("ffn_down", (width, params.ffn[layer])),
        ):
            shapes[f"blk.{layer}.{name}.weight"] = shape
    return shapes
