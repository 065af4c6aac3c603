// The same of experts. Behind gemv.cu, whose `multiply` and `make_ready` it uses, and choose.cuh.
//
// moe_gemv: pair p, of row p / per of norm(x) and of expert lut[ids[p]]. Of two matrices (gate and up) y is act(gate) · up.
// With `beside`, a matrix that every row meets, each `used` pairs have one of it behind them, which ids do not name.
//
// Grid: (blocks of row tiles, 1, pairs). A thread block takes whole tiles of one pair's expert, of both matrices; its warps
// share the records evenly, and sums meet in shared memory, as in gemv.cu. Of the pairs of one expert X_ROWS go together,
// through the first one's thread blocks: the others' have nothing to do.
//
// Which records there are is known when ids are; those of `beside` always: they are asked for before the wait.
// x comes ready from the router's launch, or is made ready while records are on their way.
//
// instructions: (IDP\.4A|IMMA) (LDG|LDGSTS)\.[.\w]*128

struct Stack {
  const u8* records[2];  // of all experts, one below the other; the second: or none
  const u8* beside[2];   // or none
  const int *ids, *lut;
  const float *x, *norm;  // [rows][ldx]; [width], or none
  const u8* ready;        // norm(x) [blocks][rows][X_BYTES], or none
  float* y;               // [pairs][n]
  int per, n, used, known, width, ldx;  // known: entries of lut
  int act, clamp;                  // clamp: 0 none, 1 before the activation, 2 after it
  float limit, eps;
  Logits logits;  // instead of ids, where X_ROWS is 1
};

__device__ __forceinline__ float limited(const Stack& s, float gate, float up) {
  if (s.clamp == 1) gate = fminf(gate, s.limit);
  float v = activated(s.act, gate, 1.f);
  if (s.clamp == 2) v = fminf(v, s.limit);
  return v * (s.clamp ? fminf(fmaxf(up, -s.limit), s.limit) : up);
}

// The pairs that go with this one -> taken, itself first, and how many; 0: it goes with an earlier one. By whole warps.
__device__ __forceinline__ int together(int* taken, const Stack& s, const int* lut, int pair, int each, int expert, int lane) {
  if (lane == 0) taken[0] = pair;
  if (X_ROWS == 1) return 1;
  const int row = pair / each, place = pair % each, rows = gridDim.z / each;
  int earlier = 0, later = 0;
  if (place == s.used) {
    earlier = row, later = rows - 1 - row;
    if (lane < later && lane + 1 < X_ROWS) taken[lane + 1] = pair + (lane + 1) * each;
  } else {
    const int own = row * s.used + place;
    for (int base = 0; base < rows * s.used; base += 32) {
      const int at = base + lane, id = at < rows * s.used ? (int)load1(s.ids + at) : -1;
      const bool same = id >= 0 && lut[id] == expert, behind = same && at > own;
      earlier += __popc(__ballot_sync(~0u, same && at < own));
      const u32 all = __ballot_sync(~0u, behind);
      const int among = later + __popc(all & ((1u << lane) - 1));
      if (behind && among + 1 < X_ROWS) taken[among + 1] = at / s.used * each + at % s.used;
      later += __popc(all);
    }
  }
  return earlier % X_ROWS ? 0 : 1 + min(later, X_ROWS - 1);
}

