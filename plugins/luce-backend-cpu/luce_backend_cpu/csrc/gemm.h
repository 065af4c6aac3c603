/* Products with many rows: y[m][n] = Σ_k x[m][k] · w[n][k].
 *
 * The activations are packed once (all threads), then each thread takes panels of 32 weight rows, dequantizes a panel and
 * multiplies it with all activations. With AMX the operands are bf16 and the sums f32; otherwise everything is f32. Both
 * have smaller errors than int8 activations. The result of a panel is [n][m]; `panel_part` turns it around. */
#ifndef LUCE_GEMM_H
#define LUCE_GEMM_H

#include "formats.h"
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define HAVE_AMX 1
#else
#define HAVE_AMX 0
#endif

#define PANEL 32        /* weight rows worked on together */
#define M_TILE 32       /* activation rows are packed in tiles of this many, zero-filled */
#define K_BLOCK 1536    /* weights of a row dequantized at a time: the panel stays in L2 */

static int amx_allowed;  /* the kernel lets this process use tiles */

static int request_amx(void) {
#if HAVE_AMX
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
    return 0;
#endif
}

INLINE int32_t padded(int32_t n, int32_t to) { return ceil_div(n, to) * to; }
INLINE int64_t packed_bytes(int32_t rows, int32_t cols) {
    return (int64_t)padded(rows, M_TILE) * padded(cols, 32) * (amx_allowed ? 2 : 4);
}

