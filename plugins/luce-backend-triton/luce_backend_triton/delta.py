"""Op `delta`: one launch for a held row, in CUDA C++ one for all small trees, else three for trees, five for
prompts; none waits for the host.

Prompts of Kimi Delta Attention, and shapes the kernels do not take, go to the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from luce_backend_triton import bounds, delta_one, delta_trees
from luce_backend_triton import delta_chunks as chunks
from luce_backend_triton import delta_kernels as kernels
from luce_backend_triton.attention import overlaps, room_of
from luce_backend_triton.attention_cuts import searched
from luce_backend_triton.kernels import INTERPRETED
from luce_core.contracts import DeltaSpec, ForwardBatch, SlotState
from luce_core.contracts.staged import takes_padding
from luce_core.ops import delta as reference

CHUNK, SMALL_CHUNK = 64, 16
"""Rows of a prompt that meet one state; where products are small (the interpreter, no tensor cores)."""
SMALL_CHUNK_BYTES = 64 << 10
"""Shared memory `emit` takes there, for heads of 128 (tests/compile_sequences.py shows it)."""
CONV_ROWS = 16
COLS = 1024
WIDEST = 256
"""Of a head."""
PROVEN = 128
"""Width of a head of prompts on a device. With 16, rows came out wrong on an H200, for want of a barrier:
see `attention_kernels.product`. Products were put into another order since, which was not run yet: other
widths go to the reference.
"""
HELD_LIMIT = 64
"""Rows of one sequence `held_tree` takes."""
SMALL_HELD = 16
"""The same for `held_tree` without tensor cores; more go row after row."""
HELD_COLS = 32
"""Columns of a state one program of it reads."""
STATE_COLS = 32
"""Columns of a state one program carries through a prompt."""
STAGES = 2
"""Chunks in flight there."""
WARPS = {"one": 4, "tree": 4, "solve": 4, "carry": 4, "emit": 4}


def halves(device: torch.device) -> torch.dtype:
    """Of the operands of chunks; f32 in the interpreter."""
    return torch.float32 if device.type == "cpu" else torch.float16


def padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _takes(b: ForwardBatch | None, conv: SlotState, state: SlotState, spec: DeltaSpec) -> bool:
    """Whether the kernels do; b: None is any prompt."""
    tensors = (conv.state, *conv.log.values(), state.state, *state.log.values())
    widths = spec.key_dim, spec.value_dim
    if any(tensor.dtype is not torch.float32 for tensor in tensors) or max(widths) > WIDEST:
        return False
    if b is not None and b.phase == "held":
        (log_x,) = conv.log.values()
        return spec.kind == "kda" or min(b.token.shape[0], log_x.shape[1]) <= HELD_LIMIT
    if INTERPRETED or spec.kind != "gated":
        return spec.kind == "gated"
    room = room_of(state.state.device)
    return widths == (PROVEN, PROVEN) and (room.matrix or room.shared_bytes >= SMALL_CHUNK_BYTES)


def _takes_padded(
    ops: Any, b: Any, qkv: Any, z: Any, beta: Any, decay: Any, conv: SlotState, state: SlotState,
    spec: DeltaSpec,
) -> bool:  # fmt: skip
    return _takes(None, conv, state, spec)


class Delta:
    """The op of one layer. cuda: single rows and trees go through CUDA C++."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    @takes_padding(_takes_padded)
    def delta(
        self,
        ops: Any,
        b: ForwardBatch,
        qkv: Tensor,
        z: Tensor,
        beta: Tensor,
        decay: Tensor,
        conv: SlotState,
        state: SlotState,
        spec: DeltaSpec,
    ) -> Tensor:
        """conv + SiLU, split, L2 norm, recurrence, gated norm -> f32[T, Vh·Dv]; see `Ops.delta`."""
        if not _takes(b, conv, state, spec):
            return reference.delta(ops, b, qkv, z, beta, decay, conv, state, spec)
        given = [x if x.stride(-1) == 1 else x.contiguous() for x in (qkv, z, beta, decay)]
        made = torch.zeros if b.padded else torch.empty
        out = made(qkv.shape[0], spec.value_heads * spec.value_dim, device=qkv.device)
        if not qkv.shape[0]:
            return out
        if b.phase == "held":
            _held(b, given, out, conv, state, spec, self.cuda, bounds.known(z))
        else:
            _prompt(b, given, out, conv, state, spec)
        return out


