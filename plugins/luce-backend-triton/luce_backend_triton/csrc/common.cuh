// What both kernels share; compiled in front of each, with these defined: BITS 4, 5, 6, 8; TABLE 0, 1 (IQ4),
// 2 (FP4); ZERO; SCALES (place in formats.SCALE_KINDS); RECORD bytes; CODES bytes of them; X_ROWS (of x at a time);
// TILES (row tiles of a warp); WARPS (of a block); STAGES (of the ring); RESIDENT (blocks of a multiprocessor);
// ACT (as `activated` has it: mma.cu gives act(gate) · up made ready; 0: sums).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
struct __align__(16) u32x4 { u32 x, y, z, w; };
struct __align__(8) u32x2 { u32 x, y; };

#define X_BYTES 576                  // of 256 columns of a row of x; every other row begins 16 banks on
#define X_FACTOR 544                 // where the factor of these columns lies
#define X_LENGTH 548                 // of norm(x) from ready.cu: Σ of squares of the whole row
#define X_SQUARES 560                // of norm(y) without the division: Σ y² and Σ (weight y)² of half of these columns, and of the others
#define HAS_ADD (SCALES == 1 || SCALES == 2)
#define BY_16 (SCALES == 3 || SCALES == 6)
#define TWICE(h) ((u32)(h) * 0x00010001u)

struct Out {  // y f32[m][ldy] = sum · scale + bias + residual
  const float *scale, *bias, *residual;
  float *y, *sums;  // sums: slots of mma.cu
  int m, n, ldr, ldy, beside;
};

// --- pairs of halves in a word

__device__ __forceinline__ u32 sub2(u32 a, u32 b) { u32 r; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
__device__ __forceinline__ u32 mask_or(u32 a, u32 b, u32 c) { u32 r; asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }  // (a & b) | c
// So written, these are no instruction of their own: who takes them reads one half twice.
__device__ __forceinline__ u32 low2(u32 a) { u32 r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(r) : "r"(a)); return r; }
__device__ __forceinline__ u32 high2(u32 a) { u32 r; asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(r) : "r"(a)); return r; }
__device__ __forceinline__ void floats(u32 a, float& low, float& high) {
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(a));
}
__device__ __forceinline__ u32 pack_halves(float low, float high) { u32 r; asm("{.reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h};}" : "=r"(r) : "f"(low), "f"(high)); return r; }

// The exponent of a power of two not below `top`, as the bits of an f32 have it.
__device__ __forceinline__ u32 exponent_of(float top) { return max((__float_as_uint(top) + 0x7fffff) >> 23, 32u); }

// --- tensor cores: d = c + a · b, of halves

__device__ __forceinline__ void mma8(float (&d)[4], const float (&c)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]) : "r"(a0), "r"(a1), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
__device__ __forceinline__ void mma(float (&d)[4], const float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#else
  mma8(d, c, a0, a1, b0);
  mma8(d, d, a2, a3, b1);
#endif
}

// Of 8 × 8 halves, of which lane 4 g + t has (g, 2 t) and (g, 2 t + 1): (2 t, g) and (2 t + 1, g).
__device__ __forceinline__ u32 turned(u32 a) {
  u32 r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}

// --- copies that run ahead

__device__ __forceinline__ void copy16(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
  u32 to = (u32)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(global));
#else
  *(u32x4*)shared = *(const u32x4*)global;
#endif
}
__device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;");
#endif
}
template <int NEWEST> __device__ __forceinline__ void wait_but() {  // for all groups but the newest
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST));
#endif
}
__device__ __forceinline__ void wait() { wait_but<(STAGES > 2 ? STAGES - 2 : 0)>(); }
__device__ __forceinline__ void wait_all() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;");
#endif
}
// A record; to, from: 16 bytes behind those of the lane before.
__device__ __forceinline__ void copy_lanes(u8* to, const u8* from, int lane) {
#pragma unroll
  for (int j = 0; j < RECORD / 512; j++) copy16(to + j * 512, from + j * 512);
  if (RECORD % 512 && lane * 16 < RECORD % 512) copy16(to + RECORD / 512 * 512, from + RECORD / 512 * 512);
}

