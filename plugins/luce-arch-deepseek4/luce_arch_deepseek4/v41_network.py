"""The network of V4.1. As in V4 the residual is several streams, [T, n, E], but a sublayer reads them by the
gates of the sublayer before: its own serve the next one, and the last layer's collapse what the head gets.

Compressed entries and the choice among them are made by few layers and read by those that follow. Before two
layers, values looked up by the newest tokens' n-grams enter the streams.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from luce_arch_deepseek4.describe import entries_region, keys_region, tail_slot
from luce_arch_deepseek4.engram import EngramParams
from luce_arch_deepseek4.network import Mixture, attention_spec, mixture, streams_spec
from luce_arch_deepseek4.v41_describe import HISTORY, table_of
from luce_arch_deepseek4.v41_params import SharedLayer, SharedParams
from luce_core.contracts import (
    AttentionSpec,
    CompressSpec,
    ForwardBatch,
    Linear,
    LinearGroup,
    ModelSpec,
    Network,
    NgramSpec,
    Norm,
    Ops,
    RecallSpec,
    Region,
    RopeSpec,
    SlotState,
    StoredTable,
    StreamsSpec,
    Weights,
)
from luce_core.model.helpers import rope_spec
from luce_core.model.metadata import kv_region


@frozen(eq=False)
class Stream:
    """Compressed entries several layers attend to, and the keys they are found by."""

    entries: Region
    keys: Region


@frozen(eq=False)
class Compressor:
    """What fills a stream."""

    spec: CompressSpec
    tail: SlotState | None
    """None: every token is an entry."""
    key: Linear
    key_norm: Norm


@frozen(eq=False)
class Picker:
    """What picks the entries this layer and those after it attend to."""

    heads: int
    dim: int
    top_k: int
    rope: RopeSpec
    chooses: int
    """Blocks it chooses for later pickers; 0: none."""
    inside: bool
    """It keeps to the blocks that were chosen."""
    block_entries: int


@frozen(eq=False)
class Attention:
    inputs: LinearGroup
    """Queries' down projection; keys; then rows and gates of a compressor, weights of a picker's heads."""
    q_norm: Norm
    q_up: LinearGroup
    """Queries; then those of the picker."""
    near: Region
    spec: AttentionSpec
    stream: Stream | None
    compressor: Compressor | None
    picker: Picker | None
    group_output: Linear
    """[groups, rank, heads · dim / groups]."""
    groups: int
    output: Linear


@frozen(eq=False)
class Memory:
    """A table of n-grams, asked before a layer's attention."""

    place: int
    """Among the tables."""
    table: StoredTable
    make: Linear
    """Rows found -> a key per stream and the value."""
    spec: RecallSpec


@frozen(eq=False)
class Layer:
    """Handles of one layer."""

    memory: Memory | None
    attn_streams: StreamsSpec
    attn_norm: Norm
    attention: Attention
    ffn_streams: StreamsSpec
    ffn_norm: Norm
    ffn: Mixture


@frozen
class Picked:
    """What layers hand on to those after them."""

    entries: Tensor | None = None
    """i32[T, k]."""
    blocks: Tensor | None = None
    """i32[T, n]."""


