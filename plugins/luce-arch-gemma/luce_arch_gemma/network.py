"""The network. A layer is attention, a gated MLP with or without a mixture of experts beside it, and in E
models a gate on a per-layer input; each is normed going in and coming out.

Gemma norms have the weight 1 + w; converters of Gemma 3 have added the one, Gemma 4's weights have it, so
every norm here is applied as stored.
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from luce_arch_gemma.params import GemmaParams, LayerParams
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
from luce_core.model.helpers import rope_spec, unit_norm
from luce_core.model.metadata import kv_region

ACTIVATION = "gelu_tanh"


@frozen(eq=False)
class Mixture:
    """The routed experts of a layer; the router reads the residual by its own norm."""

    router_norm: Norm
    """Without weight of its own: the file's `scale`, over sqrt(E), stands in."""
    router: Tensor
    """f32[X, E]."""
    route: RouteSpec
    norm: Norm
    bank: ExpertBank
    """Its down matrices carry the factor per expert, `ffn_down_exps.scale`."""
    dense_post: Norm
    post: Norm


@frozen(eq=False)
class Gate:
    """How a layer takes its own input of each token in."""

    down: LinearGroup
    up: Linear
    post: Norm


@frozen(eq=False)
class Layer:
    """Handles of one layer."""

    attn_norm: Norm
    qkv: LinearGroup
    """Queries; then keys and values, or what serves as both; nothing more where another layer's are read."""
    kv: Region
    attention: AttentionSpec
    attn_output: Linear
    attn_post: Norm
    ffn_norm: Norm
    gate_up: LinearGroup
    down: Linear
    ffn_post: Norm
    mixture: Mixture | None
    gate: Gate | None
    output_scale: float


@frozen(eq=False)
class PerLayerInputs:
    """E models: what makes one vector per layer of every token."""

    table: Linear
    project: LinearGroup
    norm: Norm
    layers: int
    width: int


