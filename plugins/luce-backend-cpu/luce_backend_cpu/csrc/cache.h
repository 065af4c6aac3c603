/* Vectors of the cache: one head of one token, as f32, f16, bf16, or q8_0 codes as luce_core.contracts.codec lays them:
 * turned numbers as int8, then an f16 scale for each 32, up to a whole word. */
#ifndef LUCE_CACHE_H
#define LUCE_CACHE_H

#include "formats.h"
#include "lanes.h"

#define CODE_GROUP 32   /* numbers that share a scale */

INLINE int64_t vector_bytes(int format, int32_t dim) {
    if (format == F_Q8_0) return (dim + dim / CODE_GROUP * 2 + 3) / 4 * 4;
    return (int64_t)dim * (format == F_F32 ? 4 : 2);
}

INLINE const uint8_t *vector_at(int format, const void *pages, int64_t vector, int32_t dim) {
    return (const uint8_t *)pages + vector * vector_bytes(format, dim);
}

typedef int8_t v16i8 __attribute__((vector_size(16)));

/* numbers i..i+16 of a vector; n < 16 of them (never of codes): the rest zero */
INLINE v16f cache16(int format, const uint8_t *vector, int32_t i, int n, int32_t dim) {
    if (format == F_Q8_0) {
        v16i8 codes;
        memcpy(&codes, vector + i, sizeof codes);
        return __builtin_convertvector(codes, v16f) * splat(half_at(vector + dim + i / CODE_GROUP * 2));
    }
    if (n >= LANES) return plain16(format, vector, i);
    v16f v = {};
    for (int j = 0; j < n; j++) v[j] = plain1(format, vector, i + j);
    return v;
}

static void cache_write(int format, void *pages, int64_t at, const float *x, int32_t n) { /* numbers */
    if (format == F_F32) {
        memcpy((float *)pages + at, x, (size_t)n * sizeof(float));
        return;
    }
    uint16_t *to = (uint16_t *)pages + at;
    for (int32_t i = 0; i < n; i++) to[i] = format == F_F16 ? to_f16(x[i]) : to_bf16(x[i]);
}

/* --- turns */

INLINE float sign_of(uint32_t place) {
    uint32_t x = (place + 1) * 0x2545F491u;
    x = (x ^ x >> 15) * 0x1B873593u;
    return x >> 16 & 1 ? -1.0f : 1.0f;
}

static void hadamard(float *x, int32_t dim, int32_t size) { /* H x / sqrt(size), for each `size` numbers */
    for (int32_t step = 1; step < size; step *= 2)
        for (int32_t i = 0; i < dim; i += 2 * step)
            for (int32_t j = i; j < i + step; j++) {
                const float a = x[j], b = x[j + step];
                x[j] = a + b, x[j + step] = a - b;
            }
    const float by = 1.0f / sqrtf((float)size);
    for (int32_t i = 0; i < dim; i++) x[i] *= by;
}

static void turn_vector(float *x, int32_t dim, int32_t size) { /* size 0: not */
    if (!size) return;
    for (int32_t i = 0; i < dim; i++) x[i] *= sign_of((uint32_t)(i % size));
    hadamard(x, dim, size);
}

static void turn_vector_back(float *x, int32_t dim, int32_t size) {
    if (!size) return;
    hadamard(x, dim, size);
    for (int32_t i = 0; i < dim; i++) x[i] *= sign_of((uint32_t)(i % size));
}

/* x into a vector; codes: x is turned on the way */
static void keep_vector(int format, void *pages, int64_t vector, float *x, int32_t dim, int32_t size) {
    if (format != F_Q8_0) {
        cache_write(format, pages, vector * dim, x, dim);
        return;
    }
    turn_vector(x, dim, size);
    uint8_t *to = (uint8_t *)pages + vector * vector_bytes(format, dim);
    for (int32_t from = 0; from < dim; from += CODE_GROUP) {
        float most = 0, wrong = 0;  /* wrong: NaN where a number is not finite */
        for (int32_t i = from; i < from + CODE_GROUP; i++) {
            const float size_of = fabsf(x[i]);
            most = size_of > most ? size_of : most;
            wrong += x[i] * 0.0f;
        }
        const float scale = most / 127.0f, inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
        for (int32_t i = from; i < from + CODE_GROUP; i++) {
            const float t = x[i] * inverse;
            to[i] = t == t ? (uint8_t)(int8_t)fminf(fmaxf(t < 0 ? ceilf(t - 0.5f) : floorf(t + 0.5f), -127.0f), 127.0f) : 0;
        }
        const uint16_t half = to_f16(scale + wrong);
        memcpy(to + dim + from / CODE_GROUP * 2, &half, sizeof half);
    }
}

#endif
