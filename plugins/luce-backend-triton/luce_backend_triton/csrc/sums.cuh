// What becomes of the sums of mma.cu: those of several workers' parts meet, and go where they are wanted.
//
// A warp has sums of TILES row tiles of W and of X_ROWS rows of x, as mma.m16n8k16 leaves them: of each tile and each 8 rows of x
// lane (g = lane / 4, t = lane % 4) has those of rows g and g + 8 of W, each with rows 2 t and 2 t + 1 of x.

#define COLS (X_ROWS / 8)
#define SUMS (TILES * COLS * 4)  // of a lane
// Parts of sums that find registers at once.
#define AT_WORDS (X_ROWS == 8 ? 24 : X_ROWS == 16 ? (SCALES <= 1 ? 80 : 96) : X_ROWS == 32 ? 64 : BITS > 4 ? 72 : 96)
#define AT_ONCE ((BITS == 8 && X_ROWS > 8 ? AT_WORDS * 2 / 3 : AT_WORDS) / SUMS)

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
#define WORDS (ACT ? 4 : 1)        // of each lane beside its sums: `Lengths`
#define SLOT (SUMS / 4 * 32 + 32)  // u32x4 of a part, four sums each; and those words
#define PAUSE 300             // nanoseconds: those who still multiply need what reads L2 has room for

__device__ __forceinline__ void store_slot(u32x4* to, u32x4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u32x4 load_slot(const u32x4* from) {
  u32x4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void store_slot(u32* to, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory"); }
__device__ __forceinline__ u32 load_slot(const u32* from) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ u32* word_of(u32x4* slot) { return (u32*)(slot - (threadIdx.x & 31) + SUMS / 4 * 32) + (threadIdx.x & 31); }

// Of a row of norm(y) without the division: Σ y²; where a length becomes a factor, also Σ (weight y)², and so exactly that all
// owners, who add up other parts, come to the same power of two.
struct Lengths {
#if ACT
  double y = 0., weighed = 0.;
#else
  float y = 0.f;
#endif
};

__device__ __forceinline__ void add_squares(Lengths& to, const float4& both) {  // as they lie at X_SQUARES
#if ACT
  to.y += (double)both.x + (double)both.z, to.weighed += (double)both.y + (double)both.w;
#else
  to.y += both.x + both.z;
#endif
}
__device__ __forceinline__ void words_of(u32 (&words)[WORDS], const Lengths& of) {
#if ACT
  const float y = (float)of.y, weighed = (float)of.weighed;
  words[0] = __float_as_uint(y), words[1] = __float_as_uint((float)(of.y - y));
  words[2] = __float_as_uint(weighed), words[3] = __float_as_uint((float)(of.weighed - weighed));
#else
  words[0] = __float_as_uint(of.y);
#endif
}
__device__ __forceinline__ void add_words(Lengths& to, const u32 (&words)[WORDS]) {
#if ACT
  to.y += (double)__uint_as_float(words[0]) + (double)__uint_as_float(words[1]);
  to.weighed += (double)__uint_as_float(words[2]) + (double)__uint_as_float(words[3]);
#else
  to.y += __uint_as_float(words[0]);
#endif
}

// divide: whether there are words of lengths.
__device__ __forceinline__ void leave(u32x4* slot, const float (&total)[TILES][COLS][4], const Lengths& lengths, bool divide) {
  if (divide) {
    u32 words[WORDS];
    words_of(words, lengths);
#pragma unroll
    for (int i = 0; i < WORDS; i++) store_slot(word_of(slot) + i * 32, words[i]);
  }
#pragma unroll
  for (int i = 0; i < SUMS / 4; i++) {
    const float (&v)[4] = total[i / COLS][i % COLS];
    store_slot(slot + i * 32, u32x4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])});
  }
}

