/* Runs a list of ops on one batch: one parallel region, barriers between stages.
 *
 * Few rows: activations become int8 and every 16 output rows are a matrix-vector product (`few`). Many rows: packed
 * activations and panels (`gemm.h`). Norm and quantization of few rows are done by every thread for itself, which is
 * cheaper than a barrier. Values are f32 [rows, width], owned by Python. */
#ifndef LUCE_RUN_H
#define LUCE_RUN_H

#include "attention.h"
#include "batch.h"
#include "gemm.h"
#include "team.h"

#define OWN_ROWS 4          /* up to this many rows each thread prepares its own activations */
#define FEW 4               /* rows of activations a block of weights is unpacked for at a time */
#define MAX_ROPES 256 /* an architecture may build one per layer */

typedef struct {
    const luce_op *ops;
    int32_t num_ops, gemm_rows;
    const luce_batch *batch;
    float *const *values;
    void *const *taps;              /* bf16 [rows, width] per op, or NULL */
    int32_t max_cols, max_hidden, max_query, max_post, threads;
    const luce_attention *rope[MAX_ROPES];
    int32_t num_ropes, splits, group;
    float *rope_tables;             /* [num_ropes][rows][2 half] */
    char *packed;
    float *normed, *hidden, *post, *query, *partial;
    act64 *acts;                    /* shared ones, [rows][max_cols / 64] */
    char *own;                      /* one per thread */
    int64_t own_bytes, tile_floats;
    luce_team team;
    _Atomic int32_t error;
} luce_run_t;

INLINE int32_t acts_per_row(int32_t cols) { return ceil_div(cols, 64); }
INLINE int use_gemm(const luce_run_t *run) { return run->batch->rows >= run->gemm_rows && !run->batch->row_invariant; }

/* --- a thread's own space: panels, or few-row activations, or attention tiles; never two at once */

INLINE int64_t round64(int64_t n) { return (n + 63) / 64 * 64; }

static int64_t gemm_bytes(int32_t rows) {
    return 4 * (TILE_SPACE + PANEL * K_BLOCK + 16 * K_BLOCK + 2 * PANEL * (int64_t)padded(rows, M_TILE));
}

static gemm_space gemm_space_of(char *own, int32_t rows) {
    float *scratch = (float *)own, *panel = scratch + TILE_SPACE, *tile = panel + PANEL * K_BLOCK, *c = tile + 16 * K_BLOCK;
    return (gemm_space){scratch, panel, tile, {c, c + PANEL * (int64_t)padded(rows, M_TILE)}};
}

/* --- activations for matrices of `cols` columns */

typedef struct {
    const float *x;         /* normed f32 [rows, cols] */
    const act64 *a;         /* the same as int8 */
    const char *packed;     /* or as tiles of bf16 */
    int32_t cols;
} prepared;

static int all_plain(const luce_matrix *m, int32_t count) {
    for (int32_t i = 0; i < count; i++)
        if (!is_plain(m[i].format)) return 0;
    return 1;
}

/* Norm (or none) of x [rows, cols], in the form the products want. One barrier at most. */
static prepared prepare(luce_worker *w, const float *x, const float *norm, float eps, const luce_matrix *m, int32_t count) {
    luce_run_t *run = w->run;
    const int32_t rows = run->batch->rows, cols = m->cols, per_row = acts_per_row(cols);
    const int plain = all_plain(m, count);
    if (use_gemm(run)) {
        for (int32_t tile; (norm || amx_allowed) && (tile = take(w)) < ceil_div(rows, 16);) {
            const int32_t r0 = tile * 16, more = imin(16, rows - r0);
            const float *from = x + (int64_t)r0 * cols;
            if (norm) {
                float *to = run->normed + (int64_t)r0 * cols;
                for (int32_t r = 0; r < more; r++) rms_row(from + (int64_t)r * cols, cols, norm, eps, to + (int64_t)r * cols);
                from = to;
            }
#if HAVE_AMX
            if (amx_allowed) pack_rows_bf16(from, more, cols, (uint16_t *)run->packed + (int64_t)r0 * padded(cols, 32));
#endif
        }
        if (norm || amx_allowed) barrier(w);
        return (prepared){norm ? run->normed : x, NULL, run->packed, cols};
    }
    const int shared = rows > OWN_ROWS;
    char *own = run->own + w->id * run->own_bytes;
    float *normed = shared ? run->normed : (float *)own;
    act64 *acts = shared ? run->acts : (act64 *)(own + round64((int64_t)OWN_ROWS * run->max_cols * 4));
    for (int32_t i = 0, r; (r = shared ? take(w) : i) < rows; i++) {
        const float *from = x + (int64_t)r * cols;
        if (norm) {
            rms_row(from, cols, norm, eps, normed + (int64_t)r * cols);
            from = normed + (int64_t)r * cols;
        }
        if (!plain) quantize_row(from, cols, acts + (int64_t)r * per_row);
    }
    if (shared) barrier(w);
    return (prepared){norm ? normed : x, acts, NULL, cols};
}

