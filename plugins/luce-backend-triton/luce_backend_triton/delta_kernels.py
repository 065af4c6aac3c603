# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, SIM108, PLR0915
"""Triton kernels of Gated DeltaNet and Kimi Delta Attention: held rows in one launch, prompts in chunks.

See `luce_core.ops.delta` for the recurrence and `DeltaSpec` for the letters. All in f32 but for the
operands of the products of chunks, which are halves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.attention_kernels import column_of

# --- pieces


@triton.jit
def silu(x):
    return x / (1 + tl.exp(tl.minimum(-x, 80.0)))


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(tl.minimum(-x, 80.0)))


@triton.jit
def log_decay(raw, a, lower, KDA: tl.constexpr):
    """g of a row: gated a · softplus(raw), kda lower · sigmoid(a · raw)."""
    if KDA:
        g = lower * sigmoid(a * raw)
    else:
        g = a * tl.where(raw > 20, raw, tl.log(1 + tl.exp(tl.minimum(raw, 20.0))))
    return g


@triton.jit
def unit(x, eps):
    """Rows of x over their L2 norm."""
    return x * (1 / tl.sqrt(tl.sum(x * x, 1)[:, None] + eps))


@triton.jit
def held_taps(
    x, window, weight, parent, row, live, start, channel, inside, ldx, C: tl.constexpr, KERNEL: tl.constexpr
):
    """Convolution of held rows [R, 1] along their ancestors, channels [1, c]: a row's window goes up to the
    root and on into the state.
    """
    both = live & inside
    total = tl.zeros_like(row + channel).to(tl.float32)
    at = row
    above = row * 0  # steps taken beyond the root
    for back in tl.static_range(KERNEL):
        tap = tl.load(weight + channel * KERNEL + (KERNEL - 1 - back), mask=inside, other=0.0)
        mine = above == 0
        given = tl.load(x + (start + at).to(tl.int64) * ldx + channel, mask=both & mine, other=0.0)
        kept = tl.load(window + (KERNEL - 1 - above) * C + channel, mask=both & (above > 0), other=0.0)
        total += tap * tl.where(mine, given.to(tl.float32), kept)
        if back < KERNEL - 1:
            up = tl.load(parent + start + at, mask=live, other=-1)
            above += (up < 0).to(tl.int32)
            at = tl.where(up < 0, at, up)
    return silu(total)


# --- held rows


@triton.jit
def held(
    qkv, z, beta, decay, out, conv, taps, state, log_x, log_k, log_u, log_g, norm, a, dt, parent, sees,
    query_start, slots, ldqkv, ldz, ldbeta, lddecay, words, most, lower, unit_eps, norm_eps, q_scale,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr, KDA: tl.constexpr,
):  # fmt: skip
    """All held rows of one sequence, one value head: convolution, recurrence, gated norm, logs.

    Grid (value heads, sequences). R: at least the rows of a sequence. Nothing committed changes.
    """
    h, seq = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    rows = stop - start
    if rows <= 0:
        return
    C: tl.constexpr = 2 * KH * DK + VH * DV
    kh = h % KH
    slot = tl.load(slots + seq).to(tl.int64)
    i, c, v = tl.arange(0, R), tl.arange(0, DKP), tl.arange(0, DVP)
    in_k, in_v = (c < DK)[None, :], (v < DV)[None, :]
    memory = tl.load(
        state + ((slot * VH + h) * DK + c[:, None]) * DV + v[None, :],
        mask=(c < DK)[:, None] & in_v,
        other=0.0,
    )
    live = i < rows
    row, alive = i[:, None], live[:, None]
    window = conv + slot * ((KERNEL - 1) * C)
    q_at, k_at, v_at = kh * DK + c[None, :], (KH + kh) * DK + c[None, :], 2 * KH * DK + h * DV + v[None, :]
    q = held_taps(qkv, window, taps, parent, row, alive, start, q_at, in_k, ldqkv, C, KERNEL)
    k = held_taps(qkv, window, taps, parent, row, alive, start, k_at, in_k, ldqkv, C, KERNEL)
    value = held_taps(qkv, window, taps, parent, row, alive, start, v_at, in_v, ldqkv, C, KERNEL)
    q, k = unit(q, unit_eps) * q_scale, unit(k, unit_eps)

    place = (start + row).to(tl.int64)
    logged = slot * most + row
    given = tl.load(qkv + place * ldqkv + v_at, mask=alive & in_v, other=0.0)
    tl.store(log_x + logged * C + v_at, given, mask=alive & in_v)
    if h < KH:
        given = tl.load(qkv + place * ldqkv + q_at, mask=alive & in_k, other=0.0)
        tl.store(log_x + logged * C + q_at, given, mask=alive & in_k)
        given = tl.load(qkv + place * ldqkv + k_at, mask=alive & in_k, other=0.0)
        tl.store(log_x + logged * C + k_at, given, mask=alive & in_k)
        tl.store(log_k + (logged * KH + kh) * DK + c[None, :], k, mask=alive & in_k)
    if KDA:
        raw = tl.load(decay + place * lddecay + h * DK + c[None, :], mask=alive & in_k, other=0.0).to(
            tl.float32
        )
        raw += tl.load(dt + h * DK + c[None, :], mask=in_k, other=0.0)
        g = log_decay(raw, tl.load(a + h), lower, True)
        g = tl.where(alive & in_k, g, 0.0)
        tl.store(log_g + (logged * VH + h) * DK + c[None, :], g, mask=alive & in_k)
    else:
        raw = tl.load(decay + place * lddecay + h, mask=alive, other=0.0).to(tl.float32) + tl.load(dt + h)
        g = tl.where(alive, log_decay(raw, tl.load(a + h), lower, False), 0.0)  # [R, 1]
        tl.store(log_g + logged * VH + h, g, mask=alive)
    step = sigmoid(tl.load(beta + (start + i).to(tl.int64) * ldbeta + h, mask=live, other=0.0).to(tl.float32))

    since = g * 0.0  # log decay from the state to each row, along its path
    made = tl.zeros((R, DVP), tl.float32)
    y = tl.zeros((R, DVP), tl.float32)
    for n in range(rows):
        word = tl.load(sees + (start + n).to(tl.int64) * words + i // 64, mask=live, other=0)
        above = (((word >> (i % 64).to(tl.int64)) & 1) != 0) & (i < n)
        mine = row == n
        path = (above[:, None] | mine) & alive
        own = tl.sum(tl.where(path, g, 0.0), 0)  # [Dk] or [1]
        since = tl.where(mine, own[None, :], since)
        k_n, q_n = tl.sum(tl.where(mine, k, 0.0), 0), tl.sum(tl.where(mine, q, 0.0), 0)
        v_n, b_n = tl.sum(tl.where(mine, value, 0.0), 0), tl.sum(tl.where(i == n, step, 0.0), 0)
        between = tl.exp(tl.where(path, own[None, :] - since, -float("inf")))  # [R, Dk] or [R, 1]
        k_met = tl.sum(k * k_n[None, :] * between, 1)
        q_met = tl.sum(k * q_n[None, :] * between, 1)
        k_met = tl.where(i == n, 0.0, k_met)
        left = tl.exp(own)
        k_read = tl.sum(memory * (left * k_n)[:, None], 0)
        q_read = tl.sum(memory * (left * q_n)[:, None], 0)
        u = b_n * (v_n - k_read - tl.sum(made * k_met[:, None], 0))
        made = tl.where(mine, u[None, :], made)
        y = tl.where(mine, (q_read + tl.sum(made * q_met[:, None], 0))[None, :], y)
    tl.store(log_u + (logged * VH + h) * DV + v[None, :], made, mask=alive & in_v)
    gate = tl.load(z + place * ldz + h * DV + v[None, :], mask=alive & in_v, other=0.0).to(tl.float32)
    y = gated_norm(y, gate, norm, v, norm_eps, DV, KDA)
    tl.store(out + (place * VH + h) * DV + v[None, :], y, mask=alive & in_v)


@triton.jit
def gated_norm(y, gate, norm, v, eps, DV: tl.constexpr, KDA: tl.constexpr):
    """rms(y) · weight · silu(gate), or · sigmoid(gate). y [R, Dv]."""
    y = y * (1 / tl.sqrt(tl.sum(y * y, 1)[:, None] / DV + eps))
    y = y * tl.load(norm + v, mask=v < DV, other=0.0)[None, :]
    if KDA:
        y = y * sigmoid(gate)
    else:
        y = y * silu(gate)
    return y


# --- commits


@triton.jit
def fold(
    state, log_k, log_u, log_g, states, logs_k, logs_u, logs_g, slots, path, count, path_stride, most,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVB: tl.constexpr, KDA: tl.constexpr,
):  # fmt: skip
    """M <- diag(exp g) M + k uᵀ along the accepted rows. Grid (layers · value heads, sequences, blocks of Dv).

    state, log_*: those of the first layer; states, logs_*: i64, how far those of every layer lie from
    them.
    """
    seq = tl.program_id(1)
    steps = tl.load(count + seq)
    if steps <= 0:
        return
    layer, h = tl.program_id(0) // VH, tl.program_id(0) % VH
    state += tl.multiple_of(tl.load(states + layer), 4)
    log_k += tl.multiple_of(tl.load(logs_k + layer), 4)
    log_u += tl.multiple_of(tl.load(logs_u + layer), 4)
    log_g += tl.multiple_of(tl.load(logs_g + layer), 4)
    slot = tl.load(slots + seq).to(tl.int64)
    c, v = tl.arange(0, DKP), tl.program_id(2) * DVB + tl.arange(0, DVB)
    at = state + ((slot * VH + h) * DK + c[:, None]) * DV + v[None, :]
    inside = (c < DK)[:, None] & (v < DV)[None, :]
    memory = tl.load(at, mask=inside, other=0.0)
    for n in range(steps):
        row = slot * most + tl.load(path + seq * path_stride + n)
        k = tl.load(log_k + (row * KH + h % KH) * DK + c, mask=c < DK, other=0.0)
        u = tl.load(log_u + (row * VH + h) * DV + v, mask=v < DV, other=0.0)
        if KDA:
            g = tl.load(log_g + (row * VH + h) * DK + c, mask=c < DK, other=0.0)
            memory = memory * tl.exp(g)[:, None] + k[:, None] * u[None, :]
        else:
            memory = memory * tl.exp(tl.load(log_g + row * VH + h)) + k[:, None] * u[None, :]
    tl.store(at, memory, mask=inside)


@triton.jit
def shift_rows(
    state, log, states, logs, slots, path, count, path_stride, most, width,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Append the accepted rows to windows of ROWS rows, keep the newest. states, logs: as for `fold`.

    Grid (layers, sequences, blocks of columns). A thread moves its column down row by row: it reads below
    what it has written.
    """
    seq = tl.program_id(1)
    steps = tl.load(count + seq)
    if steps <= 0:
        return
    layer = tl.program_id(0)
    state += tl.multiple_of(tl.load(states + layer), 4)
    log += tl.multiple_of(tl.load(logs + layer), 4)
    slot = tl.load(slots + seq).to(tl.int64)
    c = tl.program_id(2) * COLS + tl.arange(0, COLS)
    for n in range(ROWS):
        taken = n + steps - ROWS
        if taken >= 0:
            row = tl.load(path + seq * path_stride + taken)
            x = tl.load(log + (slot * most + row) * width + c, mask=c < width)
        else:
            x = tl.load(state + (slot * ROWS + n + steps) * width + c, mask=c < width)
        tl.store(state + (slot * ROWS + n) * width + c, x, mask=c < width)


@triton.jit
def move_entries(
    page, pages, lengths, path, count, block, first, used, path_stride, table_stride, words,
    COLS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Entries of accepted rows from length + path[n] to length + n, as i32. pages: how far from page.

    Grid (page tensors, sequences, blocks of columns). Paths rise, so nothing is read after it was written
    over.
    """
    seq = tl.program_id(1)
    steps = tl.load(count + seq)
    page += tl.multiple_of(tl.load(pages + tl.program_id(0)), 4)
    length = tl.load(lengths + seq)
    c = tl.program_id(2) * COLS + tl.arange(0, COLS)
    first += seq * table_stride
    block += seq * table_stride
    columns = tl.load(used + seq)
    for n in range(steps):
        row = tl.load(path + seq * path_stride + n)
        if row != n:
            source = entry_of(block, first, columns, length + row, BLOCK)
            target = entry_of(block, first, columns, length + n, BLOCK)
            x = tl.load(page + source * words + c, mask=c < words)
            tl.store(page + target * words + c, x, mask=c < words)


@triton.jit
def entry_of(block, first, columns, token, BLOCK: tl.constexpr):
    column = column_of(first, columns, token, BLOCK)
    return tl.load(block + column).to(tl.int64) * BLOCK + token - tl.load(first + column)
