"""The network: attention whose output is gated by softplus, then an MLP or a mixture of experts with a shared
one beside it, each on the normed residual.
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from luce_arch_laguna.describe import gates_per_head
from luce_arch_laguna.params import LagunaParams
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
    SharedExpert,
    Weights,
)
from luce_core.model.helpers import rope_spec
from luce_core.model.metadata import kv_region


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


@frozen(eq=False)
class Layer:
    """Handles of one layer."""

    attn_norm: Norm
    inputs: LinearGroup
    """Queries, keys, values, gate."""
    kv: Region
    attention: AttentionSpec
    attn_output: Linear
    ffn_norm: Norm
    ffn: Mlp | Mixture


class LagunaNetwork:
    """`Network` of laguna files."""

    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: LagunaParams = spec.details["decoder"]
        norm = weights.norm("output_norm", params.decoder.eps)
        device, magnitude = norm.weight.device, params.rope_magnitude
        whole = rope_spec(params.decoder.rope, pairs="halves", device=device, magnitude=magnitude)
        local = rope_spec(params.window_rope, pairs="halves", device=device)
        ropes = [whole if window is None else local for window in params.windows]
        self.ops = ops
        self.table = weights.linear("token_embd")
        self.layers = [_layer(params, layer, weights, rope) for layer, rope in enumerate(ropes)]
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
        q, k, v, gate = ops.norm_linear(x, layer.attn_norm, layer.inputs)
        y = ops.attention(batch, q, k, v, layer.kv, layer.attention, gate=gate)
        return ops.linear_out(y, layer.attn_output, residual=x)

    def _ffn(self, batch: ForwardBatch, x: Tensor, layer: Layer) -> Tensor:
        ops, ffn = self.ops, layer.ffn
        if isinstance(ffn, Mlp):
            return ops.gated_mlp(x, layer.ffn_norm, ffn.gate_up, ffn.down, residual=x)
        routed = ops.route(batch, x, layer.ffn_norm, ffn.router, ffn.route)
        return ops.experts(x, layer.ffn_norm, routed, ffn.bank, shared=ffn.shared, residual=x)


def _layer(params: LagunaParams, layer: int, weights: Weights, rope: RopeSpec) -> Layer:
    blk, eps = f"blk.{layer}.", params.decoder.eps
    inputs = weights.group(blk, "attn_q", "attn_k", "attn_v", "attn_gate", split="out")
    per_head = gates_per_head(inputs.members[3].out_features, params, layer)
    return Layer(
        attn_norm=weights.norm(f"{blk}attn_norm", eps),
        inputs=inputs,
        kv=weights.region(kv_region(layer)),
        attention=_attention_spec(params, layer, weights, rope, per_head),
        attn_output=weights.linear(f"{blk}attn_output", split="in"),
        ffn_norm=weights.norm(f"{blk}ffn_norm", eps),
        ffn=_mlp(blk, weights) if layer < params.num_dense else _mixture(params, layer, weights),
    )


def _attention_spec(
    params: LagunaParams, layer: int, weights: Weights, rope: RopeSpec, per_head: bool
) -> AttentionSpec:
    decoder, blk = params.decoder, f"blk.{layer}."
    return AttentionSpec(
        layer=layer,
        heads=decoder.heads[layer],
        kv_heads=decoder.kv_heads[layer],
        head_dim=decoder.head_dim,
        value_dim=decoder.value_dim,
        scale=decoder.head_dim**-0.5,
        rope=rope,
        q_norm=weights.norm(f"{blk}attn_q_norm", decoder.eps),
        k_norm=weights.norm(f"{blk}attn_k_norm", decoder.eps),
        window=params.windows[layer],
        gate="softplus",
        gate_per_head=per_head,
    )


def _mlp(blk: str, weights: Weights) -> Mlp:
    gate_up = weights.group(blk, "ffn_gate", "ffn_up", split="out")
    return Mlp(gate_up, weights.linear(f"{blk}ffn_down", split="in"))


def _mixture(params: LagunaParams, layer: int, weights: Weights) -> Mixture:
    blk = f"blk.{layer}."
    assert params.experts is not None
    return Mixture(
        router=weights.vec(f"{blk}ffn_gate_inp"),
        route=RouteSpec(
            top_k=params.experts.used,
            score="sigmoid",
            bias=weights.vec(f"{blk}exp_probs_b.bias"),
            scale=params.expert_scale,
            softcap=params.router_softcap,
        ),
        bank=weights.experts(layer),
        shared=SharedExpert(
            gate_up=weights.group(blk, "ffn_gate_shexp", "ffn_up_shexp", split="out"),
            down=weights.linear(f"{blk}ffn_down_shexp", split="in"),
        ),
    )


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> LagunaNetwork:
    """The plugin's `build`."""
    return LagunaNetwork(spec, weights, ops)
