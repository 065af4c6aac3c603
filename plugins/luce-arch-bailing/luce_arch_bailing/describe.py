"""Header -> ModelSpec, and every check a bad file must fail. Imports no torch."""

from __future__ import annotations

from luce_arch_bailing.params import BailingParams, KdaParams, MlaParams, MoeParams, read_params
from luce_core.contracts import CacheOptions, Field, Group, ModelSpec, Pages, Slot, StateLayout
from luce_core.gguf import GgufHeader
from luce_core.model.metadata import (
    FULL_GROUP,
    WeightTotals,
    check_ends,
    check_tensors,
    expert_shapes,
    kv_region,
    mlp_shapes,
    model_spec,
    weight_totals,
)

Shapes = dict[str, tuple[int, ...]]
CONVOLVED = ("q", "k", "v")
"""The order of their channels in the convolution's slot."""


def describe(header: GgufHeader, cache: CacheOptions) -> ModelSpec:
    """Read and check the header. Raises ModelFormatError naming the key or tensor."""
    params = read_params(header)
    _check_tensors(header, params)
    return model_spec(header, params, _layout(params), totals=_totals(header, params))


def conv_slot(layer: int) -> str:
    """The newest rows that went into the convolution of q, k and v, before it."""
    return f"blk.{layer}.conv"


def delta_slot(layer: int) -> str:
    """The matrix M of every head."""
    return f"blk.{layer}.delta"


def _layout(params: BailingParams) -> StateLayout:
    """Latents of the layers with attention, two slots of each of the others."""
    pages = tuple(_pages(layer.number, params.mla) for layer in params.layers if layer.mla)
    slots = tuple(
        slot for layer in params.layers if not layer.mla for slot in _slots(layer.number, params.kda)
    )
    return StateLayout((Group(FULL_GROUP),) if pages else (), pages, slots)


def _pages(layer: int, mla: MlaParams) -> Pages:
    fields = {"latent": Field((mla.latent,), "kv.k"), "rope": Field((mla.rope.num_rotated,), "kv.k")}
    return Pages(kv_region(layer), FULL_GROUP, layer, fields)


def _slots(layer: int, kda: KdaParams) -> tuple[Slot, Slot]:
    channels = len(CONVOLVED) * kda.inner
    window = Field((kda.kernel - 1, channels), "f32")
    conv = Slot(conv_slot(layer), layer, window, {"row": Field((channels,), "f32")}, "shift")
    log = {name: Field((kda.heads, kda.dim), "f32") for name in ("k", "u", "g")}
    matrices = Field((kda.heads, kda.dim, kda.dim), "f32")
    return conv, Slot(delta_slot(layer), layer, matrices, log, "delta_fold")


def _totals(header: GgufHeader, params: BailingParams) -> WeightTotals:
    """Of the trunk: blocks that predict further tokens are not loaded."""
    outer = [name for name in header.tensors if not name.startswith("blk.")]
    inner = [name for name in header.tensors if _layer_of(name) in range(params.num_layers)]
    return weight_totals(header, outer + inner, experts_used=params.moe.experts.used)


def _layer_of(name: str) -> int:
    """The number in "blk.7.x"; -1: none."""
    number = name.split(".", 2)[1] if name.startswith("blk.") else ""
    return int(number) if number.isdecimal() else -1


# --- tensors


def _check_tensors(header: GgufHeader, params: BailingParams) -> None:
    check_ends(header, params)
    for layer in params.layers:
        blk = f"blk.{layer.number}."
        check_tensors(header, {"attn_norm": (params.hidden,), "ffn_norm": (params.hidden,)}, blk)
        if layer.mla:
            check_tensors(header, _mla_shapes(params.hidden, params.mla), blk)
        else:
            _check_kda(header, blk, params.hidden, params.kda)
        if layer.moe:
            _check_moe(header, blk, params.hidden, params.moe)
        else:
            check_tensors(header, mlp_shapes(params.hidden, params.ffn), blk)


def _mla_shapes(width: int, mla: MlaParams) -> Shapes:
    queries = mla.heads * mla.query_dim
    shapes: Shapes = {
        "attn_kv_a_mqa": (mla.key_dim, width),
        "attn_kv_a_norm": (mla.latent,),
        "attn_k_b": (mla.heads, mla.latent, mla.nope),
        "attn_v_b": (mla.heads, mla.value_dim, mla.latent),
        "attn_gate": (mla.heads, width),
        "attn_output": (width, mla.heads * mla.value_dim),
    }
    if not mla.q_rank:
        return {**shapes, "attn_q": (queries, width)}
    low = {"attn_q_a": (mla.q_rank, width), "attn_q_a_norm": (mla.q_rank,), "attn_q_b": (queries, mla.q_rank)}
    return shapes | low


def _check_kda(header: GgufHeader, blk: str, width: int, kda: KdaParams) -> None:
    inner = ("attn_q", "attn_k", "attn_v", "ssm_f_a", "ssm_g_a")
    shapes: Shapes = dict.fromkeys(inner, (kda.inner, width))
    shapes |= {"ssm_beta": (kda.heads, width), "ssm_norm": (kda.dim,), "attn_output": (width, kda.inner)}
    check_tensors(header, shapes, blk)
    header.tensor(f"{blk}ssm_dt.bias", (kda.inner,))
    _check_squeezed(header, f"{blk}ssm_a", (kda.heads, 1))
    for name in CONVOLVED:
        _check_squeezed(header, f"{blk}ssm_conv1d_{name}.weight", (1, kda.inner, 1, kda.kernel))


def _check_squeezed(header: GgufHeader, name: str, shape: tuple[int, ...]) -> None:
    """Tools that write files drop some dimensions of 1 and keep others."""
    if [n for n in header.tensor(name).shape if n > 1] != [n for n in shape if n > 1]:
        header.tensor(name, shape)


def _check_moe(header: GgufHeader, blk: str, width: int, moe: MoeParams) -> None:
    stacks = expert_shapes(header, blk, width, moe.experts)
    shared = mlp_shapes(width, moe.shared_ffn, "_shexp")
    check_tensors(header, {"ffn_gate_inp": (moe.experts.count, width), **stacks, **shared}, blk)
    header.tensor(f"{blk}exp_probs_b.bias", (moe.experts.count,))