// Shared memory: x [blocks][X_ROWS], rings, sums f32[WARPS][room][X_ROWS][16], by warp and its how-manieth tile, the second
// matrix's behind the first one's; squares f32[X_ROWS][WARPS]; pairs [X_ROWS]; lut; who was chosen.
extern "C" __global__ void AT_A_TIME(X_ROWS > 1 ? 512 : SCALES ? 1024 : 768)
moe_gemv(Stack stack, int tiles, int blocks, int room) {
  extern __shared__ __align__(16) u8 shared[];
  const int pair = blockIdx.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tile0 = first_unit(blockIdx.x, gridDim.x, tiles), num_tiles = first_unit(blockIdx.x + 1, gridDim.x, tiles) - tile0;
  const bool two = stack.records[1] != nullptr;
  const int one = num_tiles * blocks, units = two ? 2 * one : one;
  const int begin = first_unit(warp, WARPS, units), end = first_unit(warp + 1, WARPS, units);
  u8* ring = shared + blocks * X_ROWS * X_BYTES + warp * STAGES * RECORD;
  float* partial = (float*)(shared + blocks * X_ROWS * X_BYTES + WARPS * STAGES * RECORD);
  float* squares = partial + WARPS * room * (16 * X_ROWS);
  int *taken = (int*)(squares + X_ROWS * WARPS), *lut = taken + X_ROWS;
#pragma unroll 1
  for (int i = threadIdx.x; i < stack.known; i += 32 * WARPS) lut[i] = stack.lut[i];
  __syncthreads();
  const int each = stack.used + (stack.beside[0] != nullptr), place = pair % each;
  const bool common = place == stack.used;
  const u8* source = nullptr;
  size_t skipped = (size_t)tile0 * blocks * RECORD;
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
  auto begin_fetching = [&]() {
    if (begin < end) seek();
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch();
  };
  if (common) begin_fetching();
  const int row_of_x = ONE_ROW ? settled(pair / stack.per) : 0, rows_of_x = ONE_ROW ? settled(gridDim.z / stack.per) : 0;
  const int meets_at = ONE_ROW ? settled(worker_of(((lane >> 4) * num_tiles + warp) * blocks, WARPS, units)) : 0;  // of a warp's first sums
  const bool sooner = ONE_ROW && stack.ready, chooses = !common && stack.logits.of;
  wait_for_previous();
  let_next_start();

  if (sooner) {  // than it is known whose weights it meets; by all warps but the one that chooses
    const int idle = WARPS > 1 && chooses ? 32 : 0;
    for (int i = (int)threadIdx.x - idle; i < blocks * (X_BYTES / 16); i += 32 * WARPS - idle) {
      const u8* from = stack.ready + ((size_t)(i / (X_BYTES / 16)) * rows_of_x + row_of_x) * X_BYTES;
      if (i >= 0) copy16(shared + i * 16, from + i % (X_BYTES / 16) * 16);
      else break;
    }
    commit();
  }
  int id = 0;
  if (chooses) {
    int* chosen = lut + stack.known;
    const int row = pair / each;
    if (warp == 0)
      choose(stack.logits, row, place + 1, lane, [&](int at, int best, float) {
        if (lane == 0 && at == place) *chosen = best;
      });
    __syncthreads();
    id = *chosen;
  } else if (!common) {
    id = (int)load1(stack.ids + pair / each * stack.used + place);
  }
  const int expert = common ? 0 : id < 0 ? -1 : lut[id];
  if (expert < 0) {
    if (sooner) wait_all();
#pragma unroll 1
    for (int i = tile0 * 16 + threadIdx.x; i < min((tile0 + num_tiles) * 16, stack.n); i += 32 * WARPS) stack.y[(size_t)pair * stack.n + i] = 0.f;
    return;
  }
  const int live = together(taken, stack, lut, pair, each, expert, lane);
  if (!live) {
    wait_all();
    return;
  }
  __syncwarp();
  if (stack.ready && !sooner) {
    const int rows = gridDim.z / stack.per;
    for (int i = threadIdx.x; i < blocks * live * (X_BYTES / 16); i += 32 * WARPS) {
      const int piece = i % (X_BYTES / 16), n = i / (X_BYTES / 16) % live, block = i / (X_BYTES / 16) / live;
      const u8* from = stack.ready + ((size_t)block * rows + taken[n] / stack.per) * X_BYTES;
      copy16(shared + (block * X_ROWS + n) * X_BYTES + piece * 16, from + piece * 16);
    }
    commit();
  }
  if (!common) {
    skipped += (size_t)expert * tiles * blocks * RECORD;
    begin_fetching();
  }

  if (stack.ready) {
    if (common) wait_all();  // x was asked for last
    else wait_but<STAGES>();
  } else {
    float inverse[X_ROWS];
    if (stack.norm) {
#pragma unroll
      for (int n = 0; n < X_ROWS; n++) {
        float sum = 0.f;
        if (n < live)
          for (int i = threadIdx.x * 4; i < stack.width; i += 32 * WARPS * 4) {
            const float4 v = load4(stack.x + (size_t)(taken[n] / stack.per) * stack.ldx + i);
            sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
          }
#pragma unroll
        for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
        if (lane == 0) squares[n * WARPS + warp] = sum;
      }
      __syncthreads();
#pragma unroll
      for (int n = 0; n < X_ROWS; n++) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < WARPS; i++) sum += squares[n * WARPS + i];
        inverse[n] = 1.f / sqrtf(sum / (float)stack.width + stack.eps);
      }
    }
    for (int i = warp; i < blocks; i += WARPS) {
      const int at = first_column(i * 256, lane);
      float w[8];
      if (stack.norm) columns_of(w, stack.norm, at, stack.width);
#pragma unroll
      for (int n = 0; n < X_ROWS; n++) {
        if (n == live) break;
        float v[8];
        columns_of(v, stack.x + (size_t)(taken[n] / stack.per) * stack.ldx, at, stack.width);
        if (stack.norm)
#pragma unroll
          for (int j = 0; j < 8; j++) v[j] *= inverse[n] * w[j];
        make_ready(shared + (i * X_ROWS + n) * X_BYTES, v, 1.f, lane);
      }
    }
  }
  __syncthreads();

  float total[2][X_ROWS] = {};
  float* mine = partial + warp * room * (16 * X_ROWS) + (lane >> 2);
  int block = begin % blocks;
  for (int i = begin; i < end; i++) {
    wait_but<STAGES - 1>();
    __syncwarp();
    multiply(total, slot, shared + block * X_ROWS * X_BYTES, lane);
    __syncwarp();
    fetch();
    if (++block == blocks || i == end - 1) {
      block = 0;
      leave(total, mine, lane);
      mine += 16 * X_ROWS;
    }
  }
  __syncthreads();

  for (int i = warp; i < num_tiles * live; i += WARPS) {  // a lane has a row of one matrix
    const int tile = i / live, n = i % live;
    const int owner = (lane >> 4) * num_tiles + tile, at = (tile0 + tile) * 16 + (lane & 15);
    float v = 0.f;
    if (owner * blocks < units)
      for (int w = ONE_ROW && i == warp ? meets_at : worker_of(owner * blocks, WARPS, units); w < WARPS; w++) {
        const int start = first_unit(w, WARPS, units);
        if (start >= (owner + 1) * blocks) break;
        if (start < first_unit(w + 1, WARPS, units))
          v += partial[(w * room + owner - start / blocks) * (16 * X_ROWS) + n * 16 + (lane & 15)];
      }
    const float up = __shfl_xor_sync(~0u, v, 16);
    if (lane < 16 && at < stack.n) stack.y[(size_t)taken[n] * stack.n + at] = two ? limited(stack, v, up) : v;
  }
}
