// Held rows of one sequence, one value head: all of the op `delta`, gated, for 2 to ROWS rows that follow their ancestors.
// See `luce_core.ops.delta` for the recurrence. Heads of 128; a convolution over 4 rows; 13 warps.
//
//   wait | x of all rows to shared memory | convolution, SiLU, norms: keys and queries as halves, values as they are |
//   what they read of the state; queries and keys times keys, with decays | u, from the first row to the last, a thread for
//   every column | y, its gate, and its squares | norm; made ready for the next product too
//
// "|" is a barrier of the block. What does not depend on the launch in front lies before the wait: the state, the window,
// weights of the convolution, ancestors. Every instruction is met once or twice and comes from far away, so loops are rolled,
// and what one leaves for another lies in shared memory.
//
// Warps 0 to 7 have 16 columns of the state each, as halves in the order in which mma.m16n8k16 takes them. Tiles of rows are
// octets: eight keys in the upper half of a tile, the queries of the same rows in the lower, so that a lane has what a row's
// key and its query read of the same four columns. Warps 8 to 11 multiply keys meanwhile, warp 12 knows ancestors and decays.
//
// instructions: HMMA\.16816 HMMA\.1688 LDSM LDGSTS\.[.\w]*128

#define ROWS X_ROWS            // a multiple of 8, at most 32
#define EVEN ((ROWS + 15) / 16 * 16)
#define READERS 8              // warps of the state
#define MAKERS 12              // of the convolution
#define SOLVERS 4              // a thread for every column; those behind them make gates meanwhile
#define WIDE (3 * DIM)         // numbers of a row: q, k, v of this head
#define PIECES (WIDE / 4)
#define THREADS (32 * (MAKERS + 1))
#define HALF_STRIDE (DIM + 8)  // halves from one key to the next: 16 bytes of eight rows lie in different banks
#define ROW_STRIDE (DIM + 16)  // floats, likewise for 64 bytes of two
#define T_STRIDE (ROWS + 4)    // floats
#define A_STRIDE (ROWS == 32 ? 20 : 12)  // words
#define U_STRIDE (ROWS / 2 + 2)          // words

struct Later {                 // where x was, when it has been read
  float gate[EVEN * ROW_STRIDE], y[EVEN * ROW_STRIDE];
  float t[ROWS * T_STRIDE];    // [j][i]: step, key i times key j, decay from j to i
  u32 a[EVEN * A_STRIDE];      // [i][j]: query i times key j, decay, as halves
  u32 u[DIM * U_STRIDE];       // [column][row], as halves
};
struct Shared {
  union {
    float x[(ABOVE + ROWS) * WIDE];  // the window, then rows
    Later later;
  };
  float v[ROWS * ROW_STRIDE];  // values, then the right side of the system, then u
  u16 q[ROWS * HALF_STRIDE], k[ROWS * HALF_STRIDE];
  float squares[EVEN][READERS];
  u32x4 above[ROWS];           // at which byte of x the three rows above a row begin; whether the first is the row in front
  float since[ROWS], step[ROWS];
  u32 sees[ROWS];
};
static_assert(sizeof(Shared) == SHARED, "delta_trees.py counts these bytes");

