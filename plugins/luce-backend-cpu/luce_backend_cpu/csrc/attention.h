/* Attention over the paged cache: head norms, RoPE, append, masked softmax, sinks, softcap, gate.
 *
 * A "place" counts the entries of a sequence's block table: place = column · block_entries + offset, holding the token
 * first[column] + offset. What a row sees: entries of tokens up to its own (prefill), or below `length` plus the held rows
 * of its `sees` bits (held), both within the window. One row walks the cache in splits of SPLIT places, so that long
 * contexts spread over threads; many rows of one sequence share converted tiles of the cache. */
#ifndef LUCE_ATTENTION_H
#define LUCE_ATTENTION_H

#include "batch.h"
#include "cache.h"
#include "lanes.h"
#include "team.h"

#define SPLIT 256       /* places one work item of a single row walks: a few microseconds */
#define CHUNK 64        /* places whose scores are held at once */
#define TILE_ROWS 8     /* rows of one sequence from which on tiles pay */

typedef struct {
    const int32_t *block, *first;
    int32_t count, entries;             /* columns in use, entries per block */
    int32_t start, rows, length;        /* batch rows start..start+rows; committed tokens */
    int32_t held;
} seq_view;

static seq_view view_of(const luce_batch *b, const luce_attention *a, int32_t s) {
    const luce_table *t = &b->table[a->table];
    return (seq_view){
        .block = t->block + (int64_t)s * t->columns, .first = t->first + (int64_t)s * t->columns,
        .count = t->count[s], .entries = a->block_entries, .start = b->query_start[s],
        .rows = b->query_start[s + 1] - b->query_start[s], .length = b->length[s], .held = b->held,
    };
}