CUDA = Delta(cuda=True)
PORTABLE = Delta(cuda=False)


def chunk_rows(device: torch.device) -> int:
    """Of a prompt, that meet one state."""
    return SMALL_CHUNK if INTERPRETED or not room_of(device).matrix else CHUNK


def _dims(spec: DeltaSpec) -> dict[str, int]:
    return {"KH": spec.key_heads, "VH": spec.value_heads, "DK": spec.key_dim, "DV": spec.value_dim}


def _precise(device: torch.device) -> tuple[str, str]:
    """How f32 is multiplied, of held rows and within chunks: by tensor cores where Triton uses them."""
    if device.type != "cuda" or not room_of(device).matrix:
        return "ieee", "ieee"
    return "ieee" if torch.version.hip else "tf32", "f16"


def _held(
    b: ForwardBatch, given: list[Tensor], out: Tensor, conv: SlotState, state: SlotState, spec: DeltaSpec,
    cuda: bool, known: bounds.Known | None,
) -> None:  # fmt: skip
    """Sequences of one row in one launch, those of more in others; each leaves the others alone. known: of
    z.
    """
    qkv, z, beta, decay = given
    rows, seqs = qkv.shape[0], b.slot.shape[0]
    (log_x,) = conv.log.values()
    log, most = state.log, log_x.shape[1]
    dims = _dims(spec)
    wide = padded(spec.key_dim), padded(spec.value_dim)
    q_scale = spec.key_dim**-0.5
    named = (spec.norm.weight, spec.a, spec.dt_bias)
    strides = (qkv.stride(0), z.stride(0), beta.stride(0), decay.stride(0))
    cut = {**dims, "DKP": wide[0], "DVP": wide[1], "KERNEL": spec.conv.shape[1]}
    logs = (log_x, log["k"], log["u"], log["g"])
    kda, overlap = spec.kind == "kda", overlaps(qkv.device)
    ones = not kda and (seqs > 1 or rows == 1)
    if ones and not (cuda and delta_one.launch(b, given, out, conv, state, spec)):
        kernels.held_one[(spec.value_heads, seqs)](
            qkv, z, beta, decay, out, conv.state, spec.conv, state.state, *logs, *named,
            b.query_start, b.slot, *strides, most, spec.eps, spec.norm.eps, q_scale, **cut,
            ALONE=rows == 1, num_warps=WARPS["one"], OVERLAP=overlap, launch_pdl=overlap,
        )  # fmt: skip
    wide_tree = min(rows, most) > SMALL_HELD and not room_of(qkv.device).matrix
    # One row each, most likely, and this one is quickest at finding nothing to do.
    if kda or rows == seqs > 1 or wide_tree:
        kernels.held_in_turn[(spec.value_heads, seqs)](
            qkv, z, beta, decay, out, conv.state, spec.conv, state.state, *logs, *named, b.parent, b.sees,
            b.query_start, b.slot, *strides, b.sees.shape[1], most, spec.lower, spec.eps, spec.norm.eps,
            q_scale, **cut, R=triton.next_power_of_2(min(rows, most)), ABOVE=0 if kda else 1,
            KDA=kda, num_warps=8, OVERLAP=overlap, launch_pdl=overlap,
        )  # fmt: skip
    elif rows > 1:
        done, largest = 1, min(rows, most)
        if cuda:
            done = delta_trees.launch(b, given, out, conv, state, spec, done, largest, known)
        if done < largest:
            _held_trees(b, given, out, conv, state, spec, done)


