/* The same formats with sixteen rows side by side: lane r of a register belongs to row r.
 *
 * A row-by-row product spends most of its instructions on unpacking and on adding lanes up. With AVX-512 the weights are
 * therefore rearranged once, at load: the blocks of sixteen neighbouring rows are cut into units of one, two or four bytes,
 * and each unit is stored for all sixteen rows before the next. Same bytes, same size, other order. A group of 32 weights
 * then is eight registers of four codes per row, a scale and a minimum per row. */
#ifndef LUCE_LANES_H
#define LUCE_LANES_H

#include "formats.h"

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define HAVE_LANES 1
#else
#define HAVE_LANES 0
#endif

/* --- rearranging */

typedef struct { int32_t unit, count; } field;
typedef struct {
    int32_t block_weights, block_bytes;
    field fields[5];            /* in the order of the block; unit 0 ends them */
} block_shape;

static const block_shape *shape_of(int32_t format) {
    static const block_shape q4_0 = {32, 18, {{2, 1}, {4, 4}}}, q4_1 = {32, 20, {{2, 2}, {4, 4}}};
    static const block_shape q5_0 = {32, 22, {{2, 1}, {4, 1}, {4, 4}}}, q5_1 = {32, 24, {{2, 2}, {4, 1}, {4, 4}}};
    static const block_shape q8_0 = {32, 34, {{2, 1}, {4, 8}}}, mxfp4 = {32, 17, {{1, 1}, {4, 4}}};
    static const block_shape q4_k = {256, 144, {{2, 2}, {1, 12}, {4, 32}}};
    static const block_shape q5_k = {256, 176, {{2, 2}, {1, 12}, {4, 8}, {4, 32}}};
    static const block_shape q6_k = {256, 210, {{4, 32}, {4, 16}, {1, 16}, {2, 1}}};
    static const block_shape iq4_xs = {256, 136, {{2, 2}, {1, 4}, {4, 32}}};
    switch (format) {
        case F_Q4_0: case F_IQ4_NL: return &q4_0;
        case F_Q4_1: return &q4_1;
        case F_Q5_0: return &q5_0;
        case F_Q5_1: return &q5_1;
        case F_Q8_0: return &q8_0;
        case F_MXFP4: return &mxfp4;
        case F_Q4_K: return &q4_k;
        case F_Q5_K: return &q5_k;
        case F_Q6_K: return &q6_k;
        case F_IQ4_XS: return &iq4_xs;
        default: return NULL;
    }
}

/* Row-major rows -> lanes. out: ceil(rows / 16) · 16 · cols / block_weights · block_bytes; missing rows are zero bytes. */
static void to_lanes(const luce_matrix *m, uint8_t *out) {
    const block_shape *shape = shape_of(m->format);
    for (int32_t r0 = 0; r0 < m->rows; r0 += 16) {
        for (int32_t block = 0; block < m->cols / shape->block_weights; block++) {
            const uint8_t *from = m->data + r0 * m->row_bytes + (int64_t)block * shape->block_bytes;
            for (const field *f = shape->fields; f->unit; f++) {
                for (int32_t u = 0; u < f->count; u++, from += f->unit, out += 16 * f->unit) {
                    for (int32_t r = 0; r < 16; r++) {
                        if (r0 + r < m->rows) memcpy(out + r * f->unit, from + r * m->row_bytes, (size_t)f->unit);
                        else memset(out + r * f->unit, 0, (size_t)f->unit);
                    }
                }
            }
        }
    }
}

#if HAVE_LANES
/* --- one group of 32 weights of sixteen rows */

typedef struct {
    __m512i code[8];            /* code[j]: weights 4j..4j+3 of the group, unsigned */
    v16f scale[2], minimum;     /* scale[h]: of weights 16h..16h+15 */
} group;

