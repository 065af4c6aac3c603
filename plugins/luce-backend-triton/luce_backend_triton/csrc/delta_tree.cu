// Held rows of one sequence, one value head: all of the op `delta`, gated, for 2 to ROWS rows that follow their ancestors.
// See `luce_core.ops.delta` for the recurrence. Heads of 128; a convolution over 4 rows; 9 warps.
//
// Eight warps share the columns of the state, 16 each, which a lane holds as halves in the order in which mma.m16n8k16 takes
// them. Row tiles are octets: eight keys in the upper half of a tile, the eight queries of the same rows in the lower one, so
// that a lane has what a row's key and its query read of the same four columns. The ninth warp knows ancestors and decays.
//
//   wait | x of all rows to shared memory | convolution, SiLU, norms: keys and queries as halves, values f32 |
//   what they read of the state; keys and queries times keys, with decays | u, from the first row to the last, a thread for
//   every column | y, and its squares | norm, gate
//
// "|" is a barrier of the block. What does not depend on the launch in front lies before the wait: the state, the window,
// weights of the convolution, ancestors.
//
// instructions: HMMA\.16816 HMMA\.1688 LDGSTS\.[.\w]*128

#define ROWS X_ROWS          // a multiple of 8, at most 32
#define OCTETS (ROWS / 8)
#define RUN (ROWS / WARPS)   // rows of a warp in the convolution
#define DIM 128
#define ABOVE 3              // rows of the window
#define WIDE (3 * DIM)       // numbers of a row: q, k, v of this head
#define HALF_STRIDE 160      // halves from one key to the next: eight rows of 64 bytes lie in different banks
#define V_STRIDE (DIM + 16)  // floats, likewise
#define T_STRIDE (ROWS + 4)  // floats
#define A_STRIDE (ROWS == 32 ? 20 : 12)  // words
#define U_STRIDE (ROWS / 2 + 2)          // words

struct Tree {
  const float *qkv, *z, *beta, *decay;
  float* out;
  const float *window, *taps, *state;
  float *log_x, *log_k, *log_u, *log_g;
  const float *norm, *a, *dt;
  const int* parent;
  const long long* sees;
  const int *query_start, *slots;
  int ldqkv, ldz, ldbeta, lddecay, words, most, key_heads, above;  // above: of how many rows sequences are left to others
  float unit_eps, norm_eps, q_scale;
};

struct Shared {
  float x[(ABOVE + ROWS) * WIDE];  // the window, then rows; afterwards `Solved`
  float v[ROWS * V_STRIDE];        // values, then the right side of the system
  u16 k[ROWS * HALF_STRIDE], q[ROWS * HALF_STRIDE];
  float squares[ROWS][WARPS];
  u32x4 above[ROWS];  // where in x the three rows above a row begin; whether the first is the row in front
  float since[ROWS], step[ROWS];
  u32 sees[ROWS];
};
struct Solved {
  float t[ROWS * T_STRIDE];  // [j][i]: step, key i times key j, decay from j to i
  u32 a[ROWS * A_STRIDE];    // [i][j]: query i times key j, decay, as halves
  u32 u[DIM * U_STRIDE];     // [column][row], as halves
};

