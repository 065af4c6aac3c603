// y = x · Wᵀ for some rows of x (8 to 32 at a time) and a quantized W, on tensor cores.
//
// W lies in records of 16 rows × 256 columns (formats.py). A warp owns TILES row tiles and walks along columns; all
// warps of a block are at the same columns. A stage of the ring in shared memory holds the next record of every warp
// and the columns of x that go with it. Codes become exact halves by bit operations, and mma.m16n8k16 multiplies them
// with x. Where a group's scale is a small integer or a power of two, codes are multiplied with it before: as halves, exact
// up to 2048, so that sums run on over groups. Otherwise it is applied to the group's sum: nothing but x is rounded. Minima
// are one more product, with Σ x of every group. The rows of W are the mma's M, those of x its N.
//
// Of a word's codes, every other one lies four bits up in its half. It is not shifted: x there is a sixteenth of what it
// stands for (the second 16 columns of every 32). A code is alone in a half's bits, a multiple of 2^-24, where what it is
// multiplied with makes it a number again (AS_BITS); or in the mantissa of 1024 or 64, less that and the zero.
//
// Lane (g = lane / 4, t = lane % 4) holds rows g and g + 8 of W and columns 4 t .. 4 t + 3 of each 16. x is given in
// that order: every 32 as [t][half][4], so that a lane's eight are one load.
//
// instructions: HMMA\.1 (LDG|LDGSTS)\.[.\w]*128
// instructions from sm_90: UBLKCP
// instructions from sm_90, ACT or THEN: FENCE\.VIEW\.ASYNC

#define SLAB (WARPS * TILES * RECORD)   // where x lies in a stage
#define GATE (SLAB + X_ROWS * X_BYTES)  // which opens when what was asked for is there
#define STAGE_BYTES (GATE + BULK * 32)  // so that sources and targets of bulk copies agree modulo 32 bytes
#define BIAS TWICE(0x6400 + (TABLE ? 128 : ZERO))  // 1024 + zero; there one step of a half is 1
#define BIAS_64 TWICE(0x5400 + ZERO * 16)          // 64 + zero; there it is 1/16
#define TIMES_16 TWICE(0x1000)                     // of a half, added to its bits
#define TIMES_32 TWICE(0x1400)
#define NEGATIVE 0x80008000u
#define IN_CODES (SCALES == 2 || SCALES == 3 || SCALES == 4 || SCALES == 6)  // scales are multiplied into codes
#define AS_BITS (SCALES == 2 || SCALES == 3)                                 // codes are 2^-24, scales 32: a row's factor has the rest

// What is to be in a register, not worked out anew; where there are registers.
__device__ __forceinline__ int pinned(int v) { return BULK && IN_CODES ? __shfl_xor_sync(~0u, v, 0) : v; }

// --- scales of one row of a record

#if SCALES == 4 || SCALES == 5 || SCALES == 2
#define SCALE_WORDS 2
#else
#define SCALE_WORDS 4
#endif

struct RowScales { u32 word[SCALE_WORDS]; };

__device__ __forceinline__ RowScales row_scales(const u8* at, int row) {
  RowScales s;
#if SCALES == 2
  u32x2 w = ((const u32x2*)(at + 64))[row * 2];
#elif SCALES == 4
  u32x2 w = ((const u32x2*)(at + 32))[row];
#elif SCALES == 5
  u32x2 w = ((const u32x2*)at)[row];
#else
  u32x4 w = ((const u32x4*)(SCALES == 3 ? at + 32 : at))[row];
  s.word[2] = w.z, s.word[3] = w.w;
#endif
  s.word[0] = w.x, s.word[1] = w.y;
  return s;
}

// Of a whole record's row, and of its minima (SCALES 2).
__device__ __forceinline__ void row_factors(const u8* at, int row, float& d, float& add) {
  d = SCALES == 6 ? 128.f : 1.f, add = 0.f;
#if SCALES == 2
  floats(((const u32*)at)[row], d, add);
#elif SCALES == 3 || SCALES == 4
  floats(((const u16*)at)[row], d, add);
#endif
  if (AS_BITS) d *= 524288.f;  // 2^24 / 32
}

