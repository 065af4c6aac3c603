"""Header -> ModelSpec, and every check a bad file must fail. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from luce_arch_qwen35.params import BlockParams, DeltaParams, HybridParams, MixtureParams, read_params
from luce_core.contracts import CacheOptions, Field, Group, ModelSpec, Slot, StateLayout, StoredSize
from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    FULL_GROUP,
    WeightTotals,
    check_ends,
    check_tensors,
    expert_shapes,
    kv_pages,
    mlp_shapes,
    model_spec,
    weight_totals,
)

Shapes = dict[str, tuple[int, ...]]
AXES = 3
"""Of a position: time, height, width. Text has the same number on each."""


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_params(header)
    _check_trunk(header, params)
    _check_tensors(header, params)
    return model_spec(
        header,
        params,
        _layout(params, params.trunk),
        totals=_totals(header, params),
        position_axes=AXES,
        nextn_layout=_layout(params, params.nextn) if params.nextn else None,
        nextn_size=_nextn_size(header, params) if params.nextn else None,
    )


def conv_slot(layer: int) -> str:
    """The newest rows that went into the convolution of q, k and v, before it."""
    return f"blk.{layer}.conv"


def delta_slot(layer: int) -> str:
    """The matrix M of every value head."""
    return f"blk.{layer}.delta"


def _layout(params: HybridParams, blocks: Sequence[BlockParams]) -> StateLayout:
    """Pages of the layers with attention, two slots of each of the others."""
    dim = params.head_dim
    pages = tuple(kv_pages(b.number, b.kv_heads, dim, dim) for b in blocks if not b.recurrent)
    slots = tuple(slot for b in blocks if b.recurrent for slot in _slots(b.number, params.delta))
    return StateLayout((Group(FULL_GROUP),), pages, slots)


def _slots(layer: int, delta: DeltaParams) -> tuple[Slot, Slot]:
    window = Field((delta.kernel - 1, delta.channels), "f32")
    conv = Slot(conv_slot(layer), layer, window, {"row": Field((delta.channels,), "f32")}, "shift")
    log = {
        "k": Field((delta.key_heads, delta.key_dim), "f32"),
        "u": Field((delta.value_heads, delta.value_dim), "f32"),
        "g": Field((delta.value_heads,), "f32"),
    }
    matrices = Field((delta.value_heads, delta.key_dim, delta.value_dim), "f32")
    return conv, Slot(delta_slot(layer), layer, matrices, log, "delta_fold")


def _totals(header: GgufHeader, params: HybridParams) -> WeightTotals:
    """Of the whole file; a decoded token reads the trunk."""
    whole = weight_totals(header)
    used = params.experts.used if params.experts else 0
    behind = _behind(params)
    trunk = [name for name in header.tensors if not name.startswith(behind)] if behind else None
    active = weight_totals(header, trunk, experts_used=used)
    return evolve(
        active,
        parameters=whole.parameters,
        weight_bytes=whole.weight_bytes,
        rows_bytes=whole.rows_bytes,
    )


def _nextn_size(header: GgufHeader, params: HybridParams) -> StoredSize:
    tensors = [header.tensors[name] for name in header.tensors if name.startswith(_behind(params))]
    return StoredSize(sum(one.num_weights for one in tensors), sum(one.num_bytes for one in tensors))


def _behind(params: HybridParams) -> tuple[str, ...]:
    """How names of the MTP blocks' tensors begin."""
    return tuple(f"blk.{block.number}." for block in params.nextn)


# --- tensors


def _check_trunk(header: GgufHeader, params: HybridParams) -> None:
    """Files with MTP blocks alone are made to go with the file of their trunk."""
    if params.nextn and not any(name.startswith("blk.0.") for name in header.tensors):
        raise ModelFormatError(
            f"GGUF file '{header.path}' has no tensor 'blk.0.*': it holds the blocks that predict further "
            f"tokens (from 'blk.{params.num_layers}.' on) without the model they belong to. Use the file of "
            "the model itself."
        )


def _check_tensors(header: GgufHeader, params: HybridParams) -> None:
    check_ends(header, params)
    width = params.hidden
    for block in (*params.trunk, *params.nextn):
        blk = f"blk.{block.number}."
        norms: Shapes = {"attn_norm": (width,), "post_attention_norm": (width,)}
        check_tensors(header, norms, blk)
        if block.recurrent:
            _check_delta(header, blk, width, params.delta)
        else:
            check_tensors(header, _attention_shapes(header, params, block), blk)
        if params.experts:
            _check_experts(header, blk, width, params.experts)
        else:
            check_tensors(header, mlp_shapes(width, block.ffn), blk)
    for block in params.nextn:
        _check_nextn(header, f"blk.{block.number}.nextn.", params)


def qkv_rows(params: HybridParams, block: BlockParams) -> tuple[int, int, int]:
    """Rows of the query, key and value matrices; every head has its gate behind its queries."""
    keys = block.kv_heads * params.head_dim
    return 2 * block.heads * params.head_dim, keys, keys


def _attention_shapes(header: GgufHeader, params: HybridParams, block: BlockParams) -> Shapes:
    width, dim, (queries, keys, values) = params.hidden, params.head_dim, qkv_rows(params, block)
    shapes: Shapes = {"attn_q_norm": (dim,), "attn_k_norm": (dim,), "attn_output": (width, queries // 2)}
    if f"blk.{block.number}.attn_qkv.weight" in header.tensors:
        return {**shapes, "attn_qkv": (queries + keys + values, width)}
    return {**shapes, "attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (values, width)}


def _check_delta(header: GgufHeader, blk: str, width: int, delta: DeltaParams) -> None:
    heads = delta.value_heads
    shapes: Shapes = {
        "attn_qkv": (delta.channels, width),
        "attn_gate": (delta.inner, width),
        "ssm_beta": (heads, width),
        "ssm_alpha": (heads, width),
        "ssm_conv1d": (delta.channels, delta.kernel),
        "ssm_norm": (delta.value_dim,),
        "ssm_out": (width, delta.inner),
    }
    check_tensors(header, shapes, blk)
    header.tensor(f"{blk}ssm_a", (heads,))
    header.tensor(f"{blk}ssm_dt.bias", (heads,))


def _check_experts(header: GgufHeader, blk: str, width: int, experts: MixtureParams) -> None:
    stacks = expert_shapes(header, blk, width, experts)
    shared = mlp_shapes(width, experts.shared_ffn, "_shexp")
    check_tensors(header, {"ffn_gate_inp": (experts.count, width), **stacks, **shared}, blk)
    gate = f"{blk}ffn_gate_inp_shexp.weight"
    if header.tensor(gate).shape != (1, width):
        header.tensor(gate, (width,))


def _check_nextn(header: GgufHeader, nextn: str, params: HybridParams) -> None:
    width, table = params.hidden, (params.vocab, params.hidden)
    check_tensors(header, {"eh_proj": (width, 2 * width), "enorm": (width,), "hnorm": (width,)}, nextn)
    extra: Shapes = {"shared_head_norm": (width,), "embed_tokens": table, "shared_head_head": table}
    there = {name: shape for name, shape in extra.items() if f"{nextn}{name}.weight" in header.tensors}
    check_tensors(header, there, nextn)
