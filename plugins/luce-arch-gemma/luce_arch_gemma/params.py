"""Hyper-parameters of Gemma 3 and 4, one record per layer: no two kinds of layer are alike. Torch-free.

A layer is local (it sees the newest `window` tokens) or global. Gemma 4 gives the two kinds their own head
dimensions and counts, some global layers without a value matrix, and in its E models lets the last layers
read the keys and values of an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

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
GEMMA3_PERIOD = 6
"""Gemma 3 files seldom say which layers are local: all but every sixth."""
GEMMA3_27B_LAYERS = 62
"""The one size whose attention is scaled by width / heads instead of the head dimension; no key says so."""


@frozen
class LayerParams:
    """One layer."""

    number: int
    local: bool
    heads: int
    kv_heads: int
    head_dim: int
    """Of queries, keys and values alike."""
    ffn: int
    kv_layer: int
    """Whose keys and values it reads: its own number, or that of an earlier layer of its kind."""
    has_v: bool
    """Whether `kv_layer` has a value matrix. Without one, the key projection serves as values too."""

    @property
    def owns_kv(self) -> bool:
        return self.kv_layer == self.number


@frozen
class GemmaParams:
    """What `describe` leaves for `build`."""

    hidden: int
    vocab: int
    context: int
    eps: float
    window: int | None
    global_rope: RopeParams
    local_rope: RopeParams
    attention_scale: float
    final_softcap: float
    """0: none."""
    gemma4: bool
    """A norm on values, a factor on each layer's output, factors on the global rotary frequencies."""
    per_layer_width: int
    """Of the per-layer input of E models; 0: none."""
    experts: ExpertParams | None
    """The mixture beside each layer's dense MLP (Gemma 4 26B-A4B)."""
    layers: tuple[LayerParams, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def window_of(self, layer: LayerParams) -> int | None:
        return self.window if layer.local else None


def read_params(header: GgufHeader) -> GemmaParams:
    """Read and check the keys. Raises ModelFormatError naming the key."""
    common = read_decoder(header)
    _check_common(header, common)
    if header.arch == "gemma3":
        return _gemma3(header, common)
    return _gemma4(header, common)


def _gemma3(header: GgufHeader, common: DecoderParams) -> GemmaParams:
    local, window = _local_layers(header, common.num_layers, GEMMA3_PERIOD)
    wide = common.num_layers == GEMMA3_27B_LAYERS
    return GemmaParams(
        hidden=common.hidden,
        vocab=common.vocab,
        context=common.context,
        eps=common.eps,
        window=window,
        global_rope=common.rope,
        local_rope=read_window_rope(header, common.head_dim),
        attention_scale=(common.hidden / common.heads[0] if wide else common.head_dim) ** -0.5,
        final_softcap=_softcap(header),
        gemma4=False,
        per_layer_width=0,
        experts=None,
        layers=tuple(
            LayerParams(
                number=number,
                local=local[number],
                heads=common.heads[number],
                kv_heads=common.kv_heads[number],
                head_dim=common.head_dim,
                ffn=common.ffn[number],
                kv_layer=number,
                has_v=True,
            )
            for number in range(common.num_layers)
        ),
    )


def _gemma4(header: GgufHeader, common: DecoderParams) -> GemmaParams:
    local, window = _local_layers(header, common.num_layers, None)
    local_dim = header.uint("{a}.attention.key_length_swa", common.head_dim, low=1, high=MAX_WIDTH)
    _check_value_dim(header, "{a}.attention.value_length_swa", local_dim)
    sources = _kv_layers(header, local)
    has_v = _value_matrices(header, local, sources)
    return GemmaParams(
        hidden=common.hidden,
        vocab=common.vocab,
        context=common.context,
        eps=common.eps,
        window=window,
        global_rope=common.rope,
        local_rope=read_window_rope(header, local_dim),
        attention_scale=1.0,
        final_softcap=_softcap(header),
        gemma4=True,
        per_layer_width=header.uint("{a}.embedding_length_per_layer_input", 0, high=MAX_WIDTH),
        experts=_experts(header),
        layers=tuple(
            LayerParams(
                number=number,
                local=local[number],
                heads=common.heads[number],
                kv_heads=_shared_heads(header, common, number, sources[number]),
                head_dim=local_dim if local[number] else common.head_dim,
                ffn=common.ffn[number],
                kv_layer=sources[number],
                has_v=has_v[number],
            )
            for number in range(common.num_layers)
        ),
    )


def _check_common(header: GgufHeader, common: DecoderParams) -> None:
    _check_value_dim(header, "{a}.attention.value_length", common.head_dim)
    for layer, width in enumerate(common.ffn):
        if width == 0:
            raise bad_key(header, "{a}.feed_forward_length", f"is 0 for layer {layer}", "a width above 0")


def _check_value_dim(header: GgufHeader, key: str, head_dim: int) -> None:
    value_dim = header.uint(key, head_dim, low=1, high=MAX_WIDTH)
    if value_dim != head_dim:
        raise bad_key(header, key, f"is {value_dim}", f"the length of keys, {head_dim}")


def _softcap(header: GgufHeader) -> float:
    cap = header.float("{a}.final_logit_softcapping", 0.0)
    if cap < 0.0:
        raise bad_key(header, "{a}.final_logit_softcapping", f"is {cap}", "a number above 0, or 0 for none")
    return cap


def _local_layers(
    header: GgufHeader, num_layers: int, default_period: int | None
) -> tuple[tuple[bool, ...], int | None]:
    """Which layers are local, and their window. The pattern is a boolean per layer, or the period of global
    layers; `default_period` None: the file must have it.
    """
    window = header.uint("{a}.attention.sliding_window", 0)
    if default_period is not None and (window == 0 or not header.has(PATTERN)):
        period = default_period if window else 1
        return _periodic(num_layers, period), window or None
    key = header.key(PATTERN)
    if isinstance(header.metadata.get(key), int):
        local = _periodic(num_layers, header.uint(PATTERN, low=1))
    else:
        local = header.bools(PATTERN)
    if len(local) != num_layers:
        raise bad_key(header, PATTERN, f"has {len(local)} elements", f"one per layer, {num_layers}")
    if any(local) and not window:
        wanted = f"a window above 0: {sum(local)} layers are local"
        raise bad_key(header, "{a}.attention.sliding_window", "is absent or 0", wanted)
    return local, window if any(local) else None


def _periodic(num_layers: int, period: int) -> tuple[bool, ...]:
    """All layers but every `period`-th are local."""
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def _kv_layers(header: GgufHeader, local: Sequence[bool]) -> tuple[int, ...]:
    """The layer whose keys and values each layer reads: the last own ones of its kind, for the last n."""
    key = "{a}.attention.shared_kv_layers"
    num_layers = len(local)
    first_shared = num_layers - header.uint(key, 0, high=num_layers - 1)
    last = {local[layer]: layer for layer in range(first_shared)}
    for layer in range(first_shared, num_layers):
        if local[layer] not in last:
            kind = "local" if local[layer] else "global"
            got = f"is {num_layers - first_shared}"
            raise bad_key(
                header, key, got, f"a number that leaves layer {layer} a {kind} layer to share with"
            )
    return tuple(layer if layer < first_shared else last[local[layer]] for layer in range(num_layers))


def _shared_heads(header: GgufHeader, common: DecoderParams, layer: int, source: int) -> int:
    own, theirs = common.kv_heads[layer], common.kv_heads[source]
    if own != theirs:
        wanted = f"{theirs}, as in layer {source} whose keys and values it reads"
        raise bad_key(header, "{a}.attention.head_count_kv", f"is {own} for layer {layer}", wanted)
    return own


def _value_matrices(header: GgufHeader, local: Sequence[bool], sources: Sequence[int]) -> tuple[bool, ...]:
    """Which layers have one. All global layers or none: a file with some has lost the others."""
    own = [layer for layer in range(len(local)) if sources[layer] == layer and not local[layer]]
    some = any(f"blk.{layer}.attn_v.weight" in header.tensors for layer in own)
    return tuple(some or is_local for is_local in local)


def _experts(header: GgufHeader) -> ExpertParams | None:
    return read_experts(header) if header.uint("{a}.expert_count", 0) else None
