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

#if ACT
// --- act(gate) · up, as the next product's x
//
// A warp has a tile of gate and the same of up. Nobody has the 256 columns of which `ready.cu` takes the largest. But of a row n
// of x |act(g) u| <= |g u| <= |n|² · `most`, which is known of W's rows: so there is a power of two that is no less than any, and
// it becomes 32768, half of where f16 ends, for what is rounded on the way. Results mostly lie about k below it, times what act
// leaves of g; f16 has them to the last bit down to 2^25 below (2^29 in the first half of each 32).
static_assert(TILES == 2 && WARPS % 2 == 0, "gate and up; both tiles of a group of 32 columns in warps that can meet");

__device__ __forceinline__ void meet(int warp) { asm volatile("bar.sync %0, 64;" ::"r"(1 + warp / 2) : "memory"); }

// Of row `first_row` + 2 t + lane / 8 % 2 of x and the next 8: four columns, from 8 · (lane / 4 % 2) + 4 · (lane / 16) of the tile
// on. A lane has two columns, of two rows; four lanes, 4 and 8 apart, have 4 × 4.
__device__ __forceinline__ u32x2 four_columns(const float (&v)[4], int lane) {
  const bool odd = lane & 4, upper = lane & 8;
  const u32 low = pack_halves(v[0], v[1]), high = pack_halves(v[2], v[3]);  // both rows of x
  u32 mine = odd ? high : low, theirs = __shfl_xor_sync(~0u, odd ? low : high, 4);
  const u32 left = odd ? theirs : mine, right = odd ? mine : theirs;
  const u32 one = __byte_perm(left, right, 0x5410), other = __byte_perm(left, right, 0x7632);  // of one row of x
  mine = upper ? other : one, theirs = __shfl_xor_sync(~0u, upper ? one : other, 8);
  return upper ? u32x2{theirs, mine} : u32x2{mine, theirs};
}

// out: n of gate's rows, y: u8[n / 256][m][X_BYTES], scale: `most` of each 256; x: of the sums; tile: of gate; beside: room for
// X_ROWS floats of each warp, from one to the next `apart` bytes. Of a group of 32 columns the second tile's warp leaves its Σ
// to the first's.
__device__ __forceinline__ void finish_gated(const Out& out, const u8* x, float (&total)[TILES][COLS][4], u32x4* slots, int count,
                                             int tile, int first_row, u8* beside, int apart) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, second = tile & 1;
  const bool there = tile * 16 < out.n, odd = lane & 4, upper = lane & 8;
  const float most = there ? out.scale[tile >> 4] : 0.f;
  float squares[COLS][2];
#pragma unroll
  for (int k = 0; k < COLS * 2; k++) {
    const int row = first_row + k / 2 * 8 + 2 * t + k % 2;
    squares[k / 2][k % 2] = row < out.m ? __uint_as_float(load1(x + row * X_BYTES + X_SQUARES)) : 0.f;
  }
  gather(total, slots, count);
  float sums[COLS];
  float* mine = (float*)(beside + warp * apart);
#pragma unroll
  for (int n = 0; n < COLS; n++) {
    const u32 exponent[2] = {exponent_of(squares[n][0] * most), exponent_of(squares[n][1] * most)};
    float v[4], parts[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      v[j] = activated(ACT, total[0][n][j], total[1][n][j]) * __uint_as_float((269 - exponent[j & 1]) << 23);  // 32768 / power
    const u32x2 four = four_columns(v, lane);
    floats(four.x, parts[0], parts[1]), floats(four.y, parts[2], parts[3]);
    sums[n] = parts[0] + parts[1] + (parts[2] + parts[3]);
    sums[n] += __shfl_xor_sync(~0u, sums[n], 4);
    sums[n] += __shfl_xor_sync(~0u, sums[n], 16);
    const int col = n * 8 + 2 * t + upper, row = first_row + col;
    if (second && !(lane & 20)) mine[col] = sums[n];
    const u32 share = second ? 0x2c002c00 : 0x3c003c00;  // a sixteenth
    u8* to = (u8*)out.y + ((size_t)(tile >> 4) * out.m + row) * X_BYTES;
    if (there && row < out.m) {
      *(u32x2*)(to + tile % 16 / 2 * 64 + (odd * 2 + (lane >> 4)) * 16 + second * 8) = u32x2{mul2(four.x, share), mul2(four.y, share)};
      if (tile % 16 == 0 && !(lane & 20)) *(float*)(to + X_FACTOR) = __uint_as_float(((upper ? exponent[1] : exponent[0]) - 15) << 23);
    }
  }
  meet(warp);
  const float* theirs = (const float*)(beside + (warp + 1) * apart);
#pragma unroll
  for (int n = 0; n < COLS; n++) {
    const int col = n * 8 + 2 * t + upper, row = first_row + col;
    u8* to = (u8*)out.y + ((size_t)(tile >> 4) * out.m + row) * X_BYTES;
    if (!second && there && row < out.m && !(lane & 20))
      ((u16*)(to + 512))[tile % 16 / 2] = (u16)pack_halves((sums[n] + theirs[col]) * (1.f / 32), 0.f);
  }
  meet(warp);  // before the next are left there
}
#endif