INLINE __m512i low_nibbles(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE __m512i high_nibbles(__m512i x) { return _mm512_and_si512(_mm512_srli_epi32(x, 4), _mm512_set1_epi8(15)); }
INLINE __m512i lanes_at(const uint8_t *p, int i) { return _mm512_loadu_si512(p + 64 * i); }
INLINE v16f halves_at(const uint8_t *p) { return load16_f16((const uint16_t *)p); }
INLINE v16f floats_of(__m128i bytes) { return (v16f)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)); }
INLINE __m128i bytes_at(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)p); }

INLINE void nibble_group(const uint8_t *p, group *g) { /* four registers: low nibbles 0..15, high nibbles 16..31 */
    for (int j = 0; j < 4; j++) {
        const __m512i x = lanes_at(p, j);
        g->code[j] = low_nibbles(x);
        g->code[4 + j] = high_nibbles(x);
    }
}

INLINE void through_table(group *g, v16b table) {
    const __m512i t = _mm512_broadcast_i32x4((__m128i)table);
    for (int j = 0; j < 8; j++) g->code[j] = _mm512_shuffle_epi8(t, g->code[j]);
}

INLINE void add_fifth_bits(__m512i bits, group *g) { /* bit k of each lane: 16 more for weight k */
    const __m512i spread = _mm512_setr_epi32(0, 0x10, 0x1000, 0x1010, 0x100000, 0x100010, 0x101000, 0x101010, 0x10000000,
                                             0x10000010, 0x10001000, 0x10001010, 0x10100000, 0x10100010, 0x10101000,
                                             0x10101010);
    for (int j = 0; j < 8; j++) {
        const __m512i four = _mm512_permutexvar_epi32(_mm512_srlv_epi32(bits, _mm512_set1_epi32(4 * j)), spread);
        g->code[j] = _mm512_or_si512(g->code[j], four);
    }
}

INLINE void lanes_Q4_0(const uint8_t *p, int i, group *g) {
    p += (int64_t)i * 288;
    nibble_group(p + 32, g);
    g->scale[0] = g->scale[1] = halves_at(p);
}

INLINE void lanes_Q4_1(const uint8_t *p, int i, group *g) {
    p += (int64_t)i * 320;
    nibble_group(p + 64, g);
    g->scale[0] = g->scale[1] = halves_at(p);
    g->minimum = halves_at(p + 32);
}

INLINE void lanes_Q5_0(const uint8_t *p, int i, group *g) {
    p += (int64_t)i * 352;
    nibble_group(p + 96, g);
    add_fifth_bits(_mm512_loadu_si512(p + 32), g);
    g->scale[0] = g->scale[1] = halves_at(p);
}

INLINE void lanes_Q5_1(const uint8_t *p, int i, group *g) {
    p += (int64_t)i * 384;
    nibble_group(p + 128, g);
    add_fifth_bits(_mm512_loadu_si512(p + 64), g);
    g->scale[0] = g->scale[1] = halves_at(p);
    g->minimum = halves_at(p + 32);
}

INLINE void lanes_Q8_0(const uint8_t *p, int i, group *g) {
    p += (int64_t)i * 544;
    for (int j = 0; j < 8; j++) g->code[j] = codes_flip_sign(lanes_at(p + 32, j));
    g->scale[0] = g->scale[1] = halves_at(p);
}

INLINE void lanes_IQ4_NL(const uint8_t *p, int i, group *g) {
    lanes_Q4_0(p, i, g);
    through_table(g, IQ4_VALUES);
}

INLINE void lanes_MXFP4(const uint8_t *p, int i, group *g) {
    p += (int64_t)i * 272;
    nibble_group(p + 16, g);
    through_table(g, FP4_VALUES);
    const v16i e = (v16i)_mm512_cvtepu8_epi32(bytes_at(p));
    const v16i tiny = (v16i)_mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), (__m512i)e);
    g->scale[0] = g->scale[1] = choose(e < 2, (v16f)tiny, (v16f)((e - 1) << 23));
}

