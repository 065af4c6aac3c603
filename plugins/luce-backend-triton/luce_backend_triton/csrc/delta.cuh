// Held rows of Gated DeltaNet: what the kernels are given, and what both compute with. Heads of 128; a convolution over 4 rows.

#define DIM 128
#define ABOVE 3  // rows of the window

struct Held {
  const float *qkv, *z, *beta, *decay;
  float* out;
  const float *window, *taps, *state;
  float *log_x, *log_k, *log_u, *log_g;
  const float *norm, *a, *dt;
  const int* parent;
  const long long* sees;
  const int *query_start, *slots;
  int ldqkv, ldz, ldbeta, lddecay, words, most;
  int above;  // of trees: sequences of so many rows are left to others
  float unit_eps, norm_eps, q_scale;
  int made_rows;
  u8* made;               // of trees: out made ready for mma.cu, u8[blocks][made_rows][X_BYTES]; or nothing
  const float* factors;   // what those f16s are to be multiplied with, and its inverse
};

// With the hardware's own exponentials and quotients: otherwise there is more to it for numbers next to none.
__device__ __forceinline__ float exp2_of(float x) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float inverse_of(float x) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float inverse_root(float x) { float r; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float exp_of(float x) { return exp2_of(x * 1.4426950408889634f); }
__device__ __forceinline__ float sigmoid(float x) { return inverse_of(1.f + exp_of(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float log2_of(float x) { float r; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float softplus(float x) { return x > 20.f ? x : log2_of(1.f + exp_of(x)) * 0.6931471805599453f; }