// total and lengths += the parts in `count` slots, which are EMPTY again then.
__device__ __forceinline__ void gather(float (&total)[TILES][COLS][4], Lengths& lengths, bool divide, u32x4* slots, int count) {
#pragma unroll 1
  for (int first = 0; first < count; first += AT_ONCE, slots += AT_ONCE * SLOT) {  // some parts' loads at once, added one after the other
    u32x4 some[AT_ONCE][SUMS / 4];
    u32 words[AT_ONCE][WORDS];
    while (true) {
      u32 largest = 0;
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++)
        if (first + p < count) {
#pragma unroll
          for (int i = 0; i < SUMS / 4; i++) some[p][i] = load_slot(slots + p * SLOT + i * 32);
#pragma unroll
          for (int i = 0; i < WORDS; i++) words[p][i] = divide ? load_slot(word_of(slots + p * SLOT) + i * 32) : 0;
        }
#pragma unroll
      for (int p = 0; p < AT_ONCE; p++)
        if (first + p < count) {
#pragma unroll
          for (int i = 0; i < SUMS / 4; i++)
            largest = max(largest, max(max(some[p][i].x, some[p][i].y), max(some[p][i].z, some[p][i].w)));
#pragma unroll
          for (int i = 0; i < WORDS; i++) largest = max(largest, words[p][i]);
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
        if (divide) {
          add_words(lengths, words[p]);
#pragma unroll
          for (int i = 0; i < WORDS; i++) store_slot(word_of(slots + p * SLOT) + i * 32, EMPTY);
        }
      }
  }
}

// --- norms of rows
//
// Where norm(x) came without the division, Σ of squares lies beside x, is added up as the products are, and divides them in the end.
struct Divide { float *squares, share, eps; };  // squares: f32[m], Σ of each row for who wants it, or nothing to divide by
struct Then { const float *weight, *bound, *squares; u8* ready; };  // see `leave_ready`

// Of what each lane has of row lane % X_ROWS, this lane's: of rows 2 t and 2 t + 1 of each 8.
template <class T> __device__ __forceinline__ void of_rows(T (&v)[COLS][2], T own) {
#pragma unroll
  for (int k = 0; k < COLS * 2; k++) v[k / 2][k % 2] = __shfl_sync(~0u, own, k / 2 * 8 + 2 * (threadIdx.x & 3) + k % 2);
}

// of_row: x's factor (EVEN), and |norm(x)|², which is known behind it; first: whether this warp tells what a row's squares are.
__device__ __forceinline__ void scale_rows(float (&total)[TILES][COLS][4], const Divide& divide, float2& of_row, const Lengths& lengths, int m, bool first) {
  const int lane = threadIdx.x & 31;
  if (!EVEN && !divide.squares) return;
  float factor = EVEN ? of_row.x : 1.f;
  if (divide.squares) {
    if (first && lane < m) divide.squares[lane] = (float)lengths.y;
#if ACT
    const double inverse = 1. / (lengths.y * divide.share + divide.eps);
    factor *= sqrtf((float)inverse), of_row.y = (float)(lengths.weighed * inverse);
#else
    factor /= sqrtf(fmaf(lengths.y, divide.share, divide.eps));
#endif
  }
  float factors[COLS][2];
  of_rows(factors, factor);
#pragma unroll
  for (int j = 0; j < SUMS; j++) (&total[0][0][0])[j] *= factors[j / 4 % COLS][j % 2];
}

// --- sums as the next product's x

// Of a tile's sums of 8 rows of x: four columns (rows of W) of row g, from column 8 · (t % 2) + 4 · (t / 2) of the tile on, in this
// place of a group's 64 bytes. of_rows[0], [1] += all columns of rows 2 t, 2 t + 1.
__device__ __forceinline__ u32x2 four_columns(const float (&v)[4], float (&of_rows)[4]) {
  const u32 low = turned(pack_halves(v[0], v[1])), high = turned(pack_halves(v[2], v[3]));
  mma8(of_rows, of_rows, 0x3c003c00, 0x3c003c00, low);
  mma8(of_rows, of_rows, 0x3c003c00, 0x3c003c00, high);
  const bool odd = threadIdx.x & 1;
  const u32 other = __shfl_xor_sync(~0u, odd ? low : high, 1);
  return odd ? u32x2{other, high} : u32x2{low, other};
}
__device__ __forceinline__ int place_of_four(int lane) { return (lane & 1) * 32 + (lane & 2) * 8; }

