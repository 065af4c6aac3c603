"""Op `attention` on pages of keys and values: one to three launches, none of which waits for the host.

What the kernels do not read (one field of keys or values alone, latents, compressed entries) goes to the
reference.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
from attrs import evolve, frozen
from torch import Tensor

from luce_backend_triton import (
    attention_cuts,
    bounds,
    capability,
    one_row_kernels,
    product,
    row_kernels,
    shapes,
)
from luce_backend_triton import attention_kernels as kernels
from luce_backend_triton.attention_cuts import Cut, Room, cut, cut_together, joins, searched
from luce_backend_triton.bounds import Known
from luce_backend_triton.kernels import INTERPRETED
from luce_core.contracts import AttentionSpec, CodedField, ForwardBatch, Region, RopeSpec
from luce_core.contracts.staged import takes_padding
from luce_core.errors import PluginError
from luce_core.ops import attention as reference
from luce_core.ops.fine import section_axes

ONE = 32 * 256
"""Most rows · heads · width of a program that makes its row ready itself."""
JOINED, JOIN_COLS = 128, 64
"""Splits and columns of values one program of `join` reads at a time."""
GATES = {"": 0, "sigmoid": 1, "softplus": 2}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CODECS = ("q8_0", "fp8", "q4_0", "tq3_0")
"""Those of `codec_kernels`."""
LOG2E = 1.4426950408889634


EMULATED = Room(4, 1 << 20, True)
"""Stands for a device in the interpreter."""


def room_of(device: torch.device) -> Room:
    """Of a device."""
    return _room(device, capability.on(device).matrix)


@cache
def _room(device: torch.device, matrix: bool) -> Room:
    if device.type != "cuda":
        return evolve(EMULATED, matrix=matrix)
    room = shapes.room_of(device.index or 0)
    return Room(room.multiprocessors, room.block_bytes, matrix)


def ptx_of(device: torch.device) -> int:
    """Compute capability whose instructions kernels may have in them, such as 90; 0: none, as on AMD's cards
    and in the interpreter.
    """
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = capability.on(device).capability
    return 10 * major + minor


def overlaps(device: torch.device) -> bool:
    """Whether a launch of a step may begin beside the one before it."""
    return device.type == "cuda" and product.overlaps(device)


@cache
def _axes(sections: tuple[int, ...], interleaved: bool, device: torch.device) -> Tensor:
    """i32[n_rot / 2]: position axis of every frequency."""
    return section_axes(sections, interleaved).to(device, torch.int32)


def _known(region: Region, name: str) -> bool:
    """Whether the kernels know how a field is kept."""
    how = region.codecs.get(name)
    return region.fields[name].dtype in DTYPES if how is None else how.codec.name in CODECS


def coding(how: CodedField | None, letter: str) -> dict[str, Any]:
    """What kernels are told of how keys ("K") or values ("V") are kept; None: as numbers."""
    if how is None:
        told = {"C": "", "G": 0, "T": 0, "B": 0, "S": 0}
    else:
        codec, width = how.codec, how.width
        told = {
            "C": codec.name, "G": codec.group(width), "T": codec.turn(width), "B": codec.vector_bytes(width),
            "S": codec.code_bytes(width) // 2,
        }  # fmt: skip
    return {letter + key: value for key, value in told.items()}


def codings_of(region: Region) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Pages of keys and of values once more, as f16 where they are codes, and what kernels are told."""
    codecs = region.codecs
    scales = [
        pages.view(torch.float16) if name in codecs else pages
        for name, pages in ((name, region.fields[name]) for name in ("k", "v"))
    ]
    return scales[0], scales[1], {**coding(codecs.get("k"), "K"), **coding(codecs.get("v"), "V")}


def _compute_type(region: Region) -> torch.dtype:
    """In which queries meet keys."""
    return torch.float16 if "k" in region.codecs else region.fields["k"].dtype


def reads(region: Region, extra: Any, spec: AttentionSpec) -> bool:
    """Whether the kernels do."""
    return (
        set(region.fields) == {"k", "v"}
        and region.stride == 1
        and extra is None
        and not spec.inverse_output_rope
        and all(_known(region, name) for name in region.fields)
        and spec.heads % spec.kv_heads == 0
    )


def reads_padded(
    ops: Any, b: Any, q: Any, k: Any, v: Any, region: Region, spec: AttentionSpec, gate: Any = None,
    extra: Any = None,
) -> bool:  # fmt: skip
    return reads(region, extra, spec)


