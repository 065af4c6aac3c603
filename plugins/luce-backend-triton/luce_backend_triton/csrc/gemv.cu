// y = x · Wᵀ for one to four rows of x and a quantized W, in integers: dp4a, and from 8.0 on tensor cores (IMMA) for
// more than one row, which cost there what one does. One row is quicker by dp4a (LOG.md 2026-11-30).
//
// Weights lie as in mma.cu, and lane (g, t) has the same ones. x is two signed bytes, 256 · high + low, with one factor
// per 256 columns: a rounding of 1/65024 of their largest. So products and sums are exact, over all 256 columns where a
// group's scale is an integer too, and only records meet in floats.
//
// A warp walks alone: a ring of records in shared memory, no barrier between x's arrival and the end.
//
// instructions: (IDP\.4A|IMMA) (LDG|LDGSTS)\.[.\w]*128

#define X_WORDS 512  // [c][h][t] of (high 0-3, high 4-7, low 0-3, low 4-7); then i32[8] Σ x of groups
#if TABLE
#define CODE_ZERO 128
#else
#define CODE_ZERO ZERO
#endif
#define NEGATED ((u32)((256 - CODE_ZERO) & 255) * 0x01010101u)  // -zero four times: fits a signed byte
#define INTEGER (SCALES == 2 || SCALES == 3 || SCALES == 4)

#ifndef IMMA
#define IMMA (__CUDA_ARCH__ >= 800 && X_ROWS > 1)
#endif

#if IMMA
// D = A · B + c of a warp. Lane (g, t) gives A's rows g, g + 8 at k = 4 t .. 4 t + 3, and B's column g there; with 32 of k, the
// same of k + 16 too. It has D's (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1).
struct Four { int of[4]; };
__device__ __forceinline__ Four mma_codes(const Four& c, u32 a0, u32 a1, u32 b) {
  Four d;
  asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
      : "=r"(d.of[0]), "=r"(d.of[1]), "=r"(d.of[2]), "=r"(d.of[3])
      : "r"(a0), "r"(a1), "r"(b), "r"(c.of[0]), "r"(c.of[1]), "r"(c.of[2]), "r"(c.of[3]));
  return d;
}
__device__ __forceinline__ Four mma_codes(const Four& c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Four d;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d.of[0]), "=r"(d.of[1]), "=r"(d.of[2]), "=r"(d.of[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c.of[0]), "r"(c.of[1]), "r"(c.of[2]), "r"(c.of[3]));
  return d;
}
__device__ __forceinline__ Four mma_zeros(u32 b) {  // A is -zero everywhere
  Four d;
  asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %4}, {%5}, {%6, %6, %6, %6};"
      : "=r"(d.of[0]), "=r"(d.of[1]), "=r"(d.of[2]), "=r"(d.of[3]) : "r"(NEGATED), "r"(b), "r"(0));
  return d;
}
__device__ __forceinline__ Four mma_zeros(u32 b0, u32 b1) {
  Four d;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %6}, {%7, %7, %7, %7};"
      : "=r"(d.of[0]), "=r"(d.of[1]), "=r"(d.of[2]), "=r"(d.of[3]) : "r"(NEGATED), "r"(b0), "r"(b1), "r"(0));
  return d;
}
#else
__device__ __forceinline__ int dot(u32 codes, u32 x, int c) {  // unsigned codes
  int r;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(codes), "r"(x), "r"(c));
  return r;
}
__device__ __forceinline__ int zeros(u32 x, int c) {
  int r;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(NEGATED), "r"(x), "r"(c));
  return r;
}
#endif

