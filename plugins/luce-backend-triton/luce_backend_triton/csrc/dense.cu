// y = f(x) · Wᵀ (+ bias, + residual) for one or two rows of x and a W of floats, [n][k] as in the file (KIND 0 f32,
// 1 f16, 2 bf16). f is nothing, a norm, or act(x) · up: every thread block computes it for itself.
//
// SPLIT warps share the columns of ROWS rows of W, 256 at a time; a block has WARPS / SPLIT such teams. A warp's next
// weights are on their way while it multiplies, the first of a launch before it waits for x.
//
// Shared memory: x f32[X_ROWS][wide], sums of warps, reductions. k is a multiple of 8.
//
// instructions: (LDG|LDGSTS)\.[.\w]*128

#define THREADS (32 * WARPS)

// x · weight of a row -> to, and Σ x², in every thread, which all call it. A thread finds its weights in `kept`, which may
// be `to`, where it put them itself.
__device__ __forceinline__ float weighted(float* to, const float* kept, const float* row, int k, float* scratch, int warp, int lane) {
  float sum = 0.f;
  for (int i = threadIdx.x; i < k / 4; i += 4 * THREADS) {
    float4 f[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      f[j] = float4{0.f, 0.f, 0.f, 0.f};
      if (i + j * THREADS < k / 4) f[j] = load4(row + 4 * (i + j * THREADS));
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      sum += f[j].x * f[j].x + f[j].y * f[j].y + f[j].z * f[j].z + f[j].w * f[j].w;
      if (i + j * THREADS < k / 4) {
        const float4 w = *(const float4*)(kept + 4 * (i + j * THREADS));
        *(float4*)(to + 4 * (i + j * THREADS)) = float4{f[j].x * w.x, f[j].y * w.y, f[j].z * w.z, f[j].w * w.w};
      }
    }
  }
#pragma unroll
  for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
  if (lane == 0) scratch[warp] = sum;
  __syncthreads();
  sum = lane < WARPS ? scratch[lane] : 0.f;
#pragma unroll
  for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
  return sum;
}

#define ROWS 4
#define PIECES (KIND ? 1 : 2)  // of 16 bytes, of a lane's 8 weights

struct Weights { u32x4 v[ROWS][PIECES]; };

__device__ __forceinline__ u32x4 stream16(const void* from) {  // read once: not kept
  u32x4 v;
#if __CUDA_ARCH__ >= 700
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
#else
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
#endif
  return v;
}

__device__ __forceinline__ void read(Weights& w, const u8* weights, int row, int n, int column, int k) {
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      w.v[r][i] = u32x4{0, 0, 0, 0};
      if (row + r < n && column < k) w.v[r][i] = stream16(weights + ((size_t)(row + r) * k + column) * (KIND ? 2 : 4) + i * 16);
    }
}

