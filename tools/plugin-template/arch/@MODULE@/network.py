"""The network: ops and views only, so that the core can record, fuse and check it."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from luce_core.contracts import (
    AttentionSpec,
    ForwardBatch,
    Linear,
    LinearGroup,
    ModelSpec,
    Network,
    Norm,
    Ops,
    Region,
    Weights,
)
from luce_core.model.helpers import rope_spec
from luce_core.model.metadata import DecoderParams, kv_region


@frozen(eq=False)
class Layer:
    """Handles of one layer."""

    attn_norm: Norm
    qkv: LinearGroup
    kv: Region
    attention: AttentionSpec
    attn_output: Linear
    ffn_norm: Norm
    gate_up: LinearGroup
    down: Linear


class @CLASS@Network:
    """`Network` of @NAME@ files."""

    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: DecoderParams = spec.details["decoder"]
        self.ops = ops
        self.table = weights.linear("token_embd")
        self.norm = weights.norm("output_norm", params.eps)
        self.head = weights.linear("output", "token_embd", split="out")
        rope = rope_spec(params.rope, pairs="halves", device=self.norm.weight.device)
        self.layers = []
        for number in range(params.num_layers):
            blk = f"blk.{number}."
            attention = AttentionSpec(
                layer=number,
                heads=params.heads[number],
                kv_heads=params.kv_heads[number],
                head_dim=params.head_dim,
                value_dim=params.value_dim,
                scale=params.head_dim**-0.5,
                rope=rope,
            )
            layer = Layer(
                attn_norm=weights.norm(f"{blk}attn_norm", params.eps),
                qkv=weights.group(blk, "attn_q", "attn_k", "attn_v", split="out"),
                kv=weights.region(kv_region(number)),
                attention=attention,
                attn_output=weights.linear(f"{blk}attn_output", split="in"),
                ffn_norm=weights.norm(f"{blk}ffn_norm", params.eps),
                gate_up=weights.group(blk, "ffn_gate", "ffn_up", split="out"),
                down=weights.linear(f"{blk}ffn_down", split="in"),
            )
            self.layers.append(layer)

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, E], before the final norm."""
        ops = self.ops
        x = ops.embed(batch, self.table)
        for number, layer in enumerate(self.layers):
            q, k, v = ops.norm_linear(x, layer.attn_norm, layer.qkv)
            y = ops.attention(batch, q, k, v, layer.kv, layer.attention)
            x = ops.linear_out(y, layer.attn_output, residual=x)
            x = ops.gated_mlp(x, layer.ffn_norm, layer.gate_up, layer.down, residual=x)
            ops.tap(batch, number, x)
        return x

    def logits(self, final: Tensor) -> Tensor:
        """[R, E] -> f32[R, V]."""
        return self.ops.head(final, self.norm, self.head)


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> @CLASS@Network:
    """The plugin's `build`."""
    return @CLASS@Network(spec, weights, ops)