// Eight codes as bytes: weights 0-3 in `first`, 4-7 in `second`.
__device__ __forceinline__ void bytes(u32& first, u32& second, u32 word, u32 more, u32 high, int a) {
#if BITS == 8
  first = word, second = more;
#elif TABLE
  look_up(word, first, second);
#else
  first = word & 0x0f0f0f0f, second = (word >> 4) & 0x0f0f0f0f;
#if BITS > 4
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int field = (BITS - 4) * (BITS == 5 ? 2 * a + j : 2 * (a & 1) + j);
    const u32 bits = field > 4 ? high >> (field - 4) : high << (4 - field);
    if (j) second = mask_or(bits, BITS == 5 ? 0x10101010 : 0x30303030, second);
    else first = mask_or(bits, BITS == 5 ? 0x10101010 : 0x30303030, first);
  }
#endif
#endif
}

struct RowScales { u32 word[4]; float d, add; };

__device__ __forceinline__ RowScales row_scales(const u8* at, int row) {
  RowScales s;
#if SCALES == 2
  floats(((const u32*)at)[row], s.d, s.add);
  u32x2 w = ((const u32x2*)(at + 64))[row * 2];
  s.word[0] = w.x, s.word[1] = w.y;
#elif SCALES == 3
  floats(((const u16*)at)[row], s.d, s.add);
  u32x4 w = ((const u32x4*)(at + 32))[row];
  s.word[0] = w.x ^ 0x80808080, s.word[1] = w.y ^ 0x80808080, s.word[2] = w.z ^ 0x80808080, s.word[3] = w.w ^ 0x80808080;
#elif SCALES == 4
  floats(((const u16*)at)[row], s.d, s.add);
  u32x2 w = ((const u32x2*)(at + 32))[row];
  s.word[0] = w.x, s.word[1] = w.y;
#elif SCALES == 5
  u32x2 w = ((const u32x2*)at)[row];
  s.word[0] = w.x, s.word[1] = w.y;
#else
  u32x4 w = ((const u32x4*)at)[row];
  s.word[0] = w.x, s.word[1] = w.y, s.word[2] = w.z, s.word[3] = w.w;
#endif
  return s;
}

// By one instruction each, where a shift and a mask are two.
__device__ __forceinline__ int byte_of(u32 word, int i) { return __byte_perm(word, 0, 0x4440 | i); }
__device__ __forceinline__ int signed_byte_of(u32 word, int i) { return (int)(word << (24 - 8 * i)) >> 24; }
// Of group i (of 32, or of 16).
__device__ __forceinline__ int integer_scale(const RowScales& s, int i) {
#if SCALES == 3
  return signed_byte_of(s.word[i >> 2], i & 3);
#elif SCALES == 4
  return byte_of(s.word[i >> 2], i & 3) - 32;
#else
  return byte_of(s.word[i >> 2], i & 3);
#endif
}
__device__ __forceinline__ float float_scale(const RowScales& s, int i) {
  float low, high;
#if SCALES == 5
  floats((u32)byte_of(s.word[i >> 2], i & 3) << 10, low, high);
  return low;
#elif SCALES == 6
  floats((u32)byte_of(s.word[i >> 2], i & 3) << 7, low, high);
  return 128.f * low;
#else
  floats(s.word[i >> 1], low, high);
  return i & 1 ? high : low;
#endif
}

// The words of a lane in one group of 32 columns: of rows g and g + 8.
struct Words { u32 word[2], more[2], plane; };

__device__ __forceinline__ Words words_of(const u8* record, int group, int lane) {
  const int c = group >> 1, h = group & 1;
  Words w = {};
#if BITS == 8
  const u32x4 v = ((const u32x4*)record)[c * 64 + h * 32 + lane];
  w.word[0] = v.x, w.more[0] = v.y, w.word[1] = v.z, w.more[1] = v.w;
#else
  const u32x2 v = ((const u32x2*)record)[(c * 32 + lane) * 2 + h];
  w.word[0] = v.x, w.word[1] = v.y;
#endif
#if BITS == 5
  w.plane = ((const u32*)(record + 2048))[c * 32 + lane];
#elif BITS == 6
  w.plane = ((const u32*)(record + 2048))[(c * 32 + lane) * 2 + h];
#endif
  return w;
}