#if THEN
// --- norm(y), as the next product's x
//
// The norm's division is left to that product. So a row becomes y times the norm's weight, times a power of two by which none is
// beyond 32768: |y| is at most the length of the residual and what W can add to it. squares: f32[m], of the residual; bound: what
// its length is to be multiplied with, and x's factor. All owners take it from the same words, so that a row has one.
static_assert(TILES == 2 && WARPS == 4, "a warp has a group of 32 columns, a thread block 128");

// y: of the warp's rows and columns; beside: as for `finish_gated`.
__device__ __forceinline__ void leave_ready(const Then& then, const float (&y)[TILES][COLS][4], const float (&weight)[TILES][2],
                                            u32 exponent_of_row, int owner, int tile, int n_rows, int m, u8* beside, int apart) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3;
  const bool there = tile * 16 < n_rows;
  u32 exponents[COLS][2];
  of_rows(exponents, exponent_of_row);
  float squares[COLS][2] = {}, weighed[COLS][2] = {};
#pragma unroll
  for (int n = 0; n < COLS; n++) {
    u32x2 four[TILES];
    float sums[4] = {};
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        squares[n][j & 1] = fmaf(y[r][n][j], y[r][n][j], squares[n][j & 1]);
        v[j] = y[r][n][j] * weight[r][j >> 1];
        weighed[n][j & 1] = fmaf(v[j], v[j], weighed[n][j & 1]);
        v[j] *= __uint_as_float((269 - exponents[n][j & 1]) << 23);  // 32768 / power
      }
      four[r] = four_columns(v, sums);
    }
    u8* to = then.ready + ((size_t)(tile >> 4) * m + n * 8) * X_BYTES;
    if (there && n * 8 + (lane >> 2) < m)
      *(u32x4*)(to + (lane >> 2) * X_BYTES + tile % 16 / 2 * 64 + place_of_four(lane)) =
          u32x4{four[0].x, four[0].y, mul2(four[1].x, 0x2c002c00), mul2(four[1].y, 0x2c002c00)};  // a sixteenth
#pragma unroll
    for (int k = 0; k < 2; k++)
      if (lane < 4 && there && n * 8 + 2 * t + k < m) {
        ((u16*)(to + (2 * t + k) * X_BYTES + 512))[tile % 16 / 2] = (u16)pack_halves(sums[k] * (1.f / 32), 0.f);
        if (tile % 16 == 0) *(float*)(to + (2 * t + k) * X_BYTES + X_FACTOR) = __uint_as_float((exponents[n][k] - 15) << 23);
      }
  }
  float* mine = (float*)(beside + warp * apart);
#pragma unroll
  for (int k = 0; k < COLS * 2; k++) {
    const float one = there ? squares[k / 2][k % 2] : 0.f, other = there ? weighed[k / 2][k % 2] : 0.f;
    float sum = (lane & 4 ? other : one) + __shfl_xor_sync(~0u, lane & 4 ? one : other, 4);
    for (int i = 8; i < 32; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (lane < 8) mine[(lane >> 2) * X_ROWS + k / 2 * 8 + 2 * t + k % 2] = sum;
  }
  __syncthreads();
  const int kind = threadIdx.x / X_ROWS, row = threadIdx.x - kind * X_ROWS;  // y, weighed y
  if (kind < 2 && row < m) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += ((const float*)(beside + w * apart))[threadIdx.x];
    if (owner * 128 < n_rows) *(float*)(then.ready + ((size_t)(owner >> 1) * m + row) * X_BYTES + X_SQUARES + (owner & 1) * 8 + kind * 4) = sum;
  }
  __syncthreads();  // before the next are left there
}
#endif

