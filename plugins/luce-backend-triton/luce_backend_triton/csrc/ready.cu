// x, norm(x) or act(x) · up as csrc/mma.cu wants it, a warp for every MAKES blocks of 256 columns of a row.
//
// Defined besides: NORM; ACT, as `activated` has it, 0 none.
// Grid: (rows, 1, parts of a row); of a norm one part, so that its thread block has the sum of the row's squares. A block of
// columns does not wait for it: what a norm divides by goes into the factor that its products are multiplied with. Beside
// it lies Σ of squares behind the norm; squares_out: f32[rows], those of x, where anybody wants them.
//
// instructions: LDG\.[.\w]*128 STG\.[.\w]*128

// A warp's 256 columns, the largest 256 to 512 where it is not 0; what they are to be multiplied with then.
__device__ __forceinline__ float make_halves(u8* to, const float (&v)[8], int lane) {
  float top = 0.f;
#pragma unroll
  for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(v[i]));
  top = __uint_as_float(most(__float_as_uint(top)));  // as numbers without a sign
  const u32 exponent = top > 0.f ? exponent_of(top) : 127;
  const float steps = __uint_as_float((263 - exponent) << 23);  // 512 / power
  u32 word[4];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float low, high;
    word[i] = pack_halves(v[2 * i] * steps, v[2 * i + 1] * steps);
    floats(word[i], low, high);
    sum += low + high;
  }
  *(u32x4*)(to + lane * 16) = u32x4{word[0], word[1], mul2(word[2], 0x2c002c00), mul2(word[3], 0x2c002c00)};  // a sixteenth
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  if ((lane & 3) == 0) ((u16*)(to + 512))[lane >> 2] = (u16)pack_halves(sum * (1.f / 32), 0.f);
  return __uint_as_float((exponent - 9) << 23);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
ready(In in, u8* out, float* squares_out, int m, int blocks) {
  let_next_start();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = blockIdx.x, first = blockIdx.z * (WARPS * MAKES) + warp;
  const size_t from = (size_t)row * in.ldx;
  float v[MAKES][8], w[MAKES][8], factor[MAKES], inverse = 1.f;
  auto column = [&](int k) { return first_column((first + k * WARPS) * 256, lane); };
#pragma unroll
  for (int k = 0; k < MAKES; k++)
    if (NORM) columns_of(w[k], in.weight, column(k), in.k);  // no launch makes it
  wait_for_previous();
#pragma unroll
  for (int k = 0; k < MAKES; k++) {
    columns_of(v[k], in.x + from, column(k), in.k);
    if (ACT) columns_of(w[k], in.up + from, column(k), in.k);
  }
#if NORM
  extern __shared__ __align__(16) float2 squares_of[];
  float2 squares = {0.f, 0.f};  // of x, and times the norm's weight
  auto add_up = [&]() {
#pragma unroll
    for (int i = 16; i; i >>= 1) squares.x += __shfl_xor_sync(~0u, squares.x, i), squares.y += __shfl_xor_sync(~0u, squares.y, i);
  };
#pragma unroll
  for (int k = 0; k < MAKES; k++)
#pragma unroll
    for (int i = 0; i < 8; i++) squares.x += v[k][i] * v[k][i], v[k][i] *= w[k][i], squares.y += v[k][i] * v[k][i];
  add_up();
  if (lane == 0) squares_of[warp] = squares;
#elif ACT
#pragma unroll
  for (int k = 0; k < MAKES; k++)
#pragma unroll
    for (int i = 0; i < 8; i++) v[k][i] = activated(ACT, v[k][i], w[k][i]);
#endif
#pragma unroll
  for (int k = 0; k < MAKES; k++)
    if (first + k * WARPS < blocks) factor[k] = make_halves(out + ((size_t)(first + k * WARPS) * m + row) * X_BYTES, v[k], lane);
#if NORM
  __syncthreads();
  squares = lane < WARPS ? squares_of[lane] : float2{0.f, 0.f};
  add_up();
  inverse = 1.f / sqrtf(squares.x / (float)in.k + in.eps);
  if (squares_out && threadIdx.x == 0) squares_out[row] = squares.x;
#endif
#pragma unroll
  for (int k = 0; k < MAKES; k++)
    if (lane == 0 && first + k * WARPS < blocks) {
      u8* to = out + ((size_t)(first + k * WARPS) * m + row) * X_BYTES;
      *(float*)(to + X_FACTOR) = factor[k] * inverse;
#if NORM
      *(float*)(to + X_LENGTH) = squares.y * inverse * inverse;
#endif
    }
}
