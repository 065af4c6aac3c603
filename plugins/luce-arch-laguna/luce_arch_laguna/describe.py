"""Header -> ModelSpec, and every check a bad file must fail. Imports no torch."""

from __future__ import annotations

from luce_arch_laguna.params import LagunaParams, read_params
from luce_core.contracts import CacheOptions, ModelSpec
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    attention_shapes,
    check_ends,
    check_tensors,
    expert_shapes,
    full_attention_layout,
    mlp_shapes,
    model_spec,
    weight_totals,
)


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_params(header)
    _check_tensors(header, params)
    return model_spec(
        header,
        params,
        full_attention_layout(params.decoder, params.windows),
        totals=weight_totals(header, experts_used=params.experts.used if params.experts else 0),
    )


def gates_per_head(rows: int, params: LagunaParams, layer: int) -> bool:
    """Whether a gate of so many rows has one for every head; else one for every feature. No key says."""
    return rows == params.decoder.heads[layer]


def _check_tensors(header: GgufHeader, params: LagunaParams) -> None:
    check_ends(header, params)
    decoder, width = params.decoder, params.hidden
    for layer in range(params.num_layers):
        blk = f"blk.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q_norm": (decoder.head_dim,),
            "attn_k_norm": (decoder.head_dim,),
            "ffn_norm": (width,),
        }
        check_tensors(header, shapes | attention_shapes(decoder, layer), blk)
        _check_gate(header, f"{blk}attn_gate.weight", params, layer)
        if layer < params.num_dense:
            check_tensors(header, mlp_shapes(width, decoder.ffn[layer]), blk)
        else:
            _check_mixture(header, blk, params)


def _check_gate(header: GgufHeader, name: str, params: LagunaParams, layer: int) -> None:
    shape = header.tensor(name).shape
    if len(shape) != 2 or not gates_per_head(shape[0], params, layer):
        features = params.decoder.heads[layer] * params.decoder.value_dim
        header.tensor(name, (features, params.hidden))
    header.tensor(name, (shape[0], params.hidden))


def _check_mixture(header: GgufHeader, blk: str, params: LagunaParams) -> None:
    width, experts = params.hidden, params.experts
    assert experts is not None
    shapes = {
        "ffn_gate_inp": (experts.count, width),
        **expert_shapes(header, blk, width, experts),
        **mlp_shapes(width, params.shared_ffn, "_shexp"),
    }
    check_tensors(header, shapes, blk)
    header.tensor(f"{blk}exp_probs_b.bias", (experts.count,))