__device__ __forceinline__ u32 pack(float low, float high) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
__device__ __forceinline__ float2 load2(const float* from) {
  float2 v;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from));
  return v;
}
__device__ __forceinline__ float4 scaled(const float4& v, float by) { return float4{v.x * by, v.y * by, v.z * by, v.w * by}; }
__device__ __forceinline__ float square(const float4& v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

// The row above a row; -1, -2 and -3 are those of the window, the newest first.
__device__ __forceinline__ int row_above(int row, int parent) {
  const int up = __shfl_sync(~0u, parent, row & 31);
  return row < 0 ? row - 1 : up < 0 ? -1 : up;
}

// Four matrices of 8 rows of 8 halves: every lane has where a row of one begins, and gets two numbers of each.
__device__ __forceinline__ u32x4 matrices(const u16* row) {
  u32x4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"((u32)__cvta_generic_to_shared(row)));
  return v;
}

// What a warp of the convolution does: q, k or v of some rows, one behind the other. to_x: where the first goes in the log.
__device__ __forceinline__ void convolve(Shared& s, const float4 (&w)[4], int part, int begin, int end, int lane, float eps, bool keeps,
                                         float* to_x, size_t x_stride, float* to_k, int k_stride) {
  const u8* x = (const u8*)(s.x + part * DIM + 4 * lane);
  auto at = [&](u32 byte) { return *(const float4*)(x + byte); };
  float4 own, above[ABOVE];
#pragma unroll 1
  for (int row = begin; row < end; row += 2) {
    float4 made[2];
    float sum[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const u32x4 from = s.above[row + e];
      if (from.w && (e || row > begin)) {
        above[2] = above[1], above[1] = above[0], above[0] = own;
      } else {
        above[0] = at(from.x), above[1] = at(from.y), above[2] = at(from.z);
      }
      own = at((ABOVE + row + e) * WIDE * 4);
      made[e].x = silu(w[0].x * above[2].x + w[0].y * above[1].x + w[0].z * above[0].x + w[0].w * own.x);
      made[e].y = silu(w[1].x * above[2].y + w[1].y * above[1].y + w[1].z * above[0].y + w[1].w * own.y);
      made[e].z = silu(w[2].x * above[2].z + w[2].y * above[1].z + w[2].z * above[0].z + w[2].w * own.z);
      made[e].w = silu(w[3].x * above[2].w + w[3].y * above[1].w + w[3].z * above[0].w + w[3].w * own.w);
      if (keeps && row + e < end) *(float4*)to_x = own;
      to_x += x_stride;
      sum[e] = square(made[e]);
    }
    if (part == 2) {
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (row + e < end) *(float4*)(s.v + (row + e) * ROW_STRIDE + 4 * lane) = made[e];
      continue;
    }
#pragma unroll
    for (int i = 16; i; i >>= 1)
#pragma unroll
      for (int e = 0; e < 2; e++) sum[e] += __shfl_xor_sync(~0u, sum[e], i);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float4 y = scaled(made[e], inverse_root(sum[e] + eps));
      if (row + e < end) *(u32x2*)(s.q + (part * ROWS + row + e) * HALF_STRIDE + 4 * lane) = u32x2{pack(y.x, y.y), pack(y.z, y.w)};
      if (part == 1 && keeps && row + e < end) *(float4*)to_k = y;
      to_k += k_stride;
    }
  }
}

// Four columns of a head, which is a block's lower or upper half, to where mma.cu wants them; with Σ x of 32 columns, eight lanes'.
__device__ __forceinline__ void make_ready(u8* to, const float4& y, const float2& factors, int upper, int lane) {
  const u32 low = pack(y.x * factors.y, y.y * factors.y), high = pack(y.z * factors.y, y.w * factors.y);
  float a, b, c, d;
  floats(low, a, b), floats(high, c, d);
  float sum = (a + b) + (c + d);
#pragma unroll
  for (int i = 1; i < 8; i <<= 1) sum += __shfl_xor_sync(~0u, sum, i);
  const int group = lane >> 3, second = lane >> 2 & 1;
  const u32 share = second ? 0x2c002c00 : 0x3c003c00;  // a sixteenth
  *(u32x2*)(to + upper * 256 + group * 64 + (lane & 3) * 16 + second * 8) = u32x2{mul2(low, share), mul2(high, share)};
  if ((lane & 7) == 0) *(u16*)(to + 512 + upper * 8 + group * 2) = (u16)pack(sum * (1.f / 32), 0.f);
  if (upper == 0 && lane == 0) *(float*)(to + X_FACTOR) = factors.x;
}

