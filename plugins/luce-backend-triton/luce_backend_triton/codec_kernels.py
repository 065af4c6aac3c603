# Triton compiles these functions: no annotations, no conditional expressions.
# ruff: noqa: ANN001, ANN201, PLR0124, SIM108
"""The cache's codecs in registers: turns, codes of heads on their way into pages, and numbers out of codes.

How a vector lies is said in `luce_core.contracts.codec`; what is computed is `luce_core.ops.codecs`. CODEC is
the name of a codec, GROUP the numbers that share a scale, TURN those that are turned together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from luce_core.contracts.codec import BOUNDS, LEVELS, SIGN_FACTORS

FACTOR1, FACTOR2 = (tl.constexpr(factor) for factor in SIGN_FACTORS)
LEVEL0, LEVEL1, LEVEL2, LEVEL3 = (tl.constexpr(level) for level in LEVELS)
BOUND0, BOUND1, BOUND2 = (tl.constexpr(bound) for bound in BOUNDS)


# --- turns


@triton.jit
def signs(d):
    """The signs of a turn at places d of its group."""
    x = (d + 1).to(tl.uint32) * FACTOR1
    x = (x ^ (x >> 15)) * FACTOR2
    return 1.0 - 2.0 * ((x >> 16) & 1).to(tl.float32)


@triton.jit
def hadamard(y, ROWS: tl.constexpr, COLS: tl.constexpr, TURN: tl.constexpr):
    """H y / √TURN for each TURN columns of y f32[ROWS, COLS]."""
    d = tl.arange(0, COLS)[None, :]
    for bit in tl.static_range(7):
        if (1 << bit) < TURN:
            other = tl.gather(y, tl.broadcast_to(d ^ (1 << bit), (ROWS, COLS)), 1)
            y = tl.where((d & (1 << bit)) == 0, y, -y) + other
    return y * (TURN**-0.5)


@triton.jit
def turn(y, ROWS: tl.constexpr, COLS: tl.constexpr, TURN: tl.constexpr):
    """R y for each TURN columns."""
    return hadamard(y * signs(tl.arange(0, COLS)[None, :] % TURN), ROWS, COLS, TURN)


@triton.jit
def turn_back(y, ROWS: tl.constexpr, COLS: tl.constexpr, TURN: tl.constexpr):
    """Rᵀ y."""
    return hadamard(y, ROWS, COLS, TURN) * signs(tl.arange(0, COLS)[None, :] % TURN)


# --- numbers to codes


@triton.jit
def fp8_codes(x):
    """e4m3fn of f32, nearest even, at most 448; what is not finite becomes NaN. By bits, for any device."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # in steps of 2⁻⁹
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x * 0.0 == 0.0, code, 127)
    return code | ((x.to(tl.uint32, bitcast=True) >> 31) << 7)


