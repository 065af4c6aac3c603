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

// What one warp does of a thread block's whole tiles, `across` records each. Shared memory: x of those, rings, then
// f32[WARPS][room][16] sums, by warp and its how-manieth tile.
struct Share {
  int units, across, begin, end, room;
  u8* ring;
  float* partial;
};

__device__ __forceinline__ Share share_of(u8* shared, int num_tiles, int across, int room, int warp) {
  Share s;
  s.units = num_tiles * across, s.across = across, s.room = room;
  s.begin = first_unit(warp, WARPS, s.units), s.end = first_unit(warp + 1, WARPS, s.units);
  s.ring = shared + across * X_BYTES + warp * STAGES * RECORD;
  s.partial = (float*)(shared + across * X_BYTES + WARPS * STAGES * RECORD);
  return s;
}

// A warp multiplies its records, which `fetch` brings one after another. All threads of the block call it.
template <class Fetch>
__device__ __forceinline__ void walk(const Share& s, const u8* x, Fetch& fetch, int warp, int lane) {
  float total[2][X_ROWS] = {};
  const u8* record = s.ring;
  float* mine = s.partial + warp * s.room * 16 + (lane >> 2);
  int at = s.begin % s.across;
  for (int i = s.begin; i < s.end; i++) {
    wait();
    __syncwarp();
    fetch();
    multiply(total, record, x + at * X_BYTES, lane);
    record = record == s.ring + (STAGES - 1) * RECORD ? s.ring : record + RECORD;
    if (++at == s.across || i == s.end - 1) {
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
}

// Of a tile's row, over the warps that had part of it.
__device__ __forceinline__ float sum_of(const Share& s, int tile, int row) {
  float v = 0.f;
  for (int w = worker_of(tile * s.across, WARPS, s.units); w < WARPS; w++) {
    const int start = first_unit(w, WARPS, s.units);
    if (start >= (tile + 1) * s.across) break;
    if (start < first_unit(w + 1, WARPS, s.units)) v += s.partial[(w * s.room + tile - start / s.across) * 16 + row];
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
moe_gemv(const u8* __restrict__ x, Stack stack, int tiles, int blocks, int room) {
  extern __shared__ __align__(16) u8 shared[];
  const int which = blockIdx.z / stack.pairs, pair = blockIdx.z % stack.pairs;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tile0 = first_unit(blockIdx.x, gridDim.x, tiles), num_tiles = first_unit(blockIdx.x + 1, gridDim.x, tiles) - tile0;
  const Share share = share_of(shared, num_tiles, blocks, room, warp);
  u8* ring = share.ring;
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
  const u8* source = first + (((size_t)expert * tiles + tile0) * blocks + share.begin) * RECORD;
  int left = share.end - share.begin;
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
  walk(share, shared, fetch, warp, lane);
  for (int i = threadIdx.x; i < num_tiles * 16; i += 32 * WARPS) {
    const int at = tile0 * 16 + i;
    const float v = sum_of(share, i / 16, i % 16);
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
  const Share share = share_of(shared, num_tiles, across, room, warp);
  u8* ring = share.ring;
  float* scratch = share.partial + WARPS * room * 16;  // [2][WARPS]
  float* weight = scratch + 2 * WARPS;                 // [each]
  int* expert = (int*)(weight + each);                 // [each]
  for (int i = threadIdx.x; i < d.used; i += 32 * WARPS) {
    const int id = (int)load1(d.ids + row * d.used + i), place = id < 0 ? -1 : d.lut[id];
    expert[i] = max(place, 0);  // what is not there counts for nothing
    weight[i] = place < 0 ? 0.f : __uint_as_float(load1(d.weights + (size_t)row * d.ldw + i));
  }
  __syncthreads();

  int block = share.begin % blocks, tile = share.begin / across, place = share.begin % across / blocks, left = share.end - share.begin;
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
      weight[d.used] = 1.f / (1.f + __expf(fminf(-mixed, 80.f)));
    }
  } else if (threadIdx.x == 0 && d.beside) {
    weight[d.used] = 1.f;
  }
  __syncthreads();
  for (int i = warp; i < across; i += WARPS)
    make_ready(shared + i * X_BYTES, d, ((size_t)row * each + i / blocks) * d.hidden, i % blocks * 256, weight[i / blocks], lane);
  __syncthreads();

  walk(share, shared, fetch, warp, lane);
  for (int i = threadIdx.x; i < sums; i += 32 * WARPS) {
    const float v = sum_of(share, i / 16, i % 16);
    if (first_row + i >= d.n) continue;
    if (i != threadIdx.x) residual = d.residual ? d.residual[(size_t)row * d.ldr + first_row + i] : 0.f;
    d.y[(size_t)row * d.n + first_row + i] = v + residual;
  }
}
