// The same of experts. Behind gemv.cu, whose `multiply` it uses.
//
// moe_gemv: pair p, of row p / per of x and of expert lut[ids[p]].
// With `beside`, a matrix that every row meets, each `used` pairs have one of it behind them, which ids do not name.
//
// Grid: (blocks of row tiles, 1, pairs · matrices). A thread block takes whole tiles of one pair's expert; its warps share
// the records evenly, and sums meet in shared memory, as in gemv.cu. Few rows choose few experts twice, so every pair reads
// its own; what two pairs share comes from L2.
//
// Ids are read, and records asked for, before what came before is over. So that must be one launch that lets others start
// only when everything before it is over, as moe_gemv itself does: ids are older.
//
// instructions: IDP\.4A (LDG|LDGSTS)\.[.\w]*128

struct Stack {  // up to two matrices of the same shape (gate and up): records of all experts, one below the other
  const u8* records[2];
  const u8* beside[2];  // or none
  const int *ids, *lut;
  float* y[2];  // f32[pairs][n]
  int per, rows, n, pairs, used;  // rows of x
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
moe_gemv(const u8* __restrict__ x, Stack stack, int tiles, int blocks, int room) {
  extern __shared__ __align__(16) u8 shared[];
  const int which = blockIdx.z / stack.pairs, pair = blockIdx.z % stack.pairs;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tile0 = first_unit(blockIdx.x, gridDim.x, tiles), num_tiles = first_unit(blockIdx.x + 1, gridDim.x, tiles) - tile0;
  const int units = num_tiles * blocks, begin = first_unit(warp, WARPS, units), end = first_unit(warp + 1, WARPS, units);
  u8* ring = shared + blocks * X_BYTES + warp * STAGES * RECORD;
  float* partial = (float*)(shared + blocks * X_BYTES + WARPS * STAGES * RECORD);
  const int each = stack.used + (stack.beside[0] != nullptr), place = pair % each;
  const bool common = place == stack.used;
  const int id = common ? 0 : (int)load1(stack.ids + pair / each * stack.used + place), expert = common ? 0 : id < 0 ? -1 : stack.lut[id];
  float* y = (which ? stack.y[1] : stack.y[0]) + (size_t)pair * stack.n;
  if (expert < 0) {
    wait_for_previous();
    let_next_start();
    for (int i = tile0 * 16 + threadIdx.x; i < min((tile0 + num_tiles) * 16, stack.n); i += 32 * WARPS) y[i] = 0.f;
    return;
  }

  const u8* first = common ? (which ? stack.beside[1] : stack.beside[0]) : (which ? stack.records[1] : stack.records[0]);
  const u8* source = first + (((size_t)expert * tiles + tile0) * blocks + begin) * RECORD;
  int left = end - begin;
  u8* to = ring;
  auto fetch = [&]() {
    if (left > 0) copy_record(to, source, lane);
    commit();
    source += RECORD;
    left--;
    to = to == ring + (STAGES - 1) * RECORD ? ring : to + RECORD;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch();
  wait_for_previous();
  let_next_start();
  const int row = pair / stack.per;
  for (int i = threadIdx.x; i < blocks * (X_BYTES / 16); i += 32 * WARPS) {
    const int block = i / (X_BYTES / 16), piece = i % (X_BYTES / 16);
    copy16(shared + block * X_BYTES + piece * 16, x + ((size_t)block * stack.rows + row) * X_BYTES + piece * 16);
  }
  commit();
  wait_all();
  __syncthreads();
  float total[2][X_ROWS] = {};
  const u8* record = ring;
  float* mine = partial + warp * room * 16 + (lane >> 2);
  int block = begin % blocks;
  for (int i = begin; i < end; i++) {
    wait();
    __syncwarp();
    fetch();
    multiply(total, record, shared + block * X_BYTES, lane);
    record = record == ring + (STAGES - 1) * RECORD ? ring : record + RECORD;
    if (++block == blocks || i == end - 1) {
      block = 0;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float v = total[j][0];
        v += __shfl_xor_sync(~0u, v, 1);
        v += __shfl_xor_sync(~0u, v, 2);
        if ((lane & 3) == 0) mine[8 * j] = v;
        total[j][0] = 0.f;
      }
      mine += 16;
    }
  }
  __syncthreads();

  for (int i = threadIdx.x; i < num_tiles * 16; i += 32 * WARPS) {
    const int tile = i / 16, until = (tile + 1) * blocks, at = (tile0 + tile) * 16 + i % 16;
    float v = 0.f;
    for (int w = worker_of(tile * blocks, WARPS, units); w < WARPS; w++) {
      const int start = first_unit(w, WARPS, units);
      if (start >= until) break;
      if (start < first_unit(w + 1, WARPS, units)) v += partial[(w * room + tile - start / blocks) * 16 + i % 16];
    }
    if (at < stack.n) y[at] = v;
  }
}

// y[row] = Σ over the experts of a row of weight · expert's matrix · act(gate) · up, + residual. All experts of a row are one
// long product: x of one behind that of another, the weights in its factors. A shared expert comes last, its weight
// sigmoid(mix · norm(x)).
//
// Grid: (blocks of row tiles, 1, rows). Every thread block makes x ready for itself.

struct Down {
  const u8 *records, *beside;  // of the shared expert, or none
  const int *ids, *lut;        // [rows][used]
  const float *gate, *up;      // [rows · each][hidden], each: used, and the shared one
  const float* weights;        // [rows][ldw]
  const float *x, *norm, *mix;  // [rows][ldx]; norm, mix: [width], or none
  const float* residual;        // [rows][ldr], or none
  float* y;                     // [rows][n]
  int used, hidden, width, n, ldw, ldx, ldr;
  int act, clamp;  // clamp: 0 none, 1 before the activation, 2 after it
  float limit, eps;
};

__device__ __forceinline__ float limited(const Down& d, float gate, float up) {
  if (d.clamp == 1) gate = fminf(gate, d.limit);
  float v = activated(d.act, gate, 1.f);
  if (d.clamp == 2) v = fminf(v, d.limit);
  return v * (d.clamp ? fminf(fmaxf(up, -d.limit), d.limit) : up);
}

// 256 columns as `multiply` wants them. A lane has those of its group (of 32) that one word of each half holds.
__device__ __forceinline__ void make_ready(u8* to, const Down& d, size_t from, int column, float share, int lane) {
  const int group = lane >> 2, t = lane & 3;
  float v[8] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int at = column + group * 32 + half * 16 + t * 4;
    if (at >= d.hidden) continue;
    const float4 g = load4(d.gate + from + at), u = load4(d.up + from + at);
    v[4 * half] = limited(d, g.x, u.x), v[4 * half + 1] = limited(d, g.y, u.y);
    v[4 * half + 2] = limited(d, g.z, u.z), v[4 * half + 3] = limited(d, g.w, u.w);
  }
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[i]));
#pragma unroll
  for (int i = 16; i; i >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
  const float factor = (top > 0.f ? top : 1.f) / 32512.f;
  u32 word[4] = {};  // high of both halves, low of both
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int whole = (int)floorf(v[i] / factor + 0.5f), high = (whole + 128) >> 8, e = i & 3, byte = (e & 1) << 1 | e >> 1;
    word[i >> 2] |= (u32)(high & 255) << 8 * byte;
    word[2 + (i >> 2)] |= (u32)((whole - 256 * high) & 255) << 8 * byte;
    sum += whole;
  }
  *(u32x4*)(to + group * 64 + t * 16) = u32x4{word[0], word[1], word[2], word[3]};
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if (t == 0) ((int*)(to + X_WORDS))[group] = sum;
  if (lane == 0) *(float*)(to + X_FACTOR) = factor * share;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
