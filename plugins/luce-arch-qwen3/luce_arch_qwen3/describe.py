"""Header -> ModelSpec, and every check a bad file must fail. Imports no torch.

Architecture "qwen3" is dense, "qwen3moe" has a mixture of experts in every layer and no dense MLP; else they
are one network.
"""

from __future__ import annotations

from luce_core.contracts import CacheOptions, ModelSpec
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    DecoderParams,
    ExpertParams,
    attention_shapes,
    bad_key,
    check_ends,
    check_tensors,
    expert_shapes,
    full_attention_layout,
    mlp_shapes,
    model_spec,
    read_decoder,
    read_experts,
    weight_totals,
)

MOE = "qwen3moe"


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_decoder(header)
    _check_rope(header, params)
    experts = _experts(header, params)
    _check_tensors(header, params, experts)
    return model_spec(
        header,
        params,
        full_attention_layout(params),
        details={"experts": experts},
        totals=weight_totals(header, experts_used=experts.used if experts else 0),
    )


def _check_rope(header: GgufHeader, params: DecoderParams) -> None:
    rotated = params.rope.num_rotated
    if rotated != params.head_dim:
        wanted = f"the head dimension {params.head_dim}"
        raise bad_key(header, "{a}.rope.dimension_count", f"is {rotated}", wanted)


def _experts(header: GgufHeader, params: DecoderParams) -> ExpertParams | None:
    """None: dense. Without a key, experts together are as wide as the dense MLP the file names and lacks."""
    if header.arch == MOE:
        used = header.uint("{a}.expert_used_count", low=1)
        return read_experts(header, params.ffn[0] // used or None)
    if count := header.uint("{a}.expert_count", 0):
        raise bad_key(header, "{a}.expert_count", f"is {count}", f"0, or the architecture {MOE!r}")
    for layer, width in enumerate(params.ffn):
        if width == 0:
            raise bad_key(header, "{a}.feed_forward_length", f"is 0 for layer {layer}", "a width above 0")
    return None


def _check_tensors(header: GgufHeader, params: DecoderParams, experts: ExpertParams | None) -> None:
    check_ends(header, params)
    width = params.hidden
    for layer in range(params.num_layers):
        blk, attention = f"blk.{layer}.", attention_shapes(params, layer)
        if f"{blk}attn_qkv.weight" in header.tensors:
            fused = (sum(qkv_rows(params, layer)), width)
            attention = {"attn_qkv": fused, "attn_output": attention["attn_output"]}
        norms: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q_norm": (params.head_dim,),
            "attn_k_norm": (params.head_dim,),
            "ffn_norm": (width,),
        }
        check_tensors(header, norms | attention, blk)
        if experts is None:
            check_tensors(header, mlp_shapes(width, params.ffn[layer]), blk)
        else:
            router = {"ffn_gate_inp": (experts.count, width)}
            check_tensors(header, {**router, **expert_shapes(header, blk, width, experts)}, blk)


def qkv_rows(params: DecoderParams, layer: int) -> tuple[int, int, int]:
    """Rows of the query, key and value matrices."""
    kv_heads = params.kv_heads[layer]
    return params.heads[layer] * params.head_dim, kv_heads * params.head_dim, kv_heads * params.value_dim
