"""Held trees of Gated DeltaNet in CUDA C++: one launch for all sequences of 2 to 32 rows."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from luce_backend_triton import bounds, few_rows, nvrtc
from luce_backend_triton.attention import room_of
from luce_backend_triton.bounds import Known, Room
from luce_backend_triton.shapes import BLOCK_RESERVE
from luce_core.contracts import DeltaSpec, ForwardBatch, SlotState

SIZES = (16, 24, 32)
"""Most rows of a sequence, of each kernel."""
WARPS = 13
"""Of a thread block."""
DIM, TAPS = 128, 4
"""Of a head; of the convolution."""
PIECE = 4
"""Floats that are copied at a time: rows and their starts are multiples of it."""
FRONT = "delta.cuh"
"""In front of the source."""
PLACEHOLDERS = {"BITS": 8, "TABLE": 0, "ZERO": 0, "SCALES": 0, "RECORD": 512, "CODES": 0, "STAGES": 2}
"""What csrc/common.cuh wants to know of products, of which there are none here."""


class _Held(ctypes.Structure):
    """`Held` of csrc/delta.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "qkv", "z", "beta", "decay", "out", "window", "taps", "state", "log_x", "log_k", "log_u",
                "log_g", "norm", "a", "dt", "parent", "sees", "query_start", "slots",
            )
        ),
        *(
            (name, ctypes.c_int)
            for name in ("ldqkv", "ldz", "ldbeta", "lddecay", "words", "most", "above")
        ),
        *((name, ctypes.c_float) for name in ("unit_eps", "norm_eps", "q_scale")),
        ("made_rows", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("made", "factors")),
    )  # fmt: skip


def defines_of(rows: int, key_heads: int) -> dict[str, int]:
    """What csrc/delta_tree.cu is compiled with."""
    own = {"X_ROWS": rows, "TILES": 1, "WARPS": WARPS, "KEY_HEADS": key_heads, "SHARED": shared_bytes(rows)}
    return PLACEHOLDERS | own


def shared_bytes(rows: int) -> int:
    """Of one thread block, `Shared` of csrc/delta_tree.cu."""
    stride, even = DIM + 16, -(-rows // 16) * 16
    first = 4 * (TAPS - 1 + rows) * 3 * DIM
    solved = rows * (rows + 4) + even * (20 if rows == 32 else 12) + DIM * (rows // 2 + 2)
    later = 4 * (2 * even * stride + solved)
    return max(first, later) + rows * (4 * stride + 2 * 2 * (DIM + 8) + 16 + 3 * 4) + even * 8 * 4


def arguments(
    b: ForwardBatch, given: list[Tensor], out: Tensor, conv: SlotState, state: SlotState,
    spec: DeltaSpec, above: int, room: Room | None = None,
) -> _Held:  # fmt: skip
    """given: qkv, z, beta and decay, as `readable` wants them. room: of `out`, of trees alone."""
    (log_x,) = conv.log.values()
    log = state.log
    tensors = (
        *given, out, conv.state, spec.conv, state.state, log_x, log["k"], log["u"], log["g"],
        spec.norm.weight, spec.a, spec.dt_bias, b.parent, b.sees, b.query_start, b.slot,
    )  # fmt: skip
    sizes = (*(x.stride(0) for x in given), b.sees.shape[1], log_x.shape[1], above)
    ready = (room.ready.shape[1], room.ready.data_ptr(), room.factors.data_ptr()) if room else (0, None, None)
    scalars = (spec.eps, spec.norm.eps, spec.key_dim**-0.5)
    return _Held(*(x.data_ptr() for x in tensors), *sizes, *scalars, *ready)


def readable(given: list[Tensor], conv: SlotState, state: SlotState, spec: DeltaSpec) -> bool:
    """Whether the kernel reads and writes them: f32, four at a time."""
    qkv, z, *_ = given
    logs = (*conv.log.values(), *state.log.values())
    every = (qkv, z, conv.state, state.state, spec.conv, spec.norm.weight, *logs)
    return (
        (spec.key_dim, spec.value_dim, spec.conv.shape[1]) == (DIM, DIM, TAPS)
        and all(x.dtype is torch.float32 for x in (*given, *every))
        and all(x.data_ptr() % (4 * PIECE) == 0 for x in every)
        and all(x.stride(0) % PIECE == 0 for x in (qkv, z))
    )


def sizes(device: torch.device) -> tuple[int, ...]:
    """Of kernels that run there, upwards."""
    room = room_of(device)
    if device.type != "cuda" or torch.version.hip or not room.matrix:
        return ()
    return tuple(size for size in SIZES if shared_bytes(size) + BLOCK_RESERVE <= room.shared_bytes)


@cache
def _loaded(device: int, rows: int, key_heads: int) -> nvrtc.Kernel:
    """Compiled and loaded once."""
    return few_rows.load(device, "delta_tree", "delta_tree", defines_of(rows, key_heads), FRONT)


def launch(
    b: ForwardBatch, given: list[Tensor], out: Tensor, conv: SlotState, state: SlotState, spec: DeltaSpec,
    above: int, rows: int, known: Known | None = None,
) -> int:  # fmt: skip
    """All sequences of more than `above` rows and at most as many as this returns; no sequence has more than
    `rows`. `above` where the kernel cannot: nothing was done. known: of z. By it `out` is left ready too,
    where all its rows are those of one tree.
    """
    device = out.device
    fitting = sizes(device) if readable(given, conv, state, spec) else ()
    if not fitting:
        return above
    size = next((one for one in fitting if one >= rows), fitting[-1])
    if b.slot.shape[0] == 1 and rows > size:
        return above
    room = room_of_out(b, out, spec, known)
    tree = arguments(b, given, out, conv, state, spec, above, room)
    stream = torch.cuda.current_stream(device).cuda_stream
    grid = spec.value_heads, 1, b.slot.shape[0]
    kernel = _loaded(device.index or 0, size, spec.key_heads)
    kernel.launch(grid, 32 * WARPS, shared_bytes(size), stream, [tree])
    if room is not None:
        room.leave(out)
    return size


def room_of_out(b: ForwardBatch, out: Tensor, spec: DeltaSpec, known: Known | None) -> Room | None:
    """For norm(o) · silu(z): no more than the norm leaves of a head, times z."""
    if known is None or b.slot.shape[0] > 1 or b.padded:
        return None
    return bounds.room(*out.shape, lambda: known.factors(spec.norm.weight))