INLINE void k_group_scales(const uint8_t *p, int i, group *g) { /* d, dmin, twelve bytes of 6-bit numbers */
    const uint8_t *six = p + 64;
    const __m128i low4 = _mm_set1_epi8(15), low6 = _mm_set1_epi8(63), two_up = _mm_set1_epi8(0x30);
    __m128i scale, minimum;
    if (i < 4) {
        scale = _mm_and_si128(bytes_at(six + 16 * i), low6);
        minimum = _mm_and_si128(bytes_at(six + 16 * (4 + i)), low6);
    } else {
        const __m128i both = bytes_at(six + 16 * (4 + i));
        const __m128i s = bytes_at(six + 16 * (i - 4)), m = bytes_at(six + 16 * i);
        scale = _mm_or_si128(_mm_and_si128(both, low4), _mm_and_si128(_mm_srli_epi16(s, 2), two_up));
        minimum = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(both, 4), low4), _mm_and_si128(_mm_srli_epi16(m, 2), two_up));
    }
    g->scale[0] = g->scale[1] = halves_at(p) * floats_of(scale);
    g->minimum = -halves_at(p + 32) * floats_of(minimum);
}

INLINE void k_nibbles(const uint8_t *p, int i, group *g) { /* 32 bytes: group i even in the low nibbles, i + 1 in the high */
    for (int j = 0; j < 8; j++) {
        const __m512i x = lanes_at(p, 8 * (i / 2) + j);
        g->code[j] = low_nibbles(i % 2 ? _mm512_srli_epi32(x, 4) : x);
    }
}

INLINE void lanes_Q4_K(const uint8_t *p, int i, group *g) {
    p += (int64_t)(i / 8) * 2304;
    k_group_scales(p, i % 8, g);
    k_nibbles(p + 256, i % 8, g);
}

INLINE void lanes_Q5_K(const uint8_t *p, int i, group *g) {
    p += (int64_t)(i / 8) * 2816;
    k_group_scales(p, i % 8, g);
    k_nibbles(p + 768, i % 8, g);
    for (int j = 0; j < 8; j++) {
        const __m512i bit = _mm512_srlv_epi32(lanes_at(p + 256, j), _mm512_set1_epi32(i % 8));
        g->code[j] = _mm512_or_si512(g->code[j], _mm512_slli_epi32(_mm512_and_si512(bit, _mm512_set1_epi8(1)), 4));
    }
}

INLINE void lanes_Q6_K(const uint8_t *p, int i, group *g) {
    p += (int64_t)(i / 8) * 3360;
    const int half = i % 8 / 4, part = i % 4;
    const v16f d = halves_at(p + 3328);
    for (int h = 0; h < 2; h++)
        g->scale[h] = d * (v16f)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes_at(p + 3072 + 16 * (2 * (i % 8) + h))));
    for (int j = 0; j < 8; j++) {
        const __m512i low = lanes_at(p, 16 * half + 8 * (part % 2) + j), high = lanes_at(p + 2048, 8 * half + j);
        const __m512i two = _mm512_and_si512(_mm512_srlv_epi32(high, _mm512_set1_epi32(2 * part)), _mm512_set1_epi8(3));
        g->code[j] = _mm512_or_si512(part < 2 ? low_nibbles(low) : high_nibbles(low), _mm512_slli_epi32(two, 4));
    }
}

INLINE void lanes_IQ4_XS(const uint8_t *p, int i, group *g) {
    p += (int64_t)(i / 8) * 2176;
    const int b = i % 8;
    const v16i low = (v16i)_mm512_cvtepu8_epi32(bytes_at(p + 64 + 16 * (b / 2))) >> 4 * (b % 2) & 15;
    const v16i high = (v16i)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(p + 32))) >> 2 * b & 3;
    g->scale[0] = g->scale[1] = halves_at(p) * __builtin_convertvector((low | high << 4) - 32, v16f);
    nibble_group(p + 128 + 256 * b, g);
    through_table(g, IQ4_VALUES);
}

/* --- written once for all formats */

