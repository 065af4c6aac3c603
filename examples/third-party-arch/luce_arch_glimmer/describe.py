"""Header -> ModelSpec: hyper-parameters, what a sequence remembers, and a check of every tensor. No torch."""

from __future__ import annotations

from attrs import evolve

from luce_core.contracts import CacheOptions, Field, ModelSpec, Slot
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
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_decoder(header)
    kernel = header.uint("{a}.conv_kernel", low=2, high=64)
    for name, shape in tensor_shapes(params, kernel).items():
        header.tensor(name, shape)
    row = Field((params.hidden,), "f32")
    past = Field((kernel - 1, params.hidden), "f32")
    slots = tuple(Slot(conv_slot(n), n, past, {"row": row}, "shift") for n in range(params.num_layers))
    layout = evolve(full_attention_layout(params), slots=slots)
    return model_spec(header, params, layout, details={"conv_kernel": kernel})


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
        own = {
            "norm": (width,),
            **attention_shapes(params, layer),
            "conv_in": (width, width),
            "conv": (width, kernel),
            "conv_out": (width, width),
            **mlp_shapes(width, params.ffn[layer]),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in own.items()}
    return shapes