static void transpose16(v16f r[16]) {
#if defined(__AVX512F__) && !defined(__clang__)
#define SWAP_STAGE(S)                                                                                     \
    for (int i = 0; i < 16; i++)                                                                          \
        if (!(i & (S))) {                                                                                 \
            v16i low, high;                                                                               \
            for (int j = 0; j < 16; j++) {                                                                \
                low[j] = j & (S) ? 16 + j - (S) : j;                                                      \
                high[j] = j & (S) ? 16 + j : j + (S);                                                     \
            }                                                                                             \
            v16f a = __builtin_shuffle(r[i], r[i + (S)], low), b = __builtin_shuffle(r[i], r[i + (S)], high); \
            r[i] = a, r[i + (S)] = b;                                                                     \
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

/* Pack tile `tile` (M_TILE rows of x, f32 [.., cols] at `row(m)`); rows at or beyond `rows` become zero. */
static void pack_tile(char *packed, const float *x, int32_t rows, int32_t cols) {
    const int32_t depth = padded(cols, 32);
    for (int32_t k = 0; k < depth; k += 32) {
        for (int32_t m0 = 0; m0 < M_TILE; m0 += 16) {
            v16f a[16], b[16];
            for (int32_t m = 0; m < 16; m++) {
                const float *from = x + (int64_t)(m0 + m) * cols + k;
                const int32_t left = m0 + m < rows ? cols - k : 0;
                a[m] = left >= 16 ? load16(from) : left > 0 ? load_part(from, left) : (v16f){};
                b[m] = left >= 32 ? load16(from + 16) : left > 16 ? load_part(from + 16, left - 16) : (v16f){};
            }
#if HAVE_AMX
            if (amx_allowed) {          /* [m 2][k / 32][16 pairs][16 m][2] */
                for (int32_t m = 0; m < 16; m++)
                    a[m] = (v16f)_mm512_cvtne2ps_pbh((__m512)b[m], (__m512)a[m]);
                transpose16(a);
                memcpy(packed + ((int64_t)(m0 / 16) * depth + k) * 32, a, sizeof a);
                continue;
            }
#endif
            transpose16(a);             /* [k][M_TILE] */
            transpose16(b);
            float *to = (float *)packed + (int64_t)k * M_TILE + m0;
            for (int32_t i = 0; i < 16; i++) {
                store16(to + i * M_TILE, a[i]);
                store16(to + (16 + i) * M_TILE, b[i]);
            }
        }
    }
}

/* --- AMX */

#if HAVE_AMX
static void amx_begin(void) { /* all eight tiles: 16 rows of 64 bytes */
    uint8_t config[64] __attribute__((aligned(64))) = {1};
    for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = 16;
    _tile_loadconfig(config);
}

/* panel: tiles [k / 32][32 rows][32] bf16 */
static void dequantize_panel_bf16(const luce_matrix *w, int32_t row0, int32_t from, int32_t count, float *row, uint16_t *panel) {
    const int32_t depth = padded(count, 32);
    for (int32_t n = 0; n < PANEL; n++) {
        const int32_t live = row0 + n < w->rows;
        if (live) dequantize(w, row0 + n, from, count, row);
        for (int32_t i = count; live && i < depth; i++) row[i] = 0.0f;
        for (int32_t k = 0; k < depth; k += 32) {
            __m512i pair = live ? (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + k + 16), _mm512_loadu_ps(row + k))
                                : _mm512_setzero_si512();
            _mm512_storeu_si512(panel + (int64_t)k * PANEL + n * 32, pair);
        }
    }
}

static void multiply_amx(const uint16_t *panel, const char *tile, int32_t depth, int32_t tile_depth, int32_t from,
                         float *c, int32_t stride, int first) {
    const uint16_t *b0 = (const uint16_t *)tile + (int64_t)from * 16, *b1 = b0 + (int64_t)tile_depth * 16;
    const long row = (long)stride * 4;
    if (first) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    } else {
        _tile_loadd(0, c, row);
        _tile_loadd(1, c + 16, row);
        _tile_loadd(2, c + 16 * (int64_t)stride, row);
        _tile_loadd(3, c + 16 * (int64_t)stride + 16, row);
    }
    for (int32_t k = 0; k < depth; k += 32) {
        _tile_loadd(4, panel + (int64_t)k * PANEL, 64);
        _tile_loadd(6, b0 + (int64_t)k * 16, 64);
        _tile_loadd(7, b1 + (int64_t)k * 16, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, panel + (int64_t)k * PANEL + 512, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, row);
    _tile_stored(1, c + 16, row);
    _tile_stored(2, c + 16 * (int64_t)stride, row);
    _tile_stored(3, c + 16 * (int64_t)stride + 16, row);
}
#endif

/* --- f32 */

#if defined(__AVX512F__)
#define R_ROWS 8        /* 8 x 2 registers of sums */
#define R_VECS 2
#else
#define R_ROWS 4
#define R_VECS 1
#endif

static void dequantize_panel_f32(const luce_matrix *w, int32_t row0, int32_t from, int32_t count, float *row, float *panel) {
    for (int32_t n = 0; n < PANEL; n++) {
        float *to = panel + (int64_t)n * K_BLOCK;
        if (row0 + n < w->rows) {
            dequantize(w, row0 + n, from, count, row);
            memcpy(to, row, (size_t)count * sizeof(float));
        } else {
            memset(to, 0, (size_t)count * sizeof(float));
        }
    }
}

static void multiply_f32(const float *panel, const char *tile, int32_t count, int32_t from, float *c, int32_t stride, int first) {
    const float *x0 = (const float *)tile + (int64_t)from * M_TILE;
    for (int32_t n = 0; n < PANEL; n += R_ROWS) {
        for (int32_t m = 0; m < M_TILE; m += LANES * R_VECS) {
            v16f sum[R_ROWS][R_VECS];
            for (int i = 0; i < R_ROWS; i++)
                for (int j = 0; j < R_VECS; j++)
                    sum[i][j] = first ? (v16f){} : load16(c + (int64_t)(n + i) * stride + m + LANES * j);
            const float *w = panel + (int64_t)n * K_BLOCK;
            for (int32_t k = 0; k < count; k++) {
                v16f x[R_VECS];
                for (int j = 0; j < R_VECS; j++) x[j] = load16(x0 + (int64_t)k * M_TILE + m + LANES * j);
                for (int i = 0; i < R_ROWS; i++)
                    for (int j = 0; j < R_VECS; j++) sum[i][j] += splat(w[(int64_t)i * K_BLOCK + k]) * x[j];
            }
            for (int i = 0; i < R_ROWS; i++)
                for (int j = 0; j < R_VECS; j++) store16(c + (int64_t)(n + i) * stride + m + LANES * j, sum[i][j]);
        }
    }
}

/* --- one panel times all rows */

typedef struct {            /* a thread's own space */
    float *row;             /* [K_BLOCK + 256] */
    void *panel;            /* PANEL x K_BLOCK, f32 or bf16 */
    float *c[2];            /* [PANEL][padded rows] */
} gemm_space;

/* c[n][m] = Σ_k of weight rows row0.. with the packed activations of `rows` rows. */
static void multiply_panel(const luce_matrix *w, int32_t row0, const char *packed, int32_t rows, const gemm_space *own, float *c) {
    const int32_t depth = padded(w->cols, 32), wide = padded(rows, M_TILE);
    const int64_t tile_bytes = packed_bytes(M_TILE, w->cols);
    for (int32_t from = 0; from < w->cols; from += K_BLOCK) {
        const int32_t count = imin(K_BLOCK, w->cols - from);
#if HAVE_AMX
        if (amx_allowed) {
            dequantize_panel_bf16(w, row0, from, count, own->row, own->panel);
            for (int32_t m = 0; m < wide; m += M_TILE)
                multiply_amx(own->panel, packed + m / M_TILE * tile_bytes, padded(count, 32), depth, from, c + m, wide, from == 0);
            continue;
        }
#endif
        dequantize_panel_f32(w, row0, from, count, own->row, own->panel);
        for (int32_t m = 0; m < wide; m += M_TILE)
            multiply_f32(own->panel, packed + m / M_TILE * tile_bytes, count, from, c + m, wide, from == 0);
    }
    (void)depth;
}

/* Sixteen by sixteen of a panel's result, turned so that part[m] holds sixteen neighbouring outputs of row m0 + m. */
INLINE void panel_part(const float *c, int32_t wide, int32_t n0, int32_t m0, v16f part[16]) {
    for (int i = 0; i < 16; i++) part[i] = load16(c + (int64_t)(n0 + i) * wide + m0);
    transpose16(part);
}

#endif