__device__ __forceinline__ u32 pack(float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
__device__ __forceinline__ float2 load2(const float* from) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
  return v;
}
// With the hardware's own exponentials and quotients: without them, exp(x) is five instructions for numbers next to none.
__device__ __forceinline__ float exp2_of(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float inverse_of(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float inverse_root(float x) { float r; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float exp_of(float x) { return exp2_of(x * 1.4426950408889634f); }
__device__ __forceinline__ float sigmoid(float x) { return inverse_of(1.f + exp_of(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// The row above a row; -1, -2 and -3 are those of the window, the newest first.
__device__ __forceinline__ int row_above(int row, int parent) {
  const int up = __shfl_sync(~0u, parent, row & 31);
  return row < 0 ? row - 1 : up < 0 ? -1 : up;
}

// Keys and queries of octet o times the 16 columns that b holds of a row of 32 channels, in both orders of k.
__device__ __forceinline__ void multiply(float (&c)[4], const u32x4& k, const u32x4& q, u32 b0, u32 b1, u32 b2, u32 b3) {
  mma(c, c, k.x, q.x, k.y, q.y, b0, b1);
  mma(c, c, k.z, q.z, k.w, q.w, b2, b3);
}

// Grid (value heads, 1, sequences). Sequences of other sizes are left alone.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1))
delta_tree(Tree o) {
  extern __shared__ __align__(16) u8 shared[];
  Shared& s = *(Shared*)shared;
  Solved& solved = *(Solved*)shared;
  let_next_start();
  const int h = blockIdx.x, heads = gridDim.x, seq = blockIdx.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int g = lane >> 2, t = lane & 3;
  const int start = o.query_start[seq], rows = o.query_start[seq + 1] - start;
  if (rows <= o.above || rows > ROWS) {
    wait_for_previous();
    return;
  }
  const size_t slot = o.slots[seq];
  const int kh = h % o.key_heads, channels = (2 * o.key_heads + heads) * DIM;
  const int of[3] = {kh * DIM, (o.key_heads + kh) * DIM, (2 * o.key_heads + h) * DIM};  // first channels of q, k and v
  const bool keeps = h < o.key_heads;  // q and k of a key head in the logs

  // --- in front of the wait
  const int piece = threadIdx.x % (WIDE / 4), part = piece / 32, first = threadIdx.x / (WIDE / 4);
  const int channel = (part == 0 ? of[0] : part == 1 ? of[1] : of[2]) + piece % 32 * 4;
  copy16(s.x + first * WIDE + piece * 4, o.window + (slot * ABOVE + first) * channels + channel);
  float2 memory[4][8];
  float4 taps[3][4];
  float4 weight;
  int mine = 0;
  float shift = 0.f, rate = 0.f;
  if (warp < WARPS) {
    const float* from = o.state + ((slot * heads + h) * DIM + 8 * t) * DIM + 16 * warp + 2 * g;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int e = 0; e < 8; e++) memory[n][e] = load2(from + (32 * n + e) * DIM);
#pragma unroll
    for (int p = 0; p < 3; p++)
#pragma unroll
      for (int e = 0; e < 4; e++) taps[p][e] = load4(o.taps + (of[p] + 4 * lane + e) * 4);
    weight = load4(o.norm + 16 * warp + 4 * t);
  } else {
    const bool live = lane < rows;
    const int parent = live ? o.parent[start + lane] : -1;
    const u32 word = live ? (u32)o.sees[(size_t)(start + lane) * o.words] : 0;
    mine = word & ((1u << lane) - 1);
    shift = o.dt[h], rate = o.a[h];
    const int one = row_above(lane, parent), two = row_above(one, parent), three = row_above(two, parent);
    const u32x4 at = {(u32)((ABOVE + one) * WIDE), (u32)((ABOVE + two) * WIDE), (u32)((ABOVE + three) * WIDE), one == lane - 1};
    if (lane < ROWS) s.above[lane] = at;
  }
  wait_for_previous();

  // --- what the launch in front has written, all asked for at once
  for (int row = first; row < rows; row += ABOVE)
    copy16(s.x + (ABOVE + row) * WIDE + piece * 4, o.qkv + (size_t)(start + row) * o.ldqkv + channel);
  commit();
  float4 gate[OCTETS];
  float raw = 0.f, beta = 0.f;
  u32 b[4][2][4];  // the state: 32 channels, one of two columns, pairs of channels
  if (warp < WARPS) {
#pragma unroll
    for (int n = 0; n < OCTETS; n++)
      if (8 * n + g < rows) gate[n] = load4(o.z + (size_t)(start + 8 * n + g) * o.ldz + h * DIM + 16 * warp + 4 * t);
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        b[n][0][e] = pack(memory[n][2 * e].x, memory[n][2 * e + 1].x);
        b[n][1][e] = pack(memory[n][2 * e].y, memory[n][2 * e + 1].y);
      }
  } else if (lane < rows) {
    raw = __uint_as_float(load1(o.decay + (size_t)(start + lane) * o.lddecay + h));
    beta = __uint_as_float(load1(o.beta + (size_t)(start + lane) * o.ldbeta + h));
  }
  wait_all();
  __syncthreads();

  if (warp < WARPS) {
    float made[3][RUN][4], squares[2][RUN];
#pragma unroll
    for (int p = 0; p < 3; p++) {
      float4 own, above[ABOVE];
#pragma unroll
      for (int r = 0; r < RUN; r++) {
        const int row = warp * RUN + r;
#pragma unroll
        for (int e = 0; e < 4; e++) made[p][r][e] = 0.f;
        if (row < rows) {
          const u32x4 at = s.above[row];
          const float* x = s.x + p * DIM + 4 * lane;
          if (r && at.w) {
            above[2] = above[1], above[1] = above[0], above[0] = own;
          } else {
            above[0] = *(const float4*)(x + at.x), above[1] = *(const float4*)(x + at.y), above[2] = *(const float4*)(x + at.z);
          }
          own = *(const float4*)(x + (ABOVE + row) * WIDE);
          const float4(&w)[4] = taps[p];
          made[p][r][0] = silu(w[0].x * above[2].x + w[0].y * above[1].x + w[0].z * above[0].x + w[0].w * own.x);
          made[p][r][1] = silu(w[1].x * above[2].y + w[1].y * above[1].y + w[1].z * above[0].y + w[1].w * own.y);
          made[p][r][2] = silu(w[2].x * above[2].z + w[2].y * above[1].z + w[2].z * above[0].z + w[2].w * own.z);
          made[p][r][3] = silu(w[3].x * above[2].w + w[3].y * above[1].w + w[3].z * above[0].w + w[3].w * own.w);
          if (keeps || p == 2) *(float4*)(o.log_x + (slot * o.most + row) * channels + of[p] + 4 * lane) = own;
        }
        const float* m = made[p][r];
        if (p < 2) squares[p][r] = m[0] * m[0] + m[1] * m[1] + m[2] * m[2] + m[3] * m[3];
      }
    }
#pragma unroll
    for (int i = 16; i; i >>= 1)
#pragma unroll
      for (int r = 0; r < RUN; r++)
#pragma unroll
        for (int p = 0; p < 2; p++) squares[p][r] += __shfl_xor_sync(~0u, squares[p][r], i);
#pragma unroll
    for (int r = 0; r < RUN; r++) {
      const int row = warp * RUN + r;
#pragma unroll
      for (int p = 0; p < 2; p++) {
        const float inverse = inverse_root(squares[p][r] + o.unit_eps);
        const float4 y = {made[p][r][0] * inverse, made[p][r][1] * inverse, made[p][r][2] * inverse, made[p][r][3] * inverse};
        *(u32x2*)((p ? s.k : s.q) + row * HALF_STRIDE + 4 * lane) = u32x2{pack(y.x, y.y), pack(y.z, y.w)};
        if (p == 1 && keeps && row < rows) *(float4*)(o.log_k + ((slot * o.most + row) * o.key_heads + kh) * DIM + 4 * lane) = y;
      }
      *(float4*)(s.v + row * V_STRIDE + 4 * lane) = float4{made[2][r][0], made[2][r][1], made[2][r][2], made[2][r][3]};
    }
  } else {
    raw += shift;
    const float decay = lane < rows ? rate * (raw > 20.f ? raw : logf(1.f + exp_of(fminf(raw, 20.f)))) : 0.f;
    if (lane < rows) o.log_g[(slot * o.most + lane) * heads + h] = decay;
    float since = decay;  // along the path, from the state to the row
#pragma unroll 4
    for (int j = 0; j < ROWS; j++) {
      const float other = __shfl_sync(~0u, decay, j);
      if (mine >> j & 1) since += other;
    }
    if (lane < ROWS) {
      s.since[lane] = since, s.sees[lane] = mine;
      s.step[lane] = lane < rows ? sigmoid(beta) : 0.f;
    }
  }
  __syncthreads();

  float y[OCTETS][4] = {};
  const int column = 16 * warp + 4 * t;
  if (warp < WARPS) {
    float read[OCTETS][2][4] = {};
#pragma unroll
    for (int n = 0; n < OCTETS; n++)
      if (8 * n < rows) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int at = (8 * n + g) * HALF_STRIDE + 32 * i + 8 * t;
          const u32x4 k = *(const u32x4*)(s.k + at), q = *(const u32x4*)(s.q + at);
          multiply(read[n][0], k, q, b[i][0][0], b[i][0][1], b[i][0][2], b[i][0][3]);
          multiply(read[n][1], k, q, b[i][1][0], b[i][1][1], b[i][1][2], b[i][1][3]);
        }
        const int row = 8 * n + g;
        const float left = exp_of(s.since[row]), step = s.step[row], scaled = left * o.q_scale;
        const float(&c)[2][4] = read[n];
        float4& v = *(float4*)(s.v + row * V_STRIDE + column);
        v = float4{step * (v.x - left * c[0][0]), step * (v.y - left * c[1][0]), step * (v.z - left * c[0][1]), step * (v.w - left * c[1][1])};
        y[n][0] = scaled * c[0][2], y[n][1] = scaled * c[1][2], y[n][2] = scaled * c[0][3], y[n][3] = scaled * c[1][3];
      }
#pragma unroll 1
    for (int tile = warp; tile < OCTETS * (OCTETS + 1) / 2; tile += WARPS) {
      const int n = tile < 1 ? 0 : tile < 3 ? 1 : tile < 6 ? 2 : 3, m = tile - n * (n + 1) / 2;
      float met[4] = {}, more[4] = {};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int at = (8 * n + g) * HALF_STRIDE + 32 * i + 8 * t;
        const u32x4 k = *(const u32x4*)(s.k + at), q = *(const u32x4*)(s.q + at);
        const u32x4 other = *(const u32x4*)(s.k + (8 * m + g) * HALF_STRIDE + 32 * i + 8 * t);
        multiply(i & 1 ? more : met, k, q, other.x, other.y, other.z, other.w);
      }
      const int row = 8 * n + g, col = 8 * m + 2 * t;
      const float since = s.since[row], step = s.step[row];
      const u32 seen = s.sees[row];
      float asked[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const bool above = seen >> (col + j) & 1, within = above || row == col + j;
        const float between = within ? exp_of(since - s.since[col + j]) : 0.f;
        solved.t[(col + j) * T_STRIDE + row] = above ? step * between * (met[j] + more[j]) : 0.f;
        asked[j] = o.q_scale * between * (met[2 + j] + more[2 + j]);
      }
      solved.a[row * A_STRIDE + 4 * m + t] = pack(asked[0], asked[1]);
    }
  }
  __syncthreads();

  if (threadIdx.x < DIM) {
    float u[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) u[i] = s.v[i * V_STRIDE + threadIdx.x];
#pragma unroll
    for (int j = 0; j < ROWS - 1; j++) {
      if (j % 8 == 0 && j >= rows) break;
#pragma unroll
      for (int i = (j + 1) / 4 * 4; i < ROWS; i += 4) {
        const float4 f = *(const float4*)(solved.t + j * T_STRIDE + i);
        if (i > j) u[i] -= f.x * u[j];
        if (i + 1 > j) u[i + 1] -= f.y * u[j];
        if (i + 2 > j) u[i + 2] -= f.z * u[j];
        u[i + 3] -= f.w * u[j];
      }
    }
#pragma unroll
    for (int i = 0; i < ROWS; i += 4)
      *(u32x2*)(solved.u + threadIdx.x * U_STRIDE + i / 2) = u32x2{pack(u[i], u[i + 1]), pack(u[i + 2], u[i + 3])};
#pragma unroll
    for (int i = 0; i < ROWS; i++)
      if (i < rows) o.log_u[((slot * o.most + i) * heads + h) * DIM + threadIdx.x] = u[i];
  }
  __syncthreads();

  if (warp < WARPS) {
#pragma unroll
    for (int n = 0; n < OCTETS; n += 2)
      if (8 * n < rows) {
        const int last = n + 1 < OCTETS ? n + 1 : n;
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float c[4] = {y[n][j], y[n][2 + j], y[last][j], y[last][2 + j]};
#pragma unroll
          for (int p = 0; p <= last; p++) {
            const u32 upper = p <= n ? solved.a[(8 * n + g) * A_STRIDE + 4 * p + t] : 0;
            const u32 lower = solved.a[(8 * last + g) * A_STRIDE + 4 * p + t];
            mma8(c, c, upper, lower, solved.u[(16 * warp + 2 * g + j) * U_STRIDE + 4 * p + t]);
          }
          y[n][j] = c[0], y[n][2 + j] = c[1];
          if (last > n) y[last][j] = c[2], y[last][2 + j] = c[3];
        }
      }
#pragma unroll
    for (int n = 0; n < OCTETS; n++) {
      float sum = y[n][0] * y[n][0] + y[n][1] * y[n][1] + y[n][2] * y[n][2] + y[n][3] * y[n][3];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (t == 0) s.squares[8 * n + g][warp] = sum;
    }
  }
  __syncthreads();
  if (warp == WARPS) return;
#pragma unroll
  for (int n = 0; n < OCTETS; n++) {
    const int row = 8 * n + g;
    if (row < rows) {
      const float4 one = *(const float4*)s.squares[row], two = *(const float4*)(s.squares[row] + 4);
      const float sum = one.x + one.y + one.z + one.w + two.x + two.y + two.z + two.w;
      const float scale = inverse_root(sum * (1.f / DIM) + o.norm_eps);
      const float4 z = gate[n];
      *(float4*)(o.out + ((size_t)(start + row) * heads + h) * DIM + column) =
          float4{y[n][0] * scale * weight.x * silu(z.x), y[n][1] * scale * weight.y * silu(z.y), y[n][2] * scale * weight.z * silu(z.z),
                 y[n][3] * scale * weight.w * silu(z.w)};
    }
  }
}