#define LANE_ROWS 4     /* activation rows a group is unpacked for at a time */

#define AHEAD 4096      /* bytes: weights come from L3 or memory, at a few hundred cycles; the L2 prefetcher stops at pages */

INLINE void prefetch_group(const uint8_t *tile, int i, int64_t group_bytes) {
    const uint8_t *p = tile + i * group_bytes + AHEAD;
    for (int64_t at = 0; at < group_bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
}

/* bytes of a group of 32 weights of sixteen rows */
typedef char lanes_bytes_Q4_0[288], lanes_bytes_Q4_1[320], lanes_bytes_Q5_0[352], lanes_bytes_Q5_1[384], lanes_bytes_Q8_0[544];
typedef char lanes_bytes_IQ4_NL[288], lanes_bytes_MXFP4[272], lanes_bytes_Q4_K[288], lanes_bytes_Q5_K[352], lanes_bytes_Q6_K[420];
typedef char lanes_bytes_IQ4_XS[272];

typedef void (*lanes_dot_fn)(const uint8_t *tile, int cols, const act64 *a, int per_row, int rows, float *y);
typedef void (*lanes_dequant_fn)(const uint8_t *tile, int from, int count, float *out);

INLINE int32_t dword_at(const int8_t *q) { int32_t x; memcpy(&x, q, sizeof x); return x; }

#define LANES_FORMAT(NAME, ZERO, HALVES)                                                                                 \
    INLINE void lanes_rows_##NAME(const uint8_t *tile, int cols, const act64 *a, int per_row, const int rows, float *y) { \
        v16f sum[LANE_ROWS];                                                                                             \
        for (int r = 0; r < rows; r++) sum[r] = (v16f){};                                                                \
        for (int i = 0; i < cols / 32; i++) {                                                                            \
            group g;                                                                                                     \
            prefetch_group(tile, i, sizeof(lanes_bytes_##NAME));                                                         \
            lanes_##NAME(tile, i, &g);                                                                                   \
            for (int r = 0; r < rows; r++) {                                                                             \
                const act64 *x = a + r * per_row + i / 2;                                                                \
                const int h = i % 2;                                                                                     \
                const int8_t *q = x->q + 32 * h, *rest = x->r + 32 * h;                                                  \
                __m512i dots[2], more[2];                                                                                \
                for (int k = 0; k < 2; k++) {                                                                            \
                    dots[k] = _mm512_set1_epi32((ZERO) ? -(ZERO) * x->total[2 * h + k] : 0);                             \
                    more[k] = _mm512_set1_epi32((ZERO) ? -(ZERO) * x->rtotal[2 * h + k] : 0);                            \
                }                                                                                                        \
                for (int j = 0; j < 4; j++) {                                                                            \
                    dots[0] = _mm512_dpbusd_epi32(dots[0], g.code[j], _mm512_set1_epi32(dword_at(q + 4 * j)));           \
                    dots[1] = _mm512_dpbusd_epi32(dots[1], g.code[4 + j], _mm512_set1_epi32(dword_at(q + 16 + 4 * j)));  \
                    more[0] = _mm512_dpbusd_epi32(more[0], g.code[j], _mm512_set1_epi32(dword_at(rest + 4 * j)));        \
                    more[1] = _mm512_dpbusd_epi32(more[1], g.code[4 + j], _mm512_set1_epi32(dword_at(rest + 16 + 4 * j)));\
                }                                                                                                        \
                if (HALVES) {                                                                                            \
                    const v16f first = two_terms((v16i)dots[0], (v16i)more[0]);                                          \
                    const v16f second = two_terms((v16i)dots[1], (v16i)more[1]);                                         \
                    sum[r] += (first * g.scale[0] + second * g.scale[1]) * splat(x->d[2 * h]);                           \
                } else {                                                                                                 \
                    const v16f both = two_terms((v16i)dots[0] + (v16i)dots[1], (v16i)more[0] + (v16i)more[1]);           \
                    sum[r] += both * (g.scale[0] * splat(x->d[2 * h]));                                                  \
                }                                                                                                        \
                if (!(ZERO)) sum[r] += g.minimum * splat(x->dsum[2 * h] + x->dsum[2 * h + 1]);                           \
            }                                                                                                            \
        }                                                                                                                \
        for (int r = 0; r < rows; r++) store16(y + 16 * r, sum[r]);                                                      \
    }                                                                                                                    \
    static void lanes_dot_##NAME(const uint8_t *tile, int cols, const act64 *a, int per_row, int rows, float *y) {       \
        switch (rows) {                                                                                                  \
            case 1: lanes_rows_##NAME(tile, cols, a, per_row, 1, y); break;                                              \
            case 2: lanes_rows_##NAME(tile, cols, a, per_row, 2, y); break;                                              \
            case 3: lanes_rows_##NAME(tile, cols, a, per_row, 3, y); break;                                              \
            default: lanes_rows_##NAME(tile, cols, a, per_row, 4, y);                                                    \
        }                                                                                                                \
    }                                                                                                                    \
    static void lanes_dequant_##NAME(const uint8_t *tile, int from, int count, float *out) {                             \
        for (int i = from / 32; i < (from + count) / 32; i++) {                                                          \
            group g;                                                                                                     \
            lanes_##NAME(tile, i, &g);                                                                                   \
            for (int j = 0; j < 8; j++) {                                                                                \
                for (int b = 0; b < 4; b++, out += 16) {                                                                 \
                    const v16i code = (v16i)_mm512_srli_epi32(g.code[j], 8 * b) & 255;                                   \
                    v16f w = __builtin_convertvector(code - (ZERO), v16f) * g.scale[(HALVES) ? j / 4 : 0];               \
                    store16(out, (ZERO) ? w : w + g.minimum);                                                            \
                }                                                                                                        \
            }                                                                                                            \
        }                                                                                                                \
    }

