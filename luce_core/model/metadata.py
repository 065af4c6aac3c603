"""What the headers of decoder models have in common, read once and checked. Torch-free.

Architecture plugins call these from `describe`; nothing here knows an architecture.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

from attrs import Factory, frozen

from luce_core.contracts import Field, Group, LayerWidths, ModelSpec, Pages, StateLayout, StoredSize
from luce_core.errors import ModelFormatError
from luce_core.gguf import GgufHeader, StringArray
from luce_core.gguf.complaint import RECONVERT, bad, quote

MAX_LAYERS = 4096
MAX_WIDTH = 1 << 20
"""No published model comes near either; what is larger is a damaged file."""

FULL_GROUP = "full"
"""The usual name of the group of regions without a window."""
EXPERTS = "_exps"
"""In the name of a stack of experts."""
ROUTER, NORM_BEHIND = "ffn_gate_inp", "post_ffw_norm"
WEIGHT = re.compile(r"blk\.(\d{1,4})\.([^.]+)\.weight")
ENDS = ("token_embd.weight", "output.weight")
"""A row of the one is looked up; the other is for rows whose logits are wanted."""
MAX_EXPERTS = 1 << 16


@frozen
class RopeParams:
    """Rotary embedding as the header states it; `luce_core.model.helpers.rope_spec` makes the tensor."""

    theta: float
    num_rotated: int
    """n_rot: leading features of each head that turn."""
    scaling: Literal["none", "linear", "yarn", "longrope"] = "none"
    """longrope: the frequencies are divided by a tensor of the file; see `long_factors`."""
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    """On cos and sin; YaRN: on top of its own magnitude."""
    ext_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@frozen
class DecoderParams:
    """Hyper-parameters of a standard decoder, per layer where files may differ by layer."""

    num_layers: int
    hidden: int
    vocab: int
    context: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    value_dim: int
    ffn: tuple[int, ...]
    eps: float
    rope: RopeParams


@frozen
class ExpertParams:
    """A mixture of experts, alike in every layer that has one."""

    count: int
    used: int
    """By a token."""
    ffn: int
    """Width of an expert."""


def bad_key(header: GgufHeader, key: str, got: str, wanted: str) -> ModelFormatError:
    """The error of a key whose value an architecture cannot use. `got` begins with a verb."""
    return bad(header.path, f"metadata key {quote(header.key(key))}", got, wanted, RECONVERT)


def read_decoder(header: GgufHeader) -> DecoderParams:
    """The common keys `{a}.*`. Raises ModelFormatError naming the key."""
    total = header.uint("{a}.block_count", low=1, high=MAX_LAYERS)
    num_layers = total - header.uint("{a}.nextn_predict_layers", 0, high=total - 1)
    hidden = header.uint("{a}.embedding_length", low=1, high=MAX_WIDTH)
    heads = header.per_layer_uint("{a}.attention.head_count", total, low=1, high=MAX_WIDTH)[:num_layers]
    if header.has("{a}.attention.head_count_kv"):
        kv_heads = header.per_layer_uint("{a}.attention.head_count_kv", total, low=1, high=MAX_WIDTH)
    else:
        kv_heads = heads
    _check_grouping(header, heads, kv_heads[:num_layers])
    head_dim = header.uint("{a}.attention.key_length", None, low=1, high=MAX_WIDTH)
    if head_dim is None:
        head_dim = _even_share(header, hidden, heads[0])
    return DecoderParams(
        num_layers=num_layers,
        hidden=hidden,
        vocab=vocab_size(header),
        context=header.uint("{a}.context_length", low=1),
        heads=heads,
        kv_heads=kv_heads[:num_layers],
        head_dim=head_dim,
        value_dim=header.uint("{a}.attention.value_length", head_dim, low=1, high=MAX_WIDTH),
        ffn=header.per_layer_uint("{a}.feed_forward_length", total, 0, high=MAX_WIDTH)[:num_layers],
        eps=header.float("{a}.attention.layer_norm_rms_epsilon"),
        rope=read_rope(header, head_dim),
    )


def _even_share(header: GgufHeader, hidden: int, heads: int) -> int:
    """The head dimension of a file without `key_length`."""
    if hidden % heads:
        raise bad_key(header, "{a}.attention.head_count", f"is {heads}", f"a divisor of the width {hidden}")
    return hidden // heads


def _check_grouping(header: GgufHeader, heads: tuple[int, ...], kv_heads: tuple[int, ...]) -> None:
    for layer, (count, kv_count) in enumerate(zip(heads, kv_heads, strict=True)):
        if count % kv_count:
            got = f"is {kv_count} for layer {layer}"
            raise bad_key(header, "{a}.attention.head_count_kv", got, f"a divisor of its {count} query heads")


def vocab_size(header: GgufHeader) -> int:
    """Entries of the vocabulary, which the embedding table has rows for: converters pad both alike.

    Of a file without vocabulary: `{a}.vocab_size`, else the table's rows.
    """
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray):
        return len(tokens)
    shape = header.tensor("token_embd.weight").shape
    return header.uint("{a}.vocab_size", shape[0], low=1)


def read_rope(header: GgufHeader, head_dim: int, *, longrope: bool = False) -> RopeParams:
    """Rotary embedding: `{a}.rope.*`. longrope: the architecture reads the factors `long_factors` names."""
    num_rotated = header.uint("{a}.rope.dimension_count", head_dim, low=2, high=head_dim)
    if num_rotated % 2:
        raise bad_key(header, "{a}.rope.dimension_count", f"is {num_rotated}", "an even number")
    theta = header.float("{a}.rope.freq_base", 10000.0)
    if theta <= 0.0:
        raise bad_key(header, "{a}.rope.freq_base", f"is {theta}", "a number above 0")
    factor = header.float("{a}.rope.scaling.factor", header.float("{a}.rope.scale_linear", 1.0))
    if factor <= 0.0:
        raise bad_key(header, "{a}.rope.scaling.factor", f"is {factor}", "a number above 0")
    kind = header.str("{a}.rope.scaling.type", "linear")
    kinds = ("none", "linear", "yarn", *(("longrope",) if longrope else ()))
    if kind not in kinds:
        wanted = f"one of {', '.join(map(repr, kinds))}"
        raise bad_key(header, "{a}.rope.scaling.type", f"is {kind!r}", wanted)
    if kind == "none" or (factor == 1.0 and kind != "longrope"):
        return RopeParams(theta, num_rotated)
    return RopeParams(
        theta=theta,
        num_rotated=num_rotated,
        scaling=cast('Literal["linear", "yarn", "longrope"]', kind),
        factor=factor,
        original_context=header.uint(
            "{a}.rope.scaling.original_context_length", header.uint("{a}.context_length", low=1), low=1
        ),
        attention_factor=header.float(
            "{a}.rope.scaling.yarn_attn_factor", header.float("{a}.rope.scaling.attn_factor", 1.0)
        ),
        ext_factor=header.float("{a}.rope.scaling.yarn_ext_factor", 1.0),
        beta_fast=header.float("{a}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=header.float("{a}.rope.scaling.yarn_beta_slow", 1.0),
    )


def read_window_rope(header: GgufHeader, head_dim: int, theta: float = 10000.0) -> RopeParams:
    """Rotary embedding of layers with a window, `{a}.rope.*_swa`: never scaled. `theta`: where the key is
    absent.
    """
    num_rotated = header.uint("{a}.rope.dimension_count_swa", head_dim, low=2, high=head_dim)
    if num_rotated % 2:
        raise bad_key(header, "{a}.rope.dimension_count_swa", f"is {num_rotated}", "an even number")
    base = header.float("{a}.rope.freq_base_swa", theta)
    if base <= 0.0:
        raise bad_key(header, "{a}.rope.freq_base_swa", f"is {base}", "a number above 0")
    return RopeParams(base, num_rotated)


def read_experts(header: GgufHeader, ffn: int | None = None) -> ExpertParams:
    """Of a mixture: `{a}.expert_*`. ffn: the width where no key has it; None: one must."""
    count = header.uint("{a}.expert_count", low=1, high=MAX_EXPERTS)
    used = header.uint("{a}.expert_used_count", low=1, high=count)
    key = "{a}.expert_feed_forward_length"
    if ffn is None or header.has(key):
        ffn = header.uint(key, low=1, high=MAX_WIDTH)
    return ExpertParams(count, used, ffn)


def long_factors(params: RopeParams, context: int) -> str:
    """longrope: the tensor that divides the frequencies of a model run with so much context."""
    return "rope_factors_long" if context > params.original_context else "rope_factors_short"


def full_attention_layout(params: DecoderParams, windows: Sequence[int | None] = ()) -> StateLayout:
    """One region of k and v per layer. windows: of each layer; layers with one window share a group."""
    of_layer = windows or (None,) * params.num_layers
    groups = tuple(Group(_group_of(window), window=window) for window in dict.fromkeys(of_layer))
    pages = tuple(
        kv_pages(layer, params.kv_heads[layer], params.head_dim, params.value_dim, of_layer[layer])
        for layer in range(params.num_layers)
    )
    return StateLayout(groups, pages)


def kv_pages(layer: int, heads: int, head_dim: int, value_dim: int, window: int | None = None) -> Pages:
    """The usual region of a layer: k and v in the types chosen for the cache."""
    fields = {"k": Field((heads, head_dim), "kv.k"), "v": Field((heads, value_dim), "kv.v")}
    return Pages(kv_region(layer), _group_of(window), layer, fields)


def _group_of(window: int | None) -> str:
    return FULL_GROUP if window is None else f"window.{window}"


def kv_region(layer: int) -> str:
    """The usual name of a layer's key and value pages."""
    return f"blk.{layer}.kv"