struct Magic { u32 even, odd, bytes; };  // 0x64006400, 0x54005400 and 0x64646464

// Halves 1024 + byte of two bytes.
__device__ __forceinline__ u32 bytes01(u32 a, Magic magic) { return __byte_perm(a, magic.bytes, 0x4140); }
__device__ __forceinline__ u32 bytes23(u32 a, Magic magic) { return __byte_perm(a, magic.bytes, 0x4342); }
__device__ __forceinline__ u32 bytes02(u32 a, Magic magic) { return __byte_perm(a, magic.bytes, 0x4240); }
__device__ __forceinline__ u32 bytes13(u32 a, Magic magic) { return __byte_perm(a, magic.bytes, 0x4341); }

#if IN_CODES
// Scales of 32 columns as two halves: of 16 each (BY_16), or of these and the 32 beside them.
__device__ __forceinline__ u32 two_scales(const RowScales& s, int c, int h, Magic magic) {
#if BY_16
  const u32 two = h ? bytes23(s.word[c], magic) : bytes01(s.word[c], magic);
#else
  const u32 two = c & 1 ? bytes23(s.word[c >> 1], magic) : bytes01(s.word[c >> 1], magic);
#endif
#if SCALES == 6
  return (two & 0x00ff00ff) << 7;
#elif AS_BITS
  return fma2(two, TWICE(0x5000), (TWICE(SCALES == 3 ? 0x6480 : 0x6400) + TIMES_32) ^ NEGATIVE);  // 32 times
#else
  return sub2(two, TWICE(0x6420));
#endif
}

// Codes times their scales. h: of 64 columns the first or second 32.
__device__ __forceinline__ void scale_codes(u32 (&w)[4], u32 two, int h) {
#if BY_16
  const u32 first = low2(two), second = high2(two);
#else
  const u32 first = h ? high2(two) : low2(two), second = first;
#endif
#if AS_BITS && ZERO
  static_assert(BY_16 && ZERO == 32, "the zero as it lies in even and odd ones");
  const u32 off = mul2(two, 0x82008020);  // -2^-15, -2^-19
  w[0] = fma2(w[0], first, low2(off)), w[2] = fma2(w[2], first, low2(off));
  w[1] = fma2(w[1], second, high2(off)), w[3] = fma2(w[3], second, high2(off));
#else
  w[0] = mul2(w[0], first), w[2] = mul2(w[2], first);
  w[1] = mul2(w[1], second), w[3] = mul2(w[3], second);
#endif
}
#else
// Scales of 64 columns, of 32 each.
__device__ __forceinline__ void group_scales(const RowScales& s, int c, float (&scale)[2], Magic magic) {
#if SCALES <= 1
  floats(s.word[c], scale[0], scale[1]);
#else
  floats(((c & 1 ? bytes23(s.word[c >> 1], magic) : bytes01(s.word[c >> 1], magic)) & 0x00ff00ff) << 10, scale[0], scale[1]);
#endif
}
#endif

// What is added to groups 2 t and 2 t + 1 of a row, as halves; 32 times as much, for sums are given as a 32nd, and to be multiplied
// with row_factors' `add` (SCALES 2).
__device__ __forceinline__ u32 row_adds(const u8* at, int row, int t, Magic magic) {
#if SCALES == 1
  return ((const u32*)(at + 256))[row * 4 + t];
#elif SCALES == 2
  return fma2(bytes01(((const u16*)(at + 64))[row * 8 + 4 + t], magic), TWICE(0x5000), TWICE(0x6400 + 0x1400) ^ NEGATIVE);
#else
  return 0;
#endif
}