def _held_trees(
    b: ForwardBatch, given: list[Tensor], out: Tensor, conv: SlotState, state: SlotState, spec: DeltaSpec,
    done: int,
) -> None:  # fmt: skip
    """Sequences of more than `done` rows, in three launches."""
    qkv, z, beta, decay = given
    rows, device = qkv.shape[0], qkv.device
    (log_x,) = conv.log.values()
    log, most = state.log, log_x.shape[1]
    heads, dims, overlap = spec.value_heads, _dims(spec), overlaps(device)
    wide = padded(spec.key_dim), padded(spec.value_dim)
    begins = {"ABOVE": done, "OVERLAP": overlap, "launch_pdl": overlap, "num_warps": WARPS["tree"]}
    q, k = (torch.empty(rows, spec.key_heads, spec.key_dim, device=device) for _ in range(2))
    v = torch.empty(rows, heads, spec.value_dim, device=device)
    tile = min(16, triton.next_power_of_2(rows))
    kernels.held_rows[(-(-rows // tile), 2 * spec.key_heads + heads)](
        qkv, q, k, v, conv.state, spec.conv, log_x, log["k"], b.parent, b.seq, b.query_start, b.slot, rows,
        qkv.stride(0), most, spec.eps, spec.key_dim**-0.5, **dims, DP=max(wide), RT=tile,
        KERNEL=spec.conv.shape[1], **begins,
    )  # fmt: skip
    cols = wide[1] if INTERPRETED else min(wide[1], HELD_COLS)
    kernels.held_tree[(heads, b.slot.shape[0], -(-spec.value_dim // cols))](
        q, k, v, beta, decay, out, state.state, log["u"], log["g"], spec.a, spec.dt_bias, b.sees,
        b.query_start, b.slot, beta.stride(0), decay.stride(0), b.sees.shape[1], most, **dims, DKP=wide[0],
        DVB=cols, R=padded(min(rows, most)), PRECISE=_precise(device)[0], **begins,
    )  # fmt: skip
    per = min(8, triton.next_power_of_2(heads))
    kernels.norm_heads[(rows, -(-heads // per))](
        out, z, spec.norm.weight, b.seq, b.query_start, rows, z.stride(0), spec.norm.eps, VH=heads,
        DV=spec.value_dim, DVP=wide[1], RT=per, **begins,
    )  # fmt: skip


def _prompt(
    b: ForwardBatch, given: list[Tensor], out: Tensor, conv: SlotState, state: SlotState, spec: DeltaSpec
) -> None:
    qkv, z, beta, decay = given
    rows, seqs, device = qkv.shape[0], b.slot.shape[0], qkv.device
    dims, wide = _dims(spec), (padded(spec.key_dim), padded(spec.value_dim))
    key_heads, heads = spec.key_heads, spec.value_heads
    half = halves(device)
    q, k = (torch.empty(rows, key_heads, spec.key_dim, dtype=half, device=device) for _ in range(2))
    v = torch.empty(rows, heads, spec.value_dim, dtype=half, device=device)
    kernel = spec.conv.shape[1]
    chunks.convolve[(-(-rows // CONV_ROWS), 2 * key_heads + heads)](
        qkv, q, k, v, conv.state, spec.conv, b.seq, b.query_start, b.slot, rows, qkv.stride(0), spec.eps,
        spec.key_dim**-0.5, **dims, DP=max(wide), RT=CONV_ROWS, KERNEL=kernel, num_warps=4,
    )  # fmt: skip
    channels = conv.state.shape[2]
    chunks.move_window[(seqs, -(-channels // COLS))](
        qkv, conv.state, b.query_start, b.slot, qkv.stride(0), channels, ROWS=kernel - 1, COLS=COLS
    )
    chunk = chunk_rows(device)
    many = -(-rows // chunk) if seqs == 1 else rows // chunk + seqs
    w = torch.empty(rows, heads, spec.key_dim, dtype=half, device=device)
    u = torch.empty(rows, heads, spec.value_dim, dtype=half, device=device)
    sums = torch.empty(rows, heads, device=device)
    cut = {**dims, "DKP": wide[0], "CHUNK": chunk, "SB": searched(seqs)}
    chunks.solve[(many, heads)](
        k, v, beta, decay, w, u, sums, spec.a, spec.dt_bias, b.query_start, seqs, beta.stride(0),
        decay.stride(0), **cut, DVP=wide[1], PRECISE=_precise(device)[1], num_warps=WARPS["solve"],
    )  # fmt: skip
    states = torch.empty(many, heads, spec.key_dim, spec.value_dim, dtype=half, device=device)
    cols = wide[1] if INTERPRETED else min(wide[1], STATE_COLS)
    chunks.carry[(-(-spec.value_dim // cols), heads, seqs)](
        k, w, u, sums, states, state.state, b.query_start, b.slot, seqs, **cut, DVB=cols, STAGES=STAGES,
        num_warps=WARPS["carry"],
    )  # fmt: skip
    chunks.emit[(many, heads)](
        q, k, u, sums, states, z, spec.norm.weight, out, b.query_start, seqs, z.stride(0), spec.norm.eps,
        **cut, DVP=wide[1], num_warps=WARPS["emit"],
    )  # fmt: skip


__all__ = ["CUDA", "PORTABLE", "Delta"]
