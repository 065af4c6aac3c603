"""Hyper-parameters of Ling 3. Torch-free.

Every layer is either Kimi Delta Attention (KDA, a recurrence without positions) or latent attention
(MLA); the first few have a dense MLP, the others a mixture of experts.
"""

from __future__ import annotations

from attrs import frozen

from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    MAX_LAYERS,
    MAX_WIDTH,
    ExpertParams,
    RopeParams,
    bad_key,
    read_experts,
    read_rope,
    vocab_size,
)

MAX_KERNEL = 64
SIGMOID = 2
"""`expert_gating_func`."""


@frozen
class KdaParams:
    """A KDA layer, all alike; keys and values have one size."""

    heads: int
    dim: int
    kernel: int
    lower: float
    """Of the log decay of a step."""

    @property
    def inner(self) -> int:
        return self.heads * self.dim


@frozen
class MlaParams:
    """A latent attention layer, all alike."""

    heads: int
    nope: int
    """Features of a query that do not turn; `rope.num_rotated` more do."""
    latent: int
    value_dim: int
    q_rank: int
    """Of the queries' down projection; 0: none."""
    rope: RopeParams

    @property
    def query_dim(self) -> int:
        return self.nope + self.rope.num_rotated

    @property
    def key_dim(self) -> int:
        """Of what is kept of a token, which all heads share."""
        return self.latent + self.rope.num_rotated


@frozen
class MoeParams:
    """The mixture of the layers behind the dense ones, all alike but for their clamps."""

    experts: ExpertParams
    groups: int
    top_groups: int
    shared_ffn: int
    renorm: bool
    scale: float


@frozen
class LayerParams:
    number: int
    mla: bool
    """Latent attention; else KDA."""
    moe: bool
    clamp: float
    """Of the routed experts; 0: none."""
    shared_clamp: float


@frozen
class BailingParams:
    """What `describe` leaves for `build`."""

    hidden: int
    vocab: int
    context: int
    eps: float
    ffn: int
    """Of the dense layers."""
    kda: KdaParams
    mla: MlaParams
    moe: MoeParams
    layers: tuple[LayerParams, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def read_params(header: GgufHeader) -> BailingParams:
    """Read and check the keys. Raises ModelFormatError naming the key."""
    heads = header.uint("{a}.attention.head_count", low=1, high=MAX_WIDTH)
    return BailingParams(
        hidden=header.uint("{a}.embedding_length", low=1, high=MAX_WIDTH),
        vocab=vocab_size(header),
        context=header.uint("{a}.context_length", low=1),
        eps=header.float("{a}.attention.layer_norm_rms_epsilon"),
        ffn=header.uint("{a}.feed_forward_length", low=1, high=MAX_WIDTH),
        kda=_kda(header, heads),
        mla=_mla(header, heads),
        moe=_moe(header),
        layers=_layers(header),
    )


def _layers(header: GgufHeader) -> tuple[LayerParams, ...]:
    """Of the trunk: blocks that predict further tokens come behind it."""
    total = header.uint("{a}.block_count", low=1, high=MAX_LAYERS)
    num_layers = total - header.uint("{a}.nextn_predict_layers", 0, high=total - 1)
    latent = header.per_layer_uint("{a}.attention.head_count_kv", total, high=MAX_WIDTH)
    num_dense = header.uint("{a}.leading_dense_block_count", 0, high=total)
    clamps = _limits(header, "{a}.swiglu_clamp_exp", num_layers)
    shared_clamps = _limits(header, "{a}.swiglu_clamp_shexp", num_layers)
    return tuple(
        LayerParams(number, latent[number] > 0, number >= num_dense, clamps[number], shared_clamps[number])
        for number in range(num_layers)
    )


def _limits(header: GgufHeader, key: str, num_layers: int) -> tuple[float, ...]:
    """One per layer; files of the first converters have none."""
    limits = header.floats(key, (0.0,) * num_layers)
    if len(limits) < num_layers:
        raise bad_key(header, key, f"has {len(limits)} elements", f"one per layer, {num_layers}")
    for layer, limit in enumerate(limits):
        if limit < 0.0:
            raise bad_key(header, key, f"is {limit} for layer {layer}", "a number above 0, or 0 for none")
    return limits


def _kda(header: GgufHeader, heads: int) -> KdaParams:
    if not header.bool("{a}.kda.safe_gate", True):
        raise bad_key(header, "{a}.kda.safe_gate", "is false", "true, the decay Ling 3 was released with")
    lower = header.float("{a}.kda.gate_lower_bound", -5.0)
    if lower >= 0.0:
        raise bad_key(header, "{a}.kda.gate_lower_bound", f"is {lower}", "a number below 0")
    return KdaParams(
        heads=heads,
        dim=header.uint("{a}.kda.head_dim", low=1, high=MAX_WIDTH),
        kernel=header.uint("{a}.ssm.conv_kernel", low=2, high=MAX_KERNEL),
        lower=lower,
    )


def _mla(header: GgufHeader, heads: int) -> MlaParams:
    query_dim = header.uint("{a}.attention.key_length_mla", low=1, high=MAX_WIDTH)
    header.uint("{a}.rope.dimension_count", low=2, high=query_dim - 1)  # some features of a query stay
    rope = read_rope(header, query_dim)
    if rope.scaling != "none":
        raise bad_key(header, "{a}.rope.scaling.type", f"is {rope.scaling!r}", "'none', as in every Ling 3")
    params = MlaParams(
        heads=heads,
        nope=query_dim - rope.num_rotated,
        latent=header.uint("{a}.attention.kv_lora_rank", low=1, high=MAX_WIDTH),
        value_dim=header.uint("{a}.attention.value_length_mla", low=1, high=MAX_WIDTH),
        q_rank=header.uint("{a}.attention.q_lora_rank", 0, high=MAX_WIDTH),
        rope=rope,
    )
    key_dim = header.uint("{a}.attention.key_length", params.key_dim)
    if key_dim != params.key_dim:
        wanted = f"{params.key_dim}, the latent's {params.latent} and the {rope.num_rotated} that turn"
        raise bad_key(header, "{a}.attention.key_length", f"is {key_dim}", wanted)
    return params


def _moe(header: GgufHeader) -> MoeParams:
    if (gating := header.uint("{a}.expert_gating_func")) != SIGMOID:
        raise bad_key(header, "{a}.expert_gating_func", f"is {gating}", f"{SIGMOID} (sigmoid)")
    experts = read_experts(header)
    count = experts.count
    groups = header.uint("{a}.expert_group_count", 1, low=1, high=count)
    if count % groups or (groups > 1 and count == groups):  # a group is as good as its two best
        wanted = f"a divisor of the {count} experts that puts two or more into a group"
        raise bad_key(header, "{a}.expert_group_count", f"is {groups}", wanted)
    top_groups = header.uint("{a}.expert_group_used_count", groups, low=1, high=groups)
    header.uint("{a}.expert_used_count", high=count // groups * top_groups)
    shared = experts.ffn * header.uint("{a}.expert_shared_count", 1, low=1, high=MAX_WIDTH)
    return MoeParams(
        experts=experts,
        groups=groups,
        top_groups=top_groups,
        shared_ffn=header.uint("{a}.expert_shared_feed_forward_length", shared, low=1, high=MAX_WIDTH),
        renorm=header.bool("{a}.expert_weights_norm", True),
        scale=header.float("{a}.expert_weights_scale", 1.0),
    )
