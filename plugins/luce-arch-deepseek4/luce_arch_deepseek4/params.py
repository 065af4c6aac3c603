"""Hyper-parameters of DeepSeek V4, and what V4.1 has like it. Torch-free.

Every layer sees the newest tokens one by one, in a window. Behind it, most see the whole text compressed: one
entry per 4 tokens, of which an indexer picks some (CSA), or one per 128, all of them (HCA).
"""

from __future__ import annotations

from attrs import asdict, evolve, frozen

from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_WIDTH,
    ExpertParams,
    RopeParams,
    bad_key,
    read_rope,
    vocab_size,
)

SELECTED_RATIO = 4
"""The compression of CSA layers; every other one is of HCA."""
MAX_RATIO = 1 << 12
MAX_STREAMS = 64
MAX_ITERATIONS = 1000
SQRT_SOFTPLUS = 4
"""`expert_gating_func`."""


@frozen
class IndexerParams:
    """What picks the entries a CSA layer attends to."""

    heads: int
    dim: int
    top_k: int


@frozen
class StreamsParams:
    """The residual is several streams; every sublayer mixes them (hyper-connections)."""

    count: int
    iterations: int
    eps: float


@frozen
class AttentionParams:
    """Alike in all layers: one key per token, which is also its value, for all heads."""

    heads: int
    dim: int
    q_rank: int
    window: int
    groups: int
    """Of heads; each group's output goes through a matrix of its own."""
    group_rank: int
    near_rope: RopeParams
    """Of layers without compression; never scaled."""
    far_rope: RopeParams
    """Of all others, near keys included."""


@frozen
class ExpertLayer:
    """A layer as far as its experts go."""

    number: int
    ratio: int
    """Tokens per compressed entry; 0: none."""
    hashed: bool
    """Experts are chosen by the token's id."""
    experts: ExpertParams
    shared_ffn: int
    clamp: float
    """Of the routed experts; 0: none."""
    shared_clamp: float


@frozen
class LayerParams(ExpertLayer):
    """A layer of V4, which keeps all it needs itself."""

    @property
    def selected(self) -> bool:
        """CSA: entries overlap, and an indexer picks some."""
        return self.ratio == SELECTED_RATIO

    @property
    def parts(self) -> int:
        """Halves of a compressor's row: where entries overlap, each row goes into two."""
        return 2 if self.selected else 1


@frozen
class TrunkParams:
    """What does not differ by layer."""

    hidden: int
    vocab: int
    context: int
    eps: float
    attention: AttentionParams
    streams: StreamsParams
    renorm: bool
    expert_scale: float


