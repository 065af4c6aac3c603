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
    bad_key,
    full_attention_layout,
    read_decoder,
    special_tokens,
    weight_totals,
)

PAIRS = {"llama": "adjacent", "qwen2": "halves"}


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_decoder(header)
    _check_dense(header)
    _check_params(header, params)
    _check_tensors(header, params)
    totals = weight_totals(header)
    return ModelSpec(
        arch=header.arch,
        identity="",  # content of the file, which a header does not hold; the loader fills it in
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
        details={"decoder": params, "pairs": PAIRS[header.arch]},
    )


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
    width, vocab = params.hidden, params.vocab
    header.tensor("token_embd.weight", (vocab, width))
    header.tensor("output_norm.weight", (width,))
    if "output.weight" in header.tensors:
        header.tensor("output.weight", (vocab, width))
    if "rope_freqs.weight" in header.tensors:
        header.tensor("rope_freqs.weight", (params.rope.num_rotated // 2,))
    for layer in range(params.num_layers):
        _check_layer(header, params, layer)


def _check_layer(header: GgufHeader, params: DecoderParams, layer: int) -> None:
    width, ffn = params.hidden, params.ffn[layer]
    rows = qkv_rows(params, layer)
    blk = f"blk.{layer}."
    header.tensor(f"{blk}attn_norm.weight", (width,))
    header.tensor(f"{blk}ffn_norm.weight", (width,))
    if f"{blk}attn_qkv.weight" in header.tensors:
        _check_matrix(header, f"{blk}attn_qkv", sum(rows), width)
    else:
        for name, out in zip(("attn_q", "attn_k", "attn_v"), rows, strict=True):
            _check_matrix(header, blk + name, out, width)
    _check_matrix(header, f"{blk}attn_output", width, params.heads[layer] * params.value_dim)
    _check_matrix(header, f"{blk}ffn_gate", ffn, width)
    _check_matrix(header, f"{blk}ffn_up", ffn, width)
    _check_matrix(header, f"{blk}ffn_down", width, ffn)


def _check_matrix(header: GgufHeader, name: str, rows: int, columns: int) -> None:
    header.tensor(f"{name}.weight", (rows, columns))
    if f"{name}.bias" in header.tensors:
        header.tensor(f"{name}.bias", (rows,))


def qkv_rows(params: DecoderParams, layer: int) -> tuple[int, int, int]:
    """Rows of the query, key and value matrices."""
    kv_heads = params.kv_heads[layer]
    return params.heads[layer] * params.head_dim, kv_heads * params.head_dim, kv_heads * params.value_dim
