"""Header -> ModelSpec: hyper-parameters, what a sequence remembers, and a check of every tensor. No torch."""

from __future__ import annotations

from attrs import evolve

from luce_core.contracts import CacheOptions, Field, ModelSpec, Slot
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    DecoderParams,
    full_attention_layout,
    read_decoder,
    special_tokens,
    weight_totals,
)


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_decoder(header)
    kernel = header.uint("{a}.conv_kernel", low=2, high=64)
    for name, shape in tensor_shapes(params, kernel).items():
        header.tensor(name, shape)
    totals = weight_totals(header)
    row = Field((params.hidden,), "f32")
    past = Field((kernel - 1, params.hidden), "f32")
    slots = tuple(Slot(conv_slot(n), n, past, {"row": row}, "shift") for n in range(params.num_layers))
    return ModelSpec(
        arch=header.arch,
        identity="",
        num_layers=params.num_layers,
        hidden=params.hidden,
        vocab=params.vocab,
        context=params.context,
        position_axes=1,
        tap_width=params.hidden,
        final_width=params.hidden,
        layout=evolve(full_attention_layout(params), slots=slots),
        nextn_layout=None,
        tree="any",
        tokens=special_tokens(header),
        parameters=totals.parameters,
        weight_bytes=totals.weight_bytes,
        active_bytes=totals.active_bytes,
        details={"decoder": params, "conv_kernel": kernel},
    )


def conv_slot(layer: int) -> str:
    """Name of the slot with the newest rows of a layer's convolution."""
    return f"blk.{layer}.conv"


def tensor_shapes(params: DecoderParams, kernel: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a glimmer file, by name, in torch order."""
    width = params.hidden
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (params.vocab, width),
        "output_norm.weight": (width,),
    }
    for layer in range(params.num_layers):
        kv_heads, ffn = params.kv_heads[layer], params.ffn[layer]
        own = {
            "norm": (width,),
            "attn_q": (params.heads[layer] * params.head_dim, width),
            "attn_k": (kv_heads * params.head_dim, width),
            "attn_v": (kv_heads * params.value_dim, width),
            "attn_output": (width, params.heads[layer] * params.value_dim),
            "conv_in": (width, width),
            "conv": (width, kernel),
            "conv_out": (width, width),
            "ffn_gate": (ffn, width),
            "ffn_up": (ffn, width),
            "ffn_down": (width, ffn),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes
