"""The network. The residual is several streams, [T, n, E]: each sublayer collapses them into one, and its
output is spread over them again while they are mixed.

Attention is over the newest tokens and, in most layers, compressed entries of the whole text; keys are
values too and carry RoPE, which the output is turned back by. Experts of the first layers are chosen by
token id.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from luce_arch_deepseek4.describe import entries_region, keys_region, tail_slot
from luce_arch_deepseek4.params import DeepSeekParams, ExpertLayer, LayerParams, TrunkParams
from luce_core.contracts import (
    AttentionSpec,
    Clamp,
    CompressSpec,
    ExpertBank,
    ForwardBatch,
    Linear,
    LinearGroup,
    ModelSpec,
    Network,
    Norm,
    Ops,
    Region,
    RopeSpec,
    RouteSpec,
    SharedExpert,
    SlotState,
    StreamsSpec,
    Weights,
)
from luce_core.errors import ModelFormatError
from luce_core.model.helpers import rope_spec, unit_norm
from luce_core.model.metadata import kv_region


@frozen(eq=False)
class Compressor:
    """What pools rows into entries of a region."""

    tail: SlotState
    entries: Region
    spec: CompressSpec

    def run(self, ops: Ops, batch: ForwardBatch, kv: Tensor, gate: Tensor) -> None:
        """kv, gate: as projected."""
        ops.compress(batch, kv, gate, self.tail, self.entries, self.spec)


@frozen(eq=False)
class Indexer:
    """What picks the entries each row attends to."""

    keys: Compressor
    heads: int
    dim: int
    top_k: int


@frozen(eq=False)
class Attention:
    inputs: LinearGroup
    """Queries' down projection; keys; then the compressor's rows and gates, the indexer's, its weights."""
    q_norm: Norm
    q_up: LinearGroup
    """Queries; then those of the indexer."""
    near: Region
    spec: AttentionSpec
    compressor: Compressor | None
    indexer: Indexer | None
    group_output: Linear
    """[groups, rank, heads · dim / groups]."""
    groups: int
    output: Linear


@frozen(eq=False)
class Mixture:
    router: Tensor
    """f32[X, E]."""
    route: RouteSpec
    bank: ExpertBank
    shared: SharedExpert
    clamp: Clamp | None


@frozen(eq=False)
class Layer:
    """Handles of one layer."""

    attn_streams: StreamsSpec
    attn_norm: Norm
    attention: Attention
    ffn_streams: StreamsSpec
    ffn_norm: Norm
    ffn: Mixture