def special_tokens(header: GgufHeader) -> Mapping[str, tuple[int, ...]]:
    """Ids of `tokenizer.ggml.*_token_id`, by the name in the key; "pad" and "unk" are spelled out there."""
    keys = {name: name for name in ("bos", "eos", "eot", "eom")} | {"pad": "padding", "unk": "unknown"}
    found = {name: header.uint(f"tokenizer.ggml.{key}_token_id", None) for name, key in keys.items()}
    return {name: (token,) for name, token in found.items() if token is not None}


@frozen
class WeightTotals:
    """Sizes for the plan."""

    parameters: int
    weight_bytes: int
    active_bytes: int
    prompt_parameters: int = 0
    stored: Mapping[str, StoredSize] = Factory(dict)
    rows_bytes: Mapping[tuple[str, int], int] = Factory(dict)
    experts_used: int = 0
    """By a row."""


def weight_totals(
    header: GgufHeader,
    names: Iterable[str] | None = None,
    *,
    experts_used: int = 0,
    stored: Sequence[str] = (),
) -> WeightTotals:
    """Sizes of a model with the tensors `names` (None = all in the file); `stored` of them stay in the file.

    One decoded token reads every matrix once; of the embedding table only a row, unless it serves as
    head, and of stacks of experts (`*_exps`) `experts_used`.
    """
    chosen = header.tensors if names is None else names
    tensors = [header.tensors[name] for name in chosen if name not in stored]
    total = sum(tensor.num_bytes for tensor in tensors)
    tied = "output.weight" not in header.tensors
    unread = 0 if tied else header.tensor("token_embd.weight").num_bytes
    multiplied = 0
    for tensor in tensors:
        weights = 0 if tensor.name in ENDS or len(tensor.shape) < 2 else tensor.num_weights
        if experts_used and EXPERTS in tensor.name:
            count = tensor.shape[0]
            unread += tensor.num_bytes * (count - min(count, experts_used)) // count
            weights = weights * min(count, experts_used) // count
        multiplied += weights
    left = {name: header.tensor(name) for name in stored}
    sizes = {name: StoredSize(tensor.num_weights, tensor.num_bytes) for name, tensor in left.items()}
    parameters = sum(tensor.num_weights for tensor in tensors)
    rows = Counter[tuple[str, int]]()
    for tensor in tensors:
        rows[tensor.format.name, tensor.shape[-1] if tensor.shape else 1] += tensor.num_bytes
    active = total - unread
    return WeightTotals(parameters, total, active, multiplied, sizes, dict(rows), experts_used)


