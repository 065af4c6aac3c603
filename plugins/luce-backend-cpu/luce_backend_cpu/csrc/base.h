/* Vector types, number conversions and elementary functions.
 *
 * Everything is written with the vector extension of GCC and Clang: sixteen floats at a time, which the compiler maps to
 * one AVX-512 register, two AVX2 or four SSE/NEON ones. Intrinsics appear only where the extension has no word for the
 * instruction. Floating point is plain IEEE (no -ffast-math): NaN and infinity pass through. */
#ifndef LUCE_BASE_H
#define LUCE_BASE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef float v4f __attribute__((vector_size(16)));
typedef uint8_t v16b __attribute__((vector_size(16)));
typedef uint8_t v32b __attribute__((vector_size(32)));

INLINE int32_t imin(int32_t a, int32_t b) { return a < b ? a : b; }
INLINE int32_t imax(int32_t a, int32_t b) { return a > b ? a : b; }
INLINE int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

INLINE v16f load16(const float *p) { v16f v; memcpy(&v, p, sizeof v); return v; }
INLINE void store16(float *p, v16f v) { memcpy(p, &v, sizeof v); }
INLINE v4f load4(const float *p) { v4f v; memcpy(&v, p, sizeof v); return v; }
INLINE v16b load16b(const uint8_t *p) { v16b v; memcpy(&v, p, sizeof v); return v; }
INLINE v32b load32b(const uint8_t *p) { v32b v; memcpy(&v, p, sizeof v); return v; }
INLINE uint16_t load_u16(const uint8_t *p) { uint16_t v; memcpy(&v, p, sizeof v); return v; }
INLINE uint32_t load_u32(const uint8_t *p) { uint32_t v; memcpy(&v, p, sizeof v); return v; }
INLINE v16f splat(float x) { return (v16f){} + x; }

INLINE v16f load_part(const float *p, int n) { /* n < 16 floats, the rest zero */
    v16f v = {};
    memcpy(&v, p, (size_t)n * sizeof(float));
    return v;
}

/* --- 16-bit floats */

INLINE float float_of_bits(uint32_t u) { float f; memcpy(&f, &u, sizeof f); return f; }
INLINE uint32_t bits_of_float(float f) { uint32_t u; memcpy(&u, &f, sizeof u); return u; }

INLINE float from_f16(uint16_t h) {
#if defined(__F16C__)
    return _cvtsh_ss(h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest >= 0x7c00) return float_of_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400) {                      /* subnormal: rest · 2^-24, exact in f32 */
        float f = (float)rest * 0x1p-24f;
        return sign ? -f : f;
    }
    return float_of_bits(sign | ((rest << 13) + (112u << 23)));
#endif
}

INLINE uint16_t to_f16(float f) { /* round to nearest, ties to even */
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    uint32_t u = bits_of_float(f), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) {                 /* result is subnormal: let one addition do the rounding */
        float shifted = float_of_bits(rest) + 0.5f;
        return (uint16_t)(sign | (bits_of_float(shifted) - bits_of_float(0.5f)));
    }
    return (uint16_t)(sign | (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13);
#endif
}

INLINE float from_bf16(uint16_t h) { return float_of_bits((uint32_t)h << 16); }

INLINE uint16_t to_bf16(float f) { /* round to nearest, ties to even */
    uint32_t u = bits_of_float(f);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

INLINE v16f load16_f16(const uint16_t *p) {
#if defined(__AVX512F__)
    return (v16f)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__) && defined(__AVX__)
    union { __m256 half[2]; v16f whole; } u;
    u.half[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
    u.half[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)));
    return u.whole;
#else
    v16f v;
    for (int i = 0; i < LANES; i++) v[i] = from_f16(p[i]);
    return v;
#endif
}

INLINE v16f load16_bf16(const uint16_t *p) {
    typedef uint16_t v16h __attribute__((vector_size(32)));
    v16h h;
    memcpy(&h, p, sizeof h);
    return (v16f)(__builtin_convertvector(h, v16i) << 16);
}