class GemmaNetwork:
    """`Network` of gemma3 and gemma4 files."""

    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: GemmaParams = spec.details["decoder"]
        norm = weights.norm("output_norm", params.eps)
        device = norm.weight.device
        factors = weights.vec("rope_freqs") if params.gemma4 else None
        ropes = {
            True: rope_spec(params.local_rope, pairs="halves", device=device),
            # Gemma 4's factors of 1e30 leave all but the first quarter of the pairs as they are.
            False: rope_spec(params.global_rope, pairs="halves", factors=factors, device=device),
        }
        self.ops = ops
        self.table = weights.linear("token_embd")
        self.embed_scale = params.hidden**0.5
        self.inputs = _per_layer_inputs(params, weights)
        self.layers = [_layer(params, layer, weights, ropes[layer.local]) for layer in params.layers]
        self.norm = norm
        self.head = weights.linear("output", "token_embd", split="out")
        self.softcap = params.final_softcap

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, E]."""
        ops = self.ops
        x = ops.embed(batch, self.table, self.embed_scale)
        inputs = None if self.inputs is None else self._inputs(batch, x, self.inputs)
        for number, layer in enumerate(self.layers):
            x = self._attention(batch, x, layer)
            if layer.gate is None or inputs is None:
                x = self._mlp(batch, x, layer, layer.output_scale)
            else:
                x = self._mlp(batch, x, layer, 1.0)
                x = self._gated_input(x, inputs[:, number], layer.gate, layer.output_scale)
            ops.tap(batch, number, x)
        return x

    def logits(self, final: Tensor) -> Tensor:
        """[R, E] -> f32[R, V]."""
        return self.ops.head(final, self.norm, self.head, softcap=self.softcap)

    def _attention(self, batch: ForwardBatch, x: Tensor, layer: Layer) -> Tensor:
        ops = self.ops
        made = ops.norm_linear(x, layer.attn_norm, layer.qkv)
        k = v = None
        if len(layer.qkv.members) == 3:
            k, v = made[1], made[2]
        elif len(layer.qkv.members) == 2:
            v = made[1]
        y = ops.attention(batch, made[0], k, v, layer.kv, layer.attention)
        return ops.linear_out(y, layer.attn_output, residual=x, post=layer.attn_post)

    def _mlp(self, batch: ForwardBatch, x: Tensor, layer: Layer, scale: float) -> Tensor:
        ops, mixture = self.ops, layer.mixture
        if mixture is None:
            return ops.gated_mlp(
                x,
                layer.ffn_norm,
                layer.gate_up,
                layer.down,
                residual=x,
                post=layer.ffn_post,
                act=ACTIVATION,
                scale=scale,
            )
        dense = ops.gated_mlp(
            x, layer.ffn_norm, layer.gate_up, layer.down, post=mixture.dense_post, act=ACTIVATION
        )
        routed = ops.route(batch, x, mixture.router_norm, mixture.router, mixture.route)
        both = ops.experts(
            x, mixture.norm, routed, mixture.bank, residual=dense, post=mixture.post, act=ACTIVATION
        )
        return ops.scale(ops.add(x, ops.rms(both, layer.ffn_post)), scale)

    def _inputs(self, batch: ForwardBatch, x: Tensor, inputs: PerLayerInputs) -> Tensor:
        """The per-layer inputs: half from the token, half from its embedding -> [T, L, P]."""
        ops, shape = self.ops, (-1, inputs.layers, inputs.width)
        of_token = ops.embed(batch, inputs.table, inputs.width**0.5, given=False).view(shape)
        (projected,) = ops.norm_linear(x, None, inputs.project)
        of_embedding = ops.head_rms(ops.scale(projected, self.embed_scale**-1).view(shape), inputs.norm)
        return ops.scale(ops.add(of_embedding, of_token), 0.5**0.5)

    def _gated_input(self, x: Tensor, own: Tensor, gate: Gate, scale: float) -> Tensor:
        (narrow,) = self.ops.norm_linear(x, None, gate.down)
        y = self.ops.act_mul(narrow, own, ACTIVATION)
        return self.ops.linear_out(y, gate.up, residual=x, post=gate.post, scale=scale)


def _layer(params: GemmaParams, layer: LayerParams, weights: Weights, rope: RopeSpec) -> Layer:
    blk = f"blk.{layer.number}."
    names = ["attn_q"]
    if layer.owns_kv:
        names += ["attn_k", "attn_v"] if layer.has_v else ["attn_k"]
    return Layer(
        attn_norm=weights.norm(f"{blk}attn_norm", params.eps),
        qkv=weights.group(blk, *names, split="out"),
        kv=weights.region(kv_region(layer.kv_layer)),
        attention=_attention_spec(params, layer, weights, rope),
        attn_output=weights.linear(f"{blk}attn_output", split="in"),
        attn_post=weights.norm(f"{blk}post_attention_norm", params.eps),
        ffn_norm=weights.norm(f"{blk}ffn_norm", params.eps),
        gate_up=weights.group(blk, "ffn_gate", "ffn_up", split="out"),
        down=weights.linear(f"{blk}ffn_down", split="in"),
        ffn_post=weights.norm(f"{blk}post_ffw_norm", params.eps),
        mixture=_mixture(params, layer, weights),
        gate=_gate(params, layer, weights),
        output_scale=float(weights.vec(f"{blk}layer_output_scale")) if params.gemma4 else 1.0,
    )


def _attention_spec(
    params: GemmaParams, layer: LayerParams, weights: Weights, rope: RopeSpec
) -> AttentionSpec:
    q_norm = weights.norm(f"blk.{layer.number}.attn_q_norm", params.eps)
    v_norm = unit_norm(layer.head_dim, params.eps, q_norm.weight.device) if params.gemma4 else None
    return AttentionSpec(
        layer=layer.number,
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        value_dim=layer.head_dim,
        scale=params.attention_scale,
        rope=rope,
        q_norm=q_norm,
        # Of the layer whose keys are read: where values alone are kept, its weight makes keys of them.
        k_norm=weights.norm(f"blk.{layer.kv_layer}.attn_k_norm", params.eps),
        v_norm=v_norm,
        window=params.window_of(layer),
        bidirectional_spans=_sees_both_ways(params, layer),
    )


def _sees_both_ways(params: GemmaParams, layer: LayerParams) -> bool:
    """Within an image: Gemma 3 everywhere, Gemma 4 in local layers, its E models nowhere."""
    return not params.gemma4 or (layer.local and not params.per_layer_width)


def _mixture(params: GemmaParams, layer: LayerParams, weights: Weights) -> Mixture | None:
    if params.experts is None:
        return None
    blk = f"blk.{layer.number}."
    return Mixture(
        router_norm=Norm(weights.vec(f"{blk}ffn_gate_inp.scale") * params.hidden**-0.5, params.eps),
        router=weights.vec(f"{blk}ffn_gate_inp"),
        route=RouteSpec(top_k=params.experts.used),
        norm=weights.norm(f"{blk}pre_ffw_norm_2", params.eps),
        bank=weights.experts(layer.number),
        dense_post=weights.norm(f"{blk}post_ffw_norm_1", params.eps),
        post=weights.norm(f"{blk}post_ffw_norm_2", params.eps),
    )


def _gate(params: GemmaParams, layer: LayerParams, weights: Weights) -> Gate | None:
    if not params.per_layer_width:
        return None
    blk = f"blk.{layer.number}."
    return Gate(
        down=weights.group(blk, "inp_gate"),
        up=weights.linear(f"{blk}proj"),
        post=weights.norm(f"{blk}post_norm", params.eps),
    )


def _per_layer_inputs(params: GemmaParams, weights: Weights) -> PerLayerInputs | None:
    if not params.per_layer_width:
        return None
    return PerLayerInputs(
        table=weights.linear("per_layer_token_embd"),
        project=weights.group("", "per_layer_model_proj"),
        norm=weights.norm("per_layer_proj_norm", params.eps),
        layers=params.num_layers,
        width=params.per_layer_width,
    )


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> GemmaNetwork:
    """The plugin's `build`."""
    return GemmaNetwork(spec, weights, ops)
