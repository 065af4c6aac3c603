/* GGUF block formats: rows of weights, read in pieces of 64.
 *
 * A piece is 64 small unsigned codes, four scales (one per 16 weights) and four minima:
 *
 *     weight[j] = scale[j / 16] · (code[j] - zero) + minimum[j / 16]
 *
 * with `zero` a power of two (or 0) fixed by the format. Each format has one function that reads the piece(s) of a step:
 * two blocks of 32, or a super-block of 256. Everything else (dot products, dequantization) is written once, below.
 * (Longer than 500 lines: fourteen formats beside each other are easier to compare than to find.) */
#ifndef LUCE_FORMATS_H
#define LUCE_FORMATS_H

#include "base.h"

enum {
    F_F32 = 0, F_F16 = 1, F_Q4_0 = 2, F_Q4_1 = 3, F_Q5_0 = 6, F_Q5_1 = 7, F_Q8_0 = 8, F_Q4_K = 12, F_Q5_K = 13,
    F_Q6_K = 14, F_IQ4_NL = 20, F_IQ4_XS = 23, F_BF16 = 30, F_MXFP4 = 39,   /* ids of the file format */
};

typedef struct {            /* a weight matrix [rows, cols], bytes as in the file */
    const uint8_t *data;
    int64_t row_bytes;
    int32_t format, rows, cols;
    int32_t lanes;          /* rearranged by `to_lanes`: sixteen rows side by side */
    float scale;            /* y = (W x) · scale + bias */
    const float *bias;      /* [rows] or NULL */
} luce_matrix;

/* --- 64 codes */