/* --- sums and elementary functions */

INLINE float sum16(v16f v) { /* fixed order, so the same bits on every path */
#if defined(__AVX512F__)
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
#else
    float part[LANES];
    memcpy(part, &v, sizeof part);
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) part[i] += part[i + step];
    return part[0];
#endif
}

INLINE v16f choose(v16i mask, v16f yes, v16f no) { return (v16f)(((v16i)yes & mask) | ((v16i)no & ~mask)); }
INLINE v16f max16(v16f a, v16f b) {
#if defined(__AVX512F__)
    return (v16f)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return choose(a > b, a, b);
#endif
}

INLINE float top16(v16f v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < LANES; i++) best = v[i] > best ? v[i] : best;
    return best;
#endif
}

INLINE v4f sum16x4(const v16f v[4]) { /* the sums of four vectors */
#if defined(__AVX512F__)
    const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));    /* a b a b in each quarter */
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d even = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), odd = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
    const __m512 all = _mm512_add_ps((__m512)even, (__m512)odd);                            /* a b c d in each quarter */
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return (v4f)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    return (v4f){sum16(v[0]), sum16(v[1]), sum16(v[2]), sum16(v[3])};
#endif
}

/* e^x to about one unit in the last place: x = n·ln 2 + r, |r| <= ln 2 / 2, Taylor to r^7. NaN stays NaN. */
INLINE v16f exp16(v16f x) {
    v16f bounded = choose(x > splat(88.7f), splat(88.7f), x);
    bounded = choose(bounded < splat(-110.0f), splat(-110.0f), bounded);
    const v16f shift = splat(0x1.8p23f);     /* adding it rounds to an integer in the low bits */
    v16f biased = bounded * splat(1.44269504f) + shift;
    v16f n = biased - shift;
    v16f r = bounded - n * splat(0x1.62e4p-1f) - n * splat(0x1.7f7d1cp-20f);
    v16f p = splat(1.0f / 5040);
    p = p * r + splat(1.0f / 720);
    p = p * r + splat(1.0f / 120);
    p = p * r + splat(1.0f / 24);
    p = p * r + splat(1.0f / 6);
    p = p * r + splat(0.5f);
    p = p * r + splat(1.0f);
    p = p * r + splat(1.0f);
    v16i k = (v16i)biased - (v16i)shift;     /* n, as integers */
    v16i half = k >> 1;                      /* 2^k in two factors: k may leave the range of one exponent */
    v16f y = p * (v16f)((half + 127) << 23) * (v16f)((k - half + 127) << 23);
    y = choose(x > splat(88.7228f), splat(INFINITY), y);
    return choose(x != x, x, y);
}

INLINE v16f sigmoid16(v16f x) { return splat(1.0f) / (splat(1.0f) + exp16(-x)); }

INLINE v16f tanh16(v16f x) {
    v16f far = splat(2.0f) * sigmoid16(splat(2.0f) * x) - splat(1.0f);
    v16f s = x * x;                          /* near zero the difference above would cancel */
    v16f near = x + x * s * (splat(-1.0f / 3) + s * (splat(2.0f / 15) + s * splat(-17.0f / 315)));
    return choose(s < splat(0.01f), near, far);
}

enum { ACT_SILU = 0, ACT_GELU = 1, ACT_GELU_TANH = 2, ACT_RELU = 3, ACT_SIGMOID = 4 };

INLINE v16f activate(v16f x, int32_t kind) {
    switch (kind) {
        case ACT_SILU: return x * sigmoid16(x);
        case ACT_GELU_TANH:
            return splat(0.5f) * x * (splat(1.0f) + tanh16(splat(0.7978845608f) * (x + splat(0.044715f) * x * x * x)));
        case ACT_RELU: return choose(x < splat(0.0f), splat(0.0f), x);
        case ACT_SIGMOID: return sigmoid16(x);
        default:
            for (int i = 0; i < LANES; i++) x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
            return x;
    }
}

#endif
