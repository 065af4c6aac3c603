// What becomes of the sums of mma.cu: those of several workers' parts meet, and go where they are wanted.
//
// A warp has sums of TILES row tiles of W and of X_ROWS rows of x, as mma.m16n8k16 leaves them: of each tile and each 8 rows of x
// lane (g = lane / 4, t = lane % 4) has those of rows g and g + 8 of W, each with rows 2 t and 2 t + 1 of x.

#define COLS (X_ROWS / 8)
#define SUMS (TILES * COLS * 4)  // of a lane
#define AT_ONCE ((X_ROWS == 8 ? 24 : X_ROWS == 32 ? 64 : 96) / SUMS)  // parts of sums that find registers

// Of a lane's sums, whose first is of this row and column: with rows and columns beyond it, and which of them.
template <class Of> __device__ __forceinline__ void each_sum(const Out& out, int row, int col, Of of) {
#pragma unroll
  for (int k = 0; k < COLS * 2; k++)
#pragma unroll
    for (int i = 0; i < TILES * 2; i++)
      if (col + k / 2 * 8 + k % 2 < out.m && row + i * 8 < out.n) of(i * 8, k / 2 * 8 + k % 2, i / 2, k / 2, i % 2 * 2 + k % 2);
}

// Sums of an owner that several workers have parts of wait in slots for the one with its last part, which adds them up, always in
// the same order. Between launches a slot holds EMPTY, which is no result of arithmetic (its NaN is 0x7fffffff): a word that is
// EMPTY is read again. So nobody counts arrivals, and a worker is done when its sums are on their way. Workers begin in order and
// wait for those before them alone.
#define EMPTY 0xffffffffu
#define SLOT (SUMS / 4 * 32)  // u32x4 of a part, four sums each
#define PAUSE 300             // nanoseconds: those who still multiply need what reads L2 has room for

__device__ __forceinline__ void store_slot(u32x4* to, u32x4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u32x4 load_slot(const u32x4* from) {
  u32x4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void leave(u32x4* slot, const float (&total)[TILES][COLS][4]) {
#pragma unroll
  for (int i = 0; i < SUMS / 4; i++) {
    const float (&v)[4] = total[i / COLS][i % COLS];
    store_slot(slot + i * 32, u32x4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])});
  }
}

// total += the parts in `count` slots, which are EMPTY again then.
__device__ __forceinline__ void gather(float (&total)[TILES][COLS][4], u32x4* slots, int count) {
#pragma unroll 1
  for (int first = 0; first < count; first += AT_ONCE, slots += AT_ONCE * SLOT) {  // some parts' loads at once, added one after the other
    u32x4 some[AT_ONCE][SUMS / 4];
    while (true) {
      u32 largest = 0;
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++)
        if (first + p < count) {
#pragma unroll
          for (int i = 0; i < SUMS / 4; i++) some[p][i] = load_slot(slots + p * SLOT + i * 32);
        }
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++)
        if (first + p < count) {
#pragma unroll
          for (int i = 0; i < SUMS / 4; i++)
            largest = max(largest, max(max(some[p][i].x, some[p][i].y), max(some[p][i].z, some[p][i].w)));
        }
      if (!__any_sync(~0u, largest == EMPTY)) break;
      __nanosleep(PAUSE);
    }
#pragma unroll
    for (int p = 0; p < AT_ONCE; p++)
      if (first + p < count) {
#pragma unroll
        for (int i = 0; i < SUMS / 4; i++) {
          float (&v)[4] = total[i / COLS][i % COLS];
          const u32x4 part = some[p][i];
          v[0] += __uint_as_float(part.x), v[1] += __uint_as_float(part.y), v[2] += __uint_as_float(part.z), v[3] += __uint_as_float(part.w);
          store_slot(slots + p * SLOT + i * 32, u32x4{EMPTY, EMPTY, EMPTY, EMPTY});
        }
      }
  }
}

// The sums of this warp's rows, of which `count` parts are in slots. What is added to them is asked for before these are.
__device__ __forceinline__ void finish_sums(const Out& out, float (&total)[TILES][COLS][4], u32x4* slots, int count, int row, int col) {
  float scale = 1.f, bias[TILES][2] = {}, residual[TILES][COLS][4] = {};
  if (out.scale) scale = *out.scale;
  if (out.bias) {
#pragma unroll
    for (int i = 0; i < TILES * 2; i++)
      if (row + i * 8 < out.n) bias[i / 2][i % 2] = out.bias[row + i * 8];
  }
  if (out.residual)
    each_sum(out, row, col, [&](int down, int right, int r, int n, int j) { residual[r][n][j] = out.residual[(size_t)(col + right) * out.ldr + row + down]; });
  gather(total, slots, count);
  each_sum(out, row, col, [&](int down, int right, int r, int n, int j) {
    out.y[(size_t)(col + right) * out.ldy + row + down] = fmaf(total[r][n][j], scale, bias[r][j / 2]) + residual[r][n][j];
  });
}