#if defined(__AVX512BW__)
typedef __m512i codes;
INLINE codes codes_nibbles_2x16(const uint8_t *p, const uint8_t *q) { /* 16 bytes each: low nibbles, then high */
    __m512i both = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
    both = _mm512_mask_broadcast_i32x4(both, 0xff00, _mm_loadu_si128((const __m128i *)q));
    both = _mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
    return _mm512_and_si512(both, _mm512_set1_epi8(15));
}
INLINE codes codes_nibbles_32(const uint8_t *p) { /* 32 bytes: all low nibbles, then all high */
    __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
    both = _mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4));
    return _mm512_and_si512(both, _mm512_set1_epi8(15));
}
INLINE codes codes_bytes(const uint8_t *p, const uint8_t *q) { /* 32 bytes each */
    __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_inserti64x4(low, _mm256_loadu_si256((const __m256i *)q), 1);
}
INLINE codes codes_flip_sign(codes c) { return _mm512_xor_si512(c, _mm512_set1_epi8((char)0x80)); }
INLINE codes codes_add_where(codes c, uint64_t where, uint8_t value) { /* + value in the bytes whose bit is set */
    return _mm512_mask_add_epi8(c, where, c, _mm512_set1_epi8((char)value));
}
INLINE codes codes_add_bit(codes c, const uint8_t *bits, int low, int high, uint8_t value) {
    /* bits: 32 bytes; + value where bit `low` (first 32 codes) or `high` (last 32) is set */
    __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)bits));
    __m512i test = _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << low)), _mm256_set1_epi8((char)(1 << high)), 1);
    return codes_add_where(c, _mm512_test_epi8_mask(both, test), value);
}
INLINE codes codes_two_bits(const uint8_t *p, int low, int high) { /* ((p >> low) & 3) << 4, then ((p >> high) & 3) << 4 */
    __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
    __m512i by = _mm512_inserti64x4(_mm512_set1_epi64(low), _mm256_set1_epi64x(high), 1);
    both = _mm512_and_si512(_mm512_srlv_epi64(both, by), _mm512_set1_epi8(3));
    return _mm512_slli_epi64(both, 4);
}
INLINE codes codes_low(const uint8_t *p) { return _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(15)); }
INLINE codes codes_high(const uint8_t *p) {
    return _mm512_and_si512(_mm512_srli_epi64(_mm512_loadu_si512(p), 4), _mm512_set1_epi8(15));
}
INLINE codes codes_or(codes a, codes b) { return _mm512_or_si512(a, b); }
INLINE codes codes_table(codes c, v16b table) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), c);
}
#define codes_part(c, i) (__builtin_convertvector((v16b)_mm512_extracti32x4_epi32((c), (i)), v16i))
#else
typedef struct { v32b part[2]; } codes;
INLINE v32b join(v16b a, v16b b) { v32b v; memcpy(&v, &a, 16); memcpy((uint8_t *)&v + 16, &b, 16); return v; }
INLINE codes codes_nibbles_2x16(const uint8_t *p, const uint8_t *q) {
    v16b a = load16b(p), b = load16b(q);
    return (codes){{join(a & 15, a >> 4), join(b & 15, b >> 4)}};
}
INLINE codes codes_nibbles_32(const uint8_t *p) { v32b a = load32b(p); return (codes){{a & 15, a >> 4}}; }
INLINE codes codes_bytes(const uint8_t *p, const uint8_t *q) { return (codes){{load32b(p), load32b(q)}}; }
INLINE codes codes_flip_sign(codes c) { return (codes){{c.part[0] ^ 0x80, c.part[1] ^ 0x80}}; }
INLINE codes codes_add_where(codes c, uint64_t where, uint8_t value) {
    uint8_t more[64];
    for (int i = 0; i < 64; i++) more[i] = (uint8_t)((where >> i & 1) * value);
    return (codes){{c.part[0] + load32b(more), c.part[1] + load32b(more + 32)}};
}
INLINE codes codes_add_bit(codes c, const uint8_t *bits, int low, int high, uint8_t value) {
    v32b b = load32b(bits);
    return (codes){{c.part[0] + (b >> low & 1) * value, c.part[1] + (b >> high & 1) * value}};
}
INLINE codes codes_two_bits(const uint8_t *p, int low, int high) {
    v32b a = load32b(p);
    return (codes){{(a >> low & 3) << 4, (a >> high & 3) << 4}};
}
INLINE codes codes_low(const uint8_t *p) { return (codes){{load32b(p) & 15, load32b(p + 32) & 15}}; }
INLINE codes codes_high(const uint8_t *p) { return (codes){{load32b(p) >> 4, load32b(p + 32) >> 4}}; }
INLINE codes codes_or(codes a, codes b) { return (codes){{a.part[0] | b.part[0], a.part[1] | b.part[1]}}; }
INLINE codes codes_table(codes c, v16b table) {
#if defined(__AVX2__)
    __m256i both = _mm256_broadcastsi128_si256((__m128i)table);
    return (codes){{(v32b)_mm256_shuffle_epi8(both, (__m256i)c.part[0]),
                    (v32b)_mm256_shuffle_epi8(both, (__m256i)c.part[1])}};
#else
    for (int i = 0; i < 64; i++) c.part[i / 32][i % 32] = table[c.part[i / 32][i % 32] & 15];
    return c;
#endif
}
INLINE v16i codes_part(codes c, int i) { return __builtin_convertvector(load16b((const uint8_t *)&c + 16 * i), v16i); }
#endif

/* 16 sums of four products each: lane l covers codes 4l..4l+3. `wide`: codes are zero + signed byte, zero = 128. */
INLINE v16i dot64(codes c, const int8_t *a, int wide) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    (void)wide;
    return (v16i)_mm512_dpbusd_epi32(_mm512_setzero_si512(), c, _mm512_loadu_si512(a));
#elif defined(__AVX2__)
    union { __m256i half[2]; v16i whole; } u;
    for (int i = 0; i < 2; i++) {
#if defined(__AVX512BW__)
        __m256i w = i ? _mm512_extracti64x4_epi64(c, 1) : _mm512_castsi512_si256(c);
#else
        __m256i w = (__m256i)c.part[i];
#endif
        __m256i x = _mm256_loadu_si256((const __m256i *)(a + 32 * i));
#if defined(__AVXVNNI__)
        (void)wide;
        u.half[i] = _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), w, x);
#else
        if (wide) {     /* |w| · (x with the sign of w): pairs stay within 16 bits, 255 · 127 · 2 would not */
            w = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
            x = _mm256_sign_epi8(x, w);
            w = _mm256_abs_epi8(w);
        }
        u.half[i] = _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
#endif
    }
    return u.whole;
