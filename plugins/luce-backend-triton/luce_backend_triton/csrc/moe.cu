// The same of experts. Behind gemv.cu, whose `multiply` it uses.
//
// moe_gemv: pair p, of row p / per of x and of expert lut[ids[p]]. Of two matrices (gate and up) y is act(gate) · up.
// With `beside`, a matrix that every row meets, each `used` pairs have one of it behind them, which ids do not name.
//
// Grid: (blocks of row tiles, 1, pairs). A thread block takes whole tiles of one pair's expert, of both matrices; its warps
// share the records evenly, and sums meet in shared memory, as in gemv.cu. Few rows choose few experts twice, so every pair
// reads its own; what two pairs share comes from L2.
//
// Ids are read, and records asked for, before what came before is over. So that must be one launch that lets others start
// only when everything before it is over, as moe_gemv itself does: ids are older.
//
// instructions: (IDP\.4A|IMMA) (LDG|LDGSTS)\.[.\w]*128

struct Stack {
  const u8* records[2];  // of all experts, one below the other; the second: or none
  const u8* beside[2];   // or none
  const int *ids, *lut;
  float* y;                        // f32[pairs][n]
  int per, rows, n, pairs, used;   // rows of x
  int act, clamp;                  // clamp: 0 none, 1 before the activation, 2 after it
  float limit;
};

__device__ __forceinline__ float limited(const Stack& s, float gate, float up) {
  if (s.clamp == 1) gate = fminf(gate, s.limit);
  float v = activated(s.act, gate, 1.f);
  if (s.clamp == 2) v = fminf(v, s.limit);
  return v * (s.clamp ? fminf(fmaxf(up, -s.limit), s.limit) : up);
}

// Shared memory: x, rings, then sums f32[WARPS][room][16], by warp and its how-manieth tile, the second matrix's behind the
// first one's.
extern "C" __global__ void THREADS(1024)
moe_gemv(const u8* __restrict__ x, Stack stack, int tiles, int blocks, int room) {
  extern __shared__ __align__(16) u8 shared[];
  const int pair = blockIdx.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tile0 = first_unit(blockIdx.x, gridDim.x, tiles), num_tiles = first_unit(blockIdx.x + 1, gridDim.x, tiles) - tile0;
  const bool two = stack.records[1] != nullptr;
  const int one = num_tiles * blocks, units = two ? 2 * one : one;
  const int begin = first_unit(warp, WARPS, units), end = first_unit(warp + 1, WARPS, units);
  u8* ring = shared + blocks * X_BYTES + warp * STAGES * RECORD;
  float* partial = (float*)(shared + blocks * X_BYTES + WARPS * STAGES * RECORD);
  const int each = stack.used + (stack.beside[0] != nullptr), place = pair % each;
  const bool common = place == stack.used;
  const int id = common ? 0 : (int)load1(stack.ids + pair / each * stack.used + place), expert = common ? 0 : id < 0 ? -1 : stack.lut[id];
  if (expert < 0) {
    wait_for_previous();
    let_next_start();
    for (int i = tile0 * 16 + threadIdx.x; i < min((tile0 + num_tiles) * 16, stack.n); i += 32 * WARPS) stack.y[(size_t)pair * stack.n + i] = 0.f;
    return;
  }

  const size_t skipped = ((size_t)expert * tiles + tile0) * blocks * RECORD;
  const u8* source = nullptr;
  int next = begin;
  u8* slot = ring;  // of the oldest record, and so of the next
  auto seek = [&]() {
    const bool second = next >= one;
    source = common ? (second ? stack.beside[1] : stack.beside[0]) : (second ? stack.records[1] : stack.records[0]);
    source += skipped + (size_t)(next - (second ? one : 0)) * RECORD;
  };
  auto fetch = [&]() {
    if (next < end) {
      copy_record(slot, source, lane);
      source += RECORD;
      if (++next == one && next < end) seek();
    }
    commit();
    slot = slot == ring + (STAGES - 1) * RECORD ? ring : slot + RECORD;
  };
  if (begin < end) seek();
#pragma unroll
  for (int i = 0; i < STAGES; i++) fetch();
  wait_for_previous();
  let_next_start();
  const u8* given = x + (size_t)(pair / stack.per) * X_BYTES;
  for (int i = threadIdx.x; i < blocks * (X_BYTES / 16); i += 32 * WARPS) {  // not behind the records, as a copy would be
    const int block = i / (X_BYTES / 16), piece = i % (X_BYTES / 16);
    *(float4*)(shared + i * 16) = load4((const float*)(given + (size_t)block * stack.rows * X_BYTES + piece * 16));
  }
  __syncthreads();

  float total[2][X_ROWS] = {};
  float* mine = partial + warp * room * 16 + (lane >> 2);
  int block = begin % blocks;
  for (int i = begin; i < end; i++) {
    wait_but<STAGES - 1>();
    __syncwarp();
    multiply(total, slot, shared + block * X_BYTES, lane);
    __syncwarp();
    fetch();
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

  for (int tile = warp; tile < num_tiles; tile += WARPS) {  // a lane has a row of one matrix
    const int owner = (lane >> 4) * num_tiles + tile, at = (tile0 + tile) * 16 + (lane & 15);
    float v = 0.f;
    if (owner * blocks < units)
      for (int w = worker_of(owner * blocks, WARPS, units); w < WARPS; w++) {
        const int start = first_unit(w, WARPS, units);
        if (start >= (owner + 1) * blocks) break;
        if (start < first_unit(w + 1, WARPS, units)) v += partial[(w * room + owner - start / blocks) * 16 + (lane & 15)];
      }
    const float up = __shfl_xor_sync(~0u, v, 16);
    if (lane < 16 && at < stack.n) stack.y[(size_t)pair * stack.n + at] = two ? limited(stack, v, up) : v;
  }
}