class SharedNetwork:
    """`Network` of deepseek41 files. A tap is all streams, [T, n · E]; the head gets one, [T, E]."""

    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: SharedParams = spec.details["decoder"]
        self.ops = ops
        self.streams = params.streams.count
        self.table = weights.linear("token_embd")
        self.norm = weights.norm("output_norm", params.eps)
        device = self.norm.weight.device
        near, far = params.attention.near_rope, params.attention.far_rope
        ropes = {
            False: rope_spec(near, pairs="adjacent", part="last", device=device),
            # As in V4, YaRN leaves the size of cosines and sines as it is.
            True: rope_spec(far, pairs="adjacent", part="last", device=device, magnitude=1.0),
        }
        self.history = weights.slot(HISTORY) if params.engram else None
        self.ngrams = _ngrams(params.engram, device) if params.engram else None
        self.layers = [_layer(params, layer, weights, ropes[layer.ratio > 0]) for layer in params.layers]
        self.head = weights.linear("output", "token_embd", split="out")

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, E]."""
        ops = self.ops
        streams = ops.expand(ops.embed(batch, self.table), 1, self.streams)
        rows: Tensor | None = None
        gates: Tensor | None = None  # nothing before the first sublayer: it reads the first stream
        picked = Picked()
        if self.history is not None and self.ngrams is not None:
            rows = ops.ngram_rows(batch, self.history, self.ngrams)
        for number, layer in enumerate(self.layers):
            if layer.memory is not None and rows is not None:
                streams = self._recall(batch, streams, rows, layer.memory)
            own, mix = ops.streams_gates(streams, layer.attn_streams)
            x = self._collapsed(streams, gates)
            y, picked = self._attention(batch, x, layer, picked)
            streams = ops.streams_out(streams, y, mix)
            gates, mix = ops.streams_gates(streams, layer.ffn_streams)
            x = ops.streams_collapse(streams, own)
            streams = ops.streams_out(streams, self._ffn(batch, x, layer), mix)
            ops.tap(batch, number, streams)
        return self._collapsed(streams, gates)

    def logits(self, final: Tensor) -> Tensor:
        """[R, E] -> f32[R, V]."""
        return self.ops.head(final, self.norm, self.head)

    def _collapsed(self, streams: Tensor, gates: Tensor | None) -> Tensor:
        return streams[:, 0] if gates is None else self.ops.streams_collapse(streams, gates)

    def _recall(self, batch: ForwardBatch, streams: Tensor, rows: Tensor, memory: Memory) -> Tensor:
        ops = self.ops
        found = ops.stored_rows(memory.table, rows[:, memory.place])
        made = ops.linear(found.reshape(-1, memory.make.in_features), memory.make)
        return ops.streams_recall(batch, streams, made, memory.spec)

    def _attention(
        self, batch: ForwardBatch, x: Tensor, layer: Layer, picked: Picked
    ) -> tuple[Tensor, Picked]:
        ops, attention = self.ops, layer.attention
        spec, compressor, stream = attention.spec, attention.compressor, attention.stream
        low, kv, *more = ops.norm_linear(x, layer.attn_norm, attention.inputs)
        q, *picker_q = ops.norm_linear(low, attention.q_norm, attention.q_up)
        extra = None
        if stream is not None:
            if compressor is not None:
                gate = None if compressor.tail is None else more[1]
                keys = (stream.keys, compressor.key, compressor.key_norm)
                ops.compress(batch, more[0], gate, compressor.tail, stream.entries, compressor.spec, keys)
            if attention.picker is not None:
                picked = self._pick(batch, picker_q[0], more[-1], stream, attention.picker, picked)
            extra = (stream.entries, picked.entries)
        y = ops.attention(batch, q, kv, None, attention.near, spec, extra=extra)
        y = y.view(-1, attention.groups, spec.heads * spec.head_dim // attention.groups)
        y = ops.head_linear(y, attention.group_output)
        return ops.linear_out(y.reshape(-1, attention.output.in_features), attention.output), picked

    def _pick(
        self, batch: ForwardBatch, q: Tensor, weight: Tensor, stream: Stream, picker: Picker, before: Picked
    ) -> Picked:
        ops, size, blocks = self.ops, picker.block_entries, before.blocks
        weight = ops.scale(weight, picker.heads**-0.5 * picker.dim**-0.5)
        q = q.view(-1, picker.heads, picker.dim)
        within = None if blocks is None or not picker.inside else (blocks, size)
        entries = ops.select(batch, q, weight, stream.keys, picker.top_k, picker.rope, within)
        if picker.chooses:
            blocks = ops.select_blocks(batch, q, weight, stream.keys, picker.chooses, size, picker.rope)
        return Picked(entries, blocks)

    def _ffn(self, batch: ForwardBatch, x: Tensor, layer: Layer) -> Tensor:
        ops, ffn = self.ops, layer.ffn
        routed = ops.route(batch, x, layer.ffn_norm, ffn.router, ffn.route)
        return ops.experts(x, layer.ffn_norm, routed, ffn.bank, ffn.shared, clamp=ffn.clamp)


def _layer(params: SharedParams, layer: SharedLayer, weights: Weights, rope: RopeSpec) -> Layer:
    blk = f"blk.{layer.number}."
    return Layer(
        memory=_memory(params, layer, weights),
        attn_streams=streams_spec(params, weights, f"{blk}hc_attn"),
        attn_norm=weights.norm(f"{blk}attn_norm", params.eps),
        attention=_attention(params, layer, weights, rope),
        ffn_streams=streams_spec(params, weights, f"{blk}hc_ffn"),
        ffn_norm=weights.norm(f"{blk}ffn_norm", params.eps),
        ffn=mixture(params, layer, weights),
    )


def _attention(params: SharedParams, layer: SharedLayer, weights: Weights, rope: RopeSpec) -> Attention:
    blk, attention = f"blk.{layer.number}.", params.attention
    inputs, q_up, stream = ["attn_q_a", "attn_kv"], ["attn_q_b"], None
    if layer.compresses:
        inputs += ["attn_compressor_kv", *(["attn_compressor_gate"] if layer.ratio > 1 else [])]
    if layer.indexes:
        inputs.append("indexer.proj")
        q_up.append("indexer.attn_q_b")
    if layer.source is not None:
        entries, keys = entries_region(layer.source), keys_region(layer.source)
        stream = Stream(weights.region(entries), weights.region(keys))
    return Attention(
        inputs=weights.group(blk, *inputs),
        q_norm=weights.norm(f"{blk}attn_q_a_norm", params.eps),
        q_up=weights.group(blk, *q_up, split="out"),
        near=weights.region(kv_region(layer.number)),
        spec=attention_spec(params, layer, weights, rope, head_norm=False),
        stream=stream,
        compressor=_compressor(params, layer, weights, rope) if layer.compresses else None,
        picker=_picker(params, layer, rope),
        group_output=weights.linear(f"{blk}attn_output_a"),
        groups=attention.groups,
        output=weights.linear(f"{blk}attn_output_b", split="in"),
    )


def _compressor(params: SharedParams, layer: SharedLayer, weights: Weights, rope: RopeSpec) -> Compressor:
    blk = f"blk.{layer.number}."
    norm = weights.norm(f"{blk}attn_compressor_norm", params.eps)
    return Compressor(
        spec=CompressSpec(layer.ratio, params.attention.dim, None, norm, rope),
        tail=weights.slot(tail_slot(entries_region(layer.number))) if layer.ratio > 1 else None,
        key=weights.linear(f"{blk}indexer.attn_k"),
        key_norm=weights.norm(f"{blk}indexer.k_norm", params.eps),
    )


def _picker(params: SharedParams, layer: SharedLayer, rope: RopeSpec) -> Picker | None:
    indexer, candidates = params.indexer, params.candidates
    if indexer is None or not layer.indexes:
        return None
    return Picker(
        heads=indexer.heads,
        dim=indexer.dim,
        top_k=indexer.top_k,
        rope=rope,
        chooses=candidates.blocks if candidates and candidates.layer == layer.number else 0,
        inside=candidates is not None and candidates.layer < layer.number,
        block_entries=candidates.entries if candidates else 1,
    )


def _ngrams(engram: EngramParams, device: torch.device) -> NgramSpec:
    tables, buckets = len(engram.layers), (engram.size - 1, engram.heads)

    def integers(values: tuple[int, ...], *shape: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device).view(tables, *shape)

    return NgramSpec(
        compressed=torch.tensor(engram.compressed, dtype=torch.int32, device=device),
        pad=engram.pad,
        multipliers=integers(engram.multipliers, engram.size),
        primes=integers(engram.primes, *buckets),
        offsets=integers(engram.offsets, *buckets),
    )


def _memory(params: SharedParams, layer: SharedLayer, weights: Weights) -> Memory | None:
    if params.engram is None or layer.number not in params.engram.layers:
        return None
    blk = f"blk.{layer.number}."
    return Memory(
        place=params.engram.layers.index(layer.number),
        table=weights.stored(table_of(layer.number)),
        make=weights.linear(f"{blk}engram_wkv"),
        spec=RecallSpec(weights.vec(f"{blk}engram_q") * weights.vec(f"{blk}engram_k"), params.eps),
    )


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> SharedNetwork:
    """The plugin's `build` of deepseek41."""
    return SharedNetwork(spec, weights, ops)