class DeepSeekNetwork:
    """`Network` of deepseek4 files. A tap, and the input of the head, are all streams: [T, n · E]."""

    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: DeepSeekParams = spec.details["decoder"]
        norm = weights.norm("output_norm", params.eps)
        near, far = params.attention.near_rope, params.attention.far_rope
        device = norm.weight.device
        ropes = {
            False: rope_spec(near, pairs="adjacent", part="last", device=device),
            # Unlike elsewhere, YaRN leaves the size of cosines and sines as it is.
            True: rope_spec(far, pairs="adjacent", part="last", device=device, magnitude=1.0),
        }
        self.ops = ops
        self.streams, self.hidden = params.streams.count, params.hidden
        self.table = weights.linear("token_embd")
        self.layers = [_layer(params, layer, weights, ropes[layer.ratio > 0]) for layer in params.layers]
        self.collapse = streams_spec(params, weights, "output_hc")
        self.norm = norm
        self.head = weights.linear("output", "token_embd", split="out")

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, n · E]."""
        ops = self.ops
        streams = ops.expand(ops.embed(batch, self.table), 1, self.streams)
        for number, layer in enumerate(self.layers):
            x, mix = ops.streams_in(streams, layer.attn_streams)
            streams = ops.streams_out(streams, self._attention(batch, x, layer), mix)
            x, mix = ops.streams_in(streams, layer.ffn_streams)
            streams = ops.streams_out(streams, self._ffn(batch, x, layer), mix)
            ops.tap(batch, number, streams)
        return streams.reshape(-1, self.streams * self.hidden)

    def logits(self, final: Tensor) -> Tensor:
        """[R, n · E] -> f32[R, V]."""
        streams = final.view(-1, self.streams, self.hidden)
        x, _ = self.ops.streams_in(streams, self.collapse)
        return self.ops.head(x, self.norm, self.head)

    def _attention(self, batch: ForwardBatch, x: Tensor, layer: Layer) -> Tensor:
        ops, attention = self.ops, layer.attention
        spec, compressor = attention.spec, attention.compressor
        low, kv, *more = ops.norm_linear(x, layer.attn_norm, attention.inputs)
        q, *index_q = ops.norm_linear(low, attention.q_norm, attention.q_up)
        extra = None
        if compressor is not None:
            compressor.run(ops, batch, more[0], more[1])
            entries = None  # all of them
            if attention.indexer is not None:
                entries = self._select(batch, index_q[0], more[2:], attention.indexer)
            extra = (compressor.entries, entries)
        y = ops.attention(batch, q, kv, None, attention.near, spec, extra=extra)
        y = y.view(-1, attention.groups, spec.heads * spec.head_dim // attention.groups)
        y = ops.head_linear(y, attention.group_output)
        return ops.linear_out(y.reshape(-1, attention.output.in_features), attention.output)

    def _select(self, batch: ForwardBatch, q: Tensor, rows: list[Tensor], indexer: Indexer) -> Tensor:
        """rows: its compressor's, their gates, the weight of each head."""
        ops, spec = self.ops, indexer.keys.spec
        indexer.keys.run(ops, batch, rows[0], rows[1])
        weight = ops.scale(rows[2], indexer.heads**-0.5 * indexer.dim**-0.5)
        q = q.view(-1, indexer.heads, indexer.dim)
        return ops.select(batch, q, weight, indexer.keys.entries, indexer.top_k, spec.rope)

    def _ffn(self, batch: ForwardBatch, x: Tensor, layer: Layer) -> Tensor:
        ops, ffn = self.ops, layer.ffn
        routed = ops.route(batch, x, layer.ffn_norm, ffn.router, ffn.route)
        return ops.experts(x, layer.ffn_norm, routed, ffn.bank, ffn.shared, clamp=ffn.clamp)


def _layer(params: DeepSeekParams, layer: LayerParams, weights: Weights, rope: RopeSpec) -> Layer:
    blk = f"blk.{layer.number}."
    return Layer(
        attn_streams=streams_spec(params, weights, f"{blk}hc_attn"),
        attn_norm=weights.norm(f"{blk}attn_norm", params.eps),
        attention=_attention(params, layer, weights, rope),
        ffn_streams=streams_spec(params, weights, f"{blk}hc_ffn"),
        ffn_norm=weights.norm(f"{blk}ffn_norm", params.eps),
        ffn=mixture(params, layer, weights),
    )


def streams_spec(params: TrunkParams, weights: Weights, name: str) -> StreamsSpec:
    """Of the tensors `name`_fn, _base, _scale."""
    return StreamsSpec(
        streams=params.streams.count,
        fn=weights.vec(f"{name}_fn"),
        base=weights.vec(f"{name}_base"),
        scale=weights.vec(f"{name}_scale"),
        norm_eps=params.eps,
        eps=params.streams.eps,
        iterations=params.streams.iterations,
    )


def _attention(params: DeepSeekParams, layer: LayerParams, weights: Weights, rope: RopeSpec) -> Attention:
    blk, attention = f"blk.{layer.number}.", params.attention
    inputs, q_up = ["attn_q_a", "attn_kv"], ["attn_q_b"]
    if layer.ratio:
        inputs += ["attn_compressor_kv", "attn_compressor_gate"]
    if layer.selected:
        inputs += ["indexer_compressor_kv", "indexer_compressor_gate", "indexer.proj"]
        q_up.append("indexer.attn_q_b")
    return Attention(
        inputs=weights.group(blk, *inputs),
        q_norm=weights.norm(f"{blk}attn_q_a_norm", params.eps),
        q_up=weights.group(blk, *q_up, split="out"),
        near=weights.region(kv_region(layer.number)),
        spec=attention_spec(params, layer, weights, rope),
        compressor=_compressor(params, layer, weights, rope) if layer.ratio else None,
        indexer=_indexer(params, layer, weights, rope),
        group_output=weights.linear(f"{blk}attn_output_a"),
        groups=attention.groups,
        output=weights.linear(f"{blk}attn_output_b", split="in"),
    )