#else
    uint8_t w[64];
    int32_t sum[LANES];
    (void)wide;
    memcpy(w, &c, sizeof w);
    for (int l = 0; l < LANES; l++) {
        sum[l] = 0;
        for (int i = 0; i < 4; i++) sum[l] += (int32_t)w[4 * l + i] * a[4 * l + i];
    }
    v16i v;
    memcpy(&v, sum, sizeof v);
    return v;
#endif
}
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
#define WIDE_IS_SIGNED 1    /* dot64 of wide codes has already left the zero out */
#else
#define WIDE_IS_SIGNED 0
#endif

INLINE v16f spread4(v4f s) { /* each of four values to four lanes */
#if defined(__AVX512F__)
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return (v16f)_mm512_permutexvar_ps(lanes, _mm512_castps128_ps512((__m128)s));
#else
    return (v16f){s[0], s[0], s[0], s[0], s[1], s[1], s[1], s[1], s[2], s[2], s[2], s[2], s[3], s[3], s[3], s[3]};
#endif
}

/* --- reading pieces, one function per format */

typedef struct { codes c; v4f scale, minimum; } piece;

/* Two blocks of 32 make a piece; `second` is the same block again, with scale 0, where a row ends on an odd one. */
#define PAIR(block_bytes)                                                             \
    const uint8_t *p = row + (int64_t)step * 2 * (block_bytes);                       \
    const int whole = 2 * step + 1 < blocks;                                          \
    const uint8_t *q = whole ? p + (block_bytes) : p;                                 \
    const float keep = whole ? 1.0f : 0.0f;                                           \
    (void)keep

INLINE v4f two(float a, float b) { return (v4f){a, a, b, b}; }
INLINE float half_at(const uint8_t *p) { return from_f16(load_u16(p)); }

INLINE void read_Q4_0(const uint8_t *row, int step, int blocks, piece *out) {
    PAIR(18);
    *out = (piece){codes_nibbles_2x16(p + 2, q + 2), two(half_at(p), keep * half_at(q)), (v4f){}};
}

INLINE void read_Q4_1(const uint8_t *row, int step, int blocks, piece *out) {
    PAIR(20);
    out->c = codes_nibbles_2x16(p + 4, q + 4);
#if defined(__F16C__)                        /* the four halves in one conversion: d m d m */
    __m128i raw = _mm_insert_epi32(_mm_cvtsi32_si128((int)load_u32(p)), (int)load_u32(q), 1);
    __m128 all = _mm_mul_ps(_mm_cvtph_ps(raw), _mm_setr_ps(1, 1, keep, keep));
    out->scale = (v4f)_mm_moveldup_ps(all);
    out->minimum = (v4f)_mm_movehdup_ps(all);
#else
    out->scale = two(half_at(p), keep * half_at(q));
    out->minimum = two(half_at(p + 2), keep * half_at(q + 2));
#endif
}

INLINE void read_Q5_0(const uint8_t *row, int step, int blocks, piece *out) {
    PAIR(22);
    uint64_t fifth = load_u32(p + 2) | (uint64_t)load_u32(q + 2) << 32;
    out->c = codes_add_where(codes_nibbles_2x16(p + 6, q + 6), fifth, 16);
    out->scale = two(half_at(p), keep * half_at(q));
    out->minimum = (v4f){};
}

INLINE void read_Q5_1(const uint8_t *row, int step, int blocks, piece *out) {
    PAIR(24);
    uint64_t fifth = load_u32(p + 4) | (uint64_t)load_u32(q + 4) << 32;
    out->c = codes_add_where(codes_nibbles_2x16(p + 8, q + 8), fifth, 16);
    out->scale = two(half_at(p), keep * half_at(q));
    out->minimum = two(half_at(p + 2), keep * half_at(q + 2));
}

INLINE void read_Q8_0(const uint8_t *row, int step, int blocks, piece *out) {
    PAIR(34);
    *out = (piece){codes_flip_sign(codes_bytes(p + 2, q + 2)), two(half_at(p), keep * half_at(q)), (v4f){}};
}

/* -127 -104 -83 -65 -49 -35 -22 -10 1 13 25 38 53 69 89 113, plus 128 */
static const v16b IQ4_VALUES = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

