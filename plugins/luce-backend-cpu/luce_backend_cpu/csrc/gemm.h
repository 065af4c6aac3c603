/* Products with many rows: y[m][n] = Σ_k x[m][k] · w[n][k].
 *
 * Each thread takes panels of 32 weight rows, dequantizes them and multiplies them with all activations. With AMX the
 * operands are bf16 and the sums f32; otherwise everything is f32. Both have smaller errors than int8 activations. */
#ifndef LUCE_GEMM_H
#define LUCE_GEMM_H

#include "lanes.h"
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__linux__)
#define HAVE_AMX 1
#else
#define HAVE_AMX 0
#endif

#define PANEL 32        /* weight rows worked on together */
#define M_TILE 32       /* rows of activations multiplied together */
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

/* Bytes of the bf16 copy of activations [rows, cols]; without AMX the f32 ones are used as they are. */
INLINE int64_t packed_bytes(int32_t rows, int32_t cols) {
    return amx_allowed ? (int64_t)padded(rows, M_TILE) * padded(cols, 32) * 2 : 0;
}

/* A thread's own space. */
typedef struct {
    float *scratch;         /* [TILE_SPACE] */
    float *panel;           /* [K_BLOCK][PANEL] f32, or tiles of bf16 */
    float *tile;            /* [K_BLOCK][16] */
    float *c[2];            /* [padded rows][PANEL] */
} gemm_space;

/* --- AMX */

#if HAVE_AMX
static void amx_begin(void) { /* all eight tiles: 16 rows of 64 bytes */
    uint8_t config[64] __attribute__((aligned(64))) = {1};
    for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = 16;
    _tile_loadconfig(config);
}

/* Up to 16 rows of x [.., cols] -> tiles [cols / 32][16 rows][32] of bf16, zero-filled. */
static void pack_rows_bf16(const float *x, int32_t rows, int32_t cols, uint16_t *packed) {
    for (int32_t k = 0; k < padded(cols, 32); k += 32) {
        for (int32_t m = 0; m < 16; m++, packed += 32) {
            const float *from = x + (int64_t)m * cols + k;
            const int32_t left = m < rows ? cols - k : 0;
            const v16f a = left >= 16 ? load16(from) : left > 0 ? load_part(from, left) : (v16f){};
            const v16f b = left >= 32 ? load16(from + 16) : left > 16 ? load_part(from + 16, left - 16) : (v16f){};
            _mm512_storeu_si512(packed, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
        }
    }
}

/* panel: [k / 32][2 halves of 16 rows][16 pairs of k][16 rows][2] bf16, the order the tile product wants */
static void panel_bf16(const luce_matrix *w, int32_t row0, int32_t from, int32_t count, const gemm_space *own) {
    uint16_t *panel = (uint16_t *)own->panel;
    const int32_t depth = padded(count, 32);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int32_t half = 0; half < 2; half++) {
        const int live = row0 + 16 * half < w->rows;
        if (live) dequantize_tile(w, row0 + 16 * half, from, count, own->tile, own->scratch);
        for (int32_t k = 0; k < depth; k += 2) {
            __m512i both = _mm512_setzero_si512();
            if (live)
                both = (__m512i)_mm512_cvtne2ps_pbh((__m512)load16(own->tile + (k + 1) * 16), (__m512)load16(own->tile + k * 16));
            uint16_t *to = panel + (k / 32) * 1024 + half * 512 + (k % 32) * 16;
            _mm512_storeu_si512(to, _mm512_permutexvar_epi16(pairs, both));
        }
    }
}