// --- bulk copies: one thread asks for a whole piece (16 bytes or more of them, and so aligned on both sides). A gate in shared memory
// counts arrivals and bytes; a turn of it is over when all arrived that are told to, and all bytes that they expect.

#ifndef BULK
#define BULK (__CUDA_ARCH__ >= 900)
#endif
#if BULK
__device__ __forceinline__ void open_gate(void* gate, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(gate)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void show_gates() {  // to copies in bulk, by the thread that opened them
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ u32 one_of_warp() {  // 1 for one lane, of which the compiler knows that it is one
  u32 one;
  asm volatile("{.reg .pred p; elect.sync _|p, -1; selp.u32 %0, 1, 0, p;}" : "=r"(one));
  return one;
}
__device__ __forceinline__ void behind_bulk() {  // what copies in bulk do later is behind what this thread did before
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void expect(void* gate, u32 bytes) {  // arrives
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(gate)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bulk(void* shared, const void* global, u32 bytes, void* gate) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"((u32)__cvta_generic_to_shared(shared)),
               "l"(global), "r"(bytes), "r"((u32)__cvta_generic_to_shared(gate))
               : "memory");
}
__device__ __forceinline__ void pass_gate(void* gate, u32 odd) {  // when its turn, even or odd, is over
  asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again;}" ::"r"((u32)__cvta_generic_to_shared(gate)),
               "r"(odd)
               : "memory");
}
#endif

// --- one launch beside the next: what follows may start when all blocks of this one have, and reads results of the one
// before it only from here on

__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Products of one x that are launched one after the other, `beside` in Out: bit 0, another follows; bit 1, another was
// launched before. The first lets the next begin when x is there, so that the next need not wait for the first before it
// multiplies, only before it ends: what comes behind waits for the last alone.
__device__ __forceinline__ void begin_beside(int beside) { if (!(beside & 1)) let_next_start(); }
__device__ __forceinline__ void wait_for_x(int beside) {
  if (!(beside & 2)) wait_for_previous();
  if (beside & 1) let_next_start();
}
__device__ __forceinline__ void end_beside(int beside) { if (beside & 2) wait_for_previous(); }

// Thread blocks of two launches share a multiprocessor's registers. Where those of the first take them all, the second's ask for
// no weights before the first is over. So kernels that are to meet are compiled for as many threads of theirs at a time.
#if __CUDA_ARCH__ == 900
#define AT_A_TIME(threads) __launch_bounds__(32 * WARPS, (threads) / (32 * WARPS) ? (threads) / (32 * WARPS) : 1)
#else
#define AT_A_TIME(threads) __launch_bounds__(32 * WARPS, 1)
#endif

// Of one row of x, what does not depend on what a kernel waits for is known before the wait: above all quotients, which take as
// long as a read of L2. And loops of one turn or two say `unroll 1`: written out four times, their instructions would be far from
// each other.
#define ONE_ROW (X_ROWS == 1)
__device__ __forceinline__ int settled(int v) {  // known from here on, not where it is first used
  asm volatile("" : "+r"(v));
  return v;
}
template <class T> __device__ __forceinline__ T* settled(T* v) {
  asm volatile("" : "+l"(v));
  return v;
}

// What is the same for all of a warp, so that the compiler knows it.
#if BULK
__device__ __forceinline__ int same_in_warp(int v) { return __shfl_sync(~0u, v, 0); }
__device__ __forceinline__ u8* same_in_warp(u8* shared) {
  return (u8*)__cvta_shared_to_generic((u32)same_in_warp((int)__cvta_generic_to_shared(shared)));
}
#else
__device__ __forceinline__ int same_in_warp(int v) { return v; }
__device__ __forceinline__ u8* same_in_warp(u8* shared) { return shared; }
#endif

// --- the input of a product

