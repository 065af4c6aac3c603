"""Header -> ModelSpec, with every check a bad file must fail. Imports no torch."""

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
    """Raises ModelFormatError naming the key or tensor that is wrong."""
    params = read_decoder(header)
    _check_tensors(header, params)
    totals = weight_totals(header)
    return ModelSpec(
        arch=header.arch,
        identity="",  # the loader fills in a hash of the file's content
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


def _check_tensors(header: GgufHeader, params: DecoderParams) -> None:
    width = params.hidden
    header.tensor("token_embd.weight", (params.vocab, width))
    header.tensor("output_norm.weight", (width,))
    if "output.weight" in header.tensors:  # else the embedding table is the head
        header.tensor("output.weight", (params.vocab, width))
    for layer in range(params.num_layers):
        q_rows, kv_rows = params.heads[layer] * params.head_dim, params.kv_heads[layer] * params.head_dim
        shapes = {
            "attn_norm": (width,),
            "attn_q": (q_rows, width),
            "attn_k": (kv_rows, width),
            "attn_v": (params.kv_heads[layer] * params.value_dim, width),
            "attn_output": (width, params.heads[layer] * params.value_dim),
            "ffn_norm": (width,),
            "ffn_gate": (params.ffn[layer], width),
            "ffn_up": (params.ffn[layer], width),
            "ffn_down": (width, params.ffn[layer]),
        }
        for name, shape in shapes.items():
            header.tensor(f"blk.{layer}.{name}.weight", shape)