__device__ __forceinline__ void eight_floats(const u32x4 (&v)[PIECES], float (&f)[8]) {
  const u32 word[4] = {v[0].x, v[0].y, v[0].z, v[0].w};
#if KIND == 0
  const u32 more[4] = {v[1].x, v[1].y, v[1].z, v[1].w};
#pragma unroll
  for (int i = 0; i < 4; i++) f[i] = __uint_as_float(word[i]), f[4 + i] = __uint_as_float(more[i]);
#else
#pragma unroll
  for (int i = 0; i < 4; i++) {
#if KIND == 1
    floats(word[i], f[2 * i], f[2 * i + 1]);
#else
    f[2 * i] = __uint_as_float(word[i] << 16), f[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
#endif
  }
#endif
}

// Grid: any number of blocks. wide: k in whole chunks of 256.
extern "C" __global__ void __launch_bounds__(THREADS)
dense_linear(const u8* __restrict__ weights, In in, Out out, int wide) {
  extern __shared__ __align__(16) float values[];
  let_next_start();
  float* partial = values + X_ROWS * wide;           // [WARPS][X_ROWS][ROWS]
  float* scratch = partial + WARPS * X_ROWS * ROWS;  // [X_ROWS][WARPS]
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, sub = warp % SPLIT, team = warp / SPLIT;
  const int teams = WARPS / SPLIT * gridDim.x, groups = (out.n + ROWS - 1) / ROWS;
  const int own = (wide / 256 - sub + SPLIT - 1) / SPLIT;  // chunks of this warp, of every group
  int group = blockIdx.x * (WARPS / SPLIT) + team, chunk = 0;
  auto column = [&]() { return (sub + chunk * SPLIT) * 256 + lane * 8; };
  Weights next;
  read(next, weights, own > 0 ? group * ROWS : out.n, out.n, column(), in.k);
  float* kept = values + (X_ROWS - 1) * wide;  // the norm's weights, until the last row takes their place
  if (in.weight)
    for (int i = threadIdx.x * 4; i < in.k; i += THREADS * 4) *(float4*)(kept + i) = load4(in.weight + i);
  wait_for_previous();

#pragma unroll
  for (int n = 0; n < X_ROWS; n++) {
    if (n >= out.m) break;
    const float *x = in.x + (size_t)n * in.ldx, *up = in.up + (size_t)n * in.ldx;
    float* to = values + n * wide;
    float inverse = 1.f;
    if (in.weight) inverse = 1.f / sqrtf(weighted(to, kept, x, in.k, scratch + n * WARPS, warp, lane) / (float)in.k + in.eps);
    for (int i = threadIdx.x * 4; i < wide; i += THREADS * 4) {
      float4 v = float4{0.f, 0.f, 0.f, 0.f};
      if (i < in.k) {
        if (in.weight) {
          v = *(const float4*)(to + i);
          v.x *= inverse, v.y *= inverse, v.z *= inverse, v.w *= inverse;
        } else {
          v = load4(x + i);
        }
        if (in.act) {
          const float4 u = load4(up + i);
          v.x = activated(in.act, v.x, u.x), v.y = activated(in.act, v.y, u.y);
          v.z = activated(in.act, v.z, u.z), v.w = activated(in.act, v.w, u.w);
        }
      }
      *(float4*)(to + i) = v;
    }
  }
  __syncthreads();

  for (int first = blockIdx.x * (WARPS / SPLIT); first < groups; first += teams) {  // the same for all warps
    float sum[X_ROWS][ROWS] = {};
    const int mine = group;
    for (int c = 0; c < own; c++) {
      const Weights w = next;
      const float* x = values + column();
      if (++chunk == own) chunk = 0, group += teams;
      read(next, weights, group * ROWS, out.n, column(), in.k);
      float f[ROWS][8];
#pragma unroll
      for (int r = 0; r < ROWS; r++) eight_floats(w.v[r], f[r]);
#pragma unroll
      for (int n = 0; n < X_ROWS; n++) {
        const float4 a = *(const float4*)(x + n * wide), b = *(const float4*)(x + n * wide + 4);
        const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
          for (int i = 0; i < 8; i++) sum[n][r] += f[r][i] * v[i];
      }
    }
    if (!own) group += teams;
#pragma unroll
    for (int n = 0; n < X_ROWS; n++)
#pragma unroll
      for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int i = 16; i; i >>= 1) sum[n][r] += __shfl_xor_sync(~0u, sum[n][r], i);
        if (lane == 0) partial[(warp * X_ROWS + n) * ROWS + r] = sum[n][r];
      }
    __syncthreads();
    if (sub == 0 && lane < out.m * ROWS) {
      float v = 0.f;
#pragma unroll
      for (int s = 0; s < SPLIT; s++) v += partial[(warp + s) * X_ROWS * ROWS + lane];
      finish(out, v, mine * ROWS + lane % ROWS, lane / ROWS);
    }
    __syncthreads();
  }
}