// Eight codes as halves: weights 0-3 to w[0] and w[2], 4-7 to w[1] and w[3]. word, more: the codes (8 bits: two words);
// high: the plane of high bits that has the fields of word a.
__device__ __forceinline__ void halves(u32 (&w)[4], u32 word, u32 more, u32 high, int a, Magic magic) {
#if BITS == 8
  w[0] = bytes02(word, magic), w[2] = bytes13(word, magic), w[1] = bytes02(more, magic), w[3] = bytes13(more, magic);
#elif TABLE
  look_up(word, word, more);
  w[0] = bytes02(word, magic), w[2] = bytes13(word, magic), w[1] = bytes02(more, magic), w[3] = bytes13(more, magic);
#else
#pragma unroll
  for (int j = 0; j < 4; j++) {  // odd ones stay where they are, four bits up
    const u32 shifted = j & 2 ? word >> 8 : word, own = j & 1 ? 0x00f000f0 : 0x000f000f;
    w[j] = AS_BITS ? shifted & own : mask_or(shifted, own, j & 1 ? magic.odd : magic.even);
#if BITS > 4
    const int field = (BITS - 4) * (BITS == 5 ? 2 * a + (j & 1) : 2 * (a & 1) + (j & 1)) + (j & 2 ? 8 : 0), place = j & 1 ? 8 : 4;
    const u32 mask = (BITS == 5 ? 0x00010001u : 0x00030003u) << place;
    w[j] = mask_or(field > place ? high >> (field - place) : high << (place - field), mask, w[j]);
#endif
  }
#endif
#if !AS_BITS
  const u32 odd = BITS == 8 || TABLE ? BIAS : BIAS_64;
  w[0] = sub2(w[0], BIAS), w[2] = sub2(w[2], BIAS);
  w[1] = fma2(w[1], TWICE(0x4c00), (odd + TIMES_16) ^ NEGATIVE), w[3] = fma2(w[3], TWICE(0x4c00), (odd + TIMES_16) ^ NEGATIVE);
#endif
}

// One record of each tile. x: this lane's row of each block of 8, from its t on; sums: its Σ x / 32 of groups 2 t, 2 t + 1;
// factor: of this lane's two columns of the product; EVEN: a row has one, for the end.
__device__ __forceinline__ void multiply(float (&total)[TILES][COLS][4], const u8* record, const u8* x, const u8* sums,
                                         const u8* factor, int lane, int g, Magic magic) {
  const float zero[4] = {0.f, 0.f, 0.f, 0.f};
  float acc[TILES][COLS][4] = {};
  RowScales s[TILES][2];
#pragma unroll
  for (int r = 0; r < TILES; r++) {
    const u8* at = record + r * RECORD + CODES;
    s[r][0] = row_scales(at, g), s[r][1] = row_scales(at, g + 8);
  }
#pragma unroll
  for (int c = 0; c < 4; c++) {
    u32x4 b[2][COLS];
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int n = 0; n < COLS; n++) b[h][n] = *(const u32x4*)(x + n * 8 * X_BYTES + c * 128 + h * 64);
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      const u8* codes = record + r * RECORD;
#if !IN_CODES
      float scale[2][2];
      group_scales(s[r][0], c, scale[0], magic);
      group_scales(s[r][1], c, scale[1], magic);
#endif
      u32 high[2] = {0, 0};
#if BITS != 8
      const u32x4 four = ((const u32x4*)codes)[c * 32 + lane];
#endif
#if BITS == 5
      high[0] = high[1] = ((const u32*)(codes + 2048))[c * 32 + lane];
#elif BITS == 6
      const u32x2 two = ((const u32x2*)(codes + 2048))[c * 32 + lane];
      high[0] = two.x, high[1] = two.y;
#endif
#pragma unroll
      for (int h = 0; h < 2; h++) {
        u32 w[2][4];  // [row][pair]
#if BITS == 8
        const u32x4 v = ((const u32x4*)codes)[c * 64 + h * 32 + lane];
        halves(w[0], v.x, v.y, 0, 0, magic);
        halves(w[1], v.z, v.w, 0, 0, magic);
#else
        halves(w[0], h ? four.z : four.x, 0, high[h], 2 * h, magic);
        halves(w[1], h ? four.w : four.y, 0, high[h], 2 * h + 1, magic);
#endif
#if IN_CODES
        scale_codes(w[0], two_scales(s[r][0], c, h, magic), h);
        scale_codes(w[1], two_scales(s[r][1], c, h, magic), h);
#endif
#pragma unroll
        for (int n = 0; n < COLS; n++) {
#if IN_CODES
          mma(acc[r][n], acc[r][n], w[0][0], w[1][0], w[0][2], w[1][2], b[h][n].x, b[h][n].y);
          mma(acc[r][n], acc[r][n], w[0][1], w[1][1], w[0][3], w[1][3], b[h][n].z, b[h][n].w);
#else
          float d[4];
          mma(d, zero, w[0][0], w[1][0], w[0][2], w[1][2], b[h][n].x, b[h][n].y);
          mma(d, d, w[0][1], w[1][1], w[0][3], w[1][3], b[h][n].z, b[h][n].w);
#pragma unroll
          for (int j = 0; j < 4; j++) acc[r][n][j] += scale[j >> 1][h] * d[j];
#endif
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < TILES; r++) {
    const u8* at = record + r * RECORD + CODES;
    float d[2], add[2];
    row_factors(at, g, d[0], add[0]);
    row_factors(at, g + 8, d[1], add[1]);
#if HAS_ADD
    const u32 a0 = row_adds(at, g, lane & 3, magic), a1 = row_adds(at, g + 8, lane & 3, magic);
#endif
#pragma unroll
    for (int n = 0; n < COLS; n++) {
#if !EVEN
      const float f[2] = {*(const float*)(factor + n * 8 * X_BYTES), *(const float*)(factor + (n * 8 + 1) * X_BYTES)};
#endif
#if SCALES == 2
      float minima[4];
      mma8(minima, zero, a0, a1, *(const u32*)(sums + n * 8 * X_BYTES));
#elif HAS_ADD
      mma8(acc[r][n], acc[r][n], a0, a1, mul2(*(const u32*)(sums + n * 8 * X_BYTES), TWICE(0x5000)));
#endif
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float v = EVEN ? fmaf(d[j >> 1], acc[r][n][j], total[r][n][j]) : d[j >> 1] * acc[r][n][j];
#if SCALES == 2
        v += add[j >> 1] * minima[j];
#endif
#if EVEN
        total[r][n][j] = v;
#else
        total[r][n][j] += f[j & 1] * v;
#endif
      }
    }
  }
}