// The sums of this warp's rows from `tile` on, of which `count` parts are in slots. What is added to them is asked for before these are.
__device__ __forceinline__ void finish_sums(const Out& out, const u8* x, const Divide& divide, const Then& then,
                                            float (&total)[TILES][COLS][4], float2 of_row, Lengths lengths, u32x4* slots, int count, int owner, int tile, int first_row,
                                            u8* beside, int apart) {
  const int lane = threadIdx.x & 31, row = tile * 16 + (lane >> 2), col = first_row + 2 * (lane & 3);
  float scale = 1.f, bias[TILES][2] = {}, residual[TILES][COLS][4] = {};
  if (out.scale) scale = *out.scale;
  if (out.bias) {
#pragma unroll
    for (int i = 0; i < TILES * 2; i++)
      if (row + i * 8 < out.n) bias[i / 2][i % 2] = out.bias[row + i * 8];
  }
  if (out.residual)
    each_sum(out, row, col, [&](int down, int right, int r, int n, int j) { residual[r][n][j] = out.residual[(size_t)(col + right) * out.ldr + row + down]; });
#if THEN
  float weight[TILES][2] = {};
#pragma unroll
  for (int i = 0; i < TILES * 2; i++)
    if (row + i * 8 < out.n) weight[i / 2][i % 2] = then.weight[row + i * 8];
  const float length = sqrtf(__uint_as_float(load1(then.squares + min(lane, out.m - 1))));
  const float of_x = __uint_as_float(load1(x + min(lane, out.m - 1) * X_BYTES + X_FACTOR));
  const u32 exponent = exponent_of(fmaf(then.bound[0], length, then.bound[1] * of_x));
#endif
  gather(total, lengths, divide.squares, slots, count);
  scale_rows(total, divide, of_row, lengths, out.m, tile == 0 && !(out.beside & 2));  // of launches beside each other the first
  each_sum(out, row, col, [&](int down, int right, int r, int n, int j) {
    total[r][n][j] = fmaf(total[r][n][j], scale, bias[r][j / 2]) + residual[r][n][j];
    out.y[(size_t)(col + right) * out.ldy + row + down] = total[r][n][j];
  });
#if THEN
  leave_ready(then, total, weight, exponent, owner, tile, out.n, out.m, beside, apart);
#endif
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

// out: n of gate's rows, y: u8[n / 256][m][X_BYTES], scale: `most`; tile: of gate; beside: room for
// X_ROWS floats of each warp, from one to the next `apart` bytes. Of a group of 32 columns the second tile's warp leaves its Σ
// to the first's.
__device__ __forceinline__ void finish_gated(const Out& out, const Divide& divide, float (&total)[TILES][COLS][4],
                                             float2 of_row, Lengths lengths, u32x4* slots, int count, int tile, int first_row, u8* beside, int apart) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, t = lane & 3, second = tile & 1;
  const bool there = tile * 16 < out.n;
  const float most = *out.scale;
  gather(total, lengths, divide.squares, slots, count);
  scale_rows(total, divide, of_row, lengths, out.m, tile == 0 && !(out.beside & 2));
  u32 exponents[COLS][2];
  of_rows(exponents, exponent_of(of_row.y * most));
  float sums[COLS][4] = {}, *mine = (float*)(beside + warp * apart);
  const u32 share = second ? 0x2c002c00 : 0x3c003c00;  // a sixteenth
  u8* to = (u8*)out.y + ((size_t)(tile >> 4) * out.m + first_row) * X_BYTES;
#pragma unroll
  for (int n = 0; n < COLS; n++) {
    float v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = activated(ACT, total[0][n][j], total[1][n][j]) * __uint_as_float((269 - exponents[n][j & 1]) << 23);  // 32768 / power
    const u32x2 four = four_columns(v, sums[n]);
    const int row = n * 8 + (lane >> 2);
    if (there && first_row + row < out.m)
      *(u32x2*)(to + row * X_BYTES + tile % 16 / 2 * 64 + place_of_four(lane) + second * 8) = u32x2{mul2(four.x, share), mul2(four.y, share)};
    if (second && lane < 4) mine[n * 8 + 2 * t] = sums[n][0], mine[n * 8 + 2 * t + 1] = sums[n][1];
  }
  meet(warp);
  const float* theirs = (const float*)(beside + (warp + 1) * apart);
#pragma unroll
  for (int k = 0; k < COLS * 2; k++) {
    const int row = k / 2 * 8 + 2 * t + k % 2;
    if (!second && there && first_row + row < out.m && lane < 4) {
      ((u16*)(to + row * X_BYTES + 512))[tile % 16 / 2] = (u16)pack_halves((sums[k / 2][k % 2] + theirs[row]) * (1.f / 32), 0.f);
      if (tile % 16 == 0) *(float*)(to + row * X_BYTES + X_FACTOR) = __uint_as_float((exponents[k / 2][k % 2] - 15) << 23);
    }
  }
  meet(warp);  // before the next are left there
}
#endif
