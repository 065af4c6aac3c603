"""Header of V4.1 -> ModelSpec, and every check a bad file must fail. Imports no torch."""

from __future__ import annotations

from attrs import evolve

from luce_arch_deepseek4.describe import (
    NEAR,
    Shapes,
    attention_shapes,
    check_moe,
    entries_region,
    group_of,
    keys_region,
    layer_of,
    mix_shapes,
    tail_slot,
)
from luce_arch_deepseek4.engram import EngramParams
from luce_arch_deepseek4.params import AttentionParams, IndexerParams
from luce_arch_deepseek4.seeing import seeing
from luce_arch_deepseek4.v41_params import SharedLayer, SharedParams, read_shared_params
from luce_core.contracts import CacheOptions, Field, Group, ModelSpec, Pages, Slot, StateLayout
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    WeightTotals,
    bad_key,
    check_ends,
    check_tensors,
    kv_region,
    model_spec,
    weight_totals,
)

HISTORY = "engram.history"
"""The slot of the newest tokens' compressed ids."""
ENDS = ("token_embd.weight", "output_norm.weight", "output.weight")


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_shared_params(header)
    _check_tensors(header, params)
    spec = model_spec(
        header, params, _layout(params), totals=_totals(header, params), streams=params.streams.count
    )
    spec = seeing(header, spec)
    return evolve(spec, final_width=params.hidden)  # the streams are collapsed by the last layer's gates


def _layout(params: SharedParams) -> StateLayout:
    """A window of keys of every layer; entries and their keys of those that compress."""
    dim = params.attention.dim
    groups = {NEAR: Group(NEAR, window=params.attention.window)}
    pages = [
        Pages(kv_region(layer.number), NEAR, layer.number, {"k": Field((1, dim), "kv.k")})
        for layer in params.layers
    ]
    slots = []
    for layer in params.layers:
        if not layer.compresses or params.indexer is None:
            continue
        group, width = group_of(layer), params.indexer.dim
        groups[group] = Group(group, stride=layer.ratio)
        region, keys = entries_region(layer.number), keys_region(layer.number)
        pages.append(Pages(region, group, layer.number, {"k": Field((1, dim), "kv.k")}))
        pages.append(Pages(keys, group, layer.number, {"key": Field((width,), "kv.k")}))
        if layer.ratio > 1:
            state, log = Field((layer.ratio, 2 * dim), "f32"), {"row": Field((2 * dim,), "f32")}
            slots.append(Slot(tail_slot(region), layer.number, state, log, "shift", period=layer.ratio))
    if params.engram is not None:
        state, log = Field((params.engram.size - 1, 1), "i32"), {"row": Field((1,), "i32")}
        slots.append(Slot(HISTORY, min(params.engram.layers), state, log, "shift"))
    return StateLayout(tuple(groups.values()), tuple(pages), tuple(slots))


def table_of(layer: int) -> str:
    """The n-gram table asked before this layer; without ".weight"."""
    return f"blk.{layer}.engram_embd"


def _totals(header: GgufHeader, params: SharedParams) -> WeightTotals:
    """Of the trunk, without what drafts and what sees; tables stay in the file."""
    outer = [name for name in ENDS if name in header.tensors]
    inner = [name for name in header.tensors if layer_of(name) in range(params.num_layers)]
    tables = [f"{table_of(layer)}.weight" for layer in params.engram.layers] if params.engram else []
    used = params.layers[0].experts.used
    return weight_totals(header, outer + inner, experts_used=used, stored=tables)


# --- tensors


def _check_tensors(header: GgufHeader, params: SharedParams) -> None:
    check_ends(header, params)
    width, streams, attention = params.hidden, params.streams.count, params.attention
    for layer in params.layers:
        blk = f"blk.{layer.number}."
        shapes = attention_shapes(width, attention) | mix_shapes(width, streams)
        if params.indexer is not None:
            shapes |= _far_shapes(width, attention, params.indexer, layer)
        check_tensors(header, shapes, blk)
        check_moe(header, blk, params, layer)
    _check_tables_are_named(header, params)
    if params.engram is not None:
        _check_engram(header, params, params.engram)


def _far_shapes(width: int, attention: AttentionParams, indexer: IndexerParams, layer: SharedLayer) -> Shapes:
    shapes: Shapes = {}
    if layer.compresses:
        shapes |= {"attn_compressor_kv": (attention.dim, width), "attn_compressor_norm": (attention.dim,)}
        shapes |= {"indexer.attn_k": (indexer.dim, attention.dim), "indexer.k_norm": (indexer.dim,)}
        if layer.ratio > 1:
            shapes["attn_compressor_gate"] = (attention.dim, width)
    if layer.indexes:
        shapes["indexer.attn_q_b"] = (indexer.heads * indexer.dim, attention.q_rank)
        shapes["indexer.proj"] = (indexer.heads, width)
    return shapes


def _check_engram(header: GgufHeader, params: SharedParams, engram: EngramParams) -> None:
    width, streams = params.hidden, params.streams.count
    for place, layer in enumerate(engram.layers):
        shapes = {
            "engram_wkv": ((streams + 1) * width, engram.num_buckets * engram.width),
            "engram_q": (streams, width),
            "engram_k": (streams, width),
        }
        check_tensors(header, shapes, f"blk.{layer}.")
        name, needed = f"{table_of(layer)}.weight", engram.num_rows(place)
        rows, *more = header.tensor(name).shape
        # More rows than are named do no harm.
        header.tensor(name, (rows if len(more) == 1 and rows > needed else needed, engram.width))


def _check_tables_are_named(header: GgufHeader, params: SharedParams) -> None:
    named = params.engram.layers if params.engram is not None else ()
    for layer in range(params.num_layers):
        if layer not in named and f"{table_of(layer)}.weight" in header.tensors:
            wanted = f"layer {layer} among them, which has a table"
            raise bad_key(header, "{a}.engram.layer_ids", f"is {list(named)}", wanted)