static int32_t column_of(const seq_view *v, int32_t token) { /* last column whose first token is <= token; -1: none */
    int32_t low = 0, high = v->count;
    while (low < high) {
        int32_t middle = (low + high) / 2;
        if (v->first[middle] <= token) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

static int32_t places_below(const seq_view *v, int32_t token) { /* how many places hold a token < token */
    int32_t column = column_of(v, token - 1);
    return column < 0 ? 0 : column * v->entries + imin(v->entries, token - v->first[column]);
}

static int64_t entry_of_token(const seq_view *v, int32_t token) { /* -1: in no block */
    int32_t column = column_of(v, token);
    if (column < 0 || token - v->first[column] >= v->entries) return -1;
    return (int64_t)v->block[column] * v->entries + token - v->first[column];
}

typedef struct { int32_t begin, end; } span;    /* places */

static span places_seen(const luce_batch *b, const luce_attention *a, const seq_view *v, int32_t row) {
    const int32_t index = b->index[row];
    const int32_t end = v->held ? v->length + v->rows : index + 1;
    const int32_t begin = a->window ? imax(0, index - a->window + 1) : 0;
    return (span){places_below(v, begin), places_below(v, end)};
}

INLINE int sees_token(const luce_batch *b, const luce_attention *a, const seq_view *v, int32_t row, int32_t token) {
    int32_t index = token;
    if (!v->held) {
        if (token > b->index[row]) return 0;
    } else if (token >= v->length) {
        const int32_t j = token - v->length;
        if (!(b->sees[(int64_t)row * b->words + j / 64] >> (j % 64) & 1)) return 0;
        index = b->index[v->start + j];
    }
    return !a->window || index > b->index[row] - a->window;
}

/* --- before reading: norms, rope, append */

static void rms_row(const float *x, int32_t n, const float *weight, float eps, float *out) { /* weight NULL: copy */
    if (!weight) {
        if (out != x) memcpy(out, x, (size_t)n * sizeof(float));
        return;
    }
    v16f sum = {};
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) sum += load16(x + i) * load16(x + i);
    float rest = 0;
    for (; i < n; i++) rest += x[i] * x[i];
    const float by = 1.0f / sqrtf((sum16(sum) + rest) / (float)n + eps);
    for (i = 0; i + LANES <= n; i += LANES) store16(out + i, load16(x + i) * splat(by) * load16(weight + i));
    for (; i < n; i++) out[i] = x[i] * by * weight[i];
}

/* cos and sin of one row, times magnitude: table [half][2] */
static void rope_table(const luce_batch *b, const luce_attention *a, int32_t row, float *table) {
    for (int32_t j = 0; j < a->half; j++) {
        const int32_t axis = a->axis ? a->axis[j] : 0;
        const float angle = (float)b->position[(int64_t)axis * b->rows + row] * a->inv_freq[j];
        table[2 * j] = cosf(angle) * a->magnitude;
        table[2 * j + 1] = sinf(angle) * a->magnitude;
    }
}

static void rotate(const luce_attention *a, const float *table, float *x) {
    const int32_t first = a->adjacent ? 2 : 1, apart = a->adjacent ? 1 : a->half;
    for (int32_t j = 0; j < a->half; j++) {
        const float c = table[2 * j], s = table[2 * j + 1];
        const float p = x[first * j], q = x[first * j + apart];
        x[first * j] = p * c - q * s;
        x[first * j + apart] = p * s + q * c;
    }
}

/* One row and one KV head: turn its query heads into `query` (scaled), write its key and value. Returns an error code. */
static int turn_and_append(const luce_batch *b, const luce_attention *a, int32_t row, int32_t kv, const float *table,
                           const float *q, const float *k, const float *v, float *query) {
    const int32_t group = a->heads / a->kv_heads, dim = a->head_dim;
    for (int32_t h = kv * group; h < (kv + 1) * group; h++) {
        float *to = query + ((int64_t)row * a->heads + h) * dim;
        rms_row(q + ((int64_t)row * a->heads + h) * dim, dim, a->q_norm, a->q_eps, to);
        if (a->half) rotate(a, table, to);
        for (int32_t i = 0; i < dim; i++) to[i] *= a->scale;
        turn_vector(to, dim, a->k_turn);
    }
    if (!k || (b->held && b->parent[row] == -2)) return ERR_NONE;
    const seq_view view = view_of(b, a, b->seq[row]);
    const int64_t entry = entry_of_token(&view, b->held ? view.length + row - view.start : b->index[row]);
    if (entry < 0) return ERR_PLACE;
    float turned[dim > a->value_dim ? dim : a->value_dim];
    rms_row(k + ((int64_t)row * a->kv_heads + kv) * dim, dim, a->k_norm, a->k_eps, turned);
    if (a->half) rotate(a, table, turned);
    keep_vector(a->k_format, a->k_pages, entry * a->kv_heads + kv, turned, dim, a->k_turn);
    rms_row(v + ((int64_t)row * a->kv_heads + kv) * a->value_dim, a->value_dim, a->v_norm, a->v_eps, turned);
    keep_vector(a->v_format, a->v_pages, entry * a->kv_heads + kv, turned, a->value_dim, a->v_turn);
    return ERR_NONE;
}

/* --- one row */

INLINE void prefetch_entry(int format, const void *pages, int64_t vector, int32_t dim) {
    const uint8_t *p = vector_at(format, pages, vector, dim);
    for (int32_t i = 0; i < vector_bytes(format, dim); i += 64) __builtin_prefetch(p + i, 0, 3);
}

/* score[g][e] = query[g] · key of entry[e], for G heads of one KV head */
INLINE void score_heads(const int G, const int format, const luce_attention *a, const float *query, const int64_t *entry,
                        int32_t count, int32_t left, int32_t kv, float *score /* [G][CHUNK] */) {
    const int32_t dim = a->head_dim, whole = dim / LANES * LANES;
    for (int32_t e = 0; e < count; e += 4) {
        for (int32_t j = e; j < e + 4; j++) {    /* heads lie apart: the processor would not guess the next lines */
            prefetch_entry(format, a->k_pages, entry[imin(j + 16, left - 1)] * a->kv_heads + kv, dim);
            prefetch_entry(a->v_format, a->v_pages, entry[imin(j, count - 1)] * a->kv_heads + kv, a->value_dim);
        }
        v16f sum[4][4] = {};
        const uint8_t *from[4];
        for (int j = 0; j < 4; j++)
            from[j] = vector_at(format, a->k_pages, entry[imin(e + j, count - 1)] * a->kv_heads + kv, dim);
        for (int32_t i = 0; i < whole; i += LANES)
            for (int j = 0; j < 4; j++) {
                const v16f key = cache16(format, from[j], i, LANES, dim);
                for (int g = 0; g < G; g++) sum[g][j] += key * load16(query + g * dim + i);
            }
        for (int j = 0; j < 4 && whole < dim; j++) {
            const v16f key = cache16(format, from[j], whole, dim - whole, dim);
            for (int g = 0; g < G; g++) sum[g][j] += key * load_part(query + g * dim + whole, dim - whole);
        }
        for (int g = 0; g < G; g++) {
            const v4f four = sum16x4(sum[g]);
            memcpy(score + g * CHUNK + e, &four, sizeof four);
        }
    }
}

/* out[g][:] += Σ_e weight[g][e] · value of entry[e] */
INLINE void add_values(const int G, const int format, const luce_attention *a, const float *weight, const int64_t *entry,
                       int32_t count, int32_t kv, float *out, int32_t stride) {
    const int32_t dim = a->value_dim;
    for (int32_t i = 0; i < dim; i += LANES) {
        v16f sum[4];
        for (int g = 0; g < G; g++) sum[g] = load16(out + g * stride + i);
        if (dim - i >= LANES) {
            for (int32_t e = 0; e < count; e++) {
                const uint8_t *from = vector_at(format, a->v_pages, entry[e] * a->kv_heads + kv, dim);
                const v16f value = cache16(format, from, i, LANES, dim);
                for (int g = 0; g < G; g++) sum[g] += splat(weight[g * CHUNK + e]) * value;
            }
        } else {
            for (int32_t e = 0; e < count; e++) {
                const uint8_t *from = vector_at(format, a->v_pages, entry[e] * a->kv_heads + kv, dim);
                const v16f value = cache16(format, from, i, dim - i, dim);
                for (int g = 0; g < G; g++) sum[g] += splat(weight[g * CHUNK + e]) * value;
            }
        }
        for (int g = 0; g < G; g++) store16(out + g * stride + i, sum[g]);
    }
}

/* CALL(G, format, ...) with both known at compile time */
#define FOR_HEADS(CALL, more, ...)                   \
    switch (more) {                                  \
        case 1: CALL(1, __VA_ARGS__); break;         \
        case 2: CALL(2, __VA_ARGS__); break;         \
        case 3: CALL(3, __VA_ARGS__); break;         \
        default: CALL(4, __VA_ARGS__);               \
    }
#define FOR_FORMAT(CALL, format, more, ...)                              \
    switch (format) {                                                    \
        case F_F32: FOR_HEADS(CALL, more, F_F32, __VA_ARGS__) break;     \
        case F_F16: FOR_HEADS(CALL, more, F_F16, __VA_ARGS__) break;     \
        case F_Q8_0: FOR_HEADS(CALL, more, F_Q8_0, __VA_ARGS__) break;   \
        default: FOR_HEADS(CALL, more, F_BF16, __VA_ARGS__)              \
    }

INLINE v16f cap_scores(const luce_attention *a, v16f s) {
    return a->softcap != 0.0f ? splat(a->softcap) * tanh16(s * splat(1.0f / a->softcap)) : s;
}

/* Softmax over CHUNK scores of one head, joined to what came before: returns the factor on the earlier sums. */
INLINE float join_chunk(float *score, int32_t count, float *top, float *total) {
    v16f s[CHUNK / LANES], best = splat(*top);
    for (int i = 0; i < CHUNK / LANES; i++) {
        for (int32_t e = imax(count, 16 * i); e < 16 * i + 16; e++) score[e] = -INFINITY;
        s[i] = load16(score + 16 * i);
        best = max16(best, s[i]);
    }
    const float highest = top16(best);
    v16f sum = {};
    for (int i = 0; i < CHUNK / LANES; i++) {
        s[i] = exp16(s[i] - splat(highest));
        store16(score + 16 * i, s[i]);
        sum += s[i];
    }
    const float keep = exp16(splat(*top - highest))[0];
    *total = *total * keep + sum16(sum);
    *top = highest;
    return keep;
}

#define LOWEST (-3.0e38f)   /* below any score, yet finite: a row that sees nothing yields zeros, not NaN */

/* Places of one row and KV head -> out [group][stride], top and total per head. score, entry: space for CHUNK. */
static void attend_row(const luce_batch *b, const luce_attention *a, const seq_view *v, int32_t row, int32_t kv, span places,
                       const float *query, float *out, int32_t stride, float *top, float *total, float *score) {
    const int32_t group = a->heads / a->kv_heads;
    const float *q = query + ((int64_t)row * a->heads + kv * group) * a->head_dim;
    memset(out, 0, (size_t)(group * stride) * sizeof(float));
    for (int32_t g = 0; g < group; g++) top[g] = LOWEST, total[g] = 0;
    int64_t entry[SPLIT + 1];
    int32_t all = 0, column = places.begin / v->entries, offset = places.begin % v->entries;
    for (int32_t p = places.begin; p < places.end; p++) {
        const int32_t token = v->first[column] + offset;
        entry[all] = (int64_t)v->block[column] * v->entries + offset;
        if (++offset == v->entries) offset = 0, column++;
        all += !(v->held && token >= v->length && !sees_token(b, a, v, row, token));
    }
    for (int32_t from = 0; from < all; from += CHUNK) {
        const int32_t count = imin(CHUNK, all - from);
        for (int32_t g = 0; g < group; g += 4)
            FOR_FORMAT(score_heads, a->k_format, group - g, a, q + g * a->head_dim, entry + from, count, all - from, kv,
                       score + g * CHUNK)
        for (int32_t g = 0; g < group; g++) {
            float *s = score + g * CHUNK;
            if (a->softcap != 0.0f)
                for (int i = 0; i < CHUNK; i += LANES) store16(s + i, cap_scores(a, load16(s + i)));
            const float keep = join_chunk(s, count, top + g, total + g);
            if (keep != 1.0f)
                for (int32_t i = 0; i < stride; i += LANES)
                    store16(out + g * stride + i, load16(out + g * stride + i) * splat(keep));
        }
        for (int32_t g = 0; g < group; g += 4)
            FOR_FORMAT(add_values, a->v_format, group - g, a, score + g * CHUNK, entry + from, count, kv, out + g * stride,
                       stride)
    }
}

/* Divide by the softmax's sum, turn back (in place), gate, and write one head of one row. */
static void finish_head(const luce_attention *a, float *sum, float top, float total, int32_t row, int32_t head,
                        const float *gate, float *y) {
    const int32_t dim = a->value_dim;
    float factor = 1.0f;
    if (a->sinks) {
        const float sink = a->sinks[head], highest = sink > top ? sink : top;
        factor = exp16(splat(top - highest))[0];
        total = total * factor + exp16(splat(sink - highest))[0];
    }
    factor = total > 0.0f || total != total ? factor / total : 0.0f;
    const int64_t at = ((int64_t)row * a->heads + head) * dim;
    turn_vector_back(sum, dim, a->v_turn);
    for (int32_t i = 0; i < dim; i += LANES) {
        v16f out = load16(sum + i) * splat(factor);
        const int32_t n = imin(LANES, dim - i);
        if (gate) out *= sigmoid16(load_part(gate + at + i, n));
        memcpy(y + at + i, &out, (size_t)n * sizeof(float));
    }
}

/* --- a tile of rows */

#if defined(__AVX512F__)
#define Q_ROWS 6
#else
#define Q_ROWS 2
#endif

/* c[r][0..64) (+)= Σ_k a[r][k] · b[k][0..64), b 64 wide with row stride `bs` */
INLINE void tile_multiply(const float *a, int32_t as, const float *b, int32_t bs, int32_t depth, int32_t rows, float *c,
                          int32_t cs, int add) {
    for (int32_t r0 = 0; r0 < rows; r0 += Q_ROWS) {
        const int32_t more = imin(Q_ROWS, rows - r0);
        v16f sum[Q_ROWS][4];
        const float *from[Q_ROWS];
        for (int r = 0; r < Q_ROWS; r++) {
            from[r] = a + (int64_t)(r0 + imin(r, more - 1)) * as;
            for (int j = 0; j < 4; j++)
                sum[r][j] = add ? load16(c + (int64_t)(r0 + imin(r, more - 1)) * cs + 16 * j) : (v16f){};
        }
        for (int32_t k = 0; k < depth; k++) {
            v16f x[4];
            for (int j = 0; j < 4; j++) x[j] = load16(b + (int64_t)k * bs + 16 * j);
            for (int r = 0; r < Q_ROWS; r++)
                for (int j = 0; j < 4; j++) sum[r][j] += splat(from[r][k]) * x[j];
        }
        for (int r = 0; r < Q_ROWS; r++)
            if (r < more)
                for (int j = 0; j < 4; j++) store16(c + (int64_t)(r0 + r) * cs + 16 * j, sum[r][j]);
    }
}

INLINE int32_t value_stride(const luce_attention *a) { return ceil_div(a->value_dim, 64) * 64; }
INLINE int32_t tile_rows(const luce_attention *a) { return imax(1, 96 / (a->heads / a->kv_heads)); }

static int64_t tile_floats(const luce_attention *a) { /* space attend_tile needs */
    const int64_t rows = (int64_t)tile_rows(a) * (a->heads / a->kv_heads);
    return (int64_t)CHUNK * (a->head_dim + value_stride(a)) + rows * (a->head_dim + CHUNK + value_stride(a) + 2) + 64;
}

/* Rows row0..row0+count of one sequence, all heads of one KV head. */
static void attend_tile(const luce_batch *b, const luce_attention *a, const seq_view *v, int32_t row0, int32_t count, int32_t kv,
                        const float *query, const float *gate, float *y, float *space) {
    const int32_t group = a->heads / a->kv_heads, dim = a->head_dim, stride = value_stride(a), rows = count * group;
    float *keys = space, *values = keys + dim * CHUNK, *q = values + CHUNK * stride, *score = q + (int64_t)rows * dim;
    float *out = score + (int64_t)rows * CHUNK, *top = out + (int64_t)rows * stride, *total = top + rows;
    span places = {INT32_MAX, 0};
    int32_t low = INT32_MAX, high = 0;
    for (int32_t r = row0; r < row0 + count; r++) {
        const span seen = places_seen(b, a, v, r);
        places = (span){imin(places.begin, seen.begin), imax(places.end, seen.end)};
        low = imin(low, b->index[r]), high = imax(high, b->index[r]);
        memcpy(q + (int64_t)(r - row0) * group * dim, query + ((int64_t)r * a->heads + kv * group) * dim,
               (size_t)(group * dim) * sizeof(float));
    }
    memset(out, 0, (size_t)rows * (size_t)stride * sizeof(float));
    memset(values, 0, (size_t)CHUNK * (size_t)stride * sizeof(float));
    for (int32_t r = 0; r < rows; r++) top[r] = LOWEST, total[r] = 0;
    for (int32_t p0 = places.begin; p0 < places.end; p0 += CHUNK) {
        const int32_t n = imin(CHUNK, places.end - p0);
        int32_t token[CHUNK];
        int64_t entry[CHUNK];
        for (int32_t e = 0; e < n; e++) {
            const int32_t column = (p0 + e) / v->entries, offset = (p0 + e) % v->entries;
            token[e] = v->first[column] + offset;
            entry[e] = ((int64_t)v->block[column] * v->entries + offset) * a->kv_heads + kv;
            const int padding = v->held && token[e] >= v->length && b->parent[v->start + token[e] - v->length] == -2;
            const uint8_t *from = vector_at(a->v_format, a->v_pages, entry[e], a->value_dim);
            for (int32_t i = 0; i < a->value_dim; i += LANES)       /* padding was never written: keep it out */
                store16(values + e * stride + i,
                        padding ? (v16f){} : cache16(a->v_format, from, i, a->value_dim - i, a->value_dim));
        }
        for (int32_t e0 = 0; e0 < CHUNK; e0 += 16)
            for (int32_t i = 0; i < dim; i += LANES) {
                v16f part[16];
                for (int32_t e = 0; e < 16; e++) {
                    const uint8_t *from = vector_at(a->k_format, a->k_pages, e0 + e < n ? entry[e0 + e] : 0, dim);
                    part[e] = e0 + e < n ? cache16(a->k_format, from, i, dim - i, dim) : (v16f){};
                }
                transpose16(part);
                for (int32_t j = 0; j < imin(LANES, dim - i); j++) store16(keys + (i + j) * CHUNK + e0, part[j]);
            }
        tile_multiply(q, dim, keys, CHUNK, dim, rows, score, CHUNK, 0);
        const int all = v->held ? token[n - 1] < v->length && (!a->window || token[0] > high - a->window)
                                : token[n - 1] <= low && (!a->window || token[0] > high - a->window);
        for (int32_t r = 0; r < rows; r++) {
            float *s = score + (int64_t)r * CHUNK;
            if (a->softcap != 0.0f)
                for (int i = 0; i < CHUNK; i += LANES) store16(s + i, cap_scores(a, load16(s + i)));
            for (int32_t e = 0; e < n && !all; e++)
                if (!sees_token(b, a, v, row0 + r / group, token[e])) s[e] = -INFINITY;
            const float keep = join_chunk(s, n, top + r, total + r);
            if (keep != 1.0f)
                for (int32_t i = 0; i < stride; i += LANES)
                    store16(out + (int64_t)r * stride + i, load16(out + (int64_t)r * stride + i) * splat(keep));
        }
        for (int32_t i = 0; i < stride; i += 64)
            tile_multiply(score, CHUNK, values + i, stride, CHUNK, rows, out + i, stride, 1);
    }
    for (int32_t r = 0; r < rows; r++)
        finish_head(a, out + (int64_t)r * stride, top[r], total[r], row0 + r / group, kv * group + r % group, gate, y);
}

#endif