moe_down(Down d, int tiles, int blocks, int room) {
  extern __shared__ __align__(16) u8 shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.z;
  const int each = d.used + (d.beside != nullptr), across = each * blocks;  // records of a tile
  const int tile0 = first_unit(blockIdx.x, gridDim.x, tiles), num_tiles = first_unit(blockIdx.x + 1, gridDim.x, tiles) - tile0;
  const int units = num_tiles * across, begin = first_unit(warp, WARPS, units), end = first_unit(warp + 1, WARPS, units);
  u8* ring = shared + across * X_BYTES + warp * STAGES * RECORD;
  float* partial = (float*)(shared + across * X_BYTES + WARPS * STAGES * RECORD);
  float* scratch = partial + WARPS * room * 16;  // [2][WARPS]
  float* share = scratch + 2 * WARPS;            // [each]
  int* expert = (int*)(share + each);            // [each]
  for (int i = threadIdx.x; i < d.used; i += 32 * WARPS) {
    const int id = (int)load1(d.ids + row * d.used + i), place = id < 0 ? -1 : d.lut[id];
    expert[i] = max(place, 0);  // what is not there counts for nothing
    share[i] = place < 0 ? 0.f : __uint_as_float(load1(d.weights + (size_t)row * d.ldw + i));
  }
  __syncthreads();

  int block = begin % blocks, tile = begin / across, place = begin % across / blocks, left = end - begin;
  u8* to = ring;
  auto fetch = [&]() {
    if (left > 0) {
      const u8* first = place == d.used ? d.beside : d.records + (size_t)expert[place] * tiles * blocks * RECORD;
      copy_record(to, first + ((size_t)(tile0 + tile) * blocks + block) * RECORD, lane);
    }
    commit();
    if (++block == blocks) {
      block = 0;
      if (++place == each) place = 0, tile++;
    }
    left--;
    to = to == ring + (STAGES - 1) * RECORD ? ring : to + RECORD;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) fetch();
  const int sums = num_tiles * 16, first_row = tile0 * 16;
  float residual = 0.f;
  wait_for_previous();
  let_next_start();
  if (d.residual && threadIdx.x < sums && first_row + threadIdx.x < d.n) residual = d.residual[(size_t)row * d.ldr + first_row + threadIdx.x];
  if (d.mix) {
    const float* x = d.x + (size_t)row * d.ldx;
    float mixed = 0.f, squares = 0.f;
    for (int i = threadIdx.x * 4; i < d.width; i += 32 * WARPS * 4) {
      const float4 v = load4(x + i), m = *(const float4*)(d.mix + i);
      const float4 w = d.norm ? *(const float4*)(d.norm + i) : float4{1.f, 1.f, 1.f, 1.f};
      mixed += v.x * w.x * m.x + v.y * w.y * m.y + v.z * w.z * m.z + v.w * w.w * m.w;
      squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
#pragma unroll
    for (int i = 16; i; i >>= 1) mixed += __shfl_xor_sync(~0u, mixed, i), squares += __shfl_xor_sync(~0u, squares, i);
    if (lane == 0) scratch[warp] = mixed, scratch[WARPS + warp] = squares;
    __syncthreads();
    if (threadIdx.x == 0) {
      mixed = squares = 0.f;
      for (int i = 0; i < WARPS; i++) mixed += scratch[i], squares += scratch[WARPS + i];
      if (d.norm) mixed /= sqrtf(squares / (float)d.width + d.eps);
      share[d.used] = 1.f / (1.f + __expf(fminf(-mixed, 80.f)));
    }
  } else if (threadIdx.x == 0 && d.beside) {
    share[d.used] = 1.f;
  }
  __syncthreads();
  for (int i = warp; i < across; i += WARPS)
    make_ready(shared + i * X_BYTES, d, ((size_t)row * each + i / blocks) * d.hidden, i % blocks * 256, share[i / blocks], lane);
  __syncthreads();

  float total[2][X_ROWS] = {};
  const u8* record = ring;
  float* mine = partial + warp * room * 16 + (lane >> 2);
  int at = begin % across;
  for (int i = begin; i < end; i++) {
    wait();
    __syncwarp();
    fetch();
    multiply(total, record, shared + at * X_BYTES, lane);
    record = record == ring + (STAGES - 1) * RECORD ? ring : record + RECORD;
    if (++at == across || i == end - 1) {
      at = 0;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float v = total[j][0];
        v += __shfl_xor_sync(~0u, v, 1);
        v += __shfl_xor_sync(~0u, v, 2);
        if ((lane & 3) == 0) mine[8 * j] = v;
        total[j][0] = 0.f;
      }
      mine += 16;
    }
  }
  __syncthreads();

  for (int i = threadIdx.x; i < sums; i += 32 * WARPS) {
    const int which = i / 16, until = (which + 1) * across;
    float v = 0.f;
    for (int w = worker_of(which * across, WARPS, units); w < WARPS; w++) {
      const int start = first_unit(w, WARPS, units);
      if (start >= until) break;
      if (start < first_unit(w + 1, WARPS, units)) v += partial[(w * room + which - start / across) * 16 + i % 16];
    }
    if (first_row + i >= d.n) continue;
    if (i != threadIdx.x) residual = d.residual ? d.residual[(size_t)row * d.ldr + first_row + i] : 0.f;
    d.y[(size_t)row * d.n + first_row + i] = v + residual;
  }
}
