"""Glimmer's forward: three branches beside each other on one normed residual.

    n = rms(x);  x = x + attention(n) + mlp(n) + W_out silu(conv(W_in n))

The convolution is causal and depthwise over the text, so a sequence remembers pages (keys and values) and a
slot (the newest rows of the convolution).
"""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from luce_arch_glimmer.describe import conv_slot
from luce_core.contracts import (
    AttentionSpec,
    ForwardBatch,
    Linear,
    LinearGroup,
    ModelSpec,
    Network,
    Norm,
    Region,
    RopeSpec,
    SlotState,
    Weights,
)
from luce_core.model.helpers import rope_spec
from luce_core.model.metadata import DecoderParams, kv_region
from luce_core.ops import OpsNamespace


@frozen(eq=False)
class Layer:
    """Handles of one layer."""

    norm: Norm
    inputs: LinearGroup
    """q, k, v, and the convolution's rows."""
    kv: Region
    attention: AttentionSpec
    attn_output: Linear
    gate_up: LinearGroup
    down: Linear
    conv: Tensor
    newest: SlotState
    conv_out: Linear


class GlimmerNetwork:
    """`Network` of a glimmer file: ops and views only."""

    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: OpsNamespace) -> None:
        params: DecoderParams = spec.details["decoder"]
        self.ops = ops
        self.table = weights.linear("token_embd")
        self.norm = weights.norm("output_norm", params.eps)
        rope = rope_spec(params.rope, pairs="halves", device=self.norm.weight.device)
        self.layers = [_layer(params, layer, weights, rope) for layer in range(params.num_layers)]

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, E]."""
        ops = self.ops
        x: Tensor = ops.embed(batch, self.table)
        for number, layer in enumerate(self.layers):
            q, k, v, row = ops.norm_linear(x, layer.norm, layer.inputs)
            y = ops.attention(batch, q, k, v, layer.kv, layer.attention)
            mixed = ops.act(ops.conv_window(batch, row, layer.conv, layer.newest), "silu")
            out = ops.linear_out(y, layer.attn_output, residual=x)
            out = ops.gated_mlp(x, layer.norm, layer.gate_up, layer.down, residual=out)
            x = ops.linear_out(mixed, layer.conv_out, residual=out)
            ops.tap(batch, number, x)
        return x

    def logits(self, final: Tensor) -> Tensor:
        """[R, E] -> f32[R, V]."""
        logits: Tensor = self.ops.head(final, self.norm, self.table)
        return logits


def _layer(params: DecoderParams, layer: int, weights: Weights, rope: RopeSpec) -> Layer:
    blk = f"blk.{layer}."
    heads, kv_heads = params.heads[layer], params.kv_heads[layer]
    dim, value_dim = params.head_dim, params.value_dim
    return Layer(
        norm=weights.norm(f"{blk}norm", params.eps),
        inputs=weights.group(blk, "attn_q", "attn_k", "attn_v", "conv_in"),
        kv=weights.region(kv_region(layer)),
        attention=AttentionSpec(layer, heads, kv_heads, dim, value_dim, dim**-0.5, rope),
        attn_output=weights.linear(f"{blk}attn_output"),
        gate_up=weights.group(blk, "ffn_gate", "ffn_up"),
        down=weights.linear(f"{blk}ffn_down"),
        conv=weights.vec(f"{blk}conv"),
        newest=weights.slot(conv_slot(layer)),
        conv_out=weights.linear(f"{blk}conv_out"),
    )


def build(spec: ModelSpec, weights: Weights, ops: OpsNamespace) -> GlimmerNetwork:
    """The plugin's `build`."""
    return GlimmerNetwork(spec, weights, ops)
