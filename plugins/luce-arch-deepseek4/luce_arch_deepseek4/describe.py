"""Header -> ModelSpec, and every check a bad file must fail. Imports no torch."""

from __future__ import annotations

from luce_arch_deepseek4.params import (
    AttentionParams,
    DeepSeekParams,
    ExpertLayer,
    IndexerParams,
    LayerParams,
    TrunkParams,
    read_params,
)
from luce_arch_deepseek4.seeing import seeing
from luce_core.contracts import CacheOptions, Field, Group, ModelSpec, Pages, Slot, StateLayout
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    WeightTotals,
    check_ends,
    check_tensors,
    expert_shapes,
    kv_region,
    mlp_shapes,
    model_spec,
    weight_totals,
)

Shapes = dict[str, tuple[int, ...]]
NEAR = "near"
"""The group of the tokens in the window."""


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_params(header)
    _check_tensors(header, params)
    return seeing(
        header,
        model_spec(
            header, params, _layout(params), totals=_totals(header, params), streams=params.streams.count
        ),
    )


# --- state


def entries_region(layer: int) -> str:
    """Compressed entries of a layer."""
    return f"blk.{layer}.entries"


def keys_region(layer: int) -> str:
    """What the indexer of a CSA layer knows each entry by."""
    return f"blk.{layer}.index_keys"


def tail_slot(region: str) -> str:
    """The newest rows of the compressor that fills `region`."""
    return f"{region}.tail"


def group_of(layer: ExpertLayer) -> str:
    """Of its compressed entries."""
    return f"every.{layer.ratio}"


def _layout(params: DeepSeekParams) -> StateLayout:
    """A window of keys of every layer; entries, and rows of those incomplete, of layers that compress."""
    dim = params.attention.dim
    groups = {NEAR: Group(NEAR, window=params.attention.window)}
    pages = [
        Pages(kv_region(layer.number), NEAR, layer.number, {"k": Field((1, dim), "kv.k")})
        for layer in params.layers
    ]
    slots = []
    for layer in params.layers:
        if layer.ratio:
            group = group_of(layer)
            groups[group] = Group(group, stride=layer.ratio)
            region = entries_region(layer.number)
            pages.append(Pages(region, group, layer.number, {"k": Field((1, dim), "kv.k")}))
            slots.append(_tail(region, layer, dim))
        if layer.selected and params.indexer:
            region, width = keys_region(layer.number), params.indexer.dim
            pages.append(Pages(region, group_of(layer), layer.number, {"key": Field((width,), "kv.k")}))
            slots.append(_tail(region, layer, width))
    return StateLayout(tuple(groups.values()), tuple(pages), tuple(slots))


def _tail(region: str, layer: LayerParams, width: int) -> Slot:
    features = 2 * layer.parts * width  # what is pooled, and its gate
    state = Field((layer.parts * layer.ratio, features), "f32")
    log = {"row": Field((features,), "f32")}
    return Slot(tail_slot(region), layer.number, state, log, "shift", period=layer.ratio)


def _totals(header: GgufHeader, params: DeepSeekParams) -> WeightTotals:
    """Of the trunk: blocks that predict further tokens are not loaded."""
    outer = [name for name in header.tensors if not name.startswith("blk.")]
    inner = [name for name in header.tensors if layer_of(name) in range(params.num_layers)]
    return weight_totals(header, outer + inner, experts_used=params.layers[0].experts.used)


def layer_of(name: str) -> int:
    """The number in "blk.7.x"; -1: none."""
    number = name.split(".", 2)[1] if name.startswith("blk.") else ""
    return int(number) if number.isdecimal() else -1


# --- tensors


def _check_tensors(header: GgufHeader, params: DeepSeekParams) -> None:
    check_ends(header, params)
    width, streams = params.hidden, params.streams.count
    check_tensors(header, _streams_shapes("output_hc", width, streams, streams, 1))
    for layer in params.layers:
        blk = f"blk.{layer.number}."
        shapes = attention_shapes(width, params.attention)
        shapes |= mix_shapes(width, streams)
        if layer.ratio:
            shapes |= _compressor_shapes("attn_compressor", width, layer, params.attention.dim)
        if layer.selected and params.indexer:
            shapes |= _indexer_shapes(width, layer, params.attention, params.indexer)
        check_tensors(header, shapes, blk)
        check_moe(header, blk, params, layer)


def mix_shapes(width: int, streams: int) -> Shapes:
    """What both sublayers of a layer mix the streams by."""
    mixed = streams * (2 + streams)  # in, out, and between all pairs
    return _streams_shapes("hc_attn", width, streams, mixed, 3) | _streams_shapes(
        "hc_ffn", width, streams, mixed, 3
    )


def _streams_shapes(name: str, width: int, streams: int, rows: int, scales: int) -> Shapes:
    return {f"{name}_fn": (rows, streams * width), f"{name}_base": (rows,), f"{name}_scale": (scales,)}


def attention_shapes(width: int, attention: AttentionParams) -> Shapes:
    """Attention to the newest tokens, and the norms of both sublayers."""
    inner, rank = attention.heads * attention.dim, attention.groups * attention.group_rank
    return {
        "attn_norm": (width,),
        "attn_q_a": (attention.q_rank, width),
        "attn_q_a_norm": (attention.q_rank,),
        "attn_q_b": (inner, attention.q_rank),
        "attn_kv": (attention.dim, width),
        "attn_kv_a_norm": (attention.dim,),
        "attn_sinks": (attention.heads,),
        "attn_output_a": (rank, inner // attention.groups),
        "attn_output_b": (width, rank),
        "ffn_norm": (width,),
    }


def _compressor_shapes(name: str, width: int, layer: LayerParams, dim: int) -> Shapes:
    rows = layer.parts * dim
    return {
        f"{name}_kv": (rows, width),
        f"{name}_gate": (rows, width),
        f"{name}_ape": (layer.ratio, rows),
        f"{name}_norm": (dim,),
    }


def _indexer_shapes(
    width: int, layer: LayerParams, attention: AttentionParams, indexer: IndexerParams
) -> Shapes:
    return {
        "indexer.attn_q_b": (indexer.heads * indexer.dim, attention.q_rank),
        "indexer.proj": (indexer.heads, width),
        **_compressor_shapes("indexer_compressor", width, layer, indexer.dim),
    }


def check_moe(header: GgufHeader, blk: str, params: TrunkParams, layer: ExpertLayer) -> None:
    """Router, routed and shared experts."""
    width, experts = params.hidden, layer.experts
    shared = mlp_shapes(width, layer.shared_ffn, "_shexp")
    stacks = expert_shapes(header, blk, width, experts)
    check_tensors(header, {"ffn_gate_inp": (experts.count, width), **stacks, **shared}, blk)
    if layer.hashed:
        header.tensor(f"{blk}ffn_gate_tid2eid.weight", (params.vocab, experts.used))
    else:
        header.tensor(f"{blk}exp_probs_b.bias", (experts.count,))
    if f"{blk}exp_probs_b_vl.bias" in header.tensors:  # of files that can see
        header.tensor(f"{blk}exp_probs_b_vl.bias", (experts.count,))