@takes_padding(reads_padded)
def attention(
    ops: Any,
    b: ForwardBatch,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    region: Region,
    spec: AttentionSpec,
    gate: Tensor | None = None,
    extra: Any = None,
) -> Tensor:
    """q [T, H·D] or [T, H, D], k, v before norm and rope -> f32[T, H·Dv]; see `Ops.attention`."""
    if not reads(region, extra, spec):
        return reference.attention(ops, b, q, k, v, region, spec, gate, extra)
    check_given(k, v, region, spec, gate)
    if b.phase == "held" and q.shape[0] == b.slot.shape[0]:  # one row each: a held sequence has one at least
        made = _one_each(b, q, k, v, region, spec, gate)
        if made is not None:
            return made
    known = bound_of(b, v, region, spec)
    return _attend(b, make_rows(b, q, k, v, region, spec), region, spec, gate, known)


def check_given(
    k: Tensor | None, v: Tensor | None, region: Region, spec: AttentionSpec, gate: Tensor | None
) -> None:
    """Raises PluginError where an input is missing."""
    if spec.gate and gate is None:
        raise PluginError(f"Op 'attention' of layer {spec.layer} has the gate {spec.gate!r} and got none.")
    if (k is None) is not (v is None):
        raise PluginError(
            f"Region {region.name!r} has the fields k, v: op 'attention' takes both or neither."
        )