// How a grid shares units. parts: workers of each owner, each with its part of the blocks; 1: workers have whole owners; 0: units
// of all owners in a row, so that most owners' sums come from several workers.
struct Walk { Shares shares; u32 by_each, by_more; int parts; u32 by_parts; };  // by_: for `quotient`, of shares and parts

// Who has `unit`, where shares go across owners.
__device__ __forceinline__ int worker_of(const Walk& walk, int unit) {
  const int longer = walk.shares.more * (walk.shares.each + 1);
  return unit < longer ? quotient(unit, walk.by_more) : walk.shares.more + quotient(unit - longer, walk.by_each);
}

// Grid: (workers, 1, blocks of X_ROWS rows of x). A worker is a thread block, an owner WARPS · TILES tiles, a unit a record of each
// of them. x: [blocks][m][X_BYTES], of 256 columns each: f16[256] in the order above, the second half of each 32 a
// sixteenth, f16[8] a 32nd of groups' Σ x, and at X_FACTOR the
// f32 that x is to be multiplied with; zero beyond W's columns. Rows of shared memory beyond x hold anything: what
// comes of them is dropped. sums: slots [z][owner][warp][room]. ACT: W is gate's rows, then up's; what comes out is x again. THEN:
// what comes out is y and, as x, norm(y) without the division. divide, THEN: one pass.
extern "C" __global__ void __launch_bounds__(32 * WARPS, RESIDENT)
mma_linear(const u8* __restrict__ records, const u8* __restrict__ x, Out out, Walk walk, int tiles, int blocks, u32 by_blocks,
           int owners, int room, Divide divide, Then then) {
  extern __shared__ __align__(16) u8 room_of_block[];
  begin_beside(out.beside);
  u8* shared = same_in_warp(room_of_block);
  const int warp = same_in_warp((int)threadIdx.x >> 5);
  const int lane = pinned(threadIdx.x & 31), own = same_in_warp(warp * TILES * RECORD);  // own: where its records lie in a stage
  int owner, part = 0, block = 0, left;  // of the next records
  if (walk.parts == 1) {
    owner = first_of(walk.shares, blockIdx.x), left = (first_of(walk.shares, blockIdx.x + 1) - owner) * blocks;
  } else {
    int place = blockIdx.x;
    if (walk.parts) owner = quotient(place, walk.by_parts), place = part = place - owner * walk.parts;
    block = first_of(walk.shares, place), left = first_of(walk.shares, place + 1) - block;
    if (!walk.parts) owner = quotient(block, by_blocks), block -= owner * blocks;
  }
#if BULK
  u32 source[TILES];  // which record
#else
  const u8* source[TILES];
#endif
  auto aim = [&](int owner, int block) {
#pragma unroll
    for (int r = 0; r < TILES; r++) {
#if ACT
      const int tile = min(owner * WARPS + warp, tiles / 2 - 1) + r * (tiles / 2);  // of gate, of up
#else
      const int tile = min((owner * WARPS + warp) * TILES + r, tiles - 1);
#endif
#if BULK
      source[r] = tile * blocks + block;
#else
      source[r] = records + ((size_t)tile * blocks + block) * RECORD + lane * 16;
#endif
    }
  };
#if BULK
  if (threadIdx.x == 0) {
#pragma unroll
    for (int k = 0; k < STAGES; k++) open_gate(shared + k * STAGE_BYTES + GATE, WARPS + 1);
    show_gates();
  }
#endif
  aim(owner, block);
  const int first_row = blockIdx.z * X_ROWS;
  const u32 x_first = BULK ? same_in_warp(first_row * X_BYTES) : first_row * X_BYTES + threadIdx.x * 16;
  u32 x_at = x_first;
#if BULK
  __syncthreads();
#endif
  int who = owner, at = block, i = left, next = block;  // of what is multiplied next; and of what is asked for next
  auto fetch = [&](u8* stage) {
#if BULK
    if (one_of_warp()) {
      expect(stage + GATE, TILES * RECORD);
#pragma unroll
      for (int r = 0; r < TILES; r++) copy_bulk(stage + own + r * RECORD, records + (size_t)source[r] * RECORD, RECORD, stage + GATE);
    }
#pragma unroll
    for (int r = 0; r < TILES; r++) source[r]++;
#else
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      copy_lanes(stage + own + r * RECORD + lane * 16, source[r], lane);
      source[r] += RECORD;
    }
#endif
    if (++next == blocks) next = 0, x_at = x_first, aim(++owner, 0);
  };