INLINE void read_IQ4_NL(const uint8_t *row, int step, int blocks, piece *out) {
    PAIR(18);
    codes c = codes_table(codes_nibbles_2x16(p + 2, q + 2), IQ4_VALUES);
    *out = (piece){c, two(half_at(p), keep * half_at(q)), (v4f){}};
}

/* twice the values of E2M1 (0 .5 1 1.5 2 3 4 6, then negative), plus 16 */
static const v16b FP4_VALUES = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

INLINE float half_of_e8m0(uint8_t e) { /* 2^(e - 128) */
    return float_of_bits(e < 2 ? 0x00200000u << e : (uint32_t)(e - 1) << 23);
}

INLINE void read_MXFP4(const uint8_t *row, int step, int blocks, piece *out) {
    PAIR(17);
    codes c = codes_table(codes_nibbles_2x16(p + 1, q + 1), FP4_VALUES);
    *out = (piece){c, two(half_of_e8m0(*p), whole ? half_of_e8m0(*q) : 0.0f), (v4f){}};
}

/* 6-bit scales and minima of the eight groups of a Q4_K or Q5_K super-block, packed in 12 bytes */
INLINE void k_scales(const uint8_t *p, float d, float dmin, float scale[8], float minimum[8]) {
    uint32_t a = load_u32(p), b = load_u32(p + 4), c = load_u32(p + 8);
    uint32_t words[4] = {
        a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030),
        b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030),
    };
    uint8_t all[16];
    memcpy(all, words, sizeof all);
    v16f f = __builtin_convertvector(__builtin_convertvector(load16b(all), v16i), v16f);
    for (int g = 0; g < 8; g++) {
        scale[g] = d * f[g];
        minimum[g] = -dmin * f[8 + g];
    }
}

INLINE void read_Q4_K(const uint8_t *row, int step, int blocks, piece *out) {
    const uint8_t *p = row + (int64_t)step * 144;
    float scale[8], minimum[8];
    (void)blocks;
    k_scales(p + 4, half_at(p), half_at(p + 2), scale, minimum);
    for (int i = 0; i < 4; i++)
        out[i] = (piece){codes_nibbles_32(p + 16 + 32 * i), two(scale[2 * i], scale[2 * i + 1]),
                         two(minimum[2 * i], minimum[2 * i + 1])};
}

INLINE void read_Q5_K(const uint8_t *row, int step, int blocks, piece *out) {
    const uint8_t *p = row + (int64_t)step * 176;
    float scale[8], minimum[8];
    (void)blocks;
    k_scales(p + 4, half_at(p), half_at(p + 2), scale, minimum);
    for (int i = 0; i < 4; i++) {
        codes c = codes_add_bit(codes_nibbles_32(p + 48 + 32 * i), p + 16, 2 * i, 2 * i + 1, 16);
        out[i] = (piece){c, two(scale[2 * i], scale[2 * i + 1]), two(minimum[2 * i], minimum[2 * i + 1])};
    }
}

INLINE void read_Q6_K(const uint8_t *row, int step, int blocks, piece *out) {
    const uint8_t *p = row + (int64_t)step * 210;
    float d = half_at(p + 208), scale[16];
    (void)blocks;
    for (int g = 0; g < 16; g++) scale[g] = d * (float)(int8_t)p[192 + g];
    for (int i = 0; i < 2; i++) {            /* 128 weights: low nibbles first, then high ones */
        const uint8_t *low = p + 64 * i, *high = p + 128 + 32 * i;
        out[2 * i].c = codes_or(codes_low(low), codes_two_bits(high, 0, 2));
        out[2 * i + 1].c = codes_or(codes_high(low), codes_two_bits(high, 4, 6));
    }
    for (int i = 0; i < 4; i++) out[i].scale = load4(scale + 4 * i), out[i].minimum = (v4f){};
}

INLINE void read_IQ4_XS(const uint8_t *row, int step, int blocks, piece *out) {
    const uint8_t *p = row + (int64_t)step * 136;
    float d = half_at(p), scale[8];
    uint32_t high = load_u16(p + 2);
    (void)blocks;
    for (int g = 0; g < 8; g++) {
        int low = p[4 + g / 2] >> 4 * (g % 2) & 15;
        scale[g] = d * (float)((low | (int)(high >> 2 * g & 3) << 4) - 32);
    }
    for (int i = 0; i < 4; i++) {
        codes c = codes_table(codes_nibbles_2x16(p + 8 + 32 * i, p + 24 + 32 * i), IQ4_VALUES);
        out[i] = (piece){c, two(scale[2 * i], scale[2 * i + 1]), (v4f){}};
    }
}