/* c [32][PANEL] (+)= 32 activation rows (two tile rows x0, x1) times the panel */
static void multiply_amx(const uint16_t *x0, const uint16_t *x1, const uint16_t *panel, int32_t depth, float *c, int first) {
    const long row = PANEL * 4;
    if (first) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    } else {
        _tile_loadd(0, c, row);
        _tile_loadd(1, c + 16, row);
        _tile_loadd(2, c + 16 * PANEL, row);
        _tile_loadd(3, c + 16 * PANEL + 16, row);
    }
    for (int32_t k = 0; k < depth; k += 32) {
        _tile_loadd(4, x0 + (int64_t)k * 16, 64);
        _tile_loadd(6, panel + (int64_t)k * 32, 64);
        _tile_loadd(7, panel + (int64_t)k * 32 + 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x1 + (int64_t)k * 16, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, row);
    _tile_stored(1, c + 16, row);
    _tile_stored(2, c + 16 * PANEL, row);
    _tile_stored(3, c + 16 * PANEL + 16, row);
}
#endif

/* --- f32 */

#if defined(__AVX512F__)
#define R_ROWS 12       /* 12 x 2 registers of sums */
#else
#define R_ROWS 2
#endif

static void panel_f32(const luce_matrix *w, int32_t row0, int32_t from, int32_t count, const gemm_space *own) {
    for (int32_t half = 0; half < 2; half++) {
        const int live = row0 + 16 * half < w->rows;
        if (live) dequantize_tile(w, row0 + 16 * half, from, count, own->tile, own->scratch);
        for (int32_t k = 0; k < count; k++)
            store16(own->panel + k * PANEL + 16 * half, live ? load16(own->tile + k * 16) : (v16f){});
    }
}

/* c [rows][PANEL] (+)= x [rows, cols from `from`] times the panel */
static void multiply_f32(const float *x, int32_t cols, int32_t rows, const float *panel, int32_t count, float *c, int first) {
    for (int32_t m0 = 0; m0 < rows; m0 += R_ROWS) {
        v16f sum[R_ROWS][2];
        const float *from[R_ROWS];
        const int32_t more = imin(R_ROWS, rows - m0);
        for (int i = 0; i < R_ROWS; i++) {
            from[i] = x + (int64_t)(m0 + imin(i, more - 1)) * cols;
            for (int j = 0; j < 2; j++)
                sum[i][j] = first ? (v16f){} : load16(c + (int64_t)(m0 + imin(i, more - 1)) * PANEL + 16 * j);
        }
        for (int32_t k = 0; k < count; k++) {
            const v16f w0 = load16(panel + (int64_t)k * PANEL), w1 = load16(panel + (int64_t)k * PANEL + 16);
            for (int i = 0; i < R_ROWS; i++) {
                const v16f value = splat(from[i][k]);
                sum[i][0] += value * w0;
                sum[i][1] += value * w1;
            }
        }
        for (int i = 0; i < R_ROWS; i++)
            for (int j = 0; j < 2 && i < more; j++) store16(c + (int64_t)(m0 + i) * PANEL + 16 * j, sum[i][j]);
    }
}

/* c[m][n] for weight rows row0..row0+PANEL and all activations: bf16 tiles `packed`, or f32 `x`. */
static void multiply_panel(const luce_matrix *w, int32_t row0, const float *x, const char *packed, int32_t rows,
                           const gemm_space *own, float *c) {
    for (int32_t from = 0; from < w->cols; from += K_BLOCK) {
        const int32_t count = imin(K_BLOCK, w->cols - from);
#if HAVE_AMX
        if (amx_allowed) {
            const int64_t tile_row = (int64_t)padded(w->cols, 32) * 16;
            panel_bf16(w, row0, from, count, own);
            for (int32_t m = 0; m < rows; m += M_TILE) {
                const uint16_t *at = (const uint16_t *)packed + m / 16 * tile_row + (int64_t)from * 16;
                multiply_amx(at, at + tile_row, (const uint16_t *)own->panel, padded(count, 32), c + (int64_t)m * PANEL, from == 0);
            }
            continue;
        }
#endif
        (void)packed;
        panel_f32(w, row0, from, count, own);
        multiply_f32(x + from, w->cols, rows, own->panel, count, c, from == 0);
    }
}

#endif
