"""Op `delta`: one launch for held rows, six for prompts, none of which waits for the host.

Prompts of Kimi Delta Attention, and shapes the kernels do not take, go to the reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from luce_backend_triton import delta_chunks as chunks
from luce_backend_triton import delta_kernels as kernels
from luce_backend_triton.kernels import INTERPRETED
from luce_core.contracts import DeltaSpec, ForwardBatch, SlotState
from luce_core.ops import delta as reference

CHUNK = 16 if INTERPRETED else 64
"""Rows of a prompt that meet one state."""
CONV_ROWS = 32
COLS = 1024
WIDEST = 256
"""Of a head."""
STATE_COLS = 32
"""Columns of a state one program carries through a prompt."""


def halves(device: torch.device) -> torch.dtype:
    """Of the operands of chunks; f32 in the interpreter."""
    return torch.float32 if device.type == "cpu" else torch.float16


def _padded(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _takes(b: ForwardBatch, conv: SlotState, state: SlotState, spec: DeltaSpec) -> bool:
    """Whether the kernels do."""
    tensors = (conv.state, *conv.log.values(), state.state, *state.log.values())
    return (
        (b.phase == "held" or spec.kind == "gated")
        and all(tensor.dtype is torch.float32 for tensor in tensors)
        and max(spec.key_dim, spec.value_dim) <= WIDEST
    )


def delta(
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
    out = torch.empty(qkv.shape[0], spec.value_heads * spec.value_dim, device=qkv.device)
    if qkv.shape[0]:
        (_held if b.phase == "held" else _prompt)(b, given, out, conv, state, spec)
    return out


def _dims(spec: DeltaSpec) -> dict[str, int]:
    return {"KH": spec.key_heads, "VH": spec.value_heads, "DK": spec.key_dim, "DV": spec.value_dim}


def _held(
    b: ForwardBatch, given: list[Tensor], out: Tensor, conv: SlotState, state: SlotState, spec: DeltaSpec
) -> None:
    qkv, z, beta, decay = given
    (log_x,) = conv.log.values()
    most = log_x.shape[1]
    rows = triton.next_power_of_2(min(qkv.shape[0], most))
    wide = _padded(spec.key_dim), _padded(spec.value_dim)
    kernels.held[(spec.value_heads, b.slot.shape[0])](
        qkv, z, beta, decay, out, conv.state, spec.conv, state.state, log_x,
        state.log["k"], state.log["u"], state.log["g"], spec.norm.weight, spec.a, spec.dt_bias, b.parent, b.sees,
        b.query_start, b.slot, qkv.stride(0), z.stride(0), beta.stride(0), decay.stride(0), b.sees.shape[1], most,
        spec.lower, spec.eps, spec.norm.eps, spec.key_dim**-0.5, **_dims(spec), DKP=wide[0], DVP=wide[1], R=rows,
        KERNEL=spec.conv.shape[1], KDA=spec.kind == "kda", num_warps=8 if wide[0] * wide[1] >= 1 << 12 else 4,
    )  # fmt: skip


def _prompt(
    b: ForwardBatch, given: list[Tensor], out: Tensor, conv: SlotState, state: SlotState, spec: DeltaSpec
) -> None:
    qkv, z, beta, decay = given
    rows, seqs, device = qkv.shape[0], b.slot.shape[0], qkv.device
    dims, wide = _dims(spec), (_padded(spec.key_dim), _padded(spec.value_dim))
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
    many = -(-rows // CHUNK) if seqs == 1 else rows // CHUNK + seqs
    w = torch.empty(rows, heads, spec.key_dim, dtype=half, device=device)
    u = torch.empty(rows, heads, spec.value_dim, dtype=half, device=device)
    sums = torch.empty(rows, heads, device=device)
    cut = {**dims, "DKP": wide[0], "CHUNK": CHUNK, "SB": triton.next_power_of_2(seqs)}
    chunks.solve[(many, heads)](
        k, v, beta, decay, w, u, sums, spec.a, spec.dt_bias, b.query_start, seqs, beta.stride(0), decay.stride(0),
        **cut, DVP=wide[1], num_warps=4,
    )  # fmt: skip
    states = torch.empty(many, heads, spec.key_dim, spec.value_dim, dtype=half, device=device)
    cols = wide[1] if INTERPRETED else min(wide[1], STATE_COLS)
    chunks.carry[(-(-spec.value_dim // cols), heads, seqs)](
        k,
        w,
        u,
        sums,
        states,
        state.state,
        b.query_start,
        b.slot,
        seqs,
        **cut,
        DVB=cols,
        STAGES=2,
        num_warps=4,
    )
    chunks.emit[(many, heads)](
        q, k, u, sums, states, z, spec.norm.weight, out, b.query_start, seqs, z.stride(0), spec.norm.eps, **cut,
        DVP=wide[1], num_warps=8,
    )  # fmt: skip


__all__ = ["delta"]
