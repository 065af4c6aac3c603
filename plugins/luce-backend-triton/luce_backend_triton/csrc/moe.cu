// The same of experts: pair p, of row p / per of x and of expert lut[ids[p]]. Behind gemv.cu, whose `multiply` it uses.
// With `beside`, a matrix that every row meets, each `used` pairs have one of it behind them, which ids do not name.
//
// Grid: (blocks of row tiles, 1, pairs · matrices). A thread block takes whole tiles of one pair's expert; its warps share
// the records evenly, and sums meet in shared memory, as in gemv.cu. Few rows choose few experts twice, so every pair reads
// its own; what two pairs share comes from L2.
//
// instructions: IDP\.4A (LDG|LDGSTS)\.[.\w]*128

struct Stack {  // up to two matrices of the same shape (gate and up): records of all experts, one below the other
  const u8* records[2];
  const u8* beside[2];  // or none
  const int *ids, *lut;
  float* y[2];  // f32[pairs][n]
  int per, rows, n, pairs, used;  // rows of x
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
moe_gemv(const u8* __restrict__ x, Stack stack, int tiles, int blocks, int room) {
  extern __shared__ __align__(16) u8 shared[];
  let_next_start();
  const int which = blockIdx.z / stack.pairs, pair = blockIdx.z % stack.pairs;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tile0 = first_unit(blockIdx.x, gridDim.x, tiles), num_tiles = first_unit(blockIdx.x + 1, gridDim.x, tiles) - tile0;
  const int units = num_tiles * blocks, begin = first_unit(warp, WARPS, units), end = first_unit(warp + 1, WARPS, units);
  u8* ring = shared + blocks * X_BYTES + warp * STAGES * RECORD;
  float* partial = (float*)(shared + blocks * X_BYTES + WARPS * STAGES * RECORD);
  wait_for_previous();
  const int each = stack.used + (stack.beside[0] != nullptr), place = pair % each;
  const bool common = place == stack.used;
  const int id = common ? 0 : stack.ids[pair / each * stack.used + place], expert = common ? 0 : id < 0 ? -1 : stack.lut[id];
  float* y = (which ? stack.y[1] : stack.y[0]) + (size_t)pair * stack.n;
  if (expert < 0) {
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
