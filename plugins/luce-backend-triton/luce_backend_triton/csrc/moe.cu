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
  int n, used, known, width, ldx;  // known: entries of lut
  int act, clamp;                  // clamp: 0 none, 1 before the activation, 2 after it
  float limit, eps;
  Logits logits;  // instead of ids, where X_ROWS is 1
};

struct Cut {
  Shares tiles;  // of thread blocks
  int blocks, parts, each, rows, sums;  // parts: gemv.cu; pairs of a row; rows of x; numbers in shared memory
  u32 by_blocks, by_parts, by_each, by_per;  // per: pairs that meet a row of x
  u32 expert_bytes;                          // of a matrix
};

__device__ __forceinline__ float limited(int act, int clamp, float limit, float gate, float up) {
  if (!clamp) return activated(act, gate, up);
  if (clamp == 1) gate = fminf(gate, limit);
  float v = activated(act, gate, 1.f);
  if (clamp == 2) v = fminf(v, limit);
  return v * fminf(fmaxf(up, -limit), limit);
}

// The pairs that go with this one -> taken, itself first, and how many; 0: it goes with an earlier one. By whole warps.
__device__ __forceinline__ int together(int* taken, const Stack& s, const int* lut, int pair, int each, int expert, int lane) {
  if (lane == 0) taken[0] = pair;
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

// Shared memory: x [blocks][X_ROWS], rings, sums f32[matrices][tiles][parts][X_ROWS][16] as in gemv.cu; squares
// f32[X_ROWS][WARPS]; pairs [X_ROWS]; lut; whose records.
extern "C" __global__ void AT_A_TIME(X_ROWS > 1 ? 512 : SCALES ? 1024 : 768)
moe_gemv(Stack stack, Cut cut) {
  extern __shared__ __align__(16) u8 shared[];
  const int pair = blockIdx.z, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, blocks = cut.blocks, parts = cut.parts;
  const int tile0 = first_of(cut.tiles, blockIdx.x), num_tiles = first_of(cut.tiles, blockIdx.x + 1) - tile0;
  const bool two = stack.records[1] != nullptr;
  const int one = num_tiles * blocks, units = two ? 2 * one : one;
  const Shares shares = {units / WARPS, units % WARPS};
  const int begin = first_of(shares, warp), end = first_of(shares, warp + 1);
  u8* ring = shared + blocks * X_ROWS * X_BYTES + warp * STAGES * RECORD;
  float* partial = (float*)(shared + blocks * X_ROWS * X_BYTES + WARPS * STAGES * RECORD);
  float* squares = partial + cut.sums;
  int *taken = (int*)(squares + X_ROWS * WARPS), *lut = taken + X_ROWS;
  const int row = quotient(pair, cut.by_each), place = pair - row * cut.each, row_of_x = quotient(pair, cut.by_per);
  auto row_of = [&](int one) { return ONE_ROW ? row_of_x : quotient(one, cut.by_per); };
  const bool common = place == stack.used;
  int next = begin;
  u8* slot = ring;  // of the oldest record, and so of the next
  const size_t skipped = (size_t)tile0 * blocks * RECORD + lane * 16;
  const u8* second = (common ? stack.beside[1] : stack.records[1]) + skipped;  // from the second matrix on; of the first expert so far
  const u8* source = begin < one ? (common ? stack.beside[0] : stack.records[0]) + skipped + (size_t)begin * RECORD : second + (size_t)(begin - one) * RECORD;
  auto fetch = [&]() {
    if (next < end) {
      copy_lanes(slot + lane * 16, source, lane);
      source = ++next == one ? second : source + RECORD;
    }
    commit();
    slot = slot == ring + (STAGES - 1) * RECORD ? ring : slot + RECORD;
  };
  if (common) {
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch();
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < stack.known; i += 32 * WARPS) lut[i] = stack.lut[i];
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < cut.sums; i += 32 * WARPS * 4) *(float4*)(partial + i) = float4{0.f, 0.f, 0.f, 0.f};
  const int tile = quotient(begin, cut.by_blocks);  // of either matrix
  int block = settled(begin - tile * blocks);
  float* mine = partial + (tile * parts + warp - quotient(warp, cut.by_parts) * parts) * (16 * X_ROWS) + (lane >> 2);
  const bool sooner = ONE_ROW && stack.ready, chooses = !common && stack.logits.of;
  const Looks looks = look_at(stack.logits, row, lane);
  __syncthreads();
  wait_for_previous();
  let_next_start();

  if (sooner) {  // than it is known whose weights it meets; by all warps but the one that chooses
    const int idle = WARPS > 1 && chooses ? 32 : 0;
    const u8* from = stack.ready + (size_t)row_of_x * X_BYTES;
    const int apart = (cut.rows - 1) * X_BYTES;
#pragma unroll 1
    for (int i = (int)threadIdx.x - idle; i < blocks * (X_BYTES / 16) && i >= 0; i += 32 * WARPS - idle)
      copy16(shared + i * 16, from + (size_t)(i / (X_BYTES / 16)) * apart + i * 16);
    commit();
  }
  int expert = 0;
  if (chooses) {
    int* chosen = lut + stack.known;
    if (warp == 0)
      choose(stack.logits, looks, place, place + 1, lane, [&](int, int id, float) { *chosen = id < 0 ? -1 : lut[id]; });
    if (sooner) wait_all();
    __syncthreads();
    expert = *chosen;
  } else if (!common) {
    const int id = (int)load1(stack.ids + row * stack.used + place);
    expert = id < 0 ? -1 : lut[id];
  }
  if (expert < 0) {
    if (sooner) wait_all();
#pragma unroll 1
    for (int i = tile0 * 16 + threadIdx.x; i < min((tile0 + num_tiles) * 16, stack.n); i += 32 * WARPS) stack.y[(size_t)pair * stack.n + i] = 0.f;
    return;
  }
  const int live = ONE_ROW ? 1 : together(taken, stack, lut, pair, cut.each, expert, lane);
  if (!live) {
    wait_all();
    return;
  }
  if (!ONE_ROW) __syncwarp();
  if (stack.ready && !sooner) {
    for (int i = threadIdx.x; i < blocks * live * (X_BYTES / 16); i += 32 * WARPS) {
      const int piece = i % (X_BYTES / 16), n = i / (X_BYTES / 16) % live, at = i / (X_BYTES / 16) / live;
      const u8* from = stack.ready + ((size_t)at * cut.rows + row_of(taken[n])) * X_BYTES;
      copy16(shared + (at * X_ROWS + n) * X_BYTES + piece * 16, from + piece * 16);
    }
    commit();
  }
  if (!common) {
    const size_t before = (size_t)(u32)expert * cut.expert_bytes;
    source += before, second += before;
#pragma unroll
    for (int i = 0; i < STAGES; i++) fetch();
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
            const float4 v = load4(stack.x + (size_t)row_of(taken[n]) * stack.ldx + i);
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
        float v[1][8];
        columns_of(v[0], stack.x + (size_t)row_of(taken[n]) * stack.ldx, at, stack.width);
        if (stack.norm)
#pragma unroll
          for (int j = 0; j < 8; j++) v[0][j] *= inverse[n] * w[j];
        make_ready(shared + (i * X_ROWS + n) * X_BYTES, 0, v, {1.f}, 1, lane);
      }
    }
  }
  // While records are on their way: where a lane's sums lie, and where they go.
  const int act = settled(stack.act), clamp = settled(stack.clamp), apart = 16 * X_ROWS;
  const float* sums = settled(partial + (lane >> 4) * num_tiles * parts * apart + (lane & 15));
  float* y = settled(stack.y + tile0 * 16 + (lane & 15) + (ONE_ROW ? (size_t)pair * stack.n : 0));
  const int rows_left = settled(lane < 16 ? stack.n - tile0 * 16 - lane : 0);
  if (!(sooner && chooses)) __syncthreads();  // else x was there when it was known who was chosen

  float total[2][X_ROWS] = {};
  for (int i = begin; i < end; i++) {
    wait_but<STAGES - 1>();
    __syncwarp();
    multiply(total, slot, shared + block * X_ROWS * X_BYTES, lane);
    __syncwarp();
    fetch();
    if (++block == blocks || i == end - 1) {
      block = 0;
      leave(total, mine, lane);
      mine += parts * apart;
    }
  }
  __syncthreads();

#pragma unroll 1
  for (int i = warp; i < num_tiles * live; i += WARPS) {  // a lane has a row of one matrix
    const int at = ONE_ROW ? i : i / live, n = i - at * live;
    const float* from = sums + at * parts * apart + n * 16;
    float v = 0.f;
    if (two || lane < 16)
#pragma unroll 1
      for (int k = 0; k < parts; k += 4) {
        float some[4];
#pragma unroll
        for (int j = 0; j < 4; j++) some[j] = k + j < parts ? from[(k + j) * apart] : 0.f;
#pragma unroll
        for (int j = 0; j < 4; j++) v += some[j];
      }
    const float up = __shfl_xor_sync(~0u, v, 16);
    if (at * 16 < rows_left) y[at * 16 + (ONE_ROW ? 0 : (size_t)taken[n] * stack.n)] = two ? limited(act, clamp, stack.limit, v, up) : v;
  }
}
