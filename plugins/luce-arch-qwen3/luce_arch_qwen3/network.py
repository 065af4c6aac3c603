"""The network: attention with a norm on every head's queries and keys, then an MLP or a mixture of experts,
each on the normed residual.
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from luce_arch_qwen3.describe import qkv_rows
from luce_core.contracts import (
    AttentionSpec,
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
    Weights,
)
from luce_core.model.helpers import rope_spec
from luce_core.model.metadata import DecoderParams, ExpertParams, kv_region


@frozen(eq=False)
class Mlp:
    gate_up: LinearGroup
    down: Linear


@frozen(eq=False)
class Mixture:
    router: Tensor
    """f32[X, E]."""
    route: RouteSpec
    bank: ExpertBank


@frozen(eq=False)
class Layer:
    """Handles of one layer."""

    attn_norm: Norm
    qkv: LinearGroup
    kv: Region
    attention: AttentionSpec
    attn_output: Linear
    ffn_norm: Norm
    ffn: Mlp | Mixture


class Qwen3Network:
    """`Network` of qwen3 and qwen3moe files."""

    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: DecoderParams = spec.details["decoder"]
        experts: ExpertParams | None = spec.details["experts"]
        norm = weights.norm("output_norm", params.eps)
        rope = rope_spec(params.rope, pairs="halves", device=norm.weight.device)
        self.ops = ops
        self.table = weights.linear("token_embd")
        self.layers = [_layer(params, experts, layer, weights, rope) for layer in range(params.num_layers)]
        self.norm = norm
        self.head = weights.linear("output", "token_embd", split="out")

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, E]."""
        ops = self.ops
        x = ops.embed(batch, self.table)
        for number, layer in enumerate(self.layers):
            x = self._attention(batch, x, layer)
            x = self._ffn(batch, x, layer)
            ops.tap(batch, number, x)
        return x

    def logits(self, final: Tensor) -> Tensor:
        """[R, E] -> f32[R, V]."""
        return self.ops.head(final, self.norm, self.head)

    def _attention(self, batch: ForwardBatch, x: Tensor, layer: Layer) -> Tensor:
        ops = self.ops
        q, k, v = ops.norm_linear(x, layer.attn_norm, layer.qkv)
        y = ops.attention(batch, q, k, v, layer.kv, layer.attention)
        return ops.linear_out(y, layer.attn_output, residual=x)

    def _ffn(self, batch: ForwardBatch, x: Tensor, layer: Layer) -> Tensor:
        ops, ffn = self.ops, layer.ffn
        if isinstance(ffn, Mlp):
            return ops.gated_mlp(x, layer.ffn_norm, ffn.gate_up, ffn.down, residual=x)
        routed = ops.route(batch, x, layer.ffn_norm, ffn.router, ffn.route)
        return ops.experts(x, layer.ffn_norm, routed, ffn.bank, residual=x)


def _layer(
    params: DecoderParams, experts: ExpertParams | None, layer: int, weights: Weights, rope: RopeSpec
) -> Layer:
    blk, rows = f"blk.{layer}.", qkv_rows(params, layer)
    return Layer(
        attn_norm=weights.norm(f"{blk}attn_norm", params.eps),
        qkv=weights.group(blk, "attn_q", "attn_k", "attn_v", fused="attn_qkv", rows=rows, split="out"),
        kv=weights.region(kv_region(layer)),
        attention=AttentionSpec(
            layer=layer,
            heads=params.heads[layer],
            kv_heads=params.kv_heads[layer],
            head_dim=params.head_dim,
            value_dim=params.value_dim,
            scale=params.head_dim**-0.5,
            rope=rope,
            q_norm=weights.norm(f"{blk}attn_q_norm", params.eps),
            k_norm=weights.norm(f"{blk}attn_k_norm", params.eps),
        ),
        attn_output=weights.linear(f"{blk}attn_output", split="in"),
        ffn_norm=weights.norm(f"{blk}ffn_norm", params.eps),
        ffn=_mlp(blk, weights) if experts is None else _mixture(blk, layer, experts, weights),
    )


def _mlp(blk: str, weights: Weights) -> Mlp:
    gate_up = weights.group(blk, "ffn_gate", "ffn_up", split="out")
    return Mlp(gate_up, weights.linear(f"{blk}ffn_down", split="in"))


def _mixture(blk: str, layer: int, experts: ExpertParams, weights: Weights) -> Mixture:
    """The published models weigh the chosen experts by a softmax over them alone; no key says so."""
    return Mixture(
        router=weights.vec(f"{blk}ffn_gate_inp"),
        route=RouteSpec(top_k=experts.used),
        bank=weights.experts(layer),
    )


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> Qwen3Network:
    """The plugin's `build`."""
    return Qwen3Network(spec, weights, ops)
