// The one held row of a sequence, one value head: all of the op `delta`, gated. See `luce_core.ops.delta` for the recurrence.
//
//   wait | convolution, SiLU, norms; what key and query read of the state, by the channels of a warp | those of all warps are
//   added; u, y and its square | norm, gate
//
// "|" is a barrier of the block, the first that of the launch. A step is nothing but launches, each with one row, so what counts
// is the way from there to the end: what does not depend on the launch in front lies before it, state and window in registers.
// Eight warps have 16 channels of all columns each: their keys and queries come from the warp's own lanes, without a barrier, and
// all lanes read them at one address. Lower lanes have a key's channel, then a column's value and u; upper ones a query's channel,
// then the column's gate and y. What both compute is one sequence of instructions: step = sigmoid(b) = exp(-softplus(-b)).
//
// instructions: LDG\.[.\w]*128 LDS\.[.\w]*128 FFMA MUFU\.EX2 MUFU\.RSQ

#define CHANNELS 16             // of a warp; as many columns, when all are added
#define THREADS (32 * WARPS)
#define ROW_STRIDE (DIM + 16)   // floats: what lower and upper lanes read lies in different banks
static_assert(WARPS * CHANNELS == DIM, "warps share the channels");

struct Shared {
  float given[WARPS][2][CHANNELS];    // keys, queries
  float read[WARPS][2][ROW_STRIDE];   // what they read of the state, of every column
  float squares[2][WARPS], met[WARPS], of_y[WARPS];  // of keys, of queries; keys times queries; squares of y
  float step[WARPS][2];               // what of a row is taken; what is left of the state
};
static_assert(sizeof(Shared) == SHARED, "delta_one.py counts these bytes");

// No branch: what stands around it is waited for meanwhile.
__device__ __forceinline__ void store_if(u32 really, float* to, float v) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p st.global.f32 [%1], %2;}" ::"r"(really), "l"(to), "f"(v) : "memory");
}
__device__ __forceinline__ float read1(const float* from) { return __uint_as_float(load1(from)); }
__device__ __forceinline__ void add(float4& sum, const float4& v, float by) { sum.x += v.x * by, sum.y += v.y * by, sum.z += v.z * by, sum.w += v.w * by; }
__device__ __forceinline__ float sum_of(const float (&v)[WARPS]) { return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])); }
__device__ __forceinline__ float total(const float (&of)[WARPS]) {
  const float4 *v = (const float4*)of, one = v[0], two = v[1];
  return ((one.x + one.y) + (one.z + one.w)) + ((two.x + two.y) + (two.z + two.w));
}

struct Tap {  // of one channel: the row's own weight, what the rows before give
  float own, before;
};
__device__ __forceinline__ Tap tap_of(const float* taps, const float* window, int channel, int channels) {
  const float4 w = load4(taps + 4 * channel);
  const float one = read1(window + channel), two = read1(window + channels + channel), three = read1(window + 2 * channels + channel);
  return Tap{w.w, w.x * one + w.y * two + w.z * three};
}