/* --- products; `finish` gets sixteen (or fewer) neighbouring outputs of one row */

typedef void (*finish_fn)(luce_run_t *run, const luce_op *op, int32_t matrix, int32_t row, int32_t at, int32_t n, v16f y, v16f z);

INLINE v16f scaled(const luce_matrix *m, int32_t at, int32_t n, v16f y) {
    if (m->scale != 1.0f) y *= splat(m->scale);
    return m->bias ? y + load_part(m->bias + at, n) : y;
}

/* Work is counted in blocks of `unit` output rows over all `count` matrices. pair: matrices 0 and 1 together. */
static int32_t block_count(const luce_matrix *m, int32_t count, int32_t unit) {
    int32_t blocks = 0;
    for (int32_t i = 0; i < count; i++) blocks += ceil_div(m[i].rows, unit);
    return blocks;
}

static int32_t find_block(const luce_matrix *m, int32_t unit, int32_t block, int32_t *matrix) { /* -> first row */
    for (*matrix = 0; block >= ceil_div(m[*matrix].rows, unit); ++*matrix) block -= ceil_div(m[*matrix].rows, unit);
    return block * unit;
}

static void few_rows(luce_worker *w, const luce_op *op, const luce_matrix *m, int32_t count, int pair, prepared in, finish_fn finish) {
    luce_run_t *run = w->run;
    const int32_t rows = run->batch->rows, per_row = acts_per_row(in.cols), blocks = block_count(m, pair ? 1 : count, 16);
    const int32_t step = imax(1, imin(32, blocks / (w->size * 6)));
    for (int32_t item; (item = take(w)) < ceil_div(blocks, step);) {
        for (int32_t block = item * step; block < imin(blocks, (item + 1) * step); block++) {
            int32_t matrix;
            const int32_t at = find_block(m, 16, block, &matrix), n = imin(16, m[matrix].rows - at);
            for (int32_t r0 = 0; r0 < rows; r0 += FEW) {
                float y[16 * FEW] = {0}, z[16 * FEW] = {0};
                const float *x = in.x + (int64_t)r0 * in.cols;
                const act64 *a = in.a + (int64_t)r0 * per_row;
                const int32_t more = imin(FEW, rows - r0);
                matvec(m + matrix, at, n, x, a, per_row, more, y);
                if (pair) matvec(m + 1, at, n, x, a, per_row, more, z);
                for (int32_t r = 0; r < more; r++)
                    finish(run, op, matrix, r0 + r, at, n, scaled(m + matrix, at, n, load16(y + 16 * r)),
                           pair ? scaled(m + 1, at, n, load16(z + 16 * r)) : (v16f){});
            }
        }
    }
}

static void many_rows(luce_worker *w, const luce_op *op, const luce_matrix *m, int32_t count, int pair, prepared in, finish_fn finish) {
    luce_run_t *run = w->run;
    const int32_t rows = run->batch->rows, blocks = block_count(m, pair ? 1 : count, PANEL);
    const gemm_space own = gemm_space_of(run->own + w->id * run->own_bytes, rows);
#if HAVE_AMX
    if (amx_allowed) amx_begin();
#endif
    for (int32_t block; (block = take(w)) < blocks;) {
        int32_t matrix;
        const int32_t at = find_block(m, PANEL, block, &matrix);
        multiply_panel(m + matrix, at, in.x, in.packed, rows, &own, own.c[0]);
        if (pair) multiply_panel(m + 1, at, in.x, in.packed, rows, &own, own.c[1]);
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t n0 = 0; n0 < imin(PANEL, m[matrix].rows - at); n0 += 16) {
                const int32_t n = imin(16, m[matrix].rows - at - n0);
                const int64_t c = (int64_t)r * PANEL + n0;
                finish(run, op, matrix, r, at + n0, n, scaled(m + matrix, at + n0, n, load16(own.c[0] + c)),
                       pair ? scaled(m + 1, at + n0, n, load16(own.c[1] + c)) : (v16f){});
            }
        }
    }
