"""Op `attention` on pages of keys and values: two or three launches, none of which waits for the host.

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

from luce_backend_triton import attention_kernels as kernels
from luce_backend_triton import capability, product, shapes
from luce_backend_triton.kernels import INTERPRETED
from luce_core.contracts import AttentionSpec, CodedField, ForwardBatch, Region, RopeSpec
from luce_core.contracts.staged import takes_padding
from luce_core.errors import PluginError
from luce_core.ops import attention as reference
from luce_core.ops.fine import section_axes

FEW, FEW_PROGRAMS, MANY_PROGRAMS = 32, 4, 1
"""Programs a launch should have for each multiprocessor, where the text is long enough to split: for tiles of
at most FEW rows · heads, and for others, whose partial sums are larger.
"""
TILES = ((128, 64), (128, 32), (64, 64), (64, 32), (64, 16), (32, 16))
"""Rows · heads and places of a tile of a long chunk, best first where they fit."""
JOINED, JOIN_COLS = 64, 64
"""Splits and columns of values one program of `join` reads at a time."""
SPARE_BYTES = 4096
"""Of shared memory, for what is not a tile."""
GATES = {"": 0, "sigmoid": 1, "softplus": 2}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CODECS = ("q8_0", "fp8", "q4_0", "tq3_0")
"""Those of `codec_kernels`."""
LOG2E = 1.4426950408889634


@frozen
class Cut:
    """How `attend` is cut."""

    rows: int
    """Rows of the batch in a tile; with their query heads they fill `m`."""
    m: int
    places: int
    warps: int
    stages: int


@frozen
class Room:
    """What limits a program on one device."""

    multiprocessors: int
    shared_bytes: int
    matrix: bool
    """Whether Triton uses its tensor cores (compute capability 8.0 and newer)."""


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


def overlaps(device: torch.device) -> bool:
    """Whether a launch of a step may begin beside the one before it."""
    return device.type == "cuda" and product.overlaps(device)


@cache
def cut(rows: int, seqs: int, group: int, width: int, num_bytes: int, room: Room) -> Cut:
    """For `rows` rows of `seqs` sequences. width: of K and V, rounded up; num_bytes: of one number."""
    wanted = max(16, triton.next_power_of_2(-(-rows // max(1, seqs)) * group))
    line, least = width * num_bytes, triton.next_power_of_2(group)
    if wanted <= 32 or not room.matrix:
        m = max(least, min(wanted, 32 if room.matrix else 16))
        places = 64 if line <= 128 else 32 if line <= 1024 and room.matrix else 16
        return Cut(max(1, m // group), m, places, 4, 3 if line <= 512 else 2)
    for most, places in TILES:
        m = max(least, min(most, wanted))
        if m * width <= 128 * 256 and line * (m + 4 * places) + SPARE_BYTES <= room.shared_bytes:
            break
    return Cut(max(1, m // group), m, places, 8 if m * width >= 64 * 128 else 4, 2)


def splits_of(programs: int, places: int, each: int, wanted: int) -> int:
    """Parts the places of a sequence are cut into, so that `programs` times as many are those wanted."""
    wanted = -(-wanted // max(1, programs))
    return max(1, min(wanted, places // (2 * each)))


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
    query = make_rows(b, q, k, v, region, spec)
    return _attend(b, query, region, spec, gate)


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


def make_rows(
    b: ForwardBatch, q: Tensor, k: Tensor | None, v: Tensor | None, region: Region, spec: AttentionSpec,
    heads_each: int | None = None,
) -> Tensor:  # fmt: skip
    """The query, turned as keys are, [T, H, D] of the type it meets them in; k and v go to their entries.

    heads_each: heads of a program; None: more where there are many rows.
    """
    rows, heads, kv_heads, dim = q.shape[0], spec.heads, spec.kv_heads, spec.head_dim
    q, *apart = by_head(q, dim)
    pages_k, pages_v = region.fields["k"], region.fields["v"]
    query = torch.empty(rows, heads, dim, dtype=_compute_type(region), device=q.device)
    if rows == 0:
        return query
    write = k is not None and v is not None
    key, value = (flat(k), flat(v)) if k is not None and v is not None else (q, q)
    table = b.table[region.group]
    axis, frequency, magnitude, turning = _rope_arguments(spec.rope, dim, q)
    norms = (spec.q_norm, spec.k_norm, spec.v_norm)
    weights = [q if norm is None else norm.weight for norm in norms]
    eps = [0.0 if norm is None else norm.eps for norm in norms]
    scales_k, scales_v, codings = codings_of(region)
    per, overlap = heads_each, overlaps(q.device)
    if per is None:
        per = 8 if INTERPRETED or rows * heads >= 1024 else 1
    groups = -(-heads // per) + (2 * -(-kv_heads // per) if write else 0)
    width = max(dim, spec.value_dim)
    kernels.make_rows[(rows, groups)](
        q, key, value, query, pages_k, pages_v, scales_k, scales_v, *weights, b.position, axis, frequency,
        b.seq, b.index, b.query_start, b.length, b.parent, table.block, table.first, table.count,
        b.slot.shape[0], *apart, key.stride(0), value.stride(0), b.position.stride(0),
        b.position.stride(1), table.block.stride(0), *eps, magnitude,
        H=heads, HK=kv_heads, D=dim, DV=spec.value_dim, DP=triton.next_power_of_2(width), HB=per,
        BLOCK=region.block_entries, HELD=b.phase == "held", WRITE=write, Q_NORM=norms[0] is not None,
        K_NORM=norms[1] is not None, V_NORM=norms[2] is not None, **turning, **codings,
        num_warps=4 if per > 1 else 1, OVERLAP=overlap, launch_pdl=overlap,
    )  # fmt: skip
    return query


def _attend(
    b: ForwardBatch, query: Tensor, region: Region, spec: AttentionSpec, gate: Tensor | None
) -> Tensor:
    """query [T, H, D] -> f32[T, H·Dv], gated."""
    rows, seqs = query.shape[0], b.slot.shape[0]
    heads, kv_heads, value_dim = spec.heads, spec.kv_heads, spec.value_dim
    made = torch.zeros if b.padded else torch.empty
    out = made(rows, heads * value_dim, device=query.device)
    if rows == 0:
        return out
    pages_k, pages_v = region.fields["k"], region.fields["v"]
    table, block = b.table[region.group], region.block_entries
    wide = max(16, triton.next_power_of_2(spec.head_dim)), max(16, triton.next_power_of_2(value_dim))
    room, overlap = room_of(query.device), overlaps(query.device)
    shape = cut(rows, seqs, heads // kv_heads, max(wide), query.element_size(), room)
    scales_k, scales_v, codings = codings_of(region)
    tiles = -(-rows // shape.rows) if seqs == 1 else rows // shape.rows + seqs
    places = table.block.shape[1] * block
    if spec.window is not None:
        places = min(places, spec.window + block + (rows if seqs == 1 else 0))
    per = FEW_PROGRAMS if shape.m <= FEW else MANY_PROGRAMS
    splits = splits_of(tiles * kv_heads, places, shape.places, room.multiprocessors * per)
    parts = peaks = out
    if splits > 1:
        parts = made(splits, rows, heads, value_dim, device=query.device)
        peaks = made(splits, rows, heads, 2, device=query.device)
    span = b.span if b.phase == "prefill" and spec.bidirectional_spans else None
    sinks = out if spec.sinks is None else spec.sinks
    given, *apart = gate_of(gate, spec, out)
    ends = {
        "SINKS": spec.sinks is not None, "GATE": GATES[spec.gate], "PER_HEAD": spec.gate_per_head,
        "DV": value_dim, "H": heads,
    }  # fmt: skip
    capped = spec.softcap != 0.0
    kernels.attend[(tiles, kv_heads, splits)](
        query, pages_k, pages_v, scales_k, scales_v, out, parts, peaks, given, sinks, b.index, b.query_start,
        b.length, b.sees, b.index if span is None else span, table.block, table.first, table.count, rows,
        seqs, b.sees.shape[1], table.block.stride(0), *apart, spec.scale * LOG2E,
        spec.softcap * LOG2E, spec.window or 0, splits,
        HK=kv_heads, D=spec.head_dim, DP=wide[0], DVP=wide[1], M=shape.m, N=shape.places,
        RT=shape.rows, SB=triton.next_power_of_2(seqs), BLOCK=block, HELD=b.phase == "held",
        WINDOW=spec.window is not None, CAP=capped, SPAN=span is not None, SPLIT=splits > 1, **ends,
        **codings, num_warps=shape.warps, num_stages=shape.stages, OVERLAP=overlap,
        launch_pdl=overlap,
    )  # fmt: skip
    if splits > 1:
        step = min(JOINED, triton.next_power_of_2(splits))
        part = max(min(wide[1], JOIN_COLS), codings["VT"])
        kernels.join[(rows, heads, -(-value_dim // part))](
            parts, peaks, out, given, sinks, rows, splits, *apart, STEP=step, DVB=part, **ends,
            VT=codings["VT"], num_warps=4, OVERLAP=overlap, launch_pdl=overlap,
        )  # fmt: skip
    return out


__all__ = ["attention", "cut", "splits_of"]
