"""The network: attention and gated MLP, each on the normed residual."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from luce_arch_llama.describe import qkv_rows
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
    RopeSpec,
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


class LlamaNetwork:
    """`Network` of llama and qwen2 files."""

    nextn: Network | None = None

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: DecoderParams = spec.details["decoder"]
        factors = weights.vec("rope_freqs") if weights.has("rope_freqs") else None
        table = weights.linear("token_embd")
        norm = weights.norm("output_norm", params.eps)
        rope = rope_spec(params.rope, pairs=spec.details["pairs"], factors=factors, device=norm.weight.device)
        self.ops = ops
        self.table = table
        self.layers = [_layer(params, layer, weights, rope) for layer in range(params.num_layers)]
        self.norm = norm
        self.head = weights.linear("output", "token_embd", split="out")

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, E]."""
        ops = self.ops
        x = ops.embed(batch, self.table)
        for number, layer in enumerate(self.layers):
            x = self._attention(batch, x, layer)
            x = ops.gated_mlp(x, layer.ffn_norm, layer.gate_up, layer.down, residual=x)
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


def _layer(params: DecoderParams, layer: int, weights: Weights, rope: RopeSpec) -> Layer:
    blk = f"blk.{layer}."
    return Layer(
        attn_norm=weights.norm(f"{blk}attn_norm", params.eps),
        qkv=weights.group(
            blk, "attn_q", "attn_k", "attn_v", fused="attn_qkv", rows=qkv_rows(params, layer), split="out"
        ),
        kv=weights.region(kv_region(layer)),
        attention=AttentionSpec(
            layer=layer,
            heads=params.heads[layer],
            kv_heads=params.kv_heads[layer],
            head_dim=params.head_dim,
            value_dim=params.value_dim,
            scale=params.head_dim**-0.5,
            rope=rope,
        ),
        attn_output=weights.linear(f"{blk}attn_output", split="in"),
        ffn_norm=weights.norm(f"{blk}ffn_norm", params.eps),
        gate_up=weights.group(blk, "ffn_gate", "ffn_up", split="out"),
        down=weights.linear(f"{blk}ffn_down", split="in"),
    )


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> LlamaNetwork:
    """The plugin's `build`."""
    return LlamaNetwork(spec, weights, ops)