#if HAVE_AMX
    if (amx_allowed) _tile_release();
#endif
}

static void products(luce_worker *w, const luce_op *op, const luce_matrix *m, int32_t count, int pair, prepared in, finish_fn finish) {
    if (!in.a) many_rows(w, op, m, count, pair, in, finish);
    else few_rows(w, op, m, count, pair, in, finish);
    barrier(w);
}

INLINE void put(float *to, int32_t n, v16f y) {
    if (n == 16) store16(to, y);
    else memcpy(to, &y, (size_t)n * sizeof(float));
}

static void finish_plain(luce_run_t *run, const luce_op *op, int32_t matrix, int32_t row, int32_t at, int32_t n, v16f y, v16f z) {
    (void)z;
    put(run->values[op->out[matrix]] + (int64_t)row * op->matrices[matrix].rows + at, n, y);
}

static void finish_gate(luce_run_t *run, const luce_op *op, int32_t matrix, int32_t row, int32_t at, int32_t n, v16f y, v16f z) {
    (void)matrix;
    if (op->clamp >= 0.0f) {
        const v16f c = splat(op->clamp);
        y = choose(y > c, c, y);
        z = choose(z > c, c, choose(z < -c, -c, z));
    }
    put(run->hidden + (int64_t)row * op->matrices[0].rows + at, n, activate(y, op->act) * z);
}

static void finish_residual(luce_run_t *run, const luce_op *op, int32_t matrix, int32_t row, int32_t at, int32_t n, v16f y, v16f z) {
    (void)z;
    const int32_t width = op->matrices[op->num_matrices - 1].rows;
    (void)matrix;
    if (op->post) {             /* the norm needs the whole row first */
        put(run->post + (int64_t)row * width + at, n, y);
        return;
    }
    if (op->residual >= 0) y += load_part(run->values[op->residual] + (int64_t)row * width + at, n);
    put(run->values[op->out[0]] + (int64_t)row * width + at, n, y * splat(op->scale));
}

static void finish_head_logits(luce_run_t *run, const luce_op *op, int32_t matrix, int32_t row, int32_t at, int32_t n, v16f y, v16f z) {
    (void)z;
    y *= splat(op->scale);
    if (op->softcap != 0.0f) y = splat(op->softcap) * tanh16(y * splat(1.0f / op->softcap));
    put(run->values[op->out[matrix]] + (int64_t)row * op->matrices[matrix].rows + at, n, y);
}

/* --- ops */

static void run_residual(luce_worker *w, const luce_op *op, const luce_matrix *m, const float *x) {
    luce_run_t *run = w->run;
    products(w, op, m, 1, 0, prepare(w, x, NULL, 0, m, 1), finish_residual);
    if (!op->post) return;
    for (int32_t r; (r = take(w)) < run->batch->rows;) {
        float *row = run->post + (int64_t)r * m->rows, *out = run->values[op->out[0]] + (int64_t)r * m->rows;
        rms_row(row, m->rows, op->post, op->post_eps, row);
        const float *residual = op->residual >= 0 ? run->values[op->residual] + (int64_t)r * m->rows : NULL;
        for (int32_t i = 0; i < m->rows; i++) out[i] = ((residual ? residual[i] : 0.0f) + row[i]) * op->scale;
    }
    barrier(w);
}

static void run_gated_mlp(luce_worker *w, const luce_op *op) {
    luce_run_t *run = w->run;
    products(w, op, op->matrices, 2, 1, prepare(w, run->values[op->x], op->norm, op->norm_eps, op->matrices, 2), finish_gate);
    run_residual(w, op, op->matrices + 2, run->hidden);
}