#pragma unroll
  for (int k = 0; k < STAGES - 1; k++)
    if (k < left) fetch(shared + k * STAGE_BYTES);

  const int g = pinned(lane >> 2), t = lane & 3, x_lane = pinned(SLAB + g * X_BYTES + t * 16), sums_lane = pinned(SLAB + g * X_BYTES + 512 + t * 4);
  const int row_lane = pinned(SLAB + min(lane, X_ROWS - 1) * X_BYTES);
  const int factor_lane = pinned(SLAB + 2 * t * X_BYTES + X_FACTOR);  // where in a stage
  block = settled(block);  // what follows, behind the first weights
  Magic magic;             // in registers, so that an instruction has room for another constant
  asm volatile("mov.b32 %0, 0x64006400;" : "=r"(magic.even));
  asm volatile("mov.b32 %0, 0x54005400;" : "=r"(magic.odd));
  magic.bytes = same_in_warp(0x64646463 + gridDim.y);  // 1, which the compiler does not know
  const int pieces = min(out.m - first_row, X_ROWS) * (X_BYTES / 16);
  const u32 x_step = out.m * X_BYTES;
  x_at = BULK ? same_in_warp(x_first + block * x_step) : x_first + block * x_step;
  auto fetch_x = [&](u8* stage) {
    const u8* x_from = x + x_at;
#if BULK
    if (warp == 0 && one_of_warp()) {
      expect(stage + GATE, pieces * 16);
      copy_bulk(stage + SLAB, x_from, pieces * 16, stage + GATE);
    }
#else
    u8* to = stage + SLAB + threadIdx.x * 16;
    if (pieces == X_ROWS * (X_BYTES / 16)) {  // no comparisons but one
#pragma unroll
      for (int k = 0; k < X_ROWS * (X_BYTES / 16); k += 32 * WARPS)
        if (k + 32 * WARPS <= X_ROWS * (X_BYTES / 16) || k + threadIdx.x < X_ROWS * (X_BYTES / 16)) copy16(to + k * 16, x_from + k * 16);
    } else {
#pragma unroll 1
      for (int k = 0; k + (int)threadIdx.x < pieces; k += 32 * WARPS) copy16(to + k * 16, x_from + k * 16);
    }
#endif
    x_at += x_step;
  };
  auto slots = [&](int owner) { return (u32x4*)out.sums + (size_t)((blockIdx.z * owners + owner) * WARPS + warp) * room * SLOT + lane; };
  int kept = 0;  // parts of the first owner, which is added up in the end
  float total[TILES][COLS][4] = {};
  Lengths lengths;  // of row `lane`
  float2 of_row = {1.f, 0.f};  // what lies at X_FACTOR and X_LENGTH
  wait_for_x(out.beside);
