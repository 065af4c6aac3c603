"""Header -> ModelSpec, and every check a bad file must fail. Imports no torch.

Llama 2 and 3.x, SmolLM2 (architecture "llama") and Qwen2, Qwen2.5 ("qwen2") are one network. They differ in
how pairs for RoPE lie in a head: converters permute llama's query and key rows so that pairs are adjacent,
qwen2's stay in halves.
"""

from __future__ import annotations

from luce_core.contracts import CacheOptions, ModelSpec
from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    DecoderParams,
    attention_shapes,
    bad_key,
    check_ends,
    check_tensors,
    full_attention_layout,
    mlp_shapes,
    model_spec,
    read_decoder,
)

PAIRS = {"llama": "adjacent", "qwen2": "halves"}


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_decoder(header)
    _check_dense(header)
    _check_params(header, params)
    _check_tensors(header, params)
    return model_spec(header, params, full_attention_layout(params), details={"pairs": PAIRS[header.arch]})


def _check_dense(header: GgufHeader) -> None:
    experts = header.uint("{a}.expert_count", 0)
    if experts:
        raise ModelFormatError(
            f"GGUF file '{header.path}' is a mixture of {experts} experts (key "
            f"{header.key('{a}.expert_count')!r}); luce-arch-llama runs dense models only. Use a dense model."
        )


def _check_params(header: GgufHeader, params: DecoderParams) -> None:
    for layer, width in enumerate(params.ffn):
        if width == 0:
            raise bad_key(header, "{a}.feed_forward_length", f"is 0 for layer {layer}", "a width above 0")
    if params.rope.num_rotated != params.head_dim:
        got = f"is {params.rope.num_rotated}"
        raise bad_key(header, "{a}.rope.dimension_count", got, f"the head dimension {params.head_dim}")


def _check_tensors(header: GgufHeader, params: DecoderParams) -> None:
    check_ends(header, params)
    if "rope_freqs.weight" in header.tensors:
        header.tensor("rope_freqs.weight", (params.rope.num_rotated // 2,))
    width = params.hidden
    for layer in range(params.num_layers):
        prefix, attention = f"blk.{layer}.", attention_shapes(params, layer)
        if f"{prefix}attn_qkv.weight" in header.tensors:
            fused = (sum(qkv_rows(params, layer)), width)
            attention = {"attn_qkv": fused, "attn_output": attention["attn_output"]}
        norms = {"attn_norm": (width,), "ffn_norm": (width,)}
        check_tensors(header, {**norms, **attention, **mlp_shapes(width, params.ffn[layer])}, prefix)


def qkv_rows(params: DecoderParams, layer: int) -> tuple[int, int, int]:
    """Rows of the query, key and value matrices."""
    kv_heads = params.kv_heads[layer]
    return params.heads[layer] * params.head_dim, kv_heads * params.head_dim, kv_heads * params.value_dim