/* --- activations as int8, one scale per 32, in two terms: x = d · (q + r / 254)
 *
 * The second term holds what rounding to the first left over. Products are bound by reading weights, so it costs little,
 * and it takes the error of int8 activations away: the KL divergence from exact decoding falls from 3e-3 to 3e-7
 * (SmolLM2 135M Q4_1, benchmarks/cpu/accuracy.py). */

#define SECOND (1.0f / 254.0f)

typedef struct {
    int8_t q[64];                   /* round(x / d), d = max|x| / 127 of each 32 */
    int8_t r[64];                   /* round((x / d - q) · 254) */
    int32_t sum[16], rsum[16];      /* of each four q, r */
    float d[4], dsum[4];            /* per 16: the scale, and scale · sum of q + r / 254 */
    int32_t total[4], rtotal[4];    /* per 16: the sums of q and r */
} act64;                            /* 320 bytes: nothing straddles a cache line */

INLINE int32_t put_codes(v16i codes_of, int8_t *to, int32_t *fours) { /* -> the sum of all */
    typedef int8_t v16c __attribute__((vector_size(16)));
    const v16c narrow = __builtin_convertvector(codes_of, v16c);
    memcpy(to, &narrow, sizeof narrow);
    int32_t total = 0;
    for (int l = 0; l < 4; l++) {
        fours[l] = to[4 * l] + to[4 * l + 1] + to[4 * l + 2] + to[4 * l + 3];
        total += fours[l];
    }
    return total;
}

static void quantize_row(const float *x, int n, act64 *out) { /* n floats -> ceil(n / 64) pieces, zero behind the end */
    for (int piece_i = 0; piece_i < ceil_div(n, 64); piece_i++) {
        act64 *o = out + piece_i;
        for (int h = 0; h < 2; h++) {
            const int at = 64 * piece_i + 32 * h;
            float tail[32] = {0};
            const float *from = x + at;
            if (at + 32 > n) {
                if (at < n) memcpy(tail, x + at, (size_t)(n - at) * sizeof(float));
                from = tail;
            }
            v16f a = load16(from), b = load16(from + 16);
            v16i bits_a = (v16i)a & 0x7fffffff, bits_b = (v16i)b & 0x7fffffff;   /* ordered like |x|, NaN on top */
            v16i top = (bits_a & (bits_a > bits_b)) | (bits_b & ~(bits_a > bits_b));
            int32_t most = 0;
#if defined(__AVX512F__)
            most = _mm512_reduce_max_epi32((__m512i)top);
#else
            for (int i = 0; i < LANES; i++) most = imax(most, top[i]);
#endif
            const float d = float_of_bits((uint32_t)most) / 127.0f;
            const float inverse = d > 0.0f && d <= 3e38f ? 1.0f / d : 0.0f;
            const v16f shift = splat(0x1.8p23f);
            for (int i = 0; i < 2; i++) {
                const v16f y = (i ? b : a) * splat(inverse), first = (y + shift) - shift;
                const v16f second = (y - first) * splat(254.0f) + shift;
                const int32_t total = put_codes(__builtin_convertvector(first, v16i), o->q + 32 * h + 16 * i,
                                                o->sum + 8 * h + 4 * i);
                const int32_t rest = put_codes((v16i)second - (v16i)shift, o->r + 32 * h + 16 * i, o->rsum + 8 * h + 4 * i);
                o->d[2 * h + i] = d;
                o->dsum[2 * h + i] = d * ((float)total + (float)rest * SECOND);
                o->total[2 * h + i] = total;
                o->rtotal[2 * h + i] = rest;
            }
        }
    }
}

/* --- what is written once for all formats */

typedef void (*dot_fn)(const uint8_t *row, int64_t row_bytes, int rows, int cols, const act64 *a, float *y);
typedef void (*dequant_fn)(const uint8_t *row, int from, int count, int cols, float *out);