def flat(x: Tensor) -> Tensor:
    """[T, features], features side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def by_head(x: Tensor, dim: int) -> tuple[Tensor, int, int]:
    """[T, H · dim], or [T, H, dim] at any strides -> it with features side by side, and how far rows and
    heads lie apart.
    """
    x = flat(x)
    return x, x.stride(0), x.stride(1) if x.dim() == 3 else dim


def gate_of(gate: Tensor | None, spec: AttentionSpec, none: Tensor) -> tuple[Tensor, int, int]:
    """As `by_head`, of what the output is multiplied with."""
    if gate is None or not spec.gate:
        return none, 0, 0
    return by_head(gate, 1 if spec.gate_per_head else spec.value_dim)


def _rope_arguments(
    rope: RopeSpec | None, dim: int, none: Tensor
) -> tuple[Tensor, Tensor, float, dict[str, Any]]:
    if rope is None:
        return none, none, 1.0, {"ROPE": False, "START": 0, "HALF": 0, "HALVES": True, "AXES": False}
    half = rope.inv_freq.shape[0]
    axes = bool(rope.sections)
    axis = _axes(rope.sections, rope.interleaved_sections, rope.inv_freq.device) if axes else none
    constants = {
        "ROPE": True, "START": dim - 2 * half if rope.part == "last" else 0, "HALF": half,
        "HALVES": rope.pairs == "halves", "AXES": axes,
    }  # fmt: skip
    return axis, rope.inv_freq, rope.magnitude, constants


def _row_arguments(
    b: ForwardBatch, q: Tensor, k: Tensor | None, v: Tensor | None, region: Region, spec: AttentionSpec
) -> dict[str, Any]:
    """What the kernels that make rows ready are told by name."""
    heads, kv_heads, dim = spec.heads, spec.kv_heads, spec.head_dim
    q, row_apart, head_apart = by_head(q, dim)
    write = k is not None and v is not None
    key, value = (flat(k), flat(v)) if k is not None and v is not None else (q, q)
    axis, frequency, magnitude, turning = _rope_arguments(spec.rope, dim, q)
    norms = {"q": spec.q_norm, "k": spec.k_norm, "v": spec.v_norm}
    told: dict[str, Any] = {"q": q, "k": key, "v": value, "ldq": row_apart, "hdq": head_apart}
    for name, norm in norms.items():
        told[f"{name}_weight"] = q if norm is None else norm.weight
        told[f"{name}_eps"] = 0.0 if norm is None else norm.eps
        told[f"{name.upper()}_NORM"] = norm is not None
    table, overlap = b.table[region.group], overlaps(q.device)
    scales_k, scales_v, codings = codings_of(region)
    return {
        **told, **turning, **codings, "ldk": key.stride(0), "ldv": value.stride(0), "axis": axis,
        "frequency": frequency, "magnitude": magnitude, "pages_k": region.fields["k"],
        "pages_v": region.fields["v"], "scales_k": scales_k, "scales_v": scales_v, "position": b.position,
        "axis_stride": b.position.stride(0), "row_stride": b.position.stride(1), "index": b.index,
        "length": b.length, "parent": b.parent, "block": table.block, "first": table.first,
        "count": table.count, "table_stride": table.block.stride(0), "H": heads, "HK": kv_heads, "D": dim,
        "DV": spec.value_dim, "BLOCK": region.block_entries, "WRITE": write, "OVERLAP": overlap,
        "launch_pdl": overlap,
    }  # fmt: skip


def make_rows(
    b: ForwardBatch, q: Tensor, k: Tensor | None, v: Tensor | None, region: Region, spec: AttentionSpec,
    heads_each: int | None = None, joins: bool = True,
) -> Tensor:  # fmt: skip
    """The query, turned as keys are, [T, H, D] of the type it meets them in; k and v go to their entries.

    heads_each: heads of a program; None: more where there are many rows. joins: whether a product and the
    sum it goes into may be one instruction, with one rounding.
    """
    rows, heads, kv_heads, dim = q.shape[0], spec.heads, spec.kv_heads, spec.head_dim
    query = torch.empty(rows, heads, dim, dtype=_compute_type(region), device=q.device)
    if rows == 0:
        return query
    per = heads_each
    if per is None:
        per = 8 if INTERPRETED or rows * heads >= 1024 else 1
    given = _row_arguments(b, q, k, v, region, spec)
    groups = -(-heads // per) + (2 * -(-kv_heads // per) if given["WRITE"] else 0)
    row_kernels.make_rows[(rows, groups)](
        turned_q=query, seq=b.seq, query_start=b.query_start, num_seqs=b.slot.shape[0],
        DP=triton.next_power_of_2(max(dim, spec.value_dim)), HB=per, HELD=b.phase == "held",
        num_warps=4 if per > 1 else 1, enable_fp_fusion=joins, **given,
    )  # fmt: skip
    return query


def _widths(spec: AttentionSpec) -> tuple[int, int]:
    """Of tiles of keys and of values."""
    return max(16, triton.next_power_of_2(spec.head_dim)), max(16, triton.next_power_of_2(spec.value_dim))


def _shape(b: ForwardBatch, rows: int, region: Region, spec: AttentionSpec, room: Room) -> Cut:
    """How a launch over these rows is cut."""
    seqs, places = b.slot.shape[0], b.table[region.group].block.shape[1] * region.block_entries
    if spec.window is not None:
        places = min(places, spec.window + region.block_entries + (rows if seqs == 1 else 0))
    num_bytes = _compute_type(region).itemsize
    how = cut_together if b.phase == "prefill" and seqs > 1 else cut
    return how(rows, seqs, places, spec.heads, spec.kv_heads, max(_widths(spec)), num_bytes, room)


@frozen
class Ends:
    """Where sums go, and what is done to them last."""

    told: dict[str, Any]
    """By name, to `attend`, `attend_one` and `join`."""
    out: Tensor
    """f32[T, H·Dv]."""
    splits: int
    joined: bool
    """Whether sums of splits, or of the only one, become the result in a launch of their own."""
    known: Known | None
    """Of v, where it bounds values."""

    def join(self, rows: int, spec: AttentionSpec, turned_back: int, overlap: bool) -> Tensor:
        """-> `out`, after the launch that made it or the sums of its splits, which leave it ready too."""
        if not self.joined:
            return self.out
        step = min(JOINED, triton.next_power_of_2(self.splits))
        part = max(min(_widths(spec)[1], JOIN_COLS), turned_back)
        known = self.known if part % 32 == 0 and spec.value_dim % part == 0 else None
        room = known and bounds.room(*self.out.shape, known.factors)
        ready, factors = (room.ready.view(torch.float16), room.factors) if room else (self.out, self.out)
        kernels.join[(rows, spec.heads, -(-spec.value_dim // part))](
            **self.told, ready=ready, factors=factors, STEP=step, DVB=part, VT=turned_back,
            READY=room is not None, OVERLAP=overlap, H=spec.heads, DV=spec.value_dim, num_warps=4,
            launch_pdl=overlap,
        )  # fmt: skip
        return room.leave(self.out) if room else self.out


def bound_of(b: ForwardBatch, v: Tensor | None, region: Region, spec: AttentionSpec) -> Known | None:
    """What is known of v, where it says how large kept values are, those of other rows too, which the same
    weights gave; codecs turn them. A gate is to be no more than 1.
    """
    made = spec.v_norm is not None or "v" in region.codecs
    if v is None or made or b.padded or spec.gate not in ("", "sigmoid"):
        return None
    return bounds.known(v)


def _ends(
    b: ForwardBatch, rows: int, spec: AttentionSpec, gate: Tensor | None, splits: int,
    joined: bool = False, known: Known | None = None,
) -> Ends:  # fmt: skip
    """joined: see `joins`."""
    device = b.index.device
    made = torch.zeros if b.padded else torch.empty
    out = made(rows, spec.heads * spec.value_dim, device=device)
    parts = peaks = out  # the sums of one split lie where the result will
    if splits > 1:
        parts = made(splits, rows, spec.heads, spec.value_dim, device=device)
    if joined:
        peaks = made(splits, rows, spec.heads, 2, device=device)
    given, row_apart, head_apart = gate_of(gate, spec, out)
    told = {
        "out": out, "parts": parts, "peaks": peaks, "gate": given, "ldg": row_apart, "hdg": head_apart,
        "sinks": out if spec.sinks is None else spec.sinks, "SINKS": spec.sinks is not None,
        "GATE": GATES[spec.gate], "PER_HEAD": spec.gate_per_head, "num_rows": rows, "splits": splits,
    }  # fmt: skip
    return Ends(told, out, splits, joined, known)


def _scores(spec: AttentionSpec) -> dict[str, Any]:
    """How scores are made, by name."""
    return {
        "scale": spec.scale * LOG2E, "cap": spec.softcap * LOG2E, "window": spec.window or 0,
        "WINDOW": spec.window is not None, "CAP": spec.softcap != 0.0,
    }  # fmt: skip


def _one_each(
    b: ForwardBatch, q: Tensor, k: Tensor | None, v: Tensor | None, region: Region, spec: AttentionSpec,
    gate: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """In one launch, and `join` where the text is split; None where a program would be too large."""
    rows, wide = b.slot.shape[0], _widths(spec)
    shape = _shape(b, rows, region, spec, room_of(q.device))
    if shape.m > attention_cuts.FEW or shape.m * max(wide) > ONE:
        return None
    ends = _ends(b, rows, spec, gate, shape.splits, shape.splits > 1, bound_of(b, v, region, spec))
    given = _row_arguments(b, q, k, v, region, spec)
    one_row_kernels.attend_one[(rows, spec.kv_heads, shape.splits)](
        **given, **ends.told, **_scores(spec), DP=wide[0], DVP=wide[1], M=shape.m, N=shape.places,
        SPLIT=shape.splits > 1, AHEAD=shape.warps == attention_cuts.HASTY, PTX=ptx_of(q.device),
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return ends.join(rows, spec, given["VT"], given["OVERLAP"])


def _attend(
    b: ForwardBatch, query: Tensor, region: Region, spec: AttentionSpec, gate: Tensor | None,
    known: Known | None,
) -> Tensor:  # fmt: skip
    """query [T, H, D] -> f32[T, H·Dv], gated."""
    rows, seqs = query.shape[0], b.slot.shape[0]
    if rows == 0:
        return _ends(b, rows, spec, gate, 1).out
    shape, wide = _shape(b, rows, region, spec, room_of(query.device)), _widths(spec)
    scales_k, scales_v, codings = codings_of(region)
    joined = joins(shape, codings["VT"])
    ends = _ends(b, rows, spec, gate, shape.splits, joined, known)
    overlap = overlaps(query.device)
    table = b.table[region.group]
    span = b.span if b.phase == "prefill" and spec.bidirectional_spans else None
    kernels.attend[(shape.tiles(rows, seqs), spec.kv_heads, shape.splits)](
        q=query, pages_k=region.fields["k"], pages_v=region.fields["v"], scales_k=scales_k,
        scales_v=scales_v, index=b.index, query_start=b.query_start, length=b.length, sees=b.sees,
        span=b.index if span is None else span, block=table.block, first=table.first, count=table.count,
        num_seqs=seqs, words=b.sees.shape[1], table_stride=table.block.stride(0), H=spec.heads,
        HK=spec.kv_heads, D=spec.head_dim, DV=spec.value_dim, DP=wide[0], DVP=wide[1], M=shape.m,
        N=shape.places, RT=shape.rows, SB=searched(seqs), BLOCK=region.block_entries,
        HELD=b.phase == "held", SPAN=span is not None, SPLIT=ends.joined, **ends.told, **_scores(spec),
        **codings, PTX=ptx_of(query.device), num_warps=shape.warps, num_stages=shape.stages,
        OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip
    return ends.join(rows, spec, codings["VT"], overlap)


__all__ = ["attention"]