LANES_FORMAT(Q4_0, 8, 0)
LANES_FORMAT(Q4_1, 0, 0)
LANES_FORMAT(Q5_0, 16, 0)
LANES_FORMAT(Q5_1, 0, 0)
LANES_FORMAT(Q8_0, 128, 0)
LANES_FORMAT(IQ4_NL, 128, 0)
LANES_FORMAT(MXFP4, 16, 0)
LANES_FORMAT(Q4_K, 0, 0)
LANES_FORMAT(Q5_K, 0, 0)
LANES_FORMAT(Q6_K, 32, 1)
LANES_FORMAT(IQ4_XS, 128, 0)

#define LANES_SWITCH(KIND)                              \
    switch (format) {                                   \
        case F_Q4_0: return lanes_##KIND##_Q4_0;        \
        case F_Q4_1: return lanes_##KIND##_Q4_1;        \
        case F_Q5_0: return lanes_##KIND##_Q5_0;        \
        case F_Q5_1: return lanes_##KIND##_Q5_1;        \
        case F_Q8_0: return lanes_##KIND##_Q8_0;        \
        case F_IQ4_NL: return lanes_##KIND##_IQ4_NL;    \
        case F_MXFP4: return lanes_##KIND##_MXFP4;      \
        case F_Q4_K: return lanes_##KIND##_Q4_K;        \
        case F_Q5_K: return lanes_##KIND##_Q5_K;        \
        case F_Q6_K: return lanes_##KIND##_Q6_K;        \
        default: return lanes_##KIND##_IQ4_XS;          \
    }
static lanes_dot_fn lanes_dot_of(int format) { LANES_SWITCH(dot) }
static lanes_dequant_fn lanes_dequant_of(int format) { LANES_SWITCH(dequant) }
#endif

/* --- a matrix in either order */

