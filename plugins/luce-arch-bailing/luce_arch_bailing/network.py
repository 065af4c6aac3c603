"""The network: five layers of Kimi Delta Attention (KDA), then one of gated latent attention (MLA), again and
again; behind each a dense MLP or a mixture of experts.

Latent attention runs absorbed: what is kept of a token is its latent and the part of its key that turns, and
queries are multiplied into the latent's space instead of keys out of it.
"""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor

from luce_arch_bailing.describe import CONVOLVED, conv_slot, delta_slot
from luce_arch_bailing.params import BailingParams, KdaParams, LayerParams, MlaParams, MoeParams
from luce_core.contracts import (
    AttentionSpec,
    Clamp,
    DeltaSpec,
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
    Weights,
)
from luce_core.model.helpers import rope_spec
from luce_core.model.metadata import kv_region

LATENT_EPS = 1e-6
"""Of the norms on the latents of queries and keys, whatever the file says of the others."""


@frozen(eq=False)
class Kda:
    """Kimi Delta Attention."""

    inputs: LinearGroup
    """q, k, v; output gate; step size; decay."""
    conv: SlotState
    state: SlotState
    spec: DeltaSpec


@frozen(eq=False)
class Mla:
    """Latent attention, gated per head."""

    inputs: LinearGroup
    """Queries or their down projection; latent and the turning part of the key; gate."""
    q_norm: Norm | None
    """Between the two projections of queries; None: there is one."""
    q_up: LinearGroup | None
    absorb: Linear
    """[heads, latent, nope]."""
    expand: Linear
    """[heads, value, latent]."""
    kv: Region
    spec: AttentionSpec


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
    shared: SharedExpert
    clamp: Clamp | None


@frozen(eq=False)
class Layer:
    """Handles of one layer."""

    mixer_norm: Norm
    mixer: Kda | Mla
    output: Linear
    ffn_norm: Norm
    ffn: Mlp | Mixture


