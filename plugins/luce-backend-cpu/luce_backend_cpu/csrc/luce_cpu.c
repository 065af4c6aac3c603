/* The CPU backend's shared library: one translation unit, compiled for the machine it runs on.
 *
 * Reading order: base.h (vectors), formats.h (weights and int8 activations), lanes.h (sixteen
 * rows side by side), gemm.h (many rows), attention.h, team.h
 * (threads), run.h (the ops), and the few functions Python calls, below. */
#include <sys/mman.h>
#include "run.h"

#define EXPORT __attribute__((visibility("default")))

/* One workspace for all calls: grown when needed, kept afterwards; calls take turns. */
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static char *workspace;
static int64_t workspace_bytes;

/* What the workspace holds for this run. First call with base NULL: returns the bytes. */
static int64_t lay_out(luce_run_t *run, char *base) {
    const luce_batch *b = run->batch;
    const int64_t rows = b->rows;
    int64_t at = 0;
#define PLACE(field, type, bytes)                   \
    do {                                            \
        run->field = (type)(base + at);             \
        at += round64(bytes);                       \
    } while (0)
    int64_t ropes = 0;
    for (int32_t i = 0; i < run->num_ropes; i++) ropes += rows * 2 * run->rope[i]->half;
    PLACE(rope_tables, float *, 4 * ropes);
    PLACE(normed, float *, 4 * rows * run->max_cols);
    PLACE(hidden, float *, 4 * rows * run->max_hidden);
    PLACE(post, float *, 4 * rows * run->max_post);
    PLACE(query, float *, 4 * rows * run->max_query);
    PLACE(partial, float *, 4 * run->group);
    if (use_gemm(run)) PLACE(packed, char *, packed_bytes(b->rows, run->max_cols));
    else PLACE(acts, act64 *, rows > OWN_ROWS ? rows * acts_per_row(run->max_cols) * (int64_t)sizeof(act64) : 0);
    PLACE(own, char *, run->own_bytes * run->threads);
    return at;
}

static int32_t measure(luce_run_t *run) {
    const luce_batch *b = run->batch;
    int32_t longest = 0;
    int64_t partial = 0, own = 4 * (TILE_SPACE + 16 * 256);
    for (int32_t s = 0; s < b->seqs; s++) {
        const int32_t rows = b->query_start[s + 1] - b->query_start[s];
        int32_t end = b->held ? b->length[s] + rows : 0;
        for (int32_t r = b->query_start[s]; r < b->query_start[s + 1] && !b->held; r++) end = imax(end, b->index[r] + 1);
        if (rows < TILE_ROWS || b->row_invariant) longest = imax(longest, end);
    }
    run->splits = imax(1, ceil_div(longest, SPLIT));
    for (int32_t i = 0; i < run->num_ops; i++) {
        const luce_op *op = run->ops + i;
        for (int32_t m = 0; m < op->num_matrices; m++) run->max_cols = imax(run->max_cols, op->matrices[m].cols);
        if (op->kind == OP_GATED_MLP) run->max_hidden = imax(run->max_hidden, op->matrices[0].rows);
        if (op->post) run->max_post = imax(run->max_post, op->matrices[op->num_matrices - 1].rows);
        const luce_attention *a = op->attention;
        if (!a) continue;
        run->max_query = imax(run->max_query, a->heads * a->head_dim);
        if (a->half && rope_number(run, a) < 0) {
            if (run->num_ropes == MAX_ROPES) return ERR_ROPES;
            run->rope[run->num_ropes++] = a;
        }
        const int64_t group = a->heads / a->kv_heads, stride = value_stride(a);
        if (longest) partial = partial > (int64_t)b->rows * run->splits * a->heads * (stride + 2)
                                   ? partial : (int64_t)b->rows * run->splits * a->heads * (stride + 2);
        const int64_t tile = 4 * (tile_floats(a) > group * CHUNK + stride ? tile_floats(a) : group * CHUNK + stride);
        own = own > tile ? own : tile;
    }
    run->group = (int32_t)partial;
    const int64_t few = round64((int64_t)OWN_ROWS * run->max_cols * 4) + OWN_ROWS * acts_per_row(run->max_cols) * (int64_t)sizeof(act64);
    const int64_t products_bytes = use_gemm(run) ? gemm_bytes(b->rows) : few;
    run->own_bytes = round64(own > products_bytes ? own : products_bytes) + 256;
    return ERR_NONE;
}