/* y[r][0..16): outputs row0..row0+n of `rows` activation rows; row0 a multiple of 16. */
static void matvec(const luce_matrix *m, int row0, int n, const float *x, const act64 *a, int per_row, int rows, float *y) {
#if HAVE_LANES
    if (m->lanes) {
        const lanes_dot_fn dot = lanes_dot_of(m->format);
        for (int r = 0; r < rows; r += LANE_ROWS)
            dot(m->data + row0 * m->row_bytes, m->cols, a + r * per_row, per_row, imin(LANE_ROWS, rows - r), y + 16 * r);
        return;
    }
#endif
    for (int r = 0; r < rows; r++)
        matvec_rows(m, row0, n, x + (int64_t)r * m->cols, a + r * per_row, y + 16 * r);
}

static void transpose16(v16f r[16]) {
#if defined(__AVX512F__) && !defined(__clang__)
#define SWAP_STAGE(S)                                                                                         \
    for (int i = 0; i < 16; i++)                                                                              \
        if (!(i & (S))) {                                                                                     \
            v16i low, high;                                                                                   \
            for (int j = 0; j < 16; j++) {                                                                    \
                low[j] = j & (S) ? 16 + j - (S) : j;                                                          \
                high[j] = j & (S) ? 16 + j : j + (S);                                                         \
            }                                                                                                 \
            v16f a = __builtin_shuffle(r[i], r[i + (S)], low), b = __builtin_shuffle(r[i], r[i + (S)], high); \
            r[i] = a, r[i + (S)] = b;                                                                         \
        }
    SWAP_STAGE(1)
    SWAP_STAGE(2)
    SWAP_STAGE(4)
    SWAP_STAGE(8)
#else
    float m[16][16], t[16][16];
    memcpy(m, r, sizeof m);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) t[j][i] = m[i][j];
    memcpy(r, t, sizeof t);
#endif
}

#define TILE_SPACE (16 * 512)   /* floats of scratch `dequantize_tile` needs */

/* Weights from..from+count of rows row0..row0+16 -> out [count up to 32][16], zero outside the matrix. from: multiple of
 * 256, row0: of 16. */
static void dequantize_tile(const luce_matrix *m, int32_t row0, int32_t from, int32_t count, float *out, float *space) {
#if HAVE_LANES
    if (m->lanes) {
        lanes_dequant_of(m->format)(m->data + row0 * m->row_bytes, from, count, out);
        return;
    }
#endif
    for (int32_t k0 = 0; k0 < count; k0 += 256) {
        const int32_t n = imin(256, count - k0), wide = ceil_div(n, 16) * 16;
        for (int32_t r = 0; r < 16; r++) {
            float *row = space + r * 512;
            if (row0 + r < m->rows) dequantize_row(m, row0 + r, from + k0, n, row);
            for (int32_t k = row0 + r < m->rows ? n : 0; k < wide; k++) row[k] = 0.0f;
        }
        for (int32_t k = 0; k < wide; k += 16) {
            v16f part[16];
            for (int32_t r = 0; r < 16; r++) part[r] = load16(space + r * 512 + k);
            transpose16(part);
            for (int32_t j = 0; j < 16; j++) store16(out + (int64_t)(k0 + k + j) * 16, part[j]);
        }
    }
    for (int32_t k = ceil_div(count, 16) * 16; k < ceil_div(count, 32) * 32; k++) store16(out + (int64_t)k * 16, (v16f){});
}

/* Row r of the matrix, all columns. space: [TILE_SPACE + 256 · 16] */
static void dequantize_all(const luce_matrix *m, int32_t r, float *out, float *space) {
    for (int32_t from = 0; from < m->cols; from += 256) {
        const int32_t n = imin(256, m->cols - from);
        if (m->lanes) {
            float *tile = space + TILE_SPACE;
            dequantize_tile(m, r / 16 * 16, from, n, tile, space);
            for (int32_t k = 0; k < n; k++) out[from + k] = tile[16 * k + r % 16];
        } else {
            dequantize_row(m, r, from, n, space);
            memcpy(out + from, space, (size_t)n * sizeof(float));
        }
    }
}

#endif
