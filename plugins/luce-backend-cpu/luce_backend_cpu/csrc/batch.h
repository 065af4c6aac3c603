/* What Python hands over: one batch, the ops of one region, and the attention of one layer. Mirrored in `native.py`. */
#ifndef LUCE_BATCH_H
#define LUCE_BATCH_H

#include "formats.h"

#define MAX_TABLES 8
#define MAX_OUTS 8

typedef struct {            /* block table of a group: [seqs, columns] */
    const int32_t *block, *first, *count;
    int32_t columns;
} luce_table;

typedef struct {            /* ForwardBatch; all i32 contiguous, sees i64 */
    int32_t rows, seqs, held, words;
    int32_t row_invariant;  /* a row's bits may depend on nothing but the row */
    int32_t embed_count;
    const int32_t *token, *index, *position /* [axes, rows] */, *seq, *query_start, *length, *parent;
    const int64_t *sees;
    const float *embeds;
    const int32_t *embed_rows;
    luce_table table[MAX_TABLES];
} luce_batch;

typedef struct {            /* AttentionSpec and its Region */
    int32_t heads, kv_heads, head_dim, value_dim;
    float scale, softcap;
    int32_t window;         /* 0: none */
    int32_t half;           /* rotated pairs; 0: no rope */
    int32_t adjacent;       /* pairs (2j, 2j+1) instead of (j, j+half) */
    int32_t gated;
    float magnitude;
    const float *inv_freq;
    const int32_t *axis;    /* position axis per frequency, or NULL */
    const float *q_norm, *k_norm, *v_norm;
    float q_eps, k_eps, v_eps;
    const float *sinks;
    void *k_pages, *v_pages;
    int32_t k_format, v_format;     /* F_F32, F_F16, F_BF16, or F_Q8_0: codes, see cache.h */
    int32_t block_entries, table;
    int32_t k_turn, v_turn;         /* numbers turned together before they become codes; 0: none */
} luce_attention;

enum { OP_EMBED = 0, OP_NORM_LINEAR = 1, OP_ATTENTION = 2, OP_LINEAR_OUT = 3, OP_GATED_MLP = 4, OP_HEAD = 5, OP_TAP = 6 };

typedef struct {
    int32_t kind;
    int32_t x, residual, gate;      /* numbers of values; -1: none */
    int32_t out[MAX_OUTS];          /* attention: out[0]; its k and v are out[1], out[2] */
    int32_t num_matrices;
    const luce_matrix *matrices;    /* gated_mlp: gate, up, down */
    const float *norm, *post;
    float norm_eps, post_eps;
    float scale, clamp, softcap;    /* clamp < 0: none */
    int32_t act;
    const luce_attention *attention;
} luce_op;

enum { ERR_NONE = 0, ERR_TOKEN = 1, ERR_PLACE = 2, ERR_MEMORY = 3, ERR_ROPES = 4 };

#endif