INLINE v16f two_terms(v16i q, v16i r) {
    return __builtin_convertvector(q, v16f) + __builtin_convertvector(r, v16f) * splat(SECOND);
}

#define LOG2(x) ((x) == 128 ? 7 : (x) == 32 ? 5 : (x) == 16 ? 4 : (x) == 8 ? 3 : 0)

/* FORMAT(name, weights per block, pieces per step, zero) */
#define FORMAT(NAME, BLOCK, PIECES, ZERO)                                                                          \
    static void dot_##NAME(const uint8_t *row, int64_t row_bytes, int rows, int cols, const act64 *a, float *y) {  \
        const int blocks = cols / (BLOCK), steps = ceil_div(cols, 64 * (PIECES));                                  \
        for (int r = 0; r < rows; r++, row += row_bytes) {                                                         \
            v16f sum = {};                                                                                         \
            v4f low = {};                                                                                          \
            for (int s = 0; s < steps; s++) {                                                                      \
                piece w[PIECES];                                                                                   \
                read_##NAME(row, s, blocks, w);                                                                    \
                for (int i = 0; i < (PIECES); i++) {                                                               \
                    const act64 *x = a + s * (PIECES) + i;                                                         \
                    v16i dots = dot64(w[i].c, x->q, (ZERO) == 128), rest = dot64(w[i].c, x->r, (ZERO) == 128);     \
                    if ((ZERO) && !((ZERO) == 128 && WIDE_IS_SIGNED)) {                                            \
                        v16i four, more;                                                                           \
                        memcpy(&four, x->sum, sizeof four);                                                        \
                        memcpy(&more, x->rsum, sizeof more);                                                       \
                        dots -= four << LOG2(ZERO);                                                                \
                        rest -= more << LOG2(ZERO);                                                                \
                    }                                                                                              \
                    sum += two_terms(dots, rest) * spread4(w[i].scale * load4(x->d));                              \
                    if (!(ZERO)) low += w[i].minimum * load4(x->dsum);                                             \
                }                                                                                                  \
            }                                                                                                      \
            y[r] = sum16(sum) + ((low[0] + low[1]) + (low[2] + low[3]));                                           \
        }                                                                                                          \
    }                                                                                                              \
    static void dequant_##NAME(const uint8_t *row, int from, int count, int cols, float *out) {                    \
        const int blocks = cols / (BLOCK);                                                                         \
        for (int s = from / (64 * (PIECES)); s * 64 * (PIECES) < from + count; s++) {                              \
            piece w[PIECES];                                                                                       \
            read_##NAME(row, s, blocks, w);                                                                        \
            for (int i = 0; i < (PIECES); i++, out += 64) {                                                        \
                store16(out, part_of(&w[i], 0, codes_part(w[i].c, 0) - (ZERO)));                                   \
                store16(out + 16, part_of(&w[i], 1, codes_part(w[i].c, 1) - (ZERO)));                              \
                store16(out + 32, part_of(&w[i], 2, codes_part(w[i].c, 2) - (ZERO)));                              \
                store16(out + 48, part_of(&w[i], 3, codes_part(w[i].c, 3) - (ZERO)));                              \
            }                                                                                                      \
        }                                                                                                          \
    }

INLINE v16f part_of(const piece *w, int i, v16i code) {
    return __builtin_convertvector(code, v16f) * splat(w->scale[i]) + splat(w->minimum[i]);
}

FORMAT(Q4_0, 32, 1, 8)
FORMAT(Q4_1, 32, 1, 0)
FORMAT(Q5_0, 32, 1, 16)
FORMAT(Q5_1, 32, 1, 0)
FORMAT(Q8_0, 32, 1, 128)
FORMAT(IQ4_NL, 32, 1, 128)
FORMAT(MXFP4, 32, 1, 16)
FORMAT(Q4_K, 256, 4, 0)
FORMAT(Q5_K, 256, 4, 0)
FORMAT(Q6_K, 256, 4, 32)
FORMAT(IQ4_XS, 256, 4, 128)

/* Plain floats: any number of columns, f32 activations. */
INLINE v16f plain16(int format, const uint8_t *p, int i) {
    if (format == F_F32) return load16((const float *)p + i);
    if (format == F_F16) return load16_f16((const uint16_t *)p + i);
    return load16_bf16((const uint16_t *)p + i);
}