class BailingNetwork:
    """`Network` of bailingmoe3 files."""

    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: BailingParams = spec.details["decoder"]
        norm = weights.norm("output_norm", params.eps)
        rope = rope_spec(params.mla.rope, pairs="adjacent", part="last", device=norm.weight.device)
        self.ops = ops
        self.table = weights.linear("token_embd")
        self.layers = [_layer(params, layer, weights, rope) for layer in params.layers]
        self.norm = norm
        self.head = weights.linear("output", "token_embd", split="out")

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, E]."""
        ops = self.ops
        x = ops.embed(batch, self.table)
        for number, layer in enumerate(self.layers):
            mixer = layer.mixer
            if isinstance(mixer, Kda):
                y = self._kda(batch, x, layer.mixer_norm, mixer)
            else:
                y = self._mla(batch, x, layer.mixer_norm, mixer)
            x = ops.linear_out(y, layer.output, residual=x)
            x = self._ffn(batch, x, layer.ffn_norm, layer.ffn)
            ops.tap(batch, number, x)
        return x

    def logits(self, final: Tensor) -> Tensor:
        """[R, E] -> f32[R, V]."""
        return self.ops.head(final, self.norm, self.head)

    def _kda(self, batch: ForwardBatch, x: Tensor, norm: Norm, kda: Kda) -> Tensor:
        ops = self.ops
        q, k, v, z, beta, decay = ops.norm_linear(x, norm, kda.inputs)
        return ops.delta(batch, ops.cat((q, k, v)), z, beta, decay, kda.conv, kda.state, kda.spec)

    def _mla(self, batch: ForwardBatch, x: Tensor, norm: Norm, mla: Mla) -> Tensor:
        ops, spec = self.ops, mla.spec
        q, kv, gate = ops.norm_linear(x, norm, mla.inputs)
        if mla.q_up is not None:
            (q,) = ops.norm_linear(q, mla.q_norm, mla.q_up)
        latent, nope = spec.value_dim, mla.absorb.in_features
        q = q.view(-1, spec.heads, nope + spec.head_dim - latent)
        q = ops.cat((ops.head_linear(q[..., :nope], mla.absorb), q[..., nope:]))
        q = q.reshape(-1, spec.heads * spec.head_dim)
        y = ops.attention(batch, q, kv[:, latent:], kv[:, :latent], mla.kv, spec, gate=gate)
        y = ops.head_linear(y.view(-1, spec.heads, latent), mla.expand)
        return y.reshape(-1, mla.expand.out_features)

    def _ffn(self, batch: ForwardBatch, x: Tensor, norm: Norm, ffn: Mlp | Mixture) -> Tensor:
        ops = self.ops
        if isinstance(ffn, Mlp):
            return ops.gated_mlp(x, norm, ffn.gate_up, ffn.down, residual=x)
        routed = ops.route(batch, x, norm, ffn.router, ffn.route)
        return ops.experts(x, norm, routed, ffn.bank, ffn.shared, residual=x, clamp=ffn.clamp)


def _layer(params: BailingParams, layer: LayerParams, weights: Weights, rope: RopeSpec) -> Layer:
    blk = f"blk.{layer.number}."
    if layer.moe:
        ffn: Mlp | Mixture = _mixture(params.moe, layer, weights)
    else:
        gate_up = weights.group(blk, "ffn_gate", "ffn_up", split="out")
        ffn = Mlp(gate_up, weights.linear(f"{blk}ffn_down", split="in"))
    return Layer(
        mixer_norm=weights.norm(f"{blk}attn_norm", params.eps),
        mixer=_mla(params.mla, layer.number, weights, rope)
        if layer.mla
        else _kda(params.kda, layer.number, weights, params.eps),
        output=weights.linear(f"{blk}attn_output", split="in"),
        ffn_norm=weights.norm(f"{blk}ffn_norm", params.eps),
        ffn=ffn,
    )


def _kda(kda: KdaParams, layer: int, weights: Weights, eps: float) -> Kda:
    blk = f"blk.{layer}."
    names = ("attn_q", "attn_k", "attn_v", "ssm_g_a", "ssm_beta", "ssm_f_a")
    convs = [weights.vec(f"{blk}ssm_conv1d_{name}").view(kda.inner, kda.kernel) for name in CONVOLVED]
    return Kda(
        inputs=weights.group(blk, *names, split="out"),
        conv=weights.slot(conv_slot(layer)),
        state=weights.slot(delta_slot(layer)),
        spec=DeltaSpec(
            layer=layer,
            key_heads=kda.heads,
            value_heads=kda.heads,
            key_dim=kda.dim,
            value_dim=kda.dim,
            norm=weights.norm(f"{blk}ssm_norm", eps),
            conv=torch.cat(convs),
            a=weights.vec(f"{blk}ssm_a").view(kda.heads),
            dt_bias=weights.vec(f"{blk}ssm_dt.bias"),
            kind="kda",
            lower=kda.lower,
        ),
    )


def _mla(mla: MlaParams, layer: int, weights: Weights, rope: RopeSpec) -> Mla:
    blk = f"blk.{layer}."
    spec = AttentionSpec(
        layer=layer,
        heads=mla.heads,
        kv_heads=1,
        head_dim=mla.key_dim,
        value_dim=mla.latent,
        scale=mla.query_dim**-0.5,
        rope=rope,
        v_norm=weights.norm(f"{blk}attn_kv_a_norm", LATENT_EPS),
        gate="sigmoid",
        gate_per_head=True,
    )
    first = "attn_q_a" if mla.q_rank else "attn_q"
    return Mla(
        inputs=weights.group(blk, first, "attn_kv_a_mqa", "attn_gate"),
        q_norm=weights.norm(f"{blk}attn_q_a_norm", LATENT_EPS) if mla.q_rank else None,
        q_up=weights.group(blk, "attn_q_b", split="out") if mla.q_rank else None,
        absorb=weights.linear(f"{blk}attn_k_b"),
        expand=weights.linear(f"{blk}attn_v_b"),
        kv=weights.region(kv_region(layer)),
        spec=spec,
    )


def _mixture(moe: MoeParams, layer: LayerParams, weights: Weights) -> Mixture:
    blk = f"blk.{layer.number}."
    shared = SharedExpert(
        gate_up=weights.group(blk, "ffn_gate_shexp", "ffn_up_shexp", split="out"),
        down=weights.linear(f"{blk}ffn_down_shexp", split="in"),
        clamp=_clamp(layer.shared_clamp),
    )
    return Mixture(
        router=weights.vec(f"{blk}ffn_gate_inp"),
        route=RouteSpec(
            top_k=moe.experts.used,
            score="sigmoid",
            bias=weights.vec(f"{blk}exp_probs_b.bias"),
            groups=moe.groups,
            top_groups=moe.top_groups,
            renorm=moe.renorm,
            scale=moe.scale,
        ),
        bank=weights.experts(layer.number),
        shared=shared,
        clamp=_clamp(layer.clamp),
    )


def _clamp(limit: float) -> Clamp | None:
    """Ling bounds the gate behind its activation, unlike DeepSeek."""
    return Clamp(limit, "after") if limit else None


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> BailingNetwork:
    """The plugin's `build`."""
    return BailingNetwork(spec, weights, ops)
