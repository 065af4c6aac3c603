"""The network: three Gated DeltaNet layers, then one of gated full attention, again and again; behind each an
MLP or a mixture of experts. And the MTP block, which guesses a token further.

Norm weights are applied as stored: converters have added the one to all but `ssm_norm`. They have also put
the value heads into an order in which head h reads key head h mod key_heads, which is that of `ops.delta`.
"""

from __future__ import annotations

from itertools import pairwise

from attrs import frozen
from torch import Tensor

from luce_arch_qwen35.describe import conv_slot, delta_slot, qkv_rows
from luce_arch_qwen35.params import BlockParams, DeltaParams, HybridParams
from luce_core.contracts import (
    AttentionSpec,
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
from luce_core.errors import PluginError
from luce_core.model.helpers import rope_spec
from luce_core.model.metadata import kv_region


@frozen(eq=False)
class Attention:
    """Full attention, gated per feature."""

    qkv: LinearGroup
    kv: Region
    spec: AttentionSpec
    output: Linear


@frozen(eq=False)
class Delta:
    """Gated DeltaNet."""

    inputs: LinearGroup
    """q, k and v; output gate; step size; decay."""
    conv: SlotState
    state: SlotState
    spec: DeltaSpec
    output: Linear


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
class Block:
    mixer_norm: Norm
    mixer: Attention | Delta
    ffn_norm: Norm
    ffn: Mlp | Mixture

    def mix(self, ops: Ops, batch: ForwardBatch, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]: the first half."""
        if isinstance(self.mixer, Delta):
            return _delta(ops, batch, x, self.mixer_norm, self.mixer)
        return _attention(ops, batch, x, self.mixer_norm, self.mixer)

    def feed(self, ops: Ops, batch: ForwardBatch, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]: the second half."""
        ffn = self.ffn
        if isinstance(ffn, Mlp):
            return ops.gated_mlp(x, self.ffn_norm, ffn.gate_up, ffn.down, residual=x)
        routed = ops.route(batch, x, self.ffn_norm, ffn.router, ffn.route)
        return ops.experts(x, self.ffn_norm, routed, ffn.bank, shared=ffn.shared, residual=x)


def _delta(ops: Ops, batch: ForwardBatch, x: Tensor, norm: Norm, mixer: Delta) -> Tensor:
    qkv, z, beta, decay = ops.norm_linear(x, norm, mixer.inputs)
    y = ops.delta(batch, qkv, z, beta, decay, mixer.conv, mixer.state, mixer.spec)
    return ops.linear_out(y, mixer.output, residual=x)


def _attention(ops: Ops, batch: ForwardBatch, x: Tensor, norm: Norm, mixer: Attention) -> Tensor:
    spec, dim = mixer.spec, mixer.spec.head_dim
    both, k, v = ops.norm_linear(x, norm, mixer.qkv)
    heads = both.view(-1, spec.heads, 2 * dim)
    y = ops.attention(batch, heads[..., :dim], k, v, mixer.kv, spec, gate=heads[..., dim:])
    return ops.linear_out(y, mixer.output, residual=x)


class HybridNetwork:
    """`Network` of qwen35 and qwen35moe files."""

    def __init__(self, spec: ModelSpec, weights: Weights, ops: Ops) -> None:
        params: HybridParams = spec.details["decoder"]
        norm = weights.norm("output_norm", params.eps)
        rope = rope_spec(
            params.rope,
            pairs="halves",
            device=norm.weight.device,
            sections=params.sections,
            interleaved_sections=True,
        )
        self.ops = ops
        self.table = weights.linear("token_embd")
        self.blocks = [_block(params, block, weights, rope) for block in params.trunk]
        self.norm = norm
        self.head = weights.linear("output", "token_embd", split="out")
        self.nextn = _nextn(spec, params, weights, ops, rope)

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """All layers -> [T, E]."""
        x = self.ops.embed(batch, self.table)
        for number, block in enumerate(self.blocks):
            x = block.mix(self.ops, batch, x)
            x = block.feed(self.ops, batch, x)
            self.ops.tap(batch, number, x)
        return x

    def logits(self, final: Tensor) -> Tensor:
        """[R, E] -> f32[R, V]."""
        return self.ops.head(final, self.norm, self.head)


@frozen(eq=False)
class Join:
    """How an MTP block takes in the final of the token before, and what it ends with."""

    embed_norm: Norm
    hidden_norm: Norm
    project: Linear
    table: Linear
    norm: Norm
    head: Linear


class NextnNetwork:
    """One MTP block: a row is a token of the text and the final of the token before it."""

    nextn: Network | None = None
    """What goes on from the finals of this one: the next MTP block, or the last again."""

    def __init__(self, ops: Ops, final_norm: Norm, join: Join, block: Block) -> None:
        """final_norm: of whoever makes the finals that come in; the block reads them normed."""
        self.ops = ops
        self.final_norm = final_norm
        self.join = join
        self.block = block

    def trunk(self, batch: ForwardBatch, final: Tensor | None = None) -> Tensor:
        """final [T, E], before its norm; zeros where there is no token before -> [T, E]."""
        if final is None:
            raise PluginError("An MTP block of 'qwen35' ran without the finals of the tokens before.")
        ops, join = self.ops, self.join
        embedded = ops.rms(ops.embed(batch, join.table), join.embed_norm)
        hidden = ops.rms(ops.rms(final, self.final_norm), join.hidden_norm)
        x = ops.linear_out(ops.cat((embedded, hidden)), join.project)
        return self.block.feed(ops, batch, self.block.mix(ops, batch, x))

    def logits(self, final: Tensor) -> Tensor:
        """[R, E] -> f32[R, V]: of the token behind the row's own."""
        return self.ops.head(final, self.join.norm, self.join.head)


# --- handles


def _nextn(
    spec: ModelSpec, params: HybridParams, weights: Weights, ops: Ops, rope: RopeSpec
) -> NextnNetwork | None:
    """The chain of MTP blocks, where their state is allocated."""
    if not spec.runs_nextn:
        return None
    before = weights.norm("output_norm", params.eps)
    chain = []
    for block in params.nextn:
        join, own = _join(params, block, weights), _block(params, block, weights, rope)
        chain.append(NextnNetwork(ops, before, join, own))
        before = join.norm
    again = NextnNetwork(ops, before, chain[-1].join, chain[-1].block)
    chain += [again, again]
    for one, following in pairwise(chain):
        one.nextn = following
    return chain[0]


def _join(params: HybridParams, block: BlockParams, weights: Weights) -> Join:
    prefix = f"blk.{block.number}.nextn."
    own_norm = f"{prefix}shared_head_norm"
    return Join(
        embed_norm=weights.norm(f"{prefix}enorm", params.eps),
        hidden_norm=weights.norm(f"{prefix}hnorm", params.eps),
        project=weights.linear(f"{prefix}eh_proj"),
        table=weights.linear(f"{prefix}embed_tokens", "token_embd"),
        norm=weights.norm(own_norm if weights.has(own_norm) else "output_norm", params.eps),
        head=weights.linear(f"{prefix}shared_head_head", "output", "token_embd", split="out"),
    )


def _block(params: HybridParams, block: BlockParams, weights: Weights, rope: RopeSpec) -> Block:
    blk = f"blk.{block.number}."
    mixer: Attention | Delta
    if block.recurrent:
        mixer = _delta_mixer(params, block, weights)
    else:
        mixer = _attention_mixer(params, block, weights, rope)
    return Block(
        mixer_norm=weights.norm(f"{blk}attn_norm", params.eps),
        mixer=mixer,
        ffn_norm=weights.norm(f"{blk}post_attention_norm", params.eps),
        ffn=_mixture(params, block, weights) if params.experts else _mlp(blk, weights),
    )


def _attention_mixer(params: HybridParams, block: BlockParams, weights: Weights, rope: RopeSpec) -> Attention:
    blk, rows = f"blk.{block.number}.", qkv_rows(params, block)
    return Attention(
        qkv=weights.group(blk, "attn_q", "attn_k", "attn_v", fused="attn_qkv", rows=rows, split="out"),
        kv=weights.region(kv_region(block.number)),
        spec=AttentionSpec(
            layer=block.number,
            heads=block.heads,
            kv_heads=block.kv_heads,
            head_dim=params.head_dim,
            value_dim=params.head_dim,
            scale=params.head_dim**-0.5,
            rope=rope,
            q_norm=weights.norm(f"{blk}attn_q_norm", params.eps),
            k_norm=weights.norm(f"{blk}attn_k_norm", params.eps),
            gate="sigmoid",
        ),
        output=weights.linear(f"{blk}attn_output", split="in"),
    )


def _delta_mixer(params: HybridParams, block: BlockParams, weights: Weights) -> Delta:
    blk, delta = f"blk.{block.number}.", params.delta
    return Delta(
        inputs=weights.group(blk, "attn_qkv", "attn_gate", "ssm_beta", "ssm_alpha", split="out"),
        conv=weights.slot(conv_slot(block.number)),
        state=weights.slot(delta_slot(block.number)),
        spec=_delta_spec(delta, block, weights, params.eps),
        output=weights.linear(f"{blk}ssm_out", split="in"),
    )


def _delta_spec(delta: DeltaParams, block: BlockParams, weights: Weights, eps: float) -> DeltaSpec:
    blk = f"blk.{block.number}."
    return DeltaSpec(
        layer=block.number,
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        norm=weights.norm(f"{blk}ssm_norm", eps),
        conv=weights.vec(f"{blk}ssm_conv1d"),
        a=weights.vec(f"{blk}ssm_a"),
        dt_bias=weights.vec(f"{blk}ssm_dt.bias"),
        eps=eps,
    )


def _mlp(blk: str, weights: Weights) -> Mlp:
    gate_up = weights.group(blk, "ffn_gate", "ffn_up", split="out")
    return Mlp(gate_up, weights.linear(f"{blk}ffn_down", split="in"))


def _mixture(params: HybridParams, block: BlockParams, weights: Weights) -> Mixture:
    blk = f"blk.{block.number}."
    assert params.experts is not None
    return Mixture(
        router=weights.vec(f"{blk}ffn_gate_inp"),
        route=RouteSpec(top_k=params.experts.used),
        bank=weights.experts(block.number),
        shared=SharedExpert(
            gate_up=weights.group(blk, "ffn_gate_shexp", "ffn_up_shexp", split="out"),
            down=weights.linear(f"{blk}ffn_down_shexp", split="in"),
            gate=weights.vec(f"{blk}ffn_gate_inp_shexp").reshape(-1),
        ),
    )


def build(spec: ModelSpec, weights: Weights, ops: Ops) -> HybridNetwork:
    """The plugin's `build`."""
    return HybridNetwork(spec, weights, ops)
