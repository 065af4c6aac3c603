"""Op `delta`, row after row: one launch for held rows, two for prompts; none waits for the host.

Held rows of a tree go through the rows above them again: rows · depth steps, at the speed of registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from luce_backend_triton.attention import overlaps
from luce_backend_triton.delta import COLS, WIDEST, padded
from luce_backend_triton.delta_chunks import move_window
from luce_backend_triton.invariant import delta_kernels as kernels
from luce_core.contracts import DeltaSpec, ForwardBatch, SlotState
from luce_core.contracts.staged import takes_padding
from luce_core.ops import delta as reference

WARPS = 8


def _takes(conv: SlotState, state: SlotState, spec: DeltaSpec) -> bool:
    """Whether the kernel does."""
    tensors = (conv.state, *conv.log.values(), state.state, *state.log.values())
    return all(one.dtype is torch.float32 for one in tensors) and max(spec.key_dim, spec.value_dim) <= WIDEST


def _takes_padded(
    ops: Any, b: Any, qkv: Any, z: Any, beta: Any, decay: Any, conv: SlotState, state: SlotState,
    spec: DeltaSpec,
) -> bool:  # fmt: skip
    return _takes(conv, state, spec)


@takes_padding(_takes_padded)
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
    if not _takes(conv, state, spec):
        return reference.delta(ops, b, qkv, z, beta, decay, conv, state, spec)
    qkv, z, beta, decay = (x if x.stride(-1) == 1 else x.contiguous() for x in (qkv, z, beta, decay))
    rows, seqs, held = qkv.shape[0], b.slot.shape[0], b.phase == "held"
    made = torch.zeros if b.padded else torch.empty
    out = made(rows, spec.value_heads * spec.value_dim, device=qkv.device)
    if not rows:
        return out
    (log_x,), log, kernel = conv.log.values(), state.log, spec.conv.shape[1]
    overlap = overlaps(qkv.device)
    kernels.in_turn[(spec.value_heads, rows if held else seqs)](
        qkv, z, beta, decay, out, conv.state, spec.conv, state.state, log_x, log["k"], log["u"], log["g"],
        spec.norm.weight, spec.a, spec.dt_bias, b.parent, b.seq, b.query_start, b.slot, seqs, qkv.stride(0),
        z.stride(0), beta.stride(0), decay.stride(0), log_x.shape[1], spec.lower, spec.eps, spec.norm.eps,
        spec.key_dim**-0.5, int(held), KH=spec.key_heads, VH=spec.value_heads, DK=spec.key_dim,
        DV=spec.value_dim, DKP=padded(spec.key_dim), DVP=padded(spec.value_dim), KERNEL=kernel,
        KDA=spec.kind == "kda", num_warps=WARPS, OVERLAP=overlap,
        launch_pdl=overlap and held,
    )  # fmt: skip
    if not held:
        channels = conv.state.shape[2]
        move_window[(seqs, -(-channels // COLS))](
            qkv, conv.state, b.query_start, b.slot, qkv.stride(0), channels, ROWS=kernel - 1, COLS=COLS
        )
    return out


__all__ = ["delta"]