// What a lane has of rows g, g + 8 and all 256 columns.
#if INTEGER
struct Sums { int high[2], low[2]; };
__device__ __forceinline__ float sum_of(const Sums& s, const RowScales& r, int i) { return (256.f * (float)s.high[i] + (float)s.low[i]) * r.d; }
#else
struct Sums { float sum[2]; };
__device__ __forceinline__ float sum_of(const Sums& s, const RowScales&, int i) { return s.sum[i]; }
#endif

// One group: high and low are its sums, of the second 16 columns alone where those have a scale of their own.
__device__ __forceinline__ void add_group(Sums& s, const RowScales& r, int i, int group, int high, int low, int high2, int low2) {
#if BY_16 && INTEGER
  const int s0 = integer_scale(r, 2 * group), s1 = integer_scale(r, 2 * group + 1);
  s.high[i] += high * s0 + high2 * s1, s.low[i] += low * s0 + low2 * s1;
#elif BY_16
  s.sum[i] += float_scale(r, 2 * group) * (float)(high * 256 + low) + float_scale(r, 2 * group + 1) * (float)(high2 * 256 + low2);
#elif INTEGER
  const int scale = integer_scale(r, group);
  s.high[i] += high * scale, s.low[i] += low * scale;
#else
  s.sum[i] += float_scale(r, group) * (float)(high * 256 + low);
#endif
}

// total[i][n] += rows g + 8 i of a record times row n of x, in parts: their sum over t is the whole.
__device__ __forceinline__ void multiply(float (&total)[2][X_ROWS], const u8* record, const u8* x, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const u8* scales = record + CODES;
  const RowScales s[2] = {row_scales(scales, g), row_scales(scales, g + 8)};
#if IMMA
  // B's columns 2 n, 2 n + 1 are high and low of row n, so lane (g, n) has both sums of it. Columns beyond repeat them.
  Sums sums = {};
  const u8* given = x + g % (2 * X_ROWS) / 2 * X_BYTES + (g & 1) * 8 + t * 16;
#pragma unroll
  for (int group = 0; group < 8; group++) {
    const u32x2 b = *(const u32x2*)(given + group * 64);
    const Words w = words_of(record, group, lane);
    u32 first[2], second[2];
#pragma unroll
    for (int i = 0; i < 2; i++) bytes(first[i], second[i], w.word[i], w.more[i], w.plane, 2 * (group & 1) + i);
    Four p = {}, q = {};
#if BY_16
#if CODE_ZERO
    p = mma_zeros(b.x), q = mma_zeros(b.y);
#endif
    p = mma_codes(p, first[0], first[1], b.x), q = mma_codes(q, second[0], second[1], b.y);
#else
#if CODE_ZERO
    p = mma_zeros(b.x, b.y);
#endif
    p = mma_codes(p, first[0], first[1], second[0], second[1], b.x, b.y);
#endif
#pragma unroll
    for (int i = 0; i < 2; i++) add_group(sums, s[i], i, group, p.of[2 * i], p.of[2 * i + 1], q.of[2 * i], q.of[2 * i + 1]);
  }
#else
  Sums sums[X_ROWS] = {};
#pragma unroll
  for (int group = 0; group < 8; group++) {
    u32x4 b[X_ROWS];
    int z[X_ROWS][4] = {};
#pragma unroll
    for (int n = 0; n < X_ROWS; n++) {
      b[n] = *(const u32x4*)(x + n * X_BYTES + group * 64 + t * 16);
#if CODE_ZERO
      z[n][0] = zeros(b[n].x, 0), z[n][1] = zeros(b[n].z, 0);
#if BY_16
      z[n][2] = zeros(b[n].y, 0), z[n][3] = zeros(b[n].w, 0);
#else
      z[n][0] = zeros(b[n].y, z[n][0]), z[n][1] = zeros(b[n].w, z[n][1]);
#endif
#endif
    }
    const Words w = words_of(record, group, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      u32 first, second;
      bytes(first, second, w.word[i], w.more[i], w.plane, 2 * (group & 1) + i);
#pragma unroll
      for (int n = 0; n < X_ROWS; n++) {
#if BY_16
        const int high = dot(first, b[n].x, z[n][0]), low = dot(first, b[n].z, z[n][1]);
        const int high2 = dot(second, b[n].y, z[n][2]), low2 = dot(second, b[n].w, z[n][3]);
#else
        const int high = dot(first, b[n].x, dot(second, b[n].y, z[n][0])), low = dot(first, b[n].z, dot(second, b[n].w, z[n][1]));
        const int high2 = 0, low2 = 0;
#endif
        add_group(sums[n], s[i], i, group, high, low, high2, low2);
      }
    }
  }
#endif
#pragma unroll
  for (int n = 0; n < X_ROWS; n++) {
    const float factor = *(const float*)(x + n * X_BYTES + X_FACTOR);
#if HAS_ADD
    const u32x2 groups = *(const u32x2*)(x + n * X_BYTES + X_WORDS + t * 8);
#endif
#pragma unroll
    for (int i = 0; i < 2; i++) {
#if IMMA
      float v = t == n ? sum_of(sums, s[i], i) : 0.f;
#else
      float v = sum_of(sums[n], s[i], i);
#endif
#if SCALES == 2
      const u32 two = ((const u16*)(scales + 64))[(g + 8 * i) * 8 + 4 + t];
      v += s[i].add * (float)((int)groups.x * (int)(two & 255) + (int)groups.y * (int)(two >> 8));
#elif SCALES == 1
      float a0, a1;
      floats(((const u32*)(scales + 256))[(g + 8 * i) * 4 + t], a0, a1);
      v += a0 * (float)(int)groups.x + a1 * (float)(int)groups.y;
#endif
      total[i][n] += factor * v;
    }
  }
}