// Grid (value heads, 1, sequences). Sequences of other sizes are left alone.
extern "C" __global__ void __launch_bounds__(THREADS)
delta_tree(Held o) {
  extern __shared__ __align__(16) u8 shared[];
  Shared& s = *(Shared*)shared;
  Later& later = s.later;
  let_next_start();
  const int h = blockIdx.x, heads = gridDim.x, seq = blockIdx.z, warp = __shfl_sync(~0u, (int)threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const int g = lane >> 2, t = lane & 3;
  const size_t slot = load1(o.slots + seq), log = slot * o.most;  // asked for together with where rows begin
  const int start = o.query_start[seq], rows = o.query_start[seq + 1] - start, octets = (rows + 7) / 8;
  if (rows <= o.above || rows > ROWS) {
    wait_for_previous();
    return;
  }
  const int kh = h % KEY_HEADS, channels = (2 * KEY_HEADS + heads) * DIM;
  auto channel_of = [&](int part) { return (part == 0 ? kh : part == 1 ? KEY_HEADS + kh : 2 * KEY_HEADS + h) * DIM; };
  const int column = 16 * warp + 4 * t;  // of a reader

  // --- in front of the wait
  const int piece = threadIdx.x % PIECES, first = threadIdx.x / PIECES;  // the last warp copies nothing of x
  const int channel = channel_of(piece / 32) + piece % 32 * 4;
  float2 memory[8][4];  // 16 channels, those of a lane
  float4 taps[4], weight;
  int mine = 0;
  float shift = 0.f, rate = 0.f;
  if (first < ABOVE) copy16(s.x + first * WIDE + piece * 4, o.window + (slot * ABOVE + first) * channels + channel);
  if (warp < READERS) {
    const float* from = o.state + ((slot * heads + h) * DIM + 2 * t) * DIM + 16 * warp + 2 * g;
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) memory[i][e] = load2(from + (16 * i + e / 2 * 8 + e % 2) * DIM);
  }
  if (warp < MAKERS) {
    weight = load4(o.norm + 4 * lane);
#pragma unroll
    for (int e = 0; e < 4; e++) taps[e] = load4(o.taps + (channel_of(warp >> 2) + 4 * lane + e) * 4);
  } else {
    const bool live = lane < rows;
    const int parent = live ? o.parent[start + lane] : -1;
    const u32 word = live ? (u32)o.sees[(size_t)(start + lane) * o.words] : 0;
    mine = word & ((1u << lane) - 1);
    shift = o.dt[h], rate = o.a[h];
    const int one = row_above(lane, parent), two = row_above(one, parent), three = row_above(two, parent);
    auto byte = [](int row) { return (u32)(ABOVE + row) * WIDE * 4; };
    if (lane < ROWS) s.above[lane] = u32x4{byte(one), byte(two), byte(three), one == lane - 1};
#pragma unroll 1
    for (int row = rows; row < 8 * octets; row++) {  // up to a whole octet
      *(u32x2*)(s.q + row * HALF_STRIDE + 4 * lane) = *(u32x2*)(s.k + row * HALF_STRIDE + 4 * lane) = u32x2{0, 0};
      *(float4*)(s.v + row * ROW_STRIDE + 4 * lane) = float4{0.f, 0.f, 0.f, 0.f};
    }
  }
  const float* from = o.qkv + (size_t)(start + first) * o.ldqkv + channel;
  wait_for_previous();

  // --- what the launch in front has written, all asked for at once
  float raw = 0.f, beta = 0.f;
  const float2 factors = o.made ? load2(o.factors) : float2{0.f, 0.f};
  u32 b[8][2][2];  // the state: 16 channels, one of two columns, pairs of channels
  if (warp < MAKERS) {
    constexpr int STEP = MAKERS * 32 / PIECES;
    float* to = s.x + (ABOVE + first) * WIDE + piece * 4;
#pragma unroll 1
    for (int row = first; row < rows; row += STEP, from += (size_t)STEP * o.ldqkv, to += STEP * WIDE) copy16(to, from);
  } else if (lane < rows) {
    raw = __uint_as_float(load1(o.decay + (size_t)(start + lane) * o.lddecay + h));
    beta = __uint_as_float(load1(o.beta + (size_t)(start + lane) * o.ldbeta + h));
  }
  if (warp < READERS) {
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        b[i][0][e] = pack(memory[i][2 * e].x, memory[i][2 * e + 1].x);
        b[i][1][e] = pack(memory[i][2 * e].y, memory[i][2 * e + 1].y);
      }
  }
  const int part = warp >> 2, each = 2 * octets, begin = (warp & 3) * each;
  float* to_x = settled(o.log_x + (log + begin) * channels + channel_of(part) + 4 * lane);
  float* to_k = settled(o.log_k + ((log + begin) * KEY_HEADS + kh) * DIM + 4 * lane);
  wait_all();
  __syncthreads();

  if (warp < MAKERS) {
    const bool keeps = h < KEY_HEADS || part == 2;  // one value head of each key head's
    convolve(s, taps, part, begin, min(rows, begin + each), lane, o.unit_eps, keeps, to_x, channels, to_k, KEY_HEADS * DIM);
  } else {
    raw += shift;
    const float decay = lane < rows ? rate * softplus(raw) : 0.f;
    if (lane < rows) o.log_g[(log + lane) * heads + h] = decay;
    float since = decay;  // along the path, from the state to the row
#pragma unroll 4
    for (int j = 0; j < ROWS; j++) {
      const float other = __shfl_sync(~0u, decay, j);
      if (mine >> j & 1) since += other;
    }
    if (lane < ROWS) s.since[lane] = since, s.sees[lane] = mine, s.step[lane] = lane < rows ? sigmoid(beta) : 0.f;
  }
  __syncthreads();

  if (warp >= SOLVERS && warp < MAKERS) {
    const float* from = o.z + (size_t)(start + warp - SOLVERS) * o.ldz + h * DIM + 4 * lane;
#pragma unroll 1
    for (int row = warp - SOLVERS; row < rows; row += MAKERS - SOLVERS, from += (size_t)(MAKERS - SOLVERS) * o.ldz)
      copy16(later.gate + row * ROW_STRIDE + 4 * lane, from);
  }
  // Of the matrices of a tile: channels 0 to 7 of keys, of queries, then 8 to 15. Of an octet of keys alone: 32 channels.
  const u16* of_tile = (lane & 8 ? s.q : s.k) + (lane & 7) * HALF_STRIDE + (lane & 16) / 2;
  if (warp < READERS) {
#pragma unroll 1
    for (int n = 0; n < octets; n++) {
      const int row = 8 * n + g;
      float c[2][2][4] = {};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const u32x4 a = matrices(of_tile + 8 * n * HALF_STRIDE + 16 * i);
#pragma unroll
        for (int j = 0; j < 2; j++) mma(c[i & 1][j], c[i & 1][j], a.x, a.y, a.z, a.w, b[i][j][0], b[i][j][1]);
      }
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) c[0][j][e] += c[1][j][e];
      const float left = exp_of(s.since[row]), step = s.step[row], of_q = left * o.q_scale;
      const float(&k)[4] = c[0][0], (&more)[4] = c[0][1];
      float4& v = *(float4*)(s.v + row * ROW_STRIDE + column);
      v = float4{step * (v.x - left * k[0]), step * (v.y - left * more[0]), step * (v.z - left * k[1]), step * (v.w - left * more[1])};
      *(float4*)(later.y + row * ROW_STRIDE + column) = float4{of_q * k[2], of_q * more[2], of_q * k[3], of_q * more[3]};
    }
  } else if (warp < MAKERS) {
    const u16* of_keys = s.k + (lane & 7) * HALF_STRIDE + lane / 8 * 8;
#pragma unroll 1
    for (int tile = warp - READERS; tile < octets * (octets + 1) / 2; tile += MAKERS - READERS) {
      const int n = tile < 1 ? 0 : tile < 3 ? 1 : tile < 6 ? 2 : 3, m = tile - n * (n + 1) / 2;
      const int row = 8 * n + g, col = 8 * m + 2 * t;
      float c[2][4] = {};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const u32x4 other = matrices(of_keys + 8 * m * HALF_STRIDE + 32 * i);
        const u32x4 a = matrices(of_tile + 8 * n * HALF_STRIDE + 32 * i), more = matrices(of_tile + 8 * n * HALF_STRIDE + 32 * i + 16);
        mma(c[0], c[0], a.x, a.y, a.z, a.w, other.x, other.y);
        mma(c[1], c[1], more.x, more.y, more.z, more.w, other.z, other.w);
      }
      const float since = s.since[row], step = s.step[row];
      const u32 seen = s.sees[row];
      float asked[2];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const bool above = seen >> (col + j) & 1, within = above || row == col + j;
        const float between = within ? exp_of(since - s.since[col + j]) : 0.f;
        later.t[(col + j) * T_STRIDE + row] = above ? step * between * (c[0][j] + c[1][j]) : 0.f;
        asked[j] = o.q_scale * between * (c[0][2 + j] + c[1][2 + j]);
      }
      later.a[row * A_STRIDE + 4 * m + t] = pack(asked[0], asked[1]);
    }
  }
  __syncthreads();

  if (warp < SOLVERS) {
    const int d = threadIdx.x;
#pragma unroll 1
    for (int n = 0; n < octets; n++) {
      float u[8];
#pragma unroll
      for (int i = 0; i < 8; i++) u[i] = s.v[(8 * n + i) * ROW_STRIDE + d];
#pragma unroll 1
      for (int j = 0; j < 8 * n; j += 8)
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const float4 *f = (const float4*)(later.t + (j + e) * T_STRIDE + 8 * n), low = f[0], high = f[1];
          const float other = s.v[(j + e) * ROW_STRIDE + d];
          u[0] -= low.x * other, u[1] -= low.y * other, u[2] -= low.z * other, u[3] -= low.w * other;
          u[4] -= high.x * other, u[5] -= high.y * other, u[6] -= high.z * other, u[7] -= high.w * other;
        }
#pragma unroll
      for (int j = 0; j < 7; j++) {
        const float4 *f = (const float4*)(later.t + (8 * n + j) * T_STRIDE + 8 * n), low = f[0], high = f[1];
        if (j < 1) u[1] -= low.y * u[j];
        if (j < 2) u[2] -= low.z * u[j];
        if (j < 3) u[3] -= low.w * u[j];
        if (j < 4) u[4] -= high.x * u[j];
        if (j < 5) u[5] -= high.y * u[j];
        if (j < 6) u[6] -= high.z * u[j];
        u[7] -= high.w * u[j];
      }
#pragma unroll
      for (int i = 0; i < 8; i++) s.v[(8 * n + i) * ROW_STRIDE + d] = u[i];
      u32* halves = later.u + d * U_STRIDE + 4 * n;
      *(u32x2*)halves = u32x2{pack(u[0], u[1]), pack(u[2], u[3])}, *(u32x2*)(halves + 2) = u32x2{pack(u[4], u[5]), pack(u[6], u[7])};
    }
  } else if (warp < MAKERS) {
    wait_all();  // for what this thread itself has copied
#pragma unroll 1
    for (int row = warp - SOLVERS; row < rows; row += MAKERS - SOLVERS) {
      float4& z = *(float4*)(later.gate + row * ROW_STRIDE + 4 * lane);
      z = float4{weight.x * silu(z.x), weight.y * silu(z.y), weight.z * silu(z.z), weight.w * silu(z.w)};
    }
  }
  __syncthreads();

  if (warp < READERS) {
#pragma unroll 1
    for (int n = 0; n < octets; n += 2) {  // two octets of rows: queries alone now
      float4 *upper = (float4*)(later.y + (8 * n + g) * ROW_STRIDE + column), *lower = upper + 8 * ROW_STRIDE / 4;
      float c[2][4] = {{upper->x, upper->z, lower->x, lower->z}, {upper->y, upper->w, lower->y, lower->w}};
      const u32* of_row = later.a + (8 * n + g) * A_STRIDE + t;
      const u32* of_column = later.u + (16 * warp + 2 * g) * U_STRIDE + t;
#pragma unroll 1
      for (int p = 0; p <= n + 1 && p < octets; p++) {
        const u32 a0 = p <= n ? of_row[4 * p] : 0, a1 = of_row[8 * A_STRIDE + 4 * p];
        mma8(c[0], c[0], a0, a1, of_column[4 * p]);
        mma8(c[1], c[1], a0, a1, of_column[U_STRIDE + 4 * p]);
      }
      const float4 y[2] = {{c[0][0], c[1][0], c[0][1], c[1][1]}, {c[0][2], c[1][2], c[0][3], c[1][3]}};
      float sum[2] = {square(y[0]), square(y[1])};
#pragma unroll
      for (int i = 1; i < 4; i <<= 1)
#pragma unroll
        for (int e = 0; e < 2; e++) sum[e] += __shfl_xor_sync(~0u, sum[e], i);
      if (t < 2) s.squares[8 * (n + t) + g][warp] = t ? sum[1] : sum[0];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float4 by = *(const float4*)(later.gate + (8 * (n + e) + g) * ROW_STRIDE + column);
        *(e ? lower : upper) = float4{y[e].x * by.x, y[e].y * by.y, y[e].z * by.z, y[e].w * by.w};
      }
    }
  } else if (warp < MAKERS) {
    float* to = o.log_u + ((log + warp - READERS) * heads + h) * DIM + 4 * lane;
#pragma unroll 1
    for (int row = warp - READERS; row < rows; row += MAKERS - READERS, to += (size_t)(MAKERS - READERS) * heads * DIM)
      *(float4*)to = *(const float4*)(s.v + row * ROW_STRIDE + 4 * lane);
  }
  __syncthreads();
  float* to = o.out + ((size_t)(start + warp) * heads + h) * DIM + 4 * lane;
  u8* made = o.made + ((size_t)(h / 2) * o.made_rows + start + warp) * X_BYTES;
#pragma unroll 1
  for (int row = warp; row < rows; row += MAKERS + 1, to += (size_t)(MAKERS + 1) * heads * DIM, made += (MAKERS + 1) * X_BYTES) {
    const float4 *parts = (const float4*)s.squares[row], one = parts[0], two = parts[1];
    const float sum = (one.x + one.y) + (one.z + one.w) + ((two.x + two.y) + (two.z + two.w));
    const float4 y = scaled(*(const float4*)(later.y + row * ROW_STRIDE + 4 * lane), inverse_root(sum * (1.f / DIM) + o.norm_eps));
    *(float4*)to = y;
    if (o.made) make_ready(made, y, factors, h & 1, lane);
  }
}