#pragma unroll
  for (int k = 0; k < STAGES - 1; k++) {
    if (k < left) fetch_x(shared + k * STAGE_BYTES);
    if (++block == blocks) block = 0, x_at = x_first;
    if (!BULK) commit();
  }
  u32 to = (STAGES - 1) * STAGE_BYTES, stage = 0;
  u32 odd = 0;  // turn of stage
#pragma unroll 1
  while (true) {
    int others = 0;  // parts in slots
    if (i > 0) {
      const int end = i - min(i, blocks - at);  // of these records, or of this owner
#pragma unroll 1
      do {
        if (!BULK) wait();
        __syncthreads();
        if (i > STAGES - 1) {
          fetch_x(shared + to);
          fetch(shared + to);
        }
#if BULK
        pass_gate(shared + stage + GATE, odd);
#else
        commit();
#endif
        add_squares(lengths, *(const float4*)(shared + stage + row_lane + X_SQUARES));
        multiply(total, shared + stage + own, shared + stage + x_lane, shared + stage + sums_lane, shared + stage + factor_lane,
                 lane, g, magic);
        to = stage, stage += STAGE_BYTES;
        if (stage == STAGES * STAGE_BYTES) stage = 0, odd ^= 1;
      } while (--i > end);
      of_row = *(const float2*)(shared + to + row_lane + X_FACTOR);
      others = walk.parts - 1;
      if (!walk.parts) {
        const int first = worker_of(walk, who * blocks);
        part = blockIdx.x - first, others = worker_of(walk, who * blocks + blocks - 1) - first;
      }
      if (part < others || (part && i > 0)) {  // the last part's block adds up; in the end, since the parts before end then
        leave(slots(who) + part * SLOT, total, lengths, divide.squares);
        if (part == others) kept = others + 1;
        others = -1;
      }
    } else if (kept) {
      who = quotient(first_of(walk.shares, blockIdx.x), by_blocks), others = kept, kept = 0;
    } else {
      break;
    }
#if ACT  // `to` is where this warp's last records were: it asks for the next ones there when all warps have come
    if (others >= 0) finish_gated(out, divide, total, of_row, lengths, slots(who), others, who * WARPS + warp, first_row, shared + to, TILES * RECORD);
#else
    if (others >= 0)
      finish_sums(out, x, divide, then, total, of_row, lengths, slots(who), others, who, (who * WARPS + warp) * TILES, first_row, shared + to,
                  TILES * RECORD);
#endif
#if BULK && (ACT || THEN)
    behind_bulk(), __syncwarp();
#endif
    at = 0, who++, lengths = Lengths{};
#pragma unroll
    for (int j = 0; j < SUMS; j++) (&total[0][0][0])[j] = 0.f;
  }
  wait_for_previous();  // where `wait_for_x` did not: asked without a condition, which would be kept in a register until here
}
