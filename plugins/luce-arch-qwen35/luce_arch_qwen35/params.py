"""What the header says of every block. Imports no torch.

"qwen35" is dense, "qwen35moe" has a mixture of experts in every block; else they are one network.
"""

from __future__ import annotations

from attrs import frozen

from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    MAX_WIDTH,
    ExpertParams,
    RopeParams,
    bad_key,
    read_decoder,
    read_experts,
)

MOE = "qwen35moe"
MAX_KERNEL = 64
KV_HEADS = "{a}.attention.head_count_kv"


@frozen
class DeltaParams:
    """A Gated DeltaNet layer, all alike."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """Of the convolution: q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.inner

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_dim


@frozen
class MixtureParams(ExpertParams):
    """Routed experts, and one that every token takes."""

    shared_ffn: int


@frozen
class BlockParams:
    number: int
    recurrent: bool
    """A Gated DeltaNet layer; else full attention."""
    heads: int
    kv_heads: int
    ffn: int
    """Of a dense MLP."""


@frozen
class HybridParams:
    """Hyper-parameters of one file."""

    num_layers: int
    hidden: int
    vocab: int
    context: int
    head_dim: int
    eps: float
    rope: RopeParams
    sections: tuple[int, ...]
    """M-RoPE: frequencies of time, height, width."""
    trunk: tuple[BlockParams, ...]
    nextn: tuple[BlockParams, ...]
    """MTP blocks, behind the trunk: always full attention."""
    delta: DeltaParams
    experts: MixtureParams | None


def read_params(header: GgufHeader) -> HybridParams:
    """Raises ModelFormatError naming the key."""
    decoder = read_decoder(header)
    if decoder.value_dim != decoder.head_dim:  # queries and the gate of the output come in one matrix
        got = f"is {decoder.value_dim}"
        raise bad_key(header, "{a}.attention.value_length", got, f"the key length {decoder.head_dim}")
    total = decoder.num_layers + header.uint("{a}.nextn_predict_layers", 0)
    experts = _experts(header)
    blocks = _blocks(header, decoder.num_layers, total, dense=experts is None)
    return HybridParams(
        num_layers=decoder.num_layers,
        hidden=decoder.hidden,
        vocab=decoder.vocab,
        context=decoder.context,
        head_dim=decoder.head_dim,
        eps=decoder.eps,
        rope=decoder.rope,
        sections=_sections(header, decoder.rope.num_rotated // 2),
        trunk=blocks[: decoder.num_layers],
        nextn=blocks[decoder.num_layers :],
        delta=_delta(header),
        experts=experts,
    )


def _blocks(header: GgufHeader, num_layers: int, total: int, *, dense: bool) -> tuple[BlockParams, ...]:
    def counts(key: str) -> tuple[int, ...]:
        return header.per_layer_uint(key, total, low=1, high=MAX_WIDTH)

    heads = counts("{a}.attention.head_count")
    kv_heads = counts(KV_HEADS) if header.has(KV_HEADS) else heads
    ffn = counts("{a}.feed_forward_length") if dense else (0,) * total
    for number in range(total):
        if heads[number] % kv_heads[number]:
            got = f"is {kv_heads[number]} for block {number}"
            raise bad_key(header, KV_HEADS, got, f"a divisor of its {heads[number]} query heads")
    recurrent = _recurrent(header, num_layers, total)
    return tuple(BlockParams(*one) for one in zip(range(total), recurrent, heads, kv_heads, ffn, strict=True))


def _recurrent(header: GgufHeader, num_layers: int, total: int) -> tuple[bool, ...]:
    """Which blocks are Gated DeltaNet layers; those behind the trunk never are, whatever the key says."""
    key = "{a}.attention.recurrent_layers"
    if header.has(key):
        flags = header.bools(key)
        if len(flags) not in (num_layers, total):
            raise bad_key(header, key, f"has {len(flags)} entries", f"one for each of the {total} blocks")
    else:
        interval = header.uint("{a}.full_attention_interval", 4, low=1)
        flags = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    return (*flags[:num_layers], *(False,) * (total - num_layers))


def _sections(header: GgufHeader, pairs: int) -> tuple[int, ...]:
    """The file has four numbers, the last of them 0."""
    key = "{a}.rope.dimension_sections"
    sections = header.uints(key, high=MAX_WIDTH)
    used = tuple(count for count in sections if count)
    if len(sections) > 4 or sections[: len(used)] != used or len(used) > 3 or sum(used) != pairs:
        wanted = f"up to three numbers that make {pairs} together, the rotated pairs, and zeros behind them"
        raise bad_key(header, key, f"is {list(sections)}", wanted)
    return used


def _delta(header: GgufHeader) -> DeltaParams:
    key_heads = header.uint("{a}.ssm.group_count", low=1, high=MAX_WIDTH)
    value_heads = header.uint("{a}.ssm.time_step_rank", low=1, high=MAX_WIDTH)
    if value_heads % key_heads:
        got = f"is {value_heads}"
        raise bad_key(header, "{a}.ssm.time_step_rank", got, f"a multiple of the {key_heads} key heads")
    inner = header.uint("{a}.ssm.inner_size", low=1, high=MAX_WIDTH)
    if inner % value_heads:
        raise bad_key(header, "{a}.ssm.inner_size", f"is {inner}", f"a multiple of {value_heads} value heads")
    return DeltaParams(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=header.uint("{a}.ssm.state_size", low=1, high=MAX_WIDTH),
        value_dim=inner // value_heads,
        kernel=header.uint("{a}.ssm.conv_kernel", low=2, high=MAX_KERNEL),
    )


def _experts(header: GgufHeader) -> MixtureParams | None:
    if header.arch != MOE:
        if count := header.uint("{a}.expert_count", 0):
            raise bad_key(header, "{a}.expert_count", f"is {count}", f"0, or the architecture {MOE!r}")
        return None
    routed = read_experts(header)
    shared_ffn = header.uint("{a}.expert_shared_feed_forward_length", low=1, high=MAX_WIDTH)
    return MixtureParams(routed.count, routed.used, routed.ffn, shared_ffn)
