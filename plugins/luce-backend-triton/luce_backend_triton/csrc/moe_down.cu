// Behind gemv.cu too, whose `multiply` and `make_ready` it uses, and choose.cuh: the sum over all experts of a row.
//
// y[row] = Σ over the experts of a row of weight · expert's matrix · given, + residual. A shared expert comes last,
// its weight sigmoid(mix · norm(x)).
//
// Grid: (blocks of row tiles, 1, rows). A part is 256 columns of one expert; warp w has parts w, w + WARPS, ... of all tiles
// of its thread block, and makes their x ready for itself, AT_ONCE parts at a time. Shared memory: of each warp its x of so
// many, then rings, sums f32[WARPS][most tiles][16], residual f32[most tiles][16], products and squares f32[2][WARPS], weights
// f32[each], an even number of them, and where experts lie, [each].
//
// `given` is what the launch before makes. All else is older, and read before that one is over, as in moe.cu: three thread
// blocks of it and one of this find room in a multiprocessor's registers; with scales as halves or e4m3, two and one.
//
// instructions: (IDP\.4A|IMMA) (LDG|LDGSTS)\.[.\w]*128

struct Down {
  const u8 *records, *beside;  // of the shared expert, or none
  const int *ids, *lut;        // [rows][used]
  const float* given;          // [rows · each][hidden], each: used, and the shared one
  const float* weights;        // [rows][ldw]
  const float *x, *norm, *mix;  // [rows][ldx]; norm, mix: [width], or none
  const float* residual;        // [rows][ldr], or none
  float* y;                     // [rows][n]
  int used, hidden, width, n, ldw, ldx, ldr;
  float eps;
  Logits logits;  // instead of ids and weights, of at most 32
};

struct DownCut {
  Shares tiles;  // of thread blocks
  int blocks, parts, room;  // room: the most tiles of a thread block
  u32 by_blocks, expert_bytes;
};

#define AT_ONCE (STAGES > 2 ? 3 : 2)  // so the columns of all that a warp has are asked for at once, where its records are