// Grid (value heads, 1, sequences). Sequences of other numbers of rows are left alone. Places within a tensor are words.
extern "C" __global__ void __launch_bounds__(320, 2)  // 96 registers: beside two blocks of gemv there are 112 left
delta_one(Held o) {
  extern __shared__ __align__(16) u8 shared[];
  Shared& s = *(Shared*)shared;
  let_next_start();
  const u32 h = blockIdx.x, heads = gridDim.x, seq = blockIdx.z, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const u32 slot = load1(o.slots + seq), start = load1(o.query_start + seq), end = load1(o.query_start + seq + 1);
  if (end != start + 1) {
    wait_for_previous();
    return;
  }
  const u32 kh = h % KEY_HEADS, channels = (2 * KEY_HEADS + heads) * DIM, log = slot * o.most;
  const u32 upper = lane >> 4, own = lane & 15, at = CHANNELS * warp + own;
  const u32 channel = (upper ? kh : KEY_HEADS + kh) * DIM + at, of_value = (2 * KEY_HEADS + h) * DIM + at, column = h * DIM + at;

  // --- in front of the wait
  float4 memory[CHANNELS];  // four columns
  const float* from = o.state + ((slot * heads + h) * DIM + CHANNELS * warp) * DIM + 4 * lane;
#pragma unroll
  for (int i = 0; i < CHANNELS; i++) memory[i] = load4(from + i * DIM);
  const float* window = o.window + slot * ABOVE * channels;
  const Tap mine = tap_of(o.taps, window, channel, channels);
  Tap other = tap_of(o.taps, window, of_value, channels);
  if (upper) other = Tap{1.f, 0.f};
  const float weight = upper ? read1(o.norm + at) : 1.f, scale = upper ? o.q_scale : 1.f;
  const float shift = upper ? read1(o.dt + h) : 0.f, rate = upper ? read1(o.a + h) : -1.f, sign = upper ? 1.f : -1.f;
  const float* to_gate = upper ? o.decay + (start * o.lddecay + h) : o.beta + (start * o.ldbeta + h);
  const float* to_more = upper ? o.z + (start * o.ldz + column) : o.qkv + (start * o.ldqkv + of_value);
  wait_for_previous();

  // --- what the launch in front has written, all asked for at once
  const float raw = read1(to_gate), more = read1(to_more), x = read1(o.qkv + (start * o.ldqkv + channel));
  const float of_row = silu(x * mine.own + mine.before);
  s.given[warp][upper][own] = of_row;
  __syncwarp();
  float4 by_key = {0.f, 0.f, 0.f, 0.f}, by_query = by_key;
#pragma unroll
  for (int i = 0; i < CHANNELS; i += 4) {
    const float4 k = *(const float4*)(s.given[warp][0] + i), q = *(const float4*)(s.given[warp][1] + i);
    add(by_key, memory[i], k.x), add(by_query, memory[i], q.x);
    add(by_key, memory[i + 1], k.y), add(by_query, memory[i + 1], q.y);
    add(by_key, memory[i + 2], k.z), add(by_query, memory[i + 2], q.z);
    add(by_key, memory[i + 3], k.w), add(by_query, memory[i + 3], q.w);
  }
  *(float4*)(s.read[warp][0] + 4 * lane) = by_key, *(float4*)(s.read[warp][1] + 4 * lane) = by_query;
  float square = of_row * of_row, met = of_row * __shfl_xor_sync(~0u, of_row, 16);
#pragma unroll
  for (int i = 8; i; i >>= 1) square += __shfl_xor_sync(~0u, square, i), met += __shfl_xor_sync(~0u, met, i);
  const float decay = rate * softplus(raw * sign + shift), step = exp_of(decay);  // of lower lanes log(step), step
  if (!own) s.squares[upper][warp] = square, s.met[warp] = met, s.step[warp][upper] = step;

  const float of_column = silu(more * other.own + other.before) * weight;  // value; gate
  __syncthreads();

  const float size = scale * inverse_root(total(s.squares[upper]) + o.unit_eps);
  float part[WARPS];
#pragma unroll
  for (int i = 0; i < WARPS; i++) part[i] = s.read[i][upper][at];
  const float read = sum_of(part) * s.step[warp][1] * size;
  const float u = step * (of_column - read);
  const float y = read + total(s.met) * size * __shfl_sync(~0u, u * size, own);  // of the key's lane
  float sum = y * y;
#pragma unroll
  for (int i = 8; i; i >>= 1) sum += __shfl_xor_sync(~0u, sum, i);
  if (lane == 16) s.of_y[warp] = sum;
  __syncthreads();

  const float inverse = inverse_root(total(s.of_y) * (1.f / DIM) + o.norm_eps);
  const bool keeps = h < KEY_HEADS;  // one value head of each key head's
  store_if(keeps, o.log_x + (log * channels + channel), x);
  store_if(!upper, o.log_x + (log * channels + of_value), more);
  store_if(!upper, o.log_u + (log * heads * DIM + column), u);
  store_if(!upper && keeps, o.log_k + ((log * KEY_HEADS + kh) * DIM + at), of_row * size);
  store_if(threadIdx.x == 16, o.log_g + (log * heads + h), decay);
  store_if(upper, o.out + (start * heads * DIM + column), y * of_column * inverse);
}
