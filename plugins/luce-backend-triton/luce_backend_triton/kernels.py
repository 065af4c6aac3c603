# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, SIM108, PLR0915
"""Triton kernels: the input of few rows, dense weights, and a product that needs neither CUDA C++ nor a GPU.

All of them run in Triton's interpreter too. Values are f32 from the load on; dots take f16 on a device
and f32 in the interpreter, which multiplies halves as they are and bf16 wrongly.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
DOT_F32 = tl.constexpr(INTERPRETED)


@triton.jit
def activated(gate, up, ACT: tl.constexpr, CLAMP: tl.constexpr, limit):
    """act(gate) · up. CLAMP: 0 none, 1 before the activation, 2 after it."""
    if CLAMP == 1:
        gate = tl.minimum(gate, limit)
    if ACT == "silu":
        y = gate / (1 + tl.exp(tl.minimum(-gate, 80.0)))
    elif ACT == "gelu":
        y = 0.5 * gate * (1 + tl.math.erf(gate * 0.7071067811865476))
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = gate / (1 + tl.exp(tl.minimum(-2 * inner, 80.0)))
    else:
        tl.static_assert(ACT == "relu")
        y = tl.maximum(gate, 0.0)
    if CLAMP == 2:
        y = tl.minimum(y, limit)
    if CLAMP != 0:
        up = tl.minimum(tl.maximum(up, -limit), limit)
    return y * up


@triton.jit
def root_mean(x, k, eps, CHUNK: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of one row."""
    total = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, k, CHUNK):
        at = start + tl.arange(0, CHUNK)
        v = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)
        total += v * v
    return 1 / tl.sqrt(tl.sum(total, 0) / k + eps)


@triton.jit
def values(
    x, up, weight, at, k, inverse, limit,
    NORM: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr,
):  # fmt: skip
    """Columns `at` of one row of the input: normed, or act(x) · up."""
    v = tl.load(x + at, mask=at < k, other=0.0).to(tl.float32)
    if NORM:
        v = v * inverse * tl.load(weight + at, mask=at < k, other=0.0)
    if ACT != "":
        u = tl.load(up + at, mask=at < k, other=0.0).to(tl.float32)
        v = activated(v, u, ACT, CLAMP, limit)
    return v