extern "C" __global__ void AT_A_TIME(SCALES > 1 && SCALES < 6 ? 1024 : 0)
moe_down(Down d, DownCut cut) {
  extern __shared__ __align__(16) u8 shared[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.z;
  const int blocks = cut.blocks, parts = cut.parts, each = d.used + (d.beside != nullptr);
  const int tile0 = first_of(cut.tiles, blockIdx.x), num_tiles = first_of(cut.tiles, blockIdx.x + 1) - tile0;
  u8 *x = shared + warp * AT_ONCE * X_BYTES, *ring = shared + WARPS * AT_ONCE * X_BYTES + warp * STAGES * RECORD;
  float* partial = (float*)(shared + WARPS * (AT_ONCE * X_BYTES + STAGES * RECORD));
  float* residual = partial + WARPS * cut.room * 16;
  float* scratch = residual + cut.room * 16;
  float* weight = scratch + 2 * WARPS;
  const u8** matrix = (const u8**)(weight + each + (each & 1));  // tile0 of it
  const u8* first_expert = d.records + (size_t)tile0 * blocks * RECORD;
  auto matrix_of = [&](int id) {
    const int place = id < 0 ? -1 : d.lut[id];
    return place < 0 ? nullptr : first_expert + (size_t)(u32)place * cut.expert_bytes;
  };
  const bool chooses = d.logits.of;
  const int idle = WARPS > 1 && chooses ? 1 : 0, helper = (int)threadIdx.x - 32 * idle, helpers = 32 * (WARPS - idle);  // idle: the warp that chooses
  const int sums = num_tiles * 16, first_row = tile0 * 16;
  const bool weighs = chooses && threadIdx.x < d.used;  // a lane one of those chosen
  bool there = false;
  if (chooses && warp == 0) {
    int* ids = (int*)matrix;
    choose(d.logits, look_at(d.logits, row, lane), 0, d.used, lane, [&](int at, int id, float logit) { ids[at] = id, weight[at] = logit; });
    __syncwarp();
    const int id = weighs ? ids[lane] : -1;
    __syncwarp();
    const u8* of = matrix_of(id);
    there = of;
    if (weighs) matrix[lane] = there ? of : first_expert;  // what is not there counts for nothing
  }
  if (helper >= 0) {
    if (helper == 0 && d.beside) matrix[d.used] = d.beside + (size_t)tile0 * blocks * RECORD, weight[d.used] = 1.f;
    if (!chooses)
#pragma unroll 1
      for (int i = helper; i < d.used; i += helpers) {
        const u32 given = load1(d.weights + (size_t)row * d.ldw + i);
        const u8* of = matrix_of((int)load1(d.ids + row * d.used + i));
        matrix[i] = of ? of : first_expert;
        weight[i] = of ? __uint_as_float(given) : 0.f;
      }
#pragma unroll 1
    for (int i = helper; i < sums; i += helpers)
      residual[i] = d.residual && first_row + i < d.n ? __uint_as_float(load1(d.residual + (size_t)row * d.ldr + first_row + i)) : 0.f;
    if (d.mix) {
      const float* from = d.x + (size_t)row * d.ldx;
      float mixed = 0.f, squares = 0.f;
#pragma unroll 2
      for (int i = helper * 4; i < d.width; i += helpers * 4) {
        const float4 v = load4(from + i), m = *(const float4*)(d.mix + i);
        const float4 w = d.norm ? *(const float4*)(d.norm + i) : float4{1.f, 1.f, 1.f, 1.f};
        mixed += v.x * w.x * m.x + v.y * w.y * m.y + v.z * w.z * m.z + v.w * w.w * m.w;
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      }
#pragma unroll
      for (int i = 16; i; i >>= 1) mixed += __shfl_xor_sync(~0u, mixed, i), squares += __shfl_xor_sync(~0u, squares, i);
      if (lane == 0) scratch[warp] = mixed, scratch[WARPS + warp] = squares;
    }
  }
  __syncthreads();

  int next = warp, tile = 0;
  const u8* source = nullptr;
  u8* slot = ring;  // of the oldest record, and so of the next
  auto place_of = [&](int part) { return quotient(part, cut.by_blocks); };
  auto seek = [&]() {
    if (next >= parts) return;
    const int place = place_of(next);
    source = matrix[place] + (u32)((next - place * blocks) * RECORD + lane * 16);
  };
  auto fetch = [&]() {
    if (next < parts) {
      copy_lanes(slot + lane * 16, source, lane);
      source += (size_t)blocks * RECORD;
      if (++tile == num_tiles) tile = 0, next += WARPS, seek();
    }
    commit();
    slot = slot == ring + (STAGES - 1) * RECORD ? ring : slot + RECORD;
  };
  seek();
#pragma unroll
  for (int i = 0; i < STAGES; i++) fetch();
  if (chooses && warp == 0) {
    const float share = weighs ? __expf(weight[lane] - weight[0]) : 0.f;
    float sum = share;
#pragma unroll
    for (int i = 16; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
    if (weighs) weight[lane] = there ? share / sum * d.logits.scale : 0.f;
  }
  if (d.mix) {
    if (warp == WARPS - 1) {
      const bool mine = lane >= idle && lane < WARPS;
      float mixed = mine ? scratch[lane] : 0.f, squares = mine ? scratch[WARPS + lane] : 0.f;
#pragma unroll
      for (int i = 16; i; i >>= 1) mixed += __shfl_xor_sync(~0u, mixed, i), squares += __shfl_xor_sync(~0u, squares, i);
      if (d.norm) mixed /= sqrtf(squares / (float)d.width + d.eps);
      if (lane == 0) weight[d.used] = 1.f / (1.f + __expf(fminf(-mixed, 80.f)));
    }
  }
  __syncthreads();
  const float* from[AT_ONCE];  // a lane's columns of each of these parts, what there is behind, and their weight
  int behind[AT_ONCE];
  float share[AT_ONCE];
  auto aim = [&](int first) {
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) {
      const int part = min(first + k * WARPS, parts - 1), place = place_of(part), at = first_column((part - place * blocks) * 256, lane);
      from[k] = d.given + (size_t)(u32)(row * each + place) * (u32)d.hidden + at;
      behind[k] = settled(d.hidden - at), share[k] = weight[place];
      from[k] = settled(from[k]);
    }
  };
  aim(warp);
  float* y = d.y + (size_t)row * d.n + first_row;
  const int rows_left = d.n - first_row;
  wait_for_previous();
  let_next_start();

  float total[2][X_ROWS] = {};
#pragma unroll 1
  for (int first = warp; first < parts; first += AT_ONCE * WARPS) {
    float v[AT_ONCE][8];
#pragma unroll
    for (int k = 0; k < AT_ONCE; k++) columns_of(v[k], from[k], 0, behind[k]);
    make_ready(x, X_BYTES, v, share, (parts - first + WARPS - 1) / WARPS, lane);
    if (first + AT_ONCE * WARPS < parts) aim(first + AT_ONCE * WARPS);
    const u8* ready = x;
#pragma unroll 1
    for (int part = first; part < min(parts, first + AT_ONCE * WARPS); part += WARPS, ready += X_BYTES) {
      float* mine = partial + warp * cut.room * 16 + (lane >> 2);
      for (int i = 0; i < num_tiles; i++, mine += 16) {
        wait_but<STAGES - 1>();
        __syncwarp();
        multiply(total, slot, ready, lane);
        __syncwarp();
        fetch();
        if (num_tiles == 1 && part + WARPS < parts) break;  // the next part goes on with its sums
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float sum = total[j][0];
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          if ((lane & 3) == 0) mine[8 * j] = part == warp || num_tiles == 1 ? sum : mine[8 * j] + sum;
          total[j][0] = 0.f;
        }
      }
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < sums; i += 32 * WARPS) {
    float v = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      if (w < parts) v += partial[w * cut.room * 16 + i];
    if (i < rows_left) y[i] = v + residual[i];
  }
}