static void run_embed(luce_worker *w, const luce_op *op) {
    luce_run_t *run = w->run;
    const luce_batch *b = run->batch;
    const luce_matrix *m = op->matrices;
    float *x = run->values[op->out[0]], *space = (float *)(run->own + w->id * run->own_bytes);
    for (int32_t r; (r = take(w)) < b->rows;) {
        float *to = x + (int64_t)r * m->cols;
        if (b->token[r] < 0 || b->token[r] >= m->rows) {
            atomic_store(&run->error, ERR_TOKEN);
            memset(to, 0, (size_t)m->cols * sizeof(float));
            continue;
        }
        dequantize_all(m, b->token[r], to, space);
        for (int32_t i = 0; i < m->cols; i++) to[i] *= m->scale * op->scale;
    }
    barrier(w);
    if (b->embed_count) {
        for (int32_t e; (e = take(w)) < b->embed_count;)
            memcpy(x + (int64_t)b->embed_rows[e] * m->cols, b->embeds + (int64_t)e * m->cols, (size_t)m->cols * sizeof(float));
        barrier(w);
    }
}

static void run_tap(luce_worker *w, const luce_op *op, int32_t number) {
    luce_run_t *run = w->run;
    uint16_t *to = run->taps ? run->taps[number] : NULL;
    if (!to) return;
    for (int32_t r; (r = take(w)) < run->batch->rows;)
        cache_write(F_BF16, to, (int64_t)r * op->out[1], run->values[op->x] + (int64_t)r * op->out[1], op->out[1]);
    barrier(w);
}

/* Layers with the same frequencies share a table of cosines and sines. -1: none yet. */
static int32_t rope_number(const luce_run_t *run, const luce_attention *a) {
    for (int32_t i = 0; i < run->num_ropes; i++) {
        const luce_attention *o = run->rope[i];
        if (o->inv_freq == a->inv_freq && o->axis == a->axis && o->magnitude == a->magnitude && o->half == a->half) return i;
    }
    return -1;
}

static float *rope_of(const luce_run_t *run, const luce_attention *a, int32_t row) {
    const int32_t number = rope_number(run, a);
    int64_t at = 0;
    for (int32_t i = 0; i < number; i++) at += (int64_t)run->batch->rows * 2 * run->rope[i]->half;
    return run->rope_tables + at + (int64_t)row * 2 * a->half;
}

static void fill_ropes(luce_worker *w) {
    luce_run_t *run = w->run;
    for (int32_t item; (item = take(w)) < run->num_ropes * run->batch->rows;) {
        const luce_attention *a = run->rope[item / run->batch->rows];
        const int32_t row = item % run->batch->rows;
        rope_table(run->batch, a, row, rope_of(run, a, row));
    }
    barrier(w);
}

/* Single rows: items are (row, kv head, split); partial sums are joined in order of the splits. */
static void attend_rows(luce_worker *w, const luce_op *op, const float *gate, float *y) {
    luce_run_t *run = w->run;
    const luce_attention *a = op->attention;
    const luce_batch *b = run->batch;
    const int32_t group = a->heads / a->kv_heads, stride = value_stride(a), splits = run->splits;
    const int32_t per_item = group * (stride + 2), units = b->rows * a->kv_heads;
    float *score = (float *)(run->own + w->id * run->own_bytes);
    for (int32_t item; (item = take(w)) < units * splits;) {
        const int32_t row = item / splits / a->kv_heads, kv = item / splits % a->kv_heads, split = item % splits;
        const seq_view v = view_of(b, a, b->seq[row]);
        if (!b->row_invariant && v.rows >= TILE_ROWS) continue;
        span places = places_seen(b, a, &v, row);
        places.begin += split * SPLIT;
        if (split < splits - 1) places.end = imin(places.end, places.begin + SPLIT);
        float *out = run->partial + (int64_t)item * per_item, *top = out + group * stride, *total = top + group;
        attend_row(b, a, &v, row, kv, places, run->query, out, stride, top, total, score);
        for (int32_t g = 0; g < group && splits == 1; g++)
            finish_head(a, out + g * stride, top[g], total[g], row, kv * group + g, gate, y);
    }
    barrier(w);
    if (splits == 1) return;
    for (int32_t item; (item = take(w)) < units;) {
        const int32_t row = item / a->kv_heads, kv = item % a->kv_heads;
        const seq_view v = view_of(b, a, b->seq[row]);
        if (!b->row_invariant && v.rows >= TILE_ROWS) continue;
        for (int32_t g = 0; g < group; g++) {
            float *sum = score, top = LOWEST, total = 0;
            memset(sum, 0, (size_t)stride * sizeof(float));
            for (int32_t s = 0; s < splits; s++) {
                const float *part = run->partial + ((int64_t)item * splits + s) * per_item;
                const float its_top = part[group * stride + g], its_total = part[group * stride + group + g];
                if (its_total == 0.0f) continue;
                const float highest = its_top > top ? its_top : top;
                const float keep = exp16(splat(top - highest))[0], add = exp16(splat(its_top - highest))[0];
                for (int32_t i = 0; i < stride; i += LANES)
                    store16(sum + i, load16(sum + i) * splat(keep) + load16(part + g * stride + i) * splat(add));
                total = total * keep + its_total * add;
                top = highest;
            }
            finish_head(a, sum, top, total, row, kv * group + g, gate, y);
        }
    }
    barrier(w);
}