struct In {  // x, norm(x) or act(x) · up
  const float *x, *up, *weight;
  int k, ldx;
  int act;  // 0 none, else as `activated` has it
  float eps;
};

__device__ __forceinline__ float4 load4(const float* from) {  // what other blocks have written: never through L1
  float4 v;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
}

__device__ __forceinline__ u32 load1(const void* from) {  // likewise
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

__device__ __forceinline__ u32 most(u32 v) {  // of a warp
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, v);
#else
#pragma unroll
  for (int i = 16; i; i >>= 1) v = max(v, __shfl_xor_sync(~0u, v, i));
  return v;
#endif
}

// Of 256 columns beginning with `first`, those a lane makes ready: of its group (of 32), what one word of each half holds.
__device__ __forceinline__ int first_column(int first, int lane) { return first + (lane >> 2) * 32 + (lane & 3) * 4; }

__device__ __forceinline__ void columns_of(float (&v)[8], const float* from, int at, int end) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4 four = at + half * 16 < end ? load4(from + at + half * 16) : float4{0.f, 0.f, 0.f, 0.f};
    v[4 * half] = four.x, v[4 * half + 1] = four.y, v[4 * half + 2] = four.z, v[4 * half + 3] = four.w;
  }
}

// act: 1 silu, 2 gelu, 3 gelu_tanh, 4 relu
__device__ __forceinline__ float activated(int act, float gate, float up) {
  if (act == 1) return __fdividef(up * gate, 1.f + __expf(fminf(-gate, 80.f)));
  if (act == 2) return up * 0.5f * gate * (1.f + erff(gate * 0.7071067811865476f));
  if (act == 3) return __fdividef(up * gate, 1.f + __expf(fminf(-1.5957691216057308f * (gate + 0.044715f * gate * gate * gate), 80.f)));
  return up * fmaxf(gate, 0.f);
}

// --- codebooks as bytes: value + 128

#if TABLE == 1
#define T0 0x3f2d1801u
#define T1 0x766a5d4fu
#define T2 0xa6998d81u
#define T3 0xf1d9c5b5u
#elif TABLE == 2
#define T0 0x83828180u
#define T1 0x8c888684u
#define T2 0x7d7e7f80u
#define T3 0x74787a7cu
#endif
#if TABLE
__device__ __forceinline__ void look_up(u32 word, u32& first, u32& second) {
  u32 select = word & 0x77777777, half = ((word & 0x88888888) >> 1) | 0x32103210;
  first = __byte_perm(__byte_perm(T0, T1, select), __byte_perm(T2, T3, select), half);
  select >>= 16, half >>= 16;
  second = __byte_perm(__byte_perm(T0, T1, select), __byte_perm(T2, T3, select), half);
}
#endif

// --- sharing the work
//
// A unit is one record (of each tile) of one owner of rows: units 0 .. blocks - 1 are the first owner's, and so on. Where
// blocks begin late, quotients stand between them and their first weights: what the host knows, it divides.

struct Shares { int each, more; };  // of each worker; the first `more` have one more
__device__ __forceinline__ int first_of(Shares s, int worker) { return worker * s.each + min(worker, s.more); }

// n / d, where n · d < 2^32; inverse: 2^32 / d, rounded up, 0 for 1.
__device__ __forceinline__ int quotient(int n, u32 inverse) { return inverse ? (int)__umulhi((u32)n, inverse) : n; }

__device__ __forceinline__ float residual_of(const Out& out, int row, int col) {
  return out.residual && row < out.n && col < out.m ? out.residual[(size_t)col * out.ldr + row] : 0.f;
}
__device__ __forceinline__ void finish_with(const Out& out, float v, float residual, int row, int col) {
  if (row >= out.n || col >= out.m) return;
  if (out.scale) v *= *out.scale;
  if (out.bias) v += out.bias[row];
  out.y[(size_t)col * out.ldy + row] = v + residual;
}
__device__ __forceinline__ void finish(const Out& out, float v, int row, int col) {
  finish_with(out, v, residual_of(out, row, col), row, col);
}