@triton.jit
def packed(codes, ROWS: tl.constexpr, COLS: tl.constexpr, BITS: tl.constexpr):
    """Codes i32[ROWS, COLS] of BITS bits as u8[ROWS, COLS · BITS / 8], the first lowest."""
    each: tl.constexpr = 8 // BITS
    of = tl.reshape(codes, (ROWS, COLS // each, each))
    return tl.sum(of << (BITS * tl.arange(0, each))[None, None, :], 2).to(tl.uint8)


@triton.jit
def inverse_of(scale):
    """1 / scale, 0 for 0."""
    return tl.where(scale == 0, 0.0, 1 / tl.where(scale == 0, 1.0, scale))[:, :, None]


@triton.jit
def whole(t):
    """A float without fraction as i32, 0 where it is NaN."""
    return tl.where(t == t, t, 0.0).to(tl.int32)


@triton.jit
def store_codes(
    to, codes, live, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr
):
    """WIDTH of COLS codes, to vectors that begin at `to` (u8 pointers [ROWS, 1])."""
    byte = tl.arange(0, COLS * BITS // 8)[None, :]
    if BITS == 8:
        made = codes.to(tl.uint8)
    else:
        made = packed(codes, ROWS, COLS, BITS)
    tl.store(to + byte, made, mask=live & (byte < WIDTH * BITS // 8))


@triton.jit
def store_vectors(
    to, scales_to, y, live, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    CODEC: tl.constexpr, GROUP: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """y f32[ROWS, COLS], of which WIDTH columns are numbers and the others 0, to vectors that begin at `to`
    (u8 pointers [ROWS, 1]), their scales at `scales_to` (f16 pointers [ROWS, 1]).
    """
    y = turn(y, ROWS, COLS, TURN)
    if CODEC == "fp8":
        store_codes(to, fp8_codes(y), live, ROWS, COLS, WIDTH, 8)
    else:
        groups: tl.constexpr = COLS // GROUP
        x = tl.reshape(y, (ROWS, groups, GROUP))
        if CODEC == "q8_0":
            scale = tl.max(tl.abs(x), 2) / 127
            t = x * inverse_of(scale)
            t = tl.minimum(tl.maximum(tl.where(t < 0, tl.ceil(t - 0.5), tl.floor(t + 0.5)), -127.0), 127.0)
            store_codes(to, tl.reshape(whole(t), (ROWS, COLS)), live, ROWS, COLS, WIDTH, 8)
        elif CODEC == "q4_0":
            high, low = tl.max(x, 2), tl.min(x, 2)
            scale = tl.where(high >= -low, high, low) / -8
            t = tl.minimum(tl.maximum(tl.floor(x * inverse_of(scale) + 8.5), 0.0), 15.0)
            store_codes(to, tl.reshape(whole(t), (ROWS, COLS)), live, ROWS, COLS, WIDTH, 4)
        else:
            tl.static_assert(CODEC == "tq3_0")
            norm = tl.sqrt(tl.sum(x * x, 2))
            z = tl.abs(x) * (inverse_of(norm) * (GROUP**0.5))
            level = (z >= BOUND0).to(tl.int32) + (z >= BOUND1).to(tl.int32) + (z >= BOUND2).to(tl.int32)
            size = magnitude(level)
            scale = norm / tl.sqrt(tl.sum(size * size, 2))
            store_codes(to, tl.reshape(level, (ROWS, COLS)), live, ROWS, COLS, WIDTH, 2)
            minus = tl.reshape((x < 0).to(tl.int32), (ROWS, COLS))
            store_codes(to + WIDTH // 4, minus, live, ROWS, COLS, WIDTH, 1)
        scale += tl.sum(x * 0.0, 2)  # NaN where a number is not finite
        at = tl.arange(0, groups)[None, :]
        tl.store(scales_to + at, scale.to(tl.float16), mask=live & (at < WIDTH // GROUP))


# --- codes to numbers


@triton.jit
def magnitude(level):
    """Of tq3_0, f32."""
    return tl.where(level < 2, tl.where(level == 0, LEVEL0, LEVEL1), tl.where(level == 2, LEVEL2, LEVEL3))


@triton.jit
def halved(codes, BITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Each of u8[ROWS, COLS / 2] as two codes of BITS bits, the low one first: u8[ROWS, COLS]."""
    return tl.reshape(tl.join(codes & ((1 << BITS) - 1), codes >> BITS), (ROWS, COLS))


@triton.jit
def load_codes(
    at, here, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """u8[ROWS, COLS · BITS / 8] of vectors that begin at `at` (u8 pointers [ROWS]); WORDS: i32, four each."""
    if WORDS:
        word = tl.arange(0, COLS * BITS // 32)[None, :]
        to = at.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + word
        return tl.load(to, mask=here[:, None] & (word < WIDTH * BITS // 32), other=0)
    else:
        byte = tl.arange(0, COLS * BITS // 8)[None, :]
        if WIDTH == COLS:
            return tl.load(at[:, None] + byte, mask=here[:, None], other=0)
        else:
            return tl.load(at[:, None] + byte, mask=here[:, None] & (byte < WIDTH * BITS // 8), other=0)


@triton.jit
def load_vectors(
    at, scales_at, here, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, CODEC: tl.constexpr,
    GROUP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Codes, scales f16[ROWS, COLS / GROUP] and signs of vectors that begin at `at` (u8 pointers [ROWS]),
    their scales at `scales_at` (f16 pointers [ROWS]); 0 where not `here` and beyond WIDTH. What a codec has
    not got is the codes once more. PTX: see `numbers_of`, which takes codes of a byte as i32, too, four in
    each: Triton would keep bytes on their way in a register each.
    """
    if CODEC == "fp8":
        codes = load_codes(at, here, ROWS, COLS, WIDTH, 8, PTX >= 89)
        return codes, codes, codes
    else:
        group = tl.arange(0, COLS // GROUP)[None, :]
        inside = here[:, None] & (group < WIDTH // GROUP)
        scales = tl.load(scales_at[:, None] + group, mask=inside, other=0.0)
        if CODEC == "q8_0":
            codes = load_codes(at, here, ROWS, COLS, WIDTH, 8, PTX > 0)
            return codes, scales, codes
        elif CODEC == "q4_0":
            codes = load_codes(at, here, ROWS, COLS, WIDTH, 4, False)
            return codes, scales, codes
        else:
            tl.static_assert(CODEC == "tq3_0")
            codes = load_codes(at, here, ROWS, COLS, WIDTH, 2, False)
            return codes, scales, load_codes(at + WIDTH // 4, here, ROWS, COLS, WIDTH, 1, False)


# By instructions of NVIDIA's: what Triton makes of the conversion of a byte is several, one of them slow.
# Bytes become the low ones of 1024 + code, and what is too much is taken off again.


SIGNED = tl.constexpr(
    """
    .reg .b32 less;
    xor.b32 code, code, 0x80808080;
    mov.b32 less, 0x64806480;
    prmt.b32 low, code, 0x64646464, 0x4140;
    prmt.b32 high, code, 0x64646464, 0x4342;
    sub.f16x2 low, low, less;
    sub.f16x2 high, high, less;
    """
)
"""Four signed bytes of `code` as halves, two in `low` and two in `high`."""
E4M3 = tl.constexpr(
    """
    .reg .b16 one, other;
    mov.b32 {one, other}, code;
    cvt.rn.f16x2.e4m3x2 low, one;
    cvt.rn.f16x2.e4m3x2 high, other;
    """
)
"""The same of e4m3fn. Compute capability 8.9 and newer."""
BEGIN, HALVES, TWOS = (
    tl.constexpr("{ .reg .b32 code, low, high; mov.b32 code, "),
    tl.constexpr("mov.b32 {$0, $1}, low; mov.b32 {$2, $3}, high; }"),
    tl.constexpr("mov.b32 $0, low; mov.b32 $1, high; }"),
)


@triton.jit
def halves_of(codes, ROWS: tl.constexpr, COLS: tl.constexpr, MADE: tl.constexpr):
    """Codes of a byte, u8[ROWS, COLS] or four in each of i32[ROWS, COLS / 4], as f16[ROWS, COLS]. MADE: by
    which instructions.
    """
    if codes.dtype == tl.int32:
        a, b, c, d = tl.inline_asm_elementwise(
            BEGIN + "$4;" + MADE + HALVES, "=h,=h,=h,=h,r", [codes], dtype=(tl.float16,) * 4, is_pure=True,
            pack=1,
        )  # fmt: skip
        return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS, COLS))
    else:
        return tl.inline_asm_elementwise(
            BEGIN + "$2;" + MADE + TWOS, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4
        )


@triton.jit
def nibble_halves(codes, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Of each byte of u8[ROWS, COLS / 2] the low half less 8, then the high one: f16[ROWS, COLS]."""
    low, high = tl.inline_asm_elementwise(
        """{
        .reg .b32 code, less;
        mov.b32 less, 0x64086408;
        and.b32 code, $4, 0x0f0f0f0f;
        prmt.b32 $0, code, 0x64646464, 0x4140;
        prmt.b32 $1, code, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, less;
        sub.f16x2 $1, $1, less;
        shr.u32 code, $4, 4;
        and.b32 code, code, 0x0f0f0f0f;
        prmt.b32 $2, code, 0x64646464, 0x4140;
        prmt.b32 $3, code, 0x64646464, 0x4342;
        sub.f16x2 $2, $2, less;
        sub.f16x2 $3, $3, less;
        }""",
        "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16,) * 2, is_pure=True, pack=4,
    )  # fmt: skip
    return tl.reshape(tl.join(low, high), (ROWS, COLS))


@triton.jit
def numbers_of(
    codes, scales, minus, ROWS: tl.constexpr, COLS: tl.constexpr, CODEC: tl.constexpr, GROUP: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """What `load_vectors` gave as numbers, turned: f16[ROWS, COLS]. PTX: compute capability, such as 90,
    whose instructions may be used; 0: none.

    To be made right in front of the product that reads them: see `product` in `attention_kernels`.
    """
    if (CODEC == "fp8") and (PTX >= 89):
        return halves_of(codes, ROWS, COLS, E4M3)
    elif CODEC == "fp8":
        code = codes.to(tl.uint16)
        bits = ((code & 128) << 8) | ((code & 127) << 7)  # as f16 all of it, 2⁻⁸ times too small
        bits = tl.where((code & 127) == 127, bits | 0x7C00, bits)
        return bits.to(tl.float16, bitcast=True) * 256.0
    else:
        if CODEC == "q8_0":
            if PTX > 0:
                code = halves_of(codes, ROWS, COLS, SIGNED)
            else:
                code = codes.to(tl.int8, bitcast=True).to(tl.float16)
        elif CODEC == "q4_0":
            if PTX > 0:
                code = nibble_halves(codes, ROWS, COLS)
            else:
                code = halved(codes, 4, ROWS, COLS).to(tl.float16) - 8.0
        else:
            size = magnitude(halved(halved(codes, 4, ROWS, COLS // 2), 2, ROWS, COLS)).to(tl.float16)
            one = halved(halved(minus, 4, ROWS, COLS // 4), 2, ROWS, COLS // 2)
            code = tl.where(halved(one, 1, ROWS, COLS) == 1, -size, size)
        numbers = tl.reshape(code, (ROWS, COLS // GROUP, GROUP)) * scales[:, :, None]
        return tl.reshape(numbers, (ROWS, COLS))
