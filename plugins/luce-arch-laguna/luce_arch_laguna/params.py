"""What the header says of every layer. Imports no torch.

Every fourth layer, the first among them, sees the whole text; the others the newest `window` tokens. The two
kinds have their own number of query heads and their own rotary embedding.
"""

from __future__ import annotations

import math

from attrs import evolve, frozen

from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    MAX_WIDTH,
    DecoderParams,
    ExpertParams,
    RopeParams,
    bad_key,
    read_decoder,
    read_experts,
    read_window_rope,
)

PATTERN = "{a}.attention.sliding_window_pattern"
DEFAULT_PERIOD = 4
"""Of layers without a window; converters write no pattern."""
SIGMOID = 2
"""`expert_gating_func` of every Laguna."""


@frozen
class LagunaParams:
    """What `describe` leaves for `build`."""

    decoder: DecoderParams
    windows: tuple[int | None, ...]
    """Of each layer."""
    window_rope: RopeParams
    rope_magnitude: float
    """On cos and sin of layers without a window."""
    num_dense: int
    """Leading layers with a dense MLP; those behind have a mixture."""
    experts: ExpertParams | None
    """None: every layer is dense."""
    shared_ffn: int
    expert_scale: float
    """On the sum of the routed experts, not on the shared one."""
    router_softcap: float
    """0: none."""

    @property
    def num_layers(self) -> int:
        return self.decoder.num_layers

    @property
    def hidden(self) -> int:
        return self.decoder.hidden

    @property
    def vocab(self) -> int:
        return self.decoder.vocab

    @property
    def context(self) -> int:
        return self.decoder.context


def read_params(header: GgufHeader) -> LagunaParams:
    """Read and check the keys. Raises ModelFormatError naming the key."""
    decoder = read_decoder(header)
    # Converters differ in what they write as `yarn_ext_factor`; the models are trained with plain YaRN.
    decoder = evolve(decoder, rope=evolve(decoder.rope, ext_factor=1.0))
    num_dense = header.uint("{a}.leading_dense_block_count", high=decoder.num_layers)
    for layer, width in enumerate(decoder.ffn[:num_dense]):
        if width == 0:
            raise bad_key(header, "{a}.feed_forward_length", f"is 0 for layer {layer}", "a width above 0")
    experts = read_experts(header) if num_dense < decoder.num_layers else None
    if experts:
        _check_routing(header)
    return LagunaParams(
        decoder=decoder,
        windows=_windows(header, decoder.num_layers),
        window_rope=read_window_rope(header, decoder.head_dim),
        rope_magnitude=_magnitude(header, decoder.rope),
        num_dense=num_dense,
        experts=experts,
        shared_ffn=_shared_ffn(header, experts) if experts else 0,
        expert_scale=header.float("{a}.expert_weights_scale", 1.0),
        router_softcap=_softcap(header),
    )


def _magnitude(header: GgufHeader, rope: RopeParams) -> float:
    """YaRN's own, unless the file has another. Old converters wrote 1.0 where the model's configuration has
    no factor, which means YaRN's own too.
    """
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor <= 0.0:
        got = f"is {rope.attention_factor}"
        raise bad_key(header, "{a}.rope.scaling.yarn_attn_factor", got, "a number above 0")
    if rope.attention_factor != 1.0:
        return rope.attention_factor
    return 1.0 + 0.1 * math.log(rope.factor)


def _windows(header: GgufHeader, num_layers: int) -> tuple[int | None, ...]:
    """The pattern is a boolean per layer, True for a window, or the period of layers without."""
    window = header.uint("{a}.attention.sliding_window", 0)
    if not window:
        return (None,) * num_layers
    if header.has(PATTERN) and not isinstance(header.metadata[header.key(PATTERN)], int):
        local = header.bools(PATTERN)
        if len(local) != num_layers:
            raise bad_key(header, PATTERN, f"has {len(local)} elements", f"one per layer, {num_layers}")
    else:
        period = header.uint(PATTERN, DEFAULT_PERIOD, low=1)
        local = tuple(layer % period != 0 for layer in range(num_layers))
    return tuple(window if is_local else None for is_local in local)


def _check_routing(header: GgufHeader) -> None:
    gating = header.uint("{a}.expert_gating_func", SIGMOID)
    if gating != SIGMOID:
        raise bad_key(header, "{a}.expert_gating_func", f"is {gating}", f"{SIGMOID}, sigmoid")
    if not header.bool("{a}.expert_weights_norm", True):
        raise bad_key(header, "{a}.expert_weights_norm", "is false", "true")
    shared = header.uint("{a}.expert_shared_count", 1)
    if shared != 1:
        raise bad_key(header, "{a}.expert_shared_count", f"is {shared}", "1")


def _shared_ffn(header: GgufHeader, experts: ExpertParams) -> int:
    return header.uint("{a}.expert_shared_feed_forward_length", experts.ffn, low=1, high=MAX_WIDTH)


def _softcap(header: GgufHeader) -> float:
    cap = header.float("{a}.router_logit_softcapping", 0.0)
    if cap < 0.0:
        raise bad_key(header, "{a}.router_logit_softcapping", f"is {cap}", "a number above 0, or 0 for none")
    return cap