@frozen
class DeepSeekParams(TrunkParams):
    """What `describe` leaves for `build`."""

    indexer: IndexerParams | None
    """None: no layer is of CSA."""
    layers: tuple[LayerParams, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def read_params(header: GgufHeader) -> DeepSeekParams:
    """Read and check the keys. Raises ModelFormatError naming the key."""
    trunk = read_trunk(header)
    total = header.uint("{a}.block_count", low=1, high=MAX_LAYERS)
    layers = tuple(
        LayerParams(**asdict(layer, recurse=False))
        for layer in read_layers(header, total - _num_nextn(header, total), total)
    )
    if any(layer.ratio == 1 for layer in layers):
        raise bad_key(header, "{a}.attention.compress_ratios", "has a 1", "2 or more, or 0 for none")
    return DeepSeekParams(
        **asdict(trunk, recurse=False),
        indexer=read_indexer(header, trunk.attention) if any(layer.selected for layer in layers) else None,
        layers=layers,
    )


def read_trunk(header: GgufHeader) -> TrunkParams:
    """Keys that do not differ by layer."""
    return TrunkParams(
        hidden=header.uint("{a}.embedding_length", low=1, high=MAX_WIDTH),
        vocab=vocab_size(header),
        context=header.uint("{a}.context_length", low=1),
        eps=header.float("{a}.attention.layer_norm_rms_epsilon"),
        attention=_attention(header),
        streams=StreamsParams(
            count=header.uint("{a}.hyper_connection.count", low=1, high=MAX_STREAMS),
            iterations=header.uint("{a}.hyper_connection.sinkhorn_iterations", low=1, high=MAX_ITERATIONS),
            eps=header.float("{a}.hyper_connection.epsilon"),
        ),
        renorm=header.bool("{a}.expert_weights_norm", True),
        expert_scale=header.float("{a}.expert_weights_scale", 1.0),
    )


def _attention(header: GgufHeader) -> AttentionParams:
    dim = header.uint("{a}.attention.key_length", low=1, high=MAX_WIDTH)
    if (value_dim := header.uint("{a}.attention.value_length", dim)) != dim:
        raise bad_key(header, "{a}.attention.value_length", f"is {value_dim}", f"the length of keys, {dim}")
    if (kv_heads := header.uint("{a}.attention.head_count_kv", 1)) != 1:
        raise bad_key(header, "{a}.attention.head_count_kv", f"is {kv_heads}", "1, for all heads")
    heads = header.uint("{a}.attention.head_count", low=1, high=MAX_WIDTH)
    groups = header.uint("{a}.attention.output_group_count", low=1, high=heads)
    if heads % groups:
        wanted = f"a divisor of the {heads} heads"
        raise bad_key(header, "{a}.attention.output_group_count", f"is {groups}", wanted)
    far = read_rope(header, dim)
    base = header.float("{a}.attention.compress_rope_freq_base", far.theta)
    if base <= 0.0:
        raise bad_key(header, "{a}.attention.compress_rope_freq_base", f"is {base}", "a number above 0")
    return AttentionParams(
        heads=heads,
        dim=dim,
        q_rank=header.uint("{a}.attention.q_lora_rank", low=1, high=MAX_WIDTH),
        window=header.uint("{a}.attention.sliding_window", low=1),
        groups=groups,
        group_rank=header.uint("{a}.attention.output_lora_rank", low=1, high=MAX_WIDTH),
        near_rope=RopeParams(far.theta, far.num_rotated),
        far_rope=evolve(far, theta=base),
    )


def read_indexer(header: GgufHeader, attention: AttentionParams) -> IndexerParams:
    """Keys `{a}.attention.indexer.*`."""
    rotated = attention.near_rope.num_rotated
    return IndexerParams(
        heads=header.uint("{a}.attention.indexer.head_count", low=1, high=MAX_WIDTH),
        dim=header.uint("{a}.attention.indexer.key_length", low=rotated, high=MAX_WIDTH),
        top_k=header.uint("{a}.attention.indexer.top_k", low=1, high=MAX_WIDTH),
    )


def read_layers(header: GgufHeader, num_layers: int, total: int) -> tuple[ExpertLayer, ...]:
    """The layers of the trunk; `total` counts further blocks too, of which the keys may say something."""
    ratios = header.uints("{a}.attention.compress_ratios", high=MAX_RATIO)
    _check_length(header, "{a}.attention.compress_ratios", len(ratios), num_layers)
    if (gating := header.uint("{a}.expert_gating_func")) != SQRT_SOFTPLUS:
        wanted = f"{SQRT_SOFTPLUS} (the root of softplus)"
        raise bad_key(header, "{a}.expert_gating_func", f"is {gating}", wanted)
    if (groups := header.uint("{a}.expert_group_count", 1)) > 1:
        raise bad_key(header, "{a}.expert_group_count", f"is {groups}", "1: no V4 groups its experts")
    num_hashed = header.uint("{a}.hash_layer_count", 0, high=total)
    count = header.uint("{a}.expert_count", low=1, high=MAX_EXPERTS)
    used = header.uint("{a}.expert_used_count", low=1, high=count)
    ffn = header.per_layer_uint("{a}.expert_feed_forward_length", total, low=1, high=MAX_WIDTH)
    shared = header.uint("{a}.expert_shared_count", 1, low=1, high=count)
    clamps = _limits(header, "{a}.swiglu_clamp_exp", num_layers, (0.0,) * num_layers)
    shared_clamps = _limits(header, "{a}.swiglu_clamp_shexp", num_layers, clamps)
    return tuple(
        ExpertLayer(
            number=number,
            ratio=ratios[number],
            hashed=number < num_hashed,
            experts=ExpertParams(count, used, ffn[number]),
            shared_ffn=shared * ffn[number],
            clamp=clamps[number],
            shared_clamp=shared_clamps[number],
        )
        for number in range(num_layers)
    )


def _num_nextn(header: GgufHeader, total: int) -> int:
    """Blocks behind the trunk that predict further tokens. Files of a trunk keep the key without them."""
    count = header.uint("{a}.nextn_predict_layers", 0, high=total - 1)
    if f"blk.{total - count}.nextn.eh_proj.weight" not in header.tensors:
        return 0
    if not any(name.startswith("blk.0.") for name in header.tensors):
        raise ModelFormatError(
            f"GGUF file '{header.path}' has no tensor 'blk.0.*': it holds the blocks that predict further "
            f"tokens (from 'blk.{total - count}.' on) without the model they belong to. Use the file of the "
            "model itself."
        )
    return count


def _limits(header: GgufHeader, key: str, num_layers: int, default: tuple[float, ...]) -> tuple[float, ...]:
    limits = header.floats(key, default)
    _check_length(header, key, len(limits), num_layers)
    for layer, limit in enumerate(limits):
        if limit < 0.0:
            raise bad_key(header, key, f"is {limit} for layer {layer}", "a number above 0, or 0 for none")
    return limits


def _check_length(header: GgufHeader, key: str, length: int, num_layers: int) -> None:
    if length < num_layers:
        raise bad_key(header, key, f"has {length} elements", f"one per layer, {num_layers}")