/* parallel, thread_num, num_threads: of the OpenMP runtime torch uses, or all NULL. Returns 1 if AMX tiles are usable. */
EXPORT int32_t luce_open(void *parallel_fn, void *thread_num, void *num_threads, int32_t want_amx) {
    memcpy(&omp_parallel, &parallel_fn, sizeof parallel_fn);
    memcpy(&omp_thread_num, &thread_num, sizeof thread_num);
    memcpy(&omp_num_threads, &num_threads, sizeof num_threads);
    amx_allowed = want_amx && request_amx();
    return amx_allowed;
}

/* Run `ops` on `batch`. gemm_rows: from how many rows on panels are used. Returns an error code; values then are garbage. */
EXPORT int32_t luce_run(const luce_op *ops, int32_t num_ops, const luce_batch *batch, float *const *values, void *const *taps,
                        int32_t threads, int32_t gemm_rows) {
    luce_run_t run = {.ops = ops, .num_ops = num_ops, .batch = batch, .values = values, .taps = taps,
                      .gemm_rows = gemm_rows, .threads = imax(1, imin(threads, MAX_THREADS))};
    if (!batch->rows) return ERR_NONE;
    const int32_t refused = measure(&run);
    if (refused) return refused;
    pthread_mutex_lock(&turn);
    const int64_t bytes = lay_out(&run, NULL) + 64;
    if (bytes > workspace_bytes) {
        free(workspace);
        workspace = aligned_alloc(64, (size_t)round64(bytes));
        workspace_bytes = workspace ? bytes : 0;
    }
    if (workspace) {
        lay_out(&run, workspace);
        parallel(run_region, &run, run.threads);
    }
    pthread_mutex_unlock(&turn);
    return workspace ? run.error : ERR_MEMORY;
}

/* Rows of a matrix as f32 [count, cols]: for tests and for embedding through other ops. */
EXPORT int32_t luce_dequantize(const luce_matrix *m, const int32_t *rows, int32_t count, float *out) {
    float *space = malloc(4 * (TILE_SPACE + 16 * 256));
    if (!space) return ERR_MEMORY;
    for (int32_t i = 0; i < count; i++) dequantize_all(m, rows[i], out + (int64_t)i * m->cols, space);
    free(space);
    return ERR_NONE;
}

/* Whether matrices of this format are rearranged here: 1 by `luce_to_lanes`, 0 not. */
EXPORT int32_t luce_wants_lanes(int32_t format) { return HAVE_LANES && shape_of(format) != NULL; }
EXPORT void luce_to_lanes(const luce_matrix *m, uint8_t *out) { to_lanes(m, out); }

/* Pages of a mapped file that were read once and are not needed again: they stop counting as resident. */
EXPORT void luce_forget(const uint8_t *p, int64_t bytes) {
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = ((uintptr_t)p + page - 1) / page * page;
    const uintptr_t end = ((uintptr_t)p + (uintptr_t)bytes) / page * page;
    if (end > first) madvise((void *)first, end - first, MADV_DONTNEED);
}

EXPORT int32_t luce_supports(int32_t format) { return is_plain(format) || dot_of(format) != NULL; }
EXPORT int64_t luce_workspace_bytes(void) { return workspace_bytes; }
EXPORT int32_t luce_sizes(int32_t which) { /* checked against the mirrored structures when the library is loaded */
    switch (which) {
        case 0: return (int32_t)sizeof(luce_matrix);
        case 1: return (int32_t)sizeof(luce_batch);
        case 2: return (int32_t)sizeof(luce_attention);
        default: return (int32_t)sizeof(luce_op);
    }
}