def attention_spec(
    params: TrunkParams, layer: ExpertLayer, weights: Weights, rope: RopeSpec, *, head_norm: bool = True
) -> AttentionSpec:
    """head_norm: queries are normed head by head."""
    blk, attention = f"blk.{layer.number}.", params.attention
    sinks = weights.vec(f"{blk}attn_sinks")
    return AttentionSpec(
        layer=layer.number,
        heads=attention.heads,
        kv_heads=1,
        head_dim=attention.dim,
        value_dim=attention.dim,
        scale=attention.dim**-0.5,
        rope=rope,
        q_norm=unit_norm(attention.dim, params.eps, sinks.device) if head_norm else None,
        k_norm=weights.norm(f"{blk}attn_kv_a_norm", params.eps),
        window=attention.window,
        sinks=sinks,
        inverse_output_rope=True,
    )


def _compressor(params: DeepSeekParams, layer: LayerParams, weights: Weights, rope: RopeSpec) -> Compressor:
    name = f"blk.{layer.number}.attn_compressor"
    spec = _compress_spec(name, params.attention.dim, params, layer, weights, rope)
    region = entries_region(layer.number)
    return Compressor(weights.slot(tail_slot(region)), weights.region(region), spec)


def _indexer(params: DeepSeekParams, layer: LayerParams, weights: Weights, rope: RopeSpec) -> Indexer | None:
    indexer, region = params.indexer, keys_region(layer.number)
    if indexer is None or not layer.selected:
        return None
    name = f"blk.{layer.number}.indexer_compressor"
    spec = _compress_spec(name, indexer.dim, params, layer, weights, rope)
    keys = Compressor(weights.slot(tail_slot(region)), weights.region(region), spec)
    return Indexer(keys, indexer.heads, indexer.dim, indexer.top_k)


def _compress_spec(
    name: str, width: int, params: DeepSeekParams, layer: LayerParams, weights: Weights, rope: RopeSpec
) -> CompressSpec:
    return CompressSpec(
        stride=layer.ratio,
        width=width,
        bias=weights.vec(f"{name}_ape"),
        norm=weights.norm(f"{name}_norm", params.eps),
        rope=rope,
        overlap=layer.selected,
    )


def mixture(params: TrunkParams, layer: ExpertLayer, weights: Weights) -> Mixture:
    """Router, routed and shared experts of a layer."""
    blk = f"blk.{layer.number}."
    given = f"{blk}exp_probs_b_vl.bias"  # of image tokens
    shared = SharedExpert(
        gate_up=weights.group(blk, "ffn_gate_shexp", "ffn_up_shexp", split="out"),
        down=weights.linear(f"{blk}ffn_down_shexp", split="in"),
        clamp=_clamp(layer.shared_clamp),
    )
    return Mixture(
        router=weights.vec(f"{blk}ffn_gate_inp"),
        route=RouteSpec(
            top_k=layer.experts.used,
            score="sqrt_softplus",
            bias=None if layer.hashed else weights.vec(f"{blk}exp_probs_b.bias"),
            given_bias=weights.vec(given) if weights.has(given) else None,
            renorm=params.renorm,
            scale=params.expert_scale,
            table=_hash_table(layer, weights) if layer.hashed else None,
        ),
        bank=weights.experts(layer.number),
        shared=shared,
        clamp=_clamp(layer.clamp),
    )


def _hash_table(layer: ExpertLayer, weights: Weights) -> Tensor:
    """i32[V, k]: the experts of every token."""
    name = f"blk.{layer.number}.ffn_gate_tid2eid"
    table, count = weights.vec(name).to(torch.int32), layer.experts.count
    low, high = int(table.min()), int(table.max())
    if low < 0 or high >= count:
        raise ModelFormatError(
            f"Tensor '{name}.weight' names experts {low} to {high}; wanted 0 to {count - 1}. Convert the "
            "model again."
        )
    return table


def _clamp(limit: float) -> Clamp | None:
    return Clamp(limit, "before") if limit else None


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> DeepSeekNetwork:
    """The plugin's `build`."""
    return DeepSeekNetwork(spec, weights, ops)