static void attend_tiles(luce_worker *w, const luce_op *op, const float *gate, float *y) {
    luce_run_t *run = w->run;
    const luce_attention *a = op->attention;
    const luce_batch *b = run->batch;
    const int32_t size = tile_rows(a);
    int32_t item = take(w), first = 0;
    for (int32_t s = 0; s < b->seqs; s++) {
        const seq_view v = view_of(b, a, s);
        if (v.rows < TILE_ROWS) continue;
        const int32_t tiles = ceil_div(v.rows, size), items = tiles * a->kv_heads;
        for (; item < first + items; item = take(w)) {
            const int32_t tile = tiles - 1 - (item - first) / a->kv_heads;      /* the longest first */
            attend_tile(b, a, &v, v.start + tile * size, imin(size, v.rows - tile * size), (item - first) % a->kv_heads,
                        run->query, gate, y, (float *)(run->own + w->id * run->own_bytes));
        }
        first += items;
    }
    barrier(w);
}

static void run_attention(luce_worker *w, const luce_op *op) {
    luce_run_t *run = w->run;
    const luce_attention *a = op->attention;
    const luce_batch *b = run->batch;
    const float *k = op->out[1] >= 0 ? run->values[op->out[1]] : NULL, *v = k ? run->values[op->out[2]] : NULL;
    const float *gate = a->gated ? run->values[op->gate] : NULL;
    for (int32_t item; (item = take(w)) < b->rows * a->kv_heads;) {
        const int32_t row = item / a->kv_heads;
        int error = turn_and_append(b, a, row, item % a->kv_heads, a->half ? rope_of(run, a, row) : NULL,
                                    run->values[op->x], k, v, run->query);
        if (error) atomic_store(&run->error, error);
    }
    barrier(w);
    int few = 0, many = 0;
    for (int32_t s = 0; s < b->seqs; s++) {
        const int32_t rows = b->query_start[s + 1] - b->query_start[s];
        if (rows >= TILE_ROWS && !b->row_invariant) many = 1;
        else if (rows) few = 1;
    }
    if (few) attend_rows(w, op, gate, run->values[op->out[0]]);
    if (many) attend_tiles(w, op, gate, run->values[op->out[0]]);
}

static void run_region(void *arg, int32_t id, int32_t size) {
    luce_run_t *run = arg;
    luce_worker me = {&run->team, id, size, run}, *w = &me;
    if (run->num_ropes) fill_ropes(w);
    for (int32_t i = 0; i < run->num_ops; i++) {
        const luce_op *op = run->ops + i;
        switch (op->kind) {
            case OP_EMBED: run_embed(w, op); break;
            case OP_NORM_LINEAR: case OP_HEAD:
                products(w, op, op->matrices, op->num_matrices, 0,
                         prepare(w, run->values[op->x], op->norm, op->norm_eps, op->matrices, op->num_matrices),
                         op->kind == OP_HEAD ? finish_head_logits : finish_plain);
                break;
            case OP_ATTENTION: run_attention(w, op); break;
            case OP_LINEAR_OUT: run_residual(w, op, op->matrices, run->values[op->x]); break;
            case OP_GATED_MLP: run_gated_mlp(w, op); break;
            case OP_TAP: run_tap(w, op, i); break;
        }
    }
}

#endif
