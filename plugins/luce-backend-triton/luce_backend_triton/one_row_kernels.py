# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0915, PLR0912, C901, SIM102, SIM108
"""Triton kernel of paged attention where each sequence has one row: norms, RoPE, append and softmax at once.

Constants that tell of codes: see `luce_backend_triton.attention_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_backend_triton.attention_kernels import (
    capped,
    gate_at,
    gated,
    load_keys,
    load_values,
    product,
    vectors_of,
    with_sink,
    with_tile,
)
from luce_backend_triton.codec_kernels import load_vectors, numbers_of, turn, turn_back
from luce_backend_triton.row_kernels import (
    entry_at,
    features,
    places_below,
    turned,
    turning_of,
    weights_of,
    write_vectors,
)
from luce_backend_triton.waiting import let_next_start, wait_only

SOON = tl.constexpr(4)
"""Tiles of pages that are asked for while the launch before still runs."""


@triton.jit
def ask_for(pages, vector, added, EACH: tl.constexpr, BYTES: tl.constexpr, PIECES: tl.constexpr):
    """Fetch vectors of BYTES bytes, EACH numbers apart in `pages`, into L2. Nothing is read: they may be old.

    PIECES: of 64 bytes, at least all of a vector.
    """
    at = (pages + (vector + added) * EACH).to(tl.int64)
    at = at[:, None] + tl.minimum(tl.arange(0, PIECES) * 64, BYTES - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def with_places(
    peak, weight, total, query, key, k_scale, k_minus, value, v_scale, v_minus, here, base, first, own,
    window, scale, cap,
    N: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, KC: tl.constexpr, KG: tl.constexpr, VC: tl.constexpr, VG: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The sums, after places base .. base + N of committed tokens: those in the window."""
    if KC != "":
        key = tl.trans(numbers_of(key, k_scale, k_minus, N, DP, KC, KG, PTX))
    score = capped(product(query, key) * scale, cap, CAP)
    seen = here
    if WINDOW:
        place = base + tl.arange(0, N)
        token = tl.load(first + place // BLOCK, mask=here, other=0) + place % BLOCK
        seen = here & (token > own - window)
    score = tl.where(seen[None, :], score, -float("inf"))
    return with_tile(peak, weight, total, score, value, v_scale, v_minus, N, DVP, VC, VG, PTX)


@triton.jit(do_not_specialize=["num_rows", "axis_stride", "row_stride", "table_stride", "splits"])
def attend_one(
    q, k, v, pages_k, pages_v, scales_k, scales_v, out, parts, peaks, gate, sinks, q_weight, k_weight,
    v_weight, position, axis, frequency, index, length, parent, block, first, count, num_rows, ldq, hdq, ldk,
    ldv, ldg, hdg, axis_stride, row_stride, table_stride, q_eps, k_eps, v_eps, magnitude, scale, cap, window,
    splits,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr, Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr, V_NORM: tl.constexpr, ROPE: tl.constexpr, START: tl.constexpr, HALF: tl.constexpr,
    HALVES: tl.constexpr, AXES: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
    SPLIT: tl.constexpr, AHEAD: tl.constexpr, GATE: tl.constexpr, PER_HEAD: tl.constexpr,
    KC: tl.constexpr, KG: tl.constexpr, KT: tl.constexpr, KB: tl.constexpr, KS: tl.constexpr,
    VC: tl.constexpr, VG: tl.constexpr, VT: tl.constexpr, VB: tl.constexpr, VS: tl.constexpr,
    PTX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The only held row of a sequence, the query heads of one KV head, one part of the committed places:
    what `make_rows` and `attend` do. The first part writes the row's key and value, and begins with them; for
    the time codes take to be made and read back it has fewer places.

    Grid (rows, KV heads, splits). Arguments as theirs. What comes from the launch before is waited for; what
    says where pages lie is not (`let_next_start`), and pages are asked for, not read, in front of the wait.
    AHEAD: there are registers for the first places while the row is made ready.
    """
    let_next_start(OVERLAP)
    row, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group: tl.constexpr = H // HK
    m = tl.arange(0, M)
    c, cv = tl.arange(0, DP), tl.arange(0, DVP)
    d, dv = c[None, :], cv[None, :]
    live, h = (m < group)[:, None], (kv * group + tl.minimum(m, group - 1))[:, None]
    at = position + row * row_stride
    other, turning, cosine, sine = turning_of(
        c, at, axis, axis_stride, frequency, magnitude, ROPE, START, HALF, HALVES, AXES
    )
    q_own, q_theirs = weights_of(q_weight, c, other, turning, D, Q_NORM, ROPE)
    k_own, k_theirs = weights_of(k_weight, c, other, turning, D, K_NORM, ROPE)
    v_own, v_theirs = weights_of(v_weight, cv, cv, cv < 0, DV, V_NORM, False)
    own, committed, used = tl.load(index + row), tl.load(length + row), tl.load(count + row)
    first += row * table_stride
    block += row * table_stride
    begin, end = used * 0, used * 0
    if used > 0:
        end = places_below(first, used, committed, BLOCK)
        if WINDOW:
            begin = places_below(first, used, own - window + 1, BLOCK) // N * N
    if SPLIT:
        if (KC != "") or (VC != ""):
            less: tl.constexpr = 2 * N
        else:
            less: tl.constexpr = 0
        each = (end - begin + less + splits - 1) // splits
        each = (each + N - 1) // N * N
        end = tl.minimum(end, begin + (split + 1) * each - less)
        begin += tl.maximum(split * each - less, 0)
    entry = tl.full((), -1, tl.int64)
    if split == 0:
        if tl.load(parent + row) != -2:
            entry = entry_at(block, first, used, committed, BLOCK)
    if begin >= end:
        begin, end = end * 0, end * 0
    here, vector, added = vectors_of(begin, end, block, kv, HK, N, BLOCK)
    if OVERLAP:
        k_bits: tl.constexpr = pages_k.dtype.element_ty.primitive_bitwidth
        v_bits: tl.constexpr = pages_v.dtype.element_ty.primitive_bitwidth
        for soon in tl.range(begin, tl.minimum(end, begin + SOON * N), N, num_stages=1):
            _, vector_soon, added_soon = vectors_of(soon, end, block, kv, HK, N, BLOCK)
            if KC != "":
                ask_for(pages_k, vector_soon, added_soon, KB, KB, DP // 32)
            else:
                ask_for(pages_k, vector_soon, added_soon, D, D * k_bits // 8, (DP * k_bits + 511) // 512)
            if VC != "":
                ask_for(pages_v, vector_soon, added_soon, VB, VB, DVP // 32)
            else:
                ask_for(pages_v, vector_soon, added_soon, DV, DV * v_bits // 8, (DVP * v_bits + 511) // 512)
    wait_only(OVERLAP)

    # All that comes from the launch before is asked for at once.
    newest, far = entry >= 0, row.to(tl.int64)
    both = live & (dv < DV)
    from_q, from_k, from_v = q + far * ldq + h * hdq, k + far * ldk + kv * D, v + far * ldv + kv * DV
    query = features(from_q, d, D, live)
    if WRITE:
        key_given = features(from_k, d, D, newest)
        value_given = features(from_v, dv, DV, newest)
    g = 0.0
    if not SPLIT:
        g = gate_at(gate, row, h, dv, ldg, hdg, both, GATE, PER_HEAD)
    if AHEAD:
        key, k_scale, k_minus = load_keys(pages_k, scales_k, vector, added, here, N, D, DP, KC, KG, KB, KS)
        value, v_scale, v_minus = load_values(
            pages_v, scales_v, vector, added, here, N, DV, DVP, VC, VG, VB, VS, PTX
        )  # fmt: skip
    query = turned(query, from_q, q_own, q_theirs, D, q_eps, other, turning, cosine, sine, live, Q_NORM, ROPE)
    if KC != "":
        query = turn(query, M, DP, KT).to(tl.float16)
    else:
        query = query.to(pages_k.dtype.element_ty)

    total = tl.zeros((M, DVP), tl.float32)
    peak = tl.full((M,), -float("inf"), tl.float32)
    weight = tl.zeros((M,), tl.float32)
    if newest:
        at_new = tl.full((1, 1), 0, tl.int64) + entry * HK + kv
        one = tl.full((1,), 1, tl.int1)
        if WRITE:
            key_given = turned(
                key_given, from_k, k_own, k_theirs, D, k_eps, other, turning, cosine, sine, newest, K_NORM,
                ROPE,
            )  # fmt: skip
            value_given = turned(
                value_given, from_v, v_own, v_theirs, DV, v_eps, cv, cv < 0, cv, cv, newest, V_NORM, False
            )
            write_vectors(pages_k, scales_k, key_given, at_new, d, True, 1, DP, D, KC, KG, KT, KB, KS)
            write_vectors(pages_v, scales_v, value_given, at_new, dv, True, 1, DVP, DV, VC, VG, VT, VB, VS)
            if (KC != "") | (VC != ""):
                tl.debug_barrier()  # codes are read back: this program wrote them
        one_at = tl.reshape(at_new, (1,))
        if KC != "":
            k_codes, k_factor, k_signs = load_vectors(
                pages_k + one_at * KB, scales_k + (one_at * (KB // 2) + KS), one, 1, DP, D, KC, KG, 0
            )
            key_new = numbers_of(k_codes, k_factor, k_signs, 1, DP, KC, KG, 0).to(tl.float32)
        elif WRITE:
            key_new = key_given.to(pages_k.dtype.element_ty).to(tl.float32)
        else:
            key_new = features(pages_k + at_new * D, d, D, True)
        if VC != "":
            v_codes, v_factor, v_signs = load_vectors(
                pages_v + one_at * VB, scales_v + (one_at * (VB // 2) + VS), one, 1, DVP, DV, VC, VG, 0
            )
            value_new = numbers_of(v_codes, v_factor, v_signs, 1, DVP, VC, VG, 0).to(tl.float32)
        elif WRITE:
            value_new = value_given.to(pages_v.dtype.element_ty).to(tl.float32)
        else:
            value_new = features(pages_v + at_new * DV, dv, DV, True)
        key_new = tl.reshape(key_new, (DP,))[None, :]
        peak = capped(tl.sum(query.to(tl.float32) * key_new, 1) * scale, cap, CAP)
        weight += 1.0
        total += value_new

    if AHEAD:
        peak, weight, total = with_places(
            peak, weight, total, query, key, k_scale, k_minus, value, v_scale, v_minus, here, begin, first,
            own, window, scale, cap, N, DP, DVP, BLOCK, WINDOW, CAP, KC, KG, VC, VG, PTX,
        )  # fmt: skip
        begin += N
    for base in range(begin, end, N):
        here, vector, added = vectors_of(base, end, block, kv, HK, N, BLOCK)
        key, k_scale, k_minus = load_keys(pages_k, scales_k, vector, added, here, N, D, DP, KC, KG, KB, KS)
        value, v_scale, v_minus = load_values(
            pages_v, scales_v, vector, added, here, N, DV, DVP, VC, VG, VB, VS, PTX
        )  # fmt: skip
        peak, weight, total = with_places(
            peak, weight, total, query, key, k_scale, k_minus, value, v_scale, v_minus, here, base, first,
            own, window, scale, cap, N, DP, DVP, BLOCK, WINDOW, CAP, KC, KG, VC, VG, PTX,
        )  # fmt: skip
    if SPLIT:
        to = (split.to(tl.int64) * num_rows + row) * H + kv * group + m
        tl.store(peaks + to * 2, peak, mask=m < group)
        tl.store(peaks + to * 2 + 1, weight, mask=m < group)
        tl.store(parts + to[:, None] * DV + dv, total, mask=both)
    else:
        weight, total = with_sink(peak, weight, total, sinks, kv * group + tl.minimum(m, group - 1), SINKS)
        y = total * (1 / tl.where(weight > 0, weight, 1.0))[:, None]
        if VC != "":
            y = turn_back(y, M, DVP, VT)
        tl.store(out + (far * H + h) * DV + dv, gated(y, g, GATE), mask=both)
