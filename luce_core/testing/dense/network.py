"""The dense model's forward: ops and views only."""

from __future__ import annotations

from torch import Tensor

from luce_core.contracts import AttentionSpec, ForwardBatch, ModelSpec, Network, Ops, Weights
from luce_core.model.helpers import rope_spec
from luce_core.model.metadata import DecoderParams, kv_region


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> DenseNetwork:
    """The network of a dense file."""
    return DenseNetwork(spec, weights, ops)


class DenseNetwork:
    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: DecoderParams = spec.details["decoder"]
        self.ops = ops
        self.table = weights.linear("token_embd")
        self.norm = weights.norm("output_norm", params.eps)
        rope = rope_spec(params.rope, pairs="halves", device=self.norm.weight.device)
        dim = params.head_dim
        self.layers = [
            (
                weights.norm(f"blk.{layer}.attn_norm", params.eps),
                weights.group(f"blk.{layer}.", "attn_q", "attn_k", "attn_v"),
                weights.region(kv_region(layer)),
                AttentionSpec(layer, params.heads[layer], params.kv_heads[layer], dim, dim, dim**-0.5, rope),
                weights.linear(f"blk.{layer}.attn_output"),
                weights.norm(f"blk.{layer}.ffn_norm", params.eps),
                weights.group(f"blk.{layer}.", "ffn_gate", "ffn_up"),
                weights.linear(f"blk.{layer}.ffn_down"),
            )
            for layer in range(params.num_layers)
        ]

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, E]."""
        ops = self.ops
        x = ops.embed(batch, self.table)
        for number, (norm, qkv, region, spec, out, ffn_norm, gate_up, down) in enumerate(self.layers):
            q, k, v = ops.norm_linear(x, norm, qkv)
            x = ops.linear_out(ops.attention(batch, q, k, v, region, spec), out, residual=x)
            x = ops.gated_mlp(x, ffn_norm, gate_up, down, residual=x)
            ops.tap(batch, number, x)
        return x

    def logits(self, final: Tensor) -> Tensor:
        """[R, E] -> f32[R, V], by the tied table."""
        return self.ops.head(final, self.norm, self.table)