@triton.jit
def power_of_two(top):
    """The smallest power of two not below `top`; 1 for 0."""
    bits = (top.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    power = (tl.maximum(bits, 32) << 23).to(tl.float32, bitcast=True)
    return tl.where(top > 0, power, 1.0)


@triton.jit
def store_integers(v, out32, out8, at):
    """256 columns of one row, in the order of `integer_columns`, to place `at` of u8[.., 576], as
    csrc/gemv.cu wants them.
    """
    p = tl.arange(0, 256)
    group, t, half = p // 32, p % 32 // 8, p % 8 // 4
    top = tl.max(tl.abs(v), 0)
    factor = tl.where(top > 0, top, 1.0) / 32512
    whole = tl.floor(v / factor + 0.5).to(tl.int32)
    high = (whole + 128) >> 8
    byte = at * 576 + group * 64 + t * 16 + half * 4 + p % 4
    tl.store(out8 + byte, high.to(tl.int8))
    tl.store(out8 + byte + 8, (whole - high * 256).to(tl.int8))
    sums = tl.sum(tl.reshape(whole, (8, 32)), 1)
    tl.store(out32 + at * 144 + 128 + tl.arange(0, 8), sums.to(tl.float32, bitcast=True))
    tl.store(out32 + at * 144 + 136, factor)


@triton.jit
def integer_columns(block):
    """The 256 columns of a block, in the order in which their bytes lie."""
    p = tl.arange(0, 256)
    e = ((p & 1) << 1) | (p % 4 >> 1)
    return block * 256 + p // 32 * 32 + p % 8 // 4 * 16 + p % 32 // 8 * 4 + e


@triton.jit(do_not_specialize=["m"])
def prepare(
    x, up, weight, out16, out32, out8, m, k, ldx, eps, limit,
    MMA: tl.constexpr, NORM: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr, CHUNK: tl.constexpr,
    PER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row, blocks of 256 columns -> X_BYTES each, as csrc/mma.cu or csrc/gemv.cu wants them.

    Grid (rows, blocks / PER); for gemv.cu PER is 1. out16, out32, out8: views of the same
    u8[blocks, m, 576]. OVERLAP: what follows may fetch its weights already; what came before is waited for.
    """
    row = tl.program_id(0)
    x += row.to(tl.int64) * ldx
    up += row.to(tl.int64) * ldx
    if MMA:
        p = tl.arange(0, 256)[None, :]
        block = tl.program_id(1) * PER + tl.arange(0, PER)
        block, here = block[:, None], (block * 256 < k)[:, None]
        column = block * 256 + p // 32 * 32 + p % 8 // 4 * 16 + p % 32 // 8 * 4 + p % 4
        column = tl.max_contiguous(tl.multiple_of(column, [1, 4]), [1, 4])
    else:
        tl.static_assert(PER == 1)
        block = tl.program_id(1)
        column = integer_columns(block)
    at = (block * m + row).to(tl.int64)
    inside = column < k
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if NORM:
        w = tl.load(weight + column, mask=inside, other=0.0)  # no launch makes it: asked for while waiting
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        v = v * root_mean(x, k, eps, CHUNK) * w
    if ACT != "":
        u = tl.load(up + column, mask=inside, other=0.0).to(tl.float32)
        v = activated(v, u, ACT, CLAMP, limit)
    if MMA:
        factor = power_of_two(tl.max(tl.abs(v), 1)[:, None]) / 512
        h = (v / factor).to(tl.float16)
        full = h.to(tl.float32)
        sums = tl.sum(tl.reshape(full, (PER, 8, 32)), 2) * 0.03125
        share = tl.where(p % 8 // 4 == 0, 1.0, 0.0625)  # of codes that lie four bits up
        tl.store(out16 + at * 288 + p, (full * share).to(tl.float16), mask=here)
        tl.store(out16 + at * 288 + 256 + tl.arange(0, 8)[None, :], sums.to(tl.float16), mask=here)
        tl.store(out32 + at * 144 + 136, factor, mask=here)
    else:
        store_integers(v, out32, out8, at)


@triton.jit
def prepare_dense(
    x, up, weight, out, factors, k, wide, ldx, eps, limit,
    NORM: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row -> out[wide] · its factor; zero beyond k.

    The factor is 1, which `finish` does not multiply by, but for f16 of values so large or small that it
    takes a power of two to keep them.
    """
    row = tl.program_id(0).to(tl.int64)
    x += row * ldx
    up += row * ldx
    out += row * wide
    inverse = 1.0
    if NORM:
        inverse = root_mean(x, k, eps, CHUNK)
    halves: tl.constexpr = out.dtype.element_ty == tl.float16
    tops = tl.zeros((CHUNK,), tl.float32)
    for start in range(0, wide, CHUNK):
        at = start + tl.arange(0, CHUNK)
        v = values(x, up, weight, at, k, inverse, limit, NORM, ACT, CLAMP)
        if halves:
            tops = tl.maximum(tops, tl.abs(v))
            v = tl.where(tl.abs(v) <= 65504, v, 0.0)
        tl.store(out + at, v.to(out.dtype.element_ty), mask=at < wide)
    factor = 1.0
    if halves:
        top = tl.max(tops, 0)
        fits = (top == 0) | ((top >= 1 / 64) & (top <= 16384))
        factor = tl.where(fits, 1.0, power_of_two(top) / 4096)
        if factor != 1.0:
            for start in range(0, wide, CHUNK):
                at = start + tl.arange(0, CHUNK)
                v = values(x, up, weight, at, k, inverse, limit, NORM, ACT, CLAMP) / factor
                tl.store(out + at, v.to(out.dtype.element_ty), mask=at < wide)
    tl.store(factors + row, factor)


@triton.jit
def finish(
    y, factors, scale, bias, residual, n, ldr,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row of y f32[m, n] = y · its factor · scale + bias + residual, in place. Most often y is done."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factors + row)
    if HAS_SCALE:
        factor *= tl.load(scale)
    todo = factor != 1.0
    if HAS_BIAS or HAS_RESIDUAL:
        todo = True
    if todo:
        for start in range(0, n, CHUNK):
            at = start + tl.arange(0, CHUNK)
            inside = at < n
            v = tl.load(y + row * n + at, mask=inside, other=0.0) * factor
            if HAS_BIAS:
                v += tl.load(bias + at, mask=inside, other=0.0)
            if HAS_RESIDUAL:
                v += tl.load(residual + row * ldr + at, mask=inside, other=0.0)
            tl.store(y + row * n + at, v, mask=inside)


@triton.jit
def decode(
    records, halves, table, row, block, blocks,
    RECORD: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr, ZERO: tl.constexpr,
    SCALES: tl.constexpr,
):  # fmt: skip
    """Rows `row` [R] of W in one block of columns -> f32[R, 256]. records u8, halves f16: the same bytes."""
    k = tl.arange(0, 256)[None, :]
    base = ((row // 16).to(tl.int64) * blocks + block)[:, None] * RECORD
    rr = (row % 16)[:, None]
    g, hi = rr % 8, rr // 8
    c, h, s, t, e = k // 64, k % 64 // 32, k % 32 // 16, k % 16 // 4, k % 4
    byte = ((e & 1) << 1) | (e >> 1)
    lane = g * 4 + t
    if BITS == 8:
        code = tl.load(records + base + c * 1024 + h * 512 + lane * 16 + hi * 8 + s * 4 + byte).to(tl.int32)
    elif TABLE:
        word = base + c * 512 + lane * 16 + (h * 2 + hi) * 4
        code = (tl.load(records + word + s * 2 + byte // 2).to(tl.int32) >> (4 * (byte % 2))) & 15
    else:
        word = base + c * 512 + lane * 16 + (h * 2 + hi) * 4
        code = (tl.load(records + word + byte).to(tl.int32) >> (4 * s)) & 15
    if BITS == 5:
        plane = tl.load(records + base + 2048 + (c * 32 + lane) * 4 + byte).to(tl.int32)
        code += ((plane >> (2 * (2 * h + hi) + s)) & 1) << 4
    if BITS == 6:
        plane = tl.load(records + base + 2048 + (c * 32 + lane) * 8 + h * 4 + byte).to(tl.int32)
        code += ((plane >> (2 * (2 * hi + s))) & 3) << 4
    if TABLE:
        value = tl.load(table + code)
    else:
        value = (code - ZERO).to(tl.float32)
    at = base + CODES
    group = k // 32
    if SCALES == 0:
        value = value * tl.load(halves + at // 2 + rr * 8 + group).to(tl.float32)
    elif SCALES == 1:
        scale = tl.load(halves + at // 2 + rr * 8 + group).to(tl.float32)
        value = value * scale + tl.load(halves + at // 2 + 128 + rr * 8 + group).to(tl.float32)
    elif SCALES == 2:
        d = tl.load(halves + at // 2 + rr * 2).to(tl.float32)
        low = tl.load(halves + at // 2 + rr * 2 + 1).to(tl.float32)
        scale = tl.load(records + at + 64 + rr * 16 + group).to(tl.float32)
        minimum = tl.load(records + at + 72 + rr * 16 + group).to(tl.float32)
        value = value * (d * scale) + low * minimum
    elif SCALES == 3:
        d = tl.load(halves + at // 2 + rr).to(tl.float32)
        value = value * (d * (tl.load(records + at + 32 + rr * 16 + k // 16).to(tl.float32) - 128))
    elif SCALES == 4:
        d = tl.load(halves + at // 2 + rr).to(tl.float32)
        value = value * (d * (tl.load(records + at + 32 + rr * 8 + group).to(tl.float32) - 32))
    elif SCALES == 5:
        bits = tl.load(records + at + rr * 8 + group).to(tl.int16) << 10
        value = value * bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        bits = tl.load(records + at + rr * 16 + k // 16).to(tl.int16) << 7
        value = value * (128 * bits.to(tl.float16, bitcast=True).to(tl.float32))
    return value


@triton.jit(do_not_specialize=["count", "first"])
def dequantize(
    records, halves, table, ids, out, count, first, cols, blocks, ldo,
    IDS: tl.constexpr, ROWS: tl.constexpr, RECORD: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr,
    TABLE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Rows first .. first + count of W, or rows `ids`, one block of columns -> out [count, ldo]."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    row = first + tl.minimum(place, count - 1)
    if IDS:
        row = tl.load(ids + tl.minimum(place, count - 1)).to(tl.int32)
    value = decode(records, halves, table, row, block, blocks, RECORD, CODES, BITS, TABLE, ZERO, SCALES)
    column = block * 256 + tl.arange(0, 256)
    to = out + place[:, None].to(tl.int64) * ldo + column[None, :]
    tl.store(to, value.to(out.dtype.element_ty), mask=(place < count)[:, None] & (column < cols)[None, :])


@triton.jit(do_not_specialize=["n"])
def most_of_pairs(
    records, halves, table, out, n, blocks,
    ROWS: tl.constexpr, RECORD: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    ZERO: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Of every row a of W's first n and b, n below, the largest |a x| |b x| where |x| is 1 -> out f32[n].

    That is the largest eigenvalue of (a bᵀ + b aᵀ) / 2, (|a| |b| + |a b|) / 2.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.minimum(row, n - 1)
    aa = tl.zeros((ROWS,), tl.float32)
    bb = tl.zeros((ROWS,), tl.float32)
    ab = tl.zeros((ROWS,), tl.float32)
    for block in range(blocks):
        a = decode(records, halves, table, place, block, blocks, RECORD, CODES, BITS, TABLE, ZERO, SCALES)
        b = decode(records, halves, table, place + n, block, blocks, RECORD, CODES, BITS, TABLE, ZERO, SCALES)
        aa += tl.sum(a * a, 1)
        bb += tl.sum(b * b, 1)
        ab += tl.sum(a * b, 1)
    tl.store(out + row, (tl.sqrt(aa) * tl.sqrt(bb) + tl.abs(ab)) * 0.5, mask=row < n)


@triton.jit(do_not_specialize=["n"])
def lengths(
    records, halves, table, out, n, blocks,
    ROWS: tl.constexpr, RECORD: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    ZERO: tl.constexpr, SCALES: tl.constexpr, ROOT: tl.constexpr,
):  # fmt: skip
    """Of every row of W, the root of its sum of squares, or its sum of magnitudes -> out f32[n]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.minimum(row, n - 1)
    total = tl.zeros((ROWS,), tl.float32)
    for block in range(blocks):
        w = decode(records, halves, table, place, block, blocks, RECORD, CODES, BITS, TABLE, ZERO, SCALES)
        total += tl.sum(w * w if ROOT else tl.abs(w), 1)
    tl.store(out + row, tl.sqrt(total) if ROOT else total, mask=row < n)


@triton.jit(do_not_specialize=["m"])
def linear(
    x, factors, records, halves, table, y, scale, bias, residual, m, n, blocks, ldr, ldy,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, RECORD: tl.constexpr, CODES: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    ZERO: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """y = x Wᵀ · scale + bias + residual, M rows of x and ROWS of W. x f16[m, 256 · blocks] · factors[m]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    who = tl.program_id(1) * M + tl.arange(0, M)
    inside, live = row < n, who < m
    column = tl.arange(0, 256)
    total = tl.zeros((M, ROWS), tl.float32)
    for block in range(blocks):
        last = (n + 15) // 16 * 16 - 1
        w = decode(
            records, halves, table, tl.minimum(row, last), block, blocks, RECORD, CODES, BITS, TABLE, ZERO,
            SCALES,
        )  # fmt: skip
        at = who[:, None].to(tl.int64) * (blocks * 256) + block * 256 + column[None, :]
        given = tl.load(x + at, mask=live[:, None], other=0.0)
        if DOT_F32:
            total += tl.dot(given.to(tl.float32), tl.trans(w), input_precision="ieee")
        else:
            total += tl.dot(given, tl.trans(w.to(tl.float16)))
    total *= tl.load(factors + who, mask=live, other=0.0)[:, None]
    if HAS_SCALE:
        total *= tl.load(scale)
    if HAS_BIAS:
        total += tl.load(bias + row, mask=inside, other=0.0)[None, :]
    both = live[:, None] & inside[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + who[:, None].to(tl.int64) * ldr + row[None, :], mask=both, other=0.0)
    tl.store(y + who[:, None].to(tl.int64) * ldy + row[None, :], total, mask=both)