#define MIDDLE 12582912.f  // of floats whose last bit is 1

// N times a warp's 256 columns, `apart` bytes from each other, as `multiply` wants them; share: what they are multiplied with
// besides; count: how many there are.
template <int N> __device__ __forceinline__ void make_ready(u8* to, int apart, const float (&v)[N][8], const float (&share)[N], int count, int lane) {
  float top[N];
  u32 sum[N];
#pragma unroll
  for (int k = 0; k < N; k++) {
    top[k] = 1e-30f;  // its inverse is a number
#pragma unroll
    for (int i = 0; i < 8; i++) top[k] = fmaxf(top[k], fabsf(v[k][i]));
  }
#pragma unroll
  for (int k = 0; k < N; k++) top[k] = __uint_as_float(most(__float_as_uint(top[k])));  // positive: of the same order
#pragma unroll
  for (int k = 0; k < N; k++) {
    const float steps = __fdividef(32512.f, top[k]);
    u32 word[4];  // high of both halves, low of both
    sum[k] = 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 low[4], high[4];  // floats whose low bits are v · steps, rounded; and that + 128
#pragma unroll
      for (int e = 0; e < 4; e++) {
        low[e] = __float_as_uint(fmaf(v[k][4 * half + e], steps, MIDDLE));
        high[e] = __float_as_uint(fmaf(v[k][4 * half + e], steps, MIDDLE + 128.f));
        sum[k] += low[e];
      }
      word[half] = __byte_perm(__byte_perm(high[0], high[2], 0x51), __byte_perm(high[1], high[3], 0x51), 0x5410);
      word[2 + half] = __byte_perm(__byte_perm(low[0], low[2], 0x40), __byte_perm(low[1], low[3], 0x40), 0x5410);
    }
    sum[k] -= 8u * __float_as_uint(MIDDLE);
    if (k < count) *(u32x4*)(to + k * apart + lane * 16) = u32x4{word[0], word[1], word[2], word[3]};
  }
