# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0912, PLR0915, C901, SIM108
"""Triton kernel of Gated DeltaNet and Kimi Delta Attention, row after row, all f32.

Chunks would sum by where a chunk begins, trees by their width. Here the state is brought to each row by the
step `state_kernels.fold` takes, so a row above another counts as if it had been committed. Held rows and
prompts are one machine code: compiled for each, additions would join other products (see
`invariant.attention_kernels`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.delta_kernels import log_decay, sigmoid, silu
from luce_backend_triton.state_kernels import stepped
from luce_backend_triton.waiting import wait_only


@triton.jit
def row_above(parent, row, steps):
    """The row `steps` above a held row; below 0 beyond the root. parent: of the sequence's first row."""
    for _ in range(steps):
        if row >= 0:
            row = tl.load(parent + row)
    return row


@triton.jit
def convolved(
    x, window, taps, parent, row, depth, channel, inside, ldx, held, C: tl.constexpr, KERNEL: tl.constexpr
):  # fmt: skip
    """(SiLU of the convolution, the row itself) of the depth-th row behind the state; x: the sequence's."""
    own = tl.load(x + row.to(tl.int64) * ldx + channel, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros_like(own)
    for n in tl.static_range(KERNEL - 1):
        behind = depth >= KERNEL - 1 - n
        source = row - (KERNEL - 1 - n)
        if held != 0:
            source = row_above(parent, row, KERNEL - 1 - n)
        source = tl.maximum(source, 0).to(tl.int64)
        kept = tl.minimum(depth + n, KERNEL - 2)  # of the window, where the row lies before the first
        given = tl.load(x + source * ldx + channel, mask=inside & behind, other=0.0).to(tl.float32)
        before = tl.load(window + kept * C + channel, mask=inside & (behind == 0), other=0.0)
        tap = tl.load(taps + channel * KERNEL + n, mask=inside, other=0.0)
        total += tl.where(behind, given, before) * tap
    tap = tl.load(taps + channel * KERNEL + (KERNEL - 1), mask=inside, other=0.0)
    return silu(own * tap + total), own


@triton.jit(do_not_specialize=["num_seqs", "most", "held"])
def in_turn(
    qkv, z, beta, decay, out, conv, taps, state, log_x, log_k, log_u, log_g, norm, a, dt, parent, seq,
    query_start, slots, num_seqs, ldqkv, ldz, ldbeta, lddecay, most, lower, unit_eps, norm_eps, q_scale, held,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, KERNEL: tl.constexpr, KDA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One value head. held: of one row, through the rows above it; its log. Prompts: of all rows of a
    sequence, and the state behind them.

    Grid (value heads, rows; prompts: sequences).
    """
    wait_only(OVERLAP)
    h = tl.program_id(0)
    last = tl.program_id(1) * 0
    s = tl.program_id(1)
    if held != 0:
        if tl.program_id(1) >= tl.load(query_start + num_seqs):
            return
        s = tl.load(seq + tl.program_id(1))
        start = tl.load(query_start + s)
        last = tl.program_id(1) - start
        parent += start
        steps, above = last * 0 + 1, tl.load(parent + last)
        while above >= 0:
            steps += 1
            above = tl.load(parent + above)
    else:
        start = tl.load(query_start + s)
        steps = tl.load(query_start + s + 1) - start
        if steps <= 0:
            return
    C: tl.constexpr = 2 * KH * DK + VH * DV
    kh = h % KH
    slot = tl.load(slots + s).to(tl.int64)
    c, v = tl.arange(0, DKP), tl.arange(0, DVP)
    in_k, in_v = c < DK, v < DV
    both = in_k[:, None] & in_v[None, :]
    to_m = state + ((slot * VH + h) * DK + c[:, None]) * DV + v[None, :]
    memory = tl.load(to_m, mask=both, other=0.0)
    x, window = qkv + start.to(tl.int64) * ldqkv, conv + slot * ((KERNEL - 1) * C)
    at_q, at_k, at_v = kh * DK + c, (KH + kh) * DK + c, 2 * KH * DK + h * DV + v
    weight, rate = tl.load(norm + v, mask=in_v, other=0.0), tl.load(a + h)
    for depth in range(steps):
        row = depth * 1
        if held != 0:
            row = row_above(parent, last, steps - 1 - depth)
        place = (start + row).to(tl.int64)
        q, own_q = convolved(x, window, taps, parent, row, depth, at_q, in_k, ldqkv, held, C, KERNEL)
        k, own_k = convolved(x, window, taps, parent, row, depth, at_k, in_k, ldqkv, held, C, KERNEL)
        value, own_v = convolved(x, window, taps, parent, row, depth, at_v, in_v, ldqkv, held, C, KERNEL)
        q = q * (1 / tl.sqrt(tl.sum(q * q, 0) + unit_eps)) * q_scale
        k = k * (1 / tl.sqrt(tl.sum(k * k, 0) + unit_eps))
        step = sigmoid(tl.load(beta + place * ldbeta + h).to(tl.float32))
        if KDA:
            raw = tl.load(decay + place * lddecay + h * DK + c, mask=in_k, other=0.0).to(tl.float32)
            raw += tl.load(dt + h * DK + c, mask=in_k, other=0.0)
            g = tl.where(in_k, log_decay(raw, rate, lower, True), 0.0)
            u = step * (value - tl.sum(memory * (tl.exp(g) * k)[:, None], 0))
            memory = stepped(memory, tl.exp(g)[:, None], k, u)
        else:
            raw = tl.load(decay + place * lddecay + h).to(tl.float32) + tl.load(dt + h)
            g = log_decay(raw, rate, lower, False)
            u = step * (value - tl.sum(memory * k[:, None], 0) * tl.exp(g))
            memory = stepped(memory, tl.exp(g), k, u)
        if (held == 0) | (depth == steps - 1):
            y = tl.sum(memory * q[:, None], 0)
            gate = tl.load(z + place * ldz + h * DV + v, mask=in_v, other=0.0).to(tl.float32)
            y = y * (1 / tl.sqrt(tl.sum(y * y, 0) / DV + norm_eps)) * weight
            if KDA:
                y = y * sigmoid(gate)
            else:
                y = y * silu(gate)
            tl.store(out + (place * VH + h) * DV + v, y, mask=in_v)
        if (held != 0) & (depth == steps - 1):
            logged = slot * most + row
            tl.store(log_u + (logged * VH + h) * DV + v, u, mask=in_v)
            if KDA:
                tl.store(log_g + (logged * VH + h) * DK + c, g, mask=in_k)
            else:
                tl.store(log_g + logged * VH + h, g)
            tl.store(log_x + logged * C + at_v, own_v, mask=in_v)
            first = in_k & (h < KH)
            tl.store(log_x + logged * C + at_q, own_q, mask=first)
            tl.store(log_x + logged * C + at_k, own_k, mask=first)
            tl.store(log_k + (logged * KH + kh) * DK + c, k, mask=first)
    if held == 0:
        tl.store(to_m, memory, mask=both)