INLINE float plain1(int format, const uint8_t *p, int i) {
    if (format == F_F32) return float_of_bits(load_u32(p + 4 * (int64_t)i));
    uint16_t half = load_u16(p + 2 * (int64_t)i);
    return format == F_F16 ? from_f16(half) : from_bf16(half);
}

INLINE void plain_dot(int format, const uint8_t *row, int64_t row_bytes, int rows, int cols, const float *x, float *y) {
    for (int r = 0; r < rows; r++, row += row_bytes) {
        v16f sum = {};
        int i = 0;
        for (; i + LANES <= cols; i += LANES) sum += plain16(format, row, i) * load16(x + i);
        float rest = 0;
        for (; i < cols; i++) rest += plain1(format, row, i) * x[i];
        y[r] = sum16(sum) + rest;
    }
}

INLINE void plain_dequant(int format, const uint8_t *row, int from, int count, int cols, float *out) {
    for (int i = 0; i < count; i++) out[i] = from + i < cols ? plain1(format, row, from + i) : 0.0f;
}

INLINE int is_plain(int format) { return format == F_F32 || format == F_F16 || format == F_BF16; }

static dot_fn dot_of(int format) {
    switch (format) {
        case F_Q4_0: return dot_Q4_0;
        case F_Q4_1: return dot_Q4_1;
        case F_Q5_0: return dot_Q5_0;
        case F_Q5_1: return dot_Q5_1;
        case F_Q8_0: return dot_Q8_0;
        case F_Q4_K: return dot_Q4_K;
        case F_Q5_K: return dot_Q5_K;
        case F_Q6_K: return dot_Q6_K;
        case F_IQ4_NL: return dot_IQ4_NL;
        case F_IQ4_XS: return dot_IQ4_XS;
        case F_MXFP4: return dot_MXFP4;
        default: return NULL;
    }
}

/* y[0..rows) = rows row0.. of W times x, given both as floats and as int8. */
static void matvec_rows(const luce_matrix *w, int row0, int rows, const float *x, const act64 *a, float *y) {
    const uint8_t *row = w->data + row0 * w->row_bytes;
    switch (w->format) {
        case F_F32: plain_dot(F_F32, row, w->row_bytes, rows, w->cols, x, y); break;
        case F_F16: plain_dot(F_F16, row, w->row_bytes, rows, w->cols, x, y); break;
        case F_BF16: plain_dot(F_BF16, row, w->row_bytes, rows, w->cols, x, y); break;
        default: dot_of(w->format)(row, w->row_bytes, rows, w->cols, a, y);
    }
}

/* Weights from..from+count of one row as f32; from a multiple of 256; whole steps are written (up to 255 more, zero
 * behind the end of the row). */
static void dequantize_row(const luce_matrix *w, int r, int from, int count, float *out) {
    const uint8_t *row = w->data + r * w->row_bytes;
    switch (w->format) {
        case F_F32: plain_dequant(F_F32, row, from, count, w->cols, out); break;
        case F_F16: plain_dequant(F_F16, row, from, count, w->cols, out); break;
        case F_BF16: plain_dequant(F_BF16, row, from, count, w->cols, out); break;
        case F_Q4_0: dequant_Q4_0(row, from, count, w->cols, out); break;
        case F_Q4_1: dequant_Q4_1(row, from, count, w->cols, out); break;
        case F_Q5_0: dequant_Q5_0(row, from, count, w->cols, out); break;
        case F_Q5_1: dequant_Q5_1(row, from, count, w->cols, out); break;
        case F_Q8_0: dequant_Q8_0(row, from, count, w->cols, out); break;
        case F_Q4_K: dequant_Q4_K(row, from, count, w->cols, out); break;
        case F_Q5_K: dequant_Q5_K(row, from, count, w->cols, out); break;
        case F_Q6_K: dequant_Q6_K(row, from, count, w->cols, out); break;
        case F_IQ4_NL: dequant_IQ4_NL(row, from, count, w->cols, out); break;
        case F_IQ4_XS: dequant_IQ4_XS(row, from, count, w->cols, out); break;
        case F_MXFP4: dequant_MXFP4(row, from, count, w->cols, out); break;
    }
}

#endif