#pragma unroll
  for (int i = 1; i < 3; i++)
#pragma unroll
    for (int k = 0; k < N; k++) sum[k] += __shfl_xor_sync(~0u, sum[k], i);
#pragma unroll
  for (int k = 0; k < N; k++) {
    if (k < count && (lane & 3) == 0) ((u32*)(to + k * apart + X_WORDS))[lane >> 2] = sum[k];
    if (k < count && lane == 0) *(float*)(to + k * apart + X_FACTOR) = top[k] * (1.f / 32512.f) * share[k];
  }
}

// The sums of a warp over one tile go to where they meet those of others; it begins anew.
__device__ __forceinline__ void leave(float (&total)[2][X_ROWS], float* mine, int lane) {
#pragma unroll
  for (int j = 0; j < 2; j++)
#pragma unroll
    for (int n = 0; n < X_ROWS; n++) {
      float v = total[j][n];
      v += __shfl_xor_sync(~0u, v, 1);
      v += __shfl_xor_sync(~0u, v, 2);
      if ((lane & 3) == 0) mine[n * 16 + 8 * j] = v;
      total[j][n] = 0.f;
    }
}

#if MAKES
#define GIVEN In
#else
#define GIVEN const u8* __restrict__
#endif

// Grid: (at most as many as tiles, 1, blocks of X_ROWS rows of x). x: [blocks][m][X_BYTES], of 256 columns each, as above, and
// at X_FACTOR the f32 that x is to be multiplied with. With MAKES every thread block makes the only row ready itself, up to
// MAKES · WARPS such blocks of it; by what a norm divides is known in the end, and sums are multiplied with it.
// A thread block takes whole tiles: sums that meet through memory would cost more than an uneven share. Its warps share
// their units evenly, and sums meet in shared memory: x, rings, then f32[tiles][parts][X_ROWS][16], where of the warps that
// share a tile each has a part of its own, and parts of none are zeros; with MAKES Σ x² of every warp's columns.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
gemv(const u8* __restrict__ records, GIVEN x, Out out, Shares tiles, int blocks, u32 by_blocks, int parts, u32 by_parts) {
  extern __shared__ __align__(16) u8 shared[];
  begin_beside(out.beside);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tile0 = first_of(tiles, blockIdx.x), num_tiles = first_of(tiles, blockIdx.x + 1) - tile0, units = num_tiles * blocks;
  const Shares shares = {units / WARPS, units % WARPS};
  const int begin = first_of(shares, warp), end = first_of(shares, warp + 1), sums = num_tiles * X_ROWS * 16;
  u8* ring = shared + X_ROWS * blocks * X_BYTES + warp * STAGES * RECORD;
  float* partial = (float*)(shared + X_ROWS * blocks * X_BYTES + WARPS * STAGES * RECORD);
  const u8* source = records + ((size_t)tile0 * blocks + begin) * RECORD + lane * 16;
  int left = end - begin;
  u8* to = ring + lane * 16;
  auto fetch = [&]() {
    if (left > 0) copy_lanes(to, source, lane);
    commit();
    source += RECORD;
    left--;
    to = to == ring + (STAGES - 1) * RECORD + lane * 16 ? ring + lane * 16 : to + RECORD;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch();
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < sums * parts; i += 32 * WARPS * 4) *(float4*)(partial + i) = float4{0.f, 0.f, 0.f, 0.f};
  const int first_row = blockIdx.z * X_ROWS, live = ONE_ROW ? 1 : min(out.m - first_row, X_ROWS);
  const int tile = quotient(begin, by_blocks), part = warp - quotient(warp, by_parts) * parts;
  int block = settled(begin - tile * blocks);
  float* mine = partial + (tile * parts + part) * (16 * X_ROWS) + (lane >> 2);
#if MAKES
  float v[MAKES][8], w[MAKES][8], squares = 0.f;
#pragma unroll
  for (int k = 0; k < MAKES; k++)
    if (x.weight) columns_of(w[k], x.weight, first_column((warp + k * WARPS) * 256, lane), x.k);
  wait_for_x(out.beside);
#pragma unroll
  for (int k = 0; k < MAKES; k++) columns_of(v[k], x.x, first_column((warp + k * WARPS) * 256, lane), x.k);
#else
  wait_for_x(out.beside);
#endif
  float residual = 0.f;  // thread i finishes sum i first: its residual is asked for now
#if !MAKES
#pragma unroll(ONE_ROW ? 1 : 4)
  for (int i = threadIdx.x; i < blocks * X_ROWS * (X_BYTES / 16); i += 32 * WARPS) {
    const int at = i / (X_ROWS * (X_BYTES / 16)), piece = i % (X_ROWS * (X_BYTES / 16));
    if (ONE_ROW || piece < live * (X_BYTES / 16))
      copy16(shared + at * X_ROWS * X_BYTES + piece * 16, x + ((size_t)at * out.m + first_row) * X_BYTES + piece * 16);
  }
  commit();
#endif
  if (threadIdx.x < sums) residual = residual_of(out, (tile0 + threadIdx.x / (16 * X_ROWS)) * 16 + threadIdx.x % 16, first_row + threadIdx.x / 16 % X_ROWS);
#if MAKES
  float share[MAKES];
#pragma unroll
  for (int k = 0; k < MAKES; k++) {
    share[k] = 1.f;
    if (x.weight)
#pragma unroll
      for (int j = 0; j < 8; j++) squares += v[k][j] * v[k][j], v[k][j] *= w[k][j];
  }
  make_ready(shared + warp * X_BYTES, WARPS * X_BYTES, v, share, warp < blocks ? (blocks - 1 - warp) / WARPS + 1 : 0, lane);
  float* squares_of = partial + sums * parts;
  if (x.weight) {
#pragma unroll
    for (int i = 16; i; i >>= 1) squares += __shfl_xor_sync(~0u, squares, i);
    if (lane == 0) squares_of[warp] = squares;
  }
#else
  wait_all();
#endif
  __syncthreads();
  float total[2][X_ROWS] = {};
  const u8* record = ring;
  for (int i = begin; i < end; i++) {
    wait();
    __syncwarp();
    fetch();
    multiply(total, record, shared + block * X_ROWS * X_BYTES, lane);
    const bool again = record == ring + (STAGES - 1) * RECORD;
    record = again ? ring : record + RECORD;
    if (++block == blocks || i == end - 1) {
      block = 0;
      leave(total, mine, lane);
      mine += parts * (16 * X_ROWS);
    }
  }
  float inverse = 1.f;
#if MAKES
  if (x.weight && threadIdx.x < sums) {
    squares = 0.f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) squares += squares_of[i];
    inverse = 1.f / sqrtf(squares / (float)x.k + x.eps);
  }
#endif
  __syncthreads();

  for (int i = threadIdx.x; i < sums; i += 32 * WARPS) {
    const int row = i % 16, n = i / 16 % X_ROWS, of = i / (16 * X_ROWS);
    const float* from = partial + of * parts * (16 * X_ROWS) + n * 16 + row;
    float v = 0.f;
#pragma unroll 1
    for (int k = 0; k < parts; k += 4) {
      float some[4];
#pragma unroll
      for (int j = 0; j < 4; j++) some[j] = k + j < parts ? from[(k + j) * (16 * X_ROWS)] : 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) v += some[j];
    }
    v *= inverse;
    if (i == threadIdx.x) finish_with(out, v, residual, (tile0 + of) * 16 + row, first_row + n);
    else finish(out, v, (tile0 + of) * 16 + row, first_row + n);
  }
  end_beside(out.beside);
}
