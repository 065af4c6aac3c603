# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, SIM108, PLR0915
"""Triton kernels of Gated DeltaNet and Kimi Delta Attention: held rows in one launch, prompts in chunks.

See `luce_core.ops.delta` for the recurrence and `DeltaSpec` for the letters. All in f32 but for the
operands of the products of chunks, which are halves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.waiting import let_next_start, wait_for_previous, wait_only

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
def taps_above(
    window, weight, parent, row, live, start, channel, inside, C: tl.constexpr, KERNEL: tl.constexpr
):
    """What the rows before a tree give the convolution of its rows [R, 1], channels [1, c]: a row's window
    goes up to the root and on into the state.
    """
    total = tl.zeros_like(row + channel).to(tl.float32)
    at = row
    above = row * 0  # steps taken beyond the root
    for back in tl.static_range(1, KERNEL):
        up = tl.load(parent + start + at, mask=live & (above == 0), other=-1)
        above += (up < 0).to(tl.int32)
        at = tl.where(up < 0, at, up)
        tap = tl.load(weight + channel * KERNEL + (KERNEL - 1 - back), mask=inside, other=0.0)
        beyond = live & inside & (above > 0)
        total += tap * tl.load(window + (KERNEL - 1 - above) * C + channel, mask=beyond, other=0.0)
    return total


@triton.jit
def taps_within(x, total, weight, parent, row, live, start, channel, inside, ldx, KERNEL: tl.constexpr):
    """(Convolution and SiLU of a tree's rows, the rows themselves); total: what `taps_above` gives."""
    own = tl.load(x + (start + row).to(tl.int64) * ldx + channel, mask=live & inside, other=0.0)
    total += own.to(tl.float32) * tl.load(weight + channel * KERNEL + (KERNEL - 1), mask=inside, other=0.0)
    at, here = row, live
    for back in tl.static_range(1, KERNEL):
        up = tl.load(parent + start + at, mask=here, other=-1)
        here = here & (up >= 0)
        at = tl.where(here, up, at)
        given = tl.load(x + (start + at).to(tl.int64) * ldx + channel, mask=here & inside, other=0.0)
        tap = tl.load(weight + channel * KERNEL + (KERNEL - 1 - back), mask=inside, other=0.0)
        total += tap * given.to(tl.float32)
    return silu(total), own


# --- held rows


@triton.jit
def held_one(
    qkv, z, beta, decay, out, conv, taps, state, log_x, log_k, log_u, log_g, norm, a, dt, query_start, slots,
    ldqkv, ldz, ldbeta, lddecay, most, unit_eps, norm_eps, q_scale,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, KERNEL: tl.constexpr, ALONE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The one held row of a sequence, one value head: all of `delta`, gated. Grid (value heads, sequences).

    ALONE: the batch is one row. Sequences of more rows are left to `held_tree`. Nothing committed changes.
    State and window are read in front of the wait: `fold`, `shift_rows` and prompts let nothing start early,
    and batches come from the host.
    """
    let_next_start(OVERLAP)
    h, seq = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_start + seq)
    if (not ALONE) and (tl.load(query_start + seq + 1) != start + 1):
        wait_only(OVERLAP)
        return
    C: tl.constexpr = 2 * KH * DK + VH * DV
    kh = h % KH
    slot = tl.load(slots + seq).to(tl.int64)
    c, v = tl.arange(0, DKP), tl.arange(0, DVP)
    in_k, in_v = c < DK, v < DV
    from_m = state + ((slot * VH + h) * DK + c[:, None]) * DV + v[None, :]
    memory = tl.load(from_m, mask=in_k[:, None] & in_v[None, :], other=0.0)
    x, window = qkv + start.to(tl.int64) * ldqkv, conv + slot * ((KERNEL - 1) * C)
    kept = log_x + slot * most * C
    at_q, at_k, at_v = kh * DK + c, (KH + kh) * DK + c, 2 * KH * DK + h * DV + v
    before_q, own_q = window_of(window, taps, at_q, in_k, C, KERNEL)
    before_k, own_k = window_of(window, taps, at_k, in_k, C, KERNEL)
    before_v, own_v = window_of(window, taps, at_v, in_v, C, KERNEL)
    weight = tl.load(norm + v, mask=in_v, other=0.0)
    shift, rate = tl.load(dt + h), tl.load(a + h)
    wait_only(OVERLAP)
    q = one_tap(x, kept, before_q, own_q, at_q, in_k, h < KH)
    k = one_tap(x, kept, before_k, own_k, at_k, in_k, h < KH)
    value = one_tap(x, kept, before_v, own_v, at_v, in_v, h >= 0)
    raw = tl.load(decay + start.to(tl.int64) * lddecay + h).to(tl.float32) + shift
    g = log_decay(raw, rate, 0.0, False)
    step = sigmoid(tl.load(beta + start.to(tl.int64) * ldbeta + h).to(tl.float32))
    gate = tl.load(z + start.to(tl.int64) * ldz + h * DV + v, mask=in_v, other=0.0).to(tl.float32)

    k_size, q_size = 1 / tl.sqrt(tl.sum(k * k, 0) + unit_eps), q_scale / tl.sqrt(tl.sum(q * q, 0) + unit_eps)
    met = tl.sum(k * q, 0) * k_size * q_size
    left = tl.exp(g)
    k_read = tl.sum(memory * k[:, None], 0) * (left * k_size)
    q_read = tl.sum(memory * q[:, None], 0) * (left * q_size)
    tl.store(log_k + (slot * most * KH + kh) * DK + c, k * k_size, mask=in_k & (h < KH))
    tl.store(log_g + slot * most * VH + h, g)
    # v and what M reads lie in different layouts: one meeting.
    made = step * (value - k_read)
    tl.store(log_u + (slot * most * VH + h) * DV + v, made, mask=in_v)
    y = q_read + met * made
    y = y * (1 / tl.sqrt(tl.sum(y * y, 0) / DV + norm_eps)) * weight * silu(gate)
    tl.store(out + (start.to(tl.int64) * VH + h) * DV + v, y, mask=in_v)


@triton.jit
def window_of(window, taps, channel, inside, C: tl.constexpr, KERNEL: tl.constexpr):
    """What the rows before give the convolution of one row, and the row's own tap."""
    own = tl.load(taps + channel * KERNEL + (KERNEL - 1), mask=inside, other=0.0)
    total = tl.zeros_like(own)
    for n in tl.static_range(KERNEL - 1):
        row = tl.load(window + n * C + channel, mask=inside, other=0.0)
        total += row * tl.load(taps + channel * KERNEL + n, mask=inside, other=0.0)
    return total, own


@triton.jit
def one_tap(x, kept, before, own, channel, inside, keeps):
    """Convolution and SiLU of one row; the row itself goes to the log where `keeps`."""
    given = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(kept + channel, given, mask=inside & keeps)
    return silu(given * own + before)


@triton.jit(do_not_specialize=["num_rows"])
def held_rows(
    qkv, q, k, v, conv, taps, log_x, log_k, parent, seq, query_start, slots, num_rows, ldqkv, most, unit_eps,
    q_scale,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr,
    RT: tl.constexpr, KERNEL: tl.constexpr, ABOVE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """RT held rows, one head of q, of k or of v: convolution and SiLU, q and k over their norm, logs. Of
    sequences of more than ABOVE rows.

    Grid (rows / RT, heads of q, then of k, then of v). Results f32.
    """
    wait_for_previous(OVERLAP)
    C: tl.constexpr = 2 * KH * DK + VH * DV
    head = tl.program_id(1)
    row = tl.program_id(0) * RT + tl.arange(0, RT)[:, None]
    live = row < num_rows
    s = tl.load(seq + row, mask=live, other=0)
    start = tl.load(query_start + s, mask=live, other=0)
    live = live & (tl.load(query_start + s + 1, mask=live, other=0) > start + ABOVE)
    d = tl.arange(0, DP)[None, :]
    of_v = head >= 2 * KH
    wide = tl.where(of_v, DV, DK)
    channel = tl.where(of_v, 2 * KH * DK + (head - 2 * KH) * DV, head * DK) + d
    inside = d < wide
    slot = tl.load(slots + s, mask=live, other=0).to(tl.int64)
    window = conv + slot * ((KERNEL - 1) * C)
    both = live & inside
    logged = slot * most + row - start
    row_in = row - start
    before = taps_above(window, taps, parent, row_in, live, start, channel, inside, C, KERNEL)
    total, own = taps_within(qkv, before, taps, parent, row_in, live, start, channel, inside, ldqkv, KERNEL)
    tl.store(log_x + logged * C + channel, own, mask=both)
    at = row.to(tl.int64)
    if of_v:
        tl.store(v + (at * VH + head - 2 * KH) * DV + d, total, mask=both)
    elif head >= KH:
        y = unit(total, unit_eps)
        tl.store(k + (at * KH + head - KH) * DK + d, y, mask=both)
        tl.store(log_k + (logged * KH + head - KH) * DK + d, y, mask=both)
    else:
        tl.store(q + (at * KH + head) * DK + d, unit(total, unit_eps) * q_scale, mask=both)


@triton.jit
def exact(a, b, PRECISE: tl.constexpr):
    """a @ b of f32, to f32. PRECISE: an `input_precision`, or f16, whose mantissa is that of tf32."""
    if PRECISE == "f16":
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        return tl.dot(a, b, input_precision=PRECISE)


@triton.jit
def inverse_of(n, SIZE: tl.constexpr, PRECISE: tl.constexpr):
    """(I - n)⁻¹ of a strictly lower triangular n [SIZE, SIZE]: of blocks of 4, then of 16, then of 64.

    Four blocks beside each other need powers up to the third; those stay small where all keys are equal,
    while powers of the whole would not.
    """
    tl.static_assert(SIZE <= 64)
    i = tl.arange(0, SIZE)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inverse += powers(tl.where((i // 4)[:, None] == (i // 4)[None, :], n, 0.0), PRECISE)
    inverse = joined(inverse, n, i, 4, PRECISE)
    if SIZE > 16:
        inverse = joined(inverse, n, i, 16, PRECISE)
    return inverse


@triton.jit
def powers(n, PRECISE: tl.constexpr):
    """n + n² + n³."""
    square = exact(n, n, PRECISE)
    return n + square + exact(n, square, PRECISE)


@triton.jit
def joined(inverse, n, i, BLOCK: tl.constexpr, PRECISE: tl.constexpr):
    """From inverses of blocks to those of blocks four times as large."""
    wider = (i // (4 * BLOCK))[:, None] == (i // (4 * BLOCK))[None, :]
    beside = wider & ((i // BLOCK)[:, None] != (i // BLOCK)[None, :])
    met = exact(inverse, tl.where(beside, n, 0.0), PRECISE)
    return inverse + exact(powers(met, PRECISE), inverse, PRECISE)


@triton.jit(do_not_specialize=["words"])
def held_tree(
    q, k, v, beta, decay, out, state, log_u, log_g, a, dt, sees, query_start, slots,
    ldbeta, lddecay, words, most,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVB: tl.constexpr, R: tl.constexpr, ABOVE: tl.constexpr, PRECISE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The held rows of one sequence, one value head, some of Dv: of what `held_rows` made of them, for
    `norm_heads`.

    Grid (value heads, sequences, blocks of Dv). Sequences of more than ABOVE rows and at most R; others
    are left alone. In front of the wait: what `held_one` reads there.
    """
    let_next_start(OVERLAP)
    h, seq = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_start + seq)
    rows = tl.load(query_start + seq + 1) - start
    if (rows <= ABOVE) | (rows > R):
        wait_only(OVERLAP)
        return
    kh = h % KH
    slot = tl.load(slots + seq).to(tl.int64)
    i, c, d = tl.arange(0, R), tl.arange(0, DKP), tl.program_id(2) * DVB + tl.arange(0, DVB)
    live, in_v, in_k = i < rows, (d < DV)[None, :], (c < DK)[None, :]
    from_m = state + ((slot * VH + h) * DK + c[:, None]) * DV + d[None, :]
    memory = tl.load(from_m, mask=(c < DK)[:, None] & in_v, other=0.0)
    row, alive, place = i[:, None], live[:, None], (start + i).to(tl.int64)
    shift, rate = tl.load(dt + h), tl.load(a + h)
    wait_only(OVERLAP)
    at = place[:, None]
    key = tl.load(k + (at * KH + kh) * DK + c[None, :], mask=alive & in_k, other=0.0)
    query = tl.load(q + (at * KH + kh) * DK + c[None, :], mask=alive & in_k, other=0.0)
    raw = tl.load(decay + place * lddecay + h, mask=live, other=0.0)
    step = tl.load(beta + place * ldbeta + h, mask=live, other=0.0)
    # Products of what was loaded come before reductions: see `product`.
    met, asked = exact(key, tl.trans(key), PRECISE), exact(query, tl.trans(key), PRECISE)
    k_read, q_read = exact(key, memory, PRECISE), exact(query, memory, PRECISE)
    value = tl.load(v + (at * VH + h) * DV + d[None, :], mask=alive & in_v, other=0.0)
    word = tl.load(sees + at * words + (i // 64)[None, :], mask=alive & live[None, :], other=0)
    above = (((word >> (i % 64)[None, :].to(tl.int64)) & 1) != 0) & (i[None, :] < row)
    within = above | (i[None, :] == row)
    g = tl.where(live, log_decay(raw.to(tl.float32) + shift, rate, 0.0, False), 0.0)
    step = tl.where(live, sigmoid(step.to(tl.float32)), 0.0)
    tl.store(log_g + (slot * most + i) * VH + h, g, mask=live & (tl.program_id(2) == 0))
    # The log decay from the state to each row, in both directions of the tile.
    since = tl.sum(tl.where(within, g[None, :], 0.0), 1)
    same = tl.sum(tl.where(i[None, :] == row, since[:, None], 0.0), 0)
    between = tl.exp(tl.where(within, since[:, None] - same[None, :], -float("inf")))
    left = tl.exp(since)[:, None]
    inverse = inverse_of(-tl.where(above, met * between * step[:, None], 0.0), R, PRECISE)
    made = exact(inverse, step[:, None] * (value - left * k_read), PRECISE)
    y = left * q_read + exact(asked * between, made, PRECISE)
    tl.store(log_u + ((slot * most + row) * VH + h) * DV + d[None, :], made, mask=alive & in_v)
    tl.store(out + (at * VH + h) * DV + d[None, :], y, mask=alive & in_v)


@triton.jit(do_not_specialize=["num_rows"])
def norm_heads(
    y, z, norm, seq, query_start, num_rows, ldz, norm_eps,
    VH: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, RT: tl.constexpr, ABOVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Outputs of `held_tree`, normed and gated in place, of sequences of more than ABOVE rows.

    Grid (rows, value heads / RT).
    """
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    s = tl.load(seq + row)
    if tl.load(query_start + s + 1) - tl.load(query_start + s) <= ABOVE:
        return
    h, v = tl.program_id(1) * RT + tl.arange(0, RT), tl.arange(0, DVP)
    inside = (h < VH)[:, None] & (v < DV)[None, :]
    at = y + (row.to(tl.int64) * VH + h[:, None]) * DV + v[None, :]
    gate = tl.load(z + row.to(tl.int64) * ldz + h[:, None] * DV + v[None, :], mask=inside, other=0.0)
    given = tl.load(at, mask=inside, other=0.0)
    tl.store(at, gated_norm(given, gate.to(tl.float32), norm, v, norm_eps, DV, False), mask=inside)


@triton.jit(do_not_specialize=["words"])
def held_in_turn(
    qkv, z, beta, decay, out, conv, taps, state, log_x, log_k, log_u, log_g, norm, a, dt, parent, sees,
    query_start, slots, ldqkv, ldz, ldbeta, lddecay, words, most, lower, unit_eps, norm_eps, q_scale,
    KH: tl.constexpr, VH: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr,
    DVP: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr, ABOVE: tl.constexpr,
    KDA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """All held rows of one sequence, one value head, row after row: every channel may decay on its own.

    Grid (value heads, sequences). Sequences of more than ABOVE rows and at most R. Nothing committed changes.
    """
    wait_for_previous(OVERLAP)
    h, seq = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    rows = stop - start
    if rows <= ABOVE:
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
    q = taps_above(window, taps, parent, row, alive, start, q_at, in_k, C, KERNEL)
    k = taps_above(window, taps, parent, row, alive, start, k_at, in_k, C, KERNEL)
    value = taps_above(window, taps, parent, row, alive, start, v_at, in_v, C, KERNEL)
    q, own_q = taps_within(qkv, q, taps, parent, row, alive, start, q_at, in_k, ldqkv, KERNEL)
    k, own_k = taps_within(qkv, k, taps, parent, row, alive, start, k_at, in_k, ldqkv, KERNEL)
    value, own_v = taps_within(qkv, value, taps, parent, row, alive, start, v_at, in_v, ldqkv, KERNEL)
    q, k = unit(q, unit_eps) * q_scale, unit(k, unit_eps)

    place = (start + row).to(tl.int64)
    logged = slot * most + row
    tl.store(log_x + logged * C + v_at, own_v, mask=alive & in_v)
    if h < KH:
        tl.store(log_x + logged * C + q_at, own_q, mask=alive & in_k)
        tl.store(log_x + logged * C + k_at, own_k, mask=alive & in_k)
        tl.store(log_k + (logged * KH + kh) * DK + c[None, :], k, mask=alive & in_k)
    if KDA:
        raw = tl.load(decay + place * lddecay + h * DK + c[None, :], mask=alive & in_k, other=0.0)
        raw = raw.to(tl.float32) + tl.load(dt + h * DK + c[None, :], mask=in_k, other=0.0)
        g = tl.where(alive & in_k, log_decay(raw, tl.load(a + h), lower, True), 0.0)
        tl.store(log_g + (logged * VH + h) * DK + c[None, :], g, mask=alive & in_k)
    else:
        raw = tl.load(decay + place * lddecay + h, mask=alive, other=0.0).to(tl.float32) + tl.load(dt + h)
        g = tl.where(alive, log_decay(raw, tl.load(a + h), lower, False), 0.0)
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
        own = tl.sum(tl.where(path, g, 0.0), 0)
        since = tl.where(mine, own[None, :], since)
        k_n, q_n = tl.sum(tl.where(mine, k, 0.0), 0), tl.sum(tl.where(mine, q, 0.0), 0)
        v_n, b_n = tl.sum(tl.where(mine, value, 0.0), 0), tl.sum(tl.where(i == n, step, 0.0), 0)
        between = tl.exp(tl.where(path, own[None, :] - since, -float("inf")))
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