def layer_widths(header: GgufHeader, num_layers: int, experts_used: int = 0) -> tuple[LayerWidths, ...]:
    """Of the trunk's layers, by the names their matrices have in every architecture: "ffn_..." and others,
    "..._exps" of routed experts, "...down..." and "...out..." of what goes back to the residual.
    """
    found = [Counter[str]() for _ in range(num_layers)]
    for tensor in header.tensors.values():
        match = WEIGHT.fullmatch(tensor.name)
        if match is None or int(match[1]) >= num_layers:
            continue
        layer, name, shape = found[int(match[1])], match[2], tensor.shape
        if name in (ROUTER, NORM_BEHIND):
            layer["experts" if name == ROUTER else "norm_behind"] = shape[0]
        if name == ROUTER or len(shape) < 2:
            continue
        of = "expert" if EXPERTS in name else "ffn" if name.startswith("ffn_") else "mixer"
        if "out" in name or "down" in name:
            layer[f"{of}_out"] += shape[-1]
        elif not name.startswith((ROUTER, "ssm_conv")):
            layer[f"{of}_in"] += shape[-2]
    return tuple(LayerWidths(**one, experts_used=experts_used if one["experts"] else 0) for one in found)


class ModelSizes(Protocol):
    """What every architecture's own record of hyper-parameters has, `DecoderParams` among them."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def context(self) -> int: ...


def model_spec(
    header: GgufHeader,
    sizes: ModelSizes,
    layout: StateLayout,
    *,
    details: Mapping[str, Any] | None = None,
    totals: WeightTotals | None = None,
    streams: int = 1,
    position_axes: int = 1,
    nextn_layout: StateLayout | None = None,
    nextn_size: StoredSize | None = None,
) -> ModelSpec:
    """What `describe` returns, with the header's own part of it. details: {"decoder": sizes}, and these.

    totals: None = `weight_totals` of a dense model. streams: parallel residuals; a tap and the input of the
    head have all of them.
    """
    totals = totals or weight_totals(header)
    return ModelSpec(
        arch=header.arch,
        identity="",  # content of the file, which a header does not hold; the loader fills it in
        num_layers=sizes.num_layers,
        hidden=sizes.hidden,
        vocab=sizes.vocab,
        context=sizes.context,
        position_axes=position_axes,
        tap_width=streams * sizes.hidden,
        final_width=streams * sizes.hidden,
        layout=layout,
        nextn_layout=nextn_layout,
        nextn_size=nextn_size,
        tree="any",
        tokens=special_tokens(header),
        parameters=totals.parameters,
        weight_bytes=totals.weight_bytes,
        rows_bytes=totals.rows_bytes,
        active_bytes=totals.active_bytes,
        prompt_parameters=totals.prompt_parameters,
        stored=totals.stored,
        widths=layer_widths(header, sizes.num_layers, totals.experts_used),
        details={"decoder": sizes, **(details or {})},
    )


# --- tensors a file must hold


def check_tensors(header: GgufHeader, shapes: Mapping[str, tuple[int, ...]], prefix: str = "") -> None:
    """`prefix + name + ".weight"` must be there in these shapes, a `.bias` beside a matrix fit its rows."""
    for name, shape in shapes.items():
        header.tensor(f"{prefix}{name}.weight", shape)
        if len(shape) > 1 and f"{prefix}{name}.bias" in header.tensors:
            header.tensor(f"{prefix}{name}.bias", shape[:-1])


def check_ends(header: GgufHeader, sizes: ModelSizes) -> None:
    """The embedding table, the last norm and, where the file has one, the head."""
    table = (sizes.vocab, sizes.hidden)
    header.tensor("token_embd.weight", table)
    header.tensor("output_norm.weight", (sizes.hidden,))
    if "output.weight" in header.tensors:
        header.tensor("output.weight", table)


def attention_shapes(params: DecoderParams, layer: int) -> dict[str, tuple[int, ...]]:
    """Query, key, value and output matrices of a layer."""
    heads, kv_heads, width = params.heads[layer], params.kv_heads[layer], params.hidden
    return {
        "attn_q": (heads * params.head_dim, width),
        "attn_k": (kv_heads * params.head_dim, width),
        "attn_v": (kv_heads * params.value_dim, width),
        "attn_output": (width, heads * params.value_dim),
    }


def mlp_shapes(hidden: int, ffn: int, suffix: str = "", experts: int = 0) -> dict[str, tuple[int, ...]]:
    """Gate, up and down of a gated MLP; with `experts`, stacks of them. suffix: "_shexp", "_exps"."""
    stack = (experts,) if experts else ()
    return {
        f"ffn_gate{suffix}": (*stack, ffn, hidden),
        f"ffn_up{suffix}": (*stack, ffn, hidden),
        f"ffn_down{suffix}": (*stack, hidden, ffn),
    }


def expert_shapes(
    header: GgufHeader, prefix: str, hidden: int, experts: ExpertParams
) -> dict[str, tuple[int, ...]]:
    """The stacks of a layer's experts: gate and up in one where the file has them so."""
    stacks = mlp_shapes(hidden, experts.ffn, EXPERTS, experts.count)
    if f"{prefix}ffn_gate_up_exps.weight" in header.tensors:
        del stacks["ffn_gate_exps"], stacks["ffn_up_exps"]
        stacks["ffn_gate_up_exps"] = (experts.count, 2 * experts.ffn, hidden)
    return stacks
