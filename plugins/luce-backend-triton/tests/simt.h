// Runs a CUDA kernel on a CPU, one thread block after another: every thread is a fiber that yields where it waits.
//
// simt.py puts this in front of a source whose inline assembly it has replaced. What hardware does at once happens in
// some order here, so a missing barrier may go unseen; wrong indices, shares and sums do not.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __restrict__
#define __forceinline__ inline
#define __align__(bytes) alignas(bytes)
#define __launch_bounds__(threads)

struct Dim { unsigned x, y, z; };
struct float4 { float x, y, z, w; };
static Dim threadIdx, blockIdx, gridDim;
static uint8_t* block_shared;

template <class A, class B> static auto min(A a, B b) { return a < (A)b ? a : (A)b; }
template <class A, class B> static auto max(A a, B b) { return a > (A)b ? a : (A)b; }

// --- fibers

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Dim thread;
  bool done;
};
static std::vector<Fiber> fibers;
static ucontext_t outside;
static int current, alive;
static void (*body)();

static int following(int from) {
  do from = (from + 1) % (int)fibers.size();
  while (fibers[from].done);
  return from;
}
static void yield() {
  const int me = current, next = following(me);
  if (next == me) return;
  current = next, threadIdx = fibers[next].thread;
  swapcontext(&fibers[me].context, &fibers[next].context);
  current = me, threadIdx = fibers[me].thread;
}
static void run_fiber() {
  body();
  fibers[current].done = true;
  if (!--alive) setcontext(&outside);
  current = following(current), threadIdx = fibers[current].thread;
  setcontext(&fibers[current].context);
}

// --- barriers and what goes by them

struct Barrier {
  int arrived = 0, generation = 0;
  void wait(int count) {
    const int mine = generation;
    if (++arrived == count) arrived = 0, generation++;
    else while (generation == mine) yield();
  }
};
static Barrier of_block;
static std::vector<Barrier> of_warp;
static std::vector<uint32_t> exchanged;

static void __syncthreads() { of_block.wait((int)fibers.size()); }
static void __syncwarp() { of_warp[threadIdx.x / 32].wait(32); }
template <class T> static T __shfl_xor_sync(unsigned, T value, int distance) {
  const int me = threadIdx.x;
  memcpy(&exchanged[me], &value, 4);
  __syncwarp();
  T result;
  memcpy(&result, &exchanged[me ^ distance], 4);
  __syncwarp();
  return result;
}

// --- instructions

static float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static float half_as_float(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return (float)value;
}
#define __expf expf
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t both = (uint64_t)b << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t byte = both >> 8 * (select >> 4 * i & 7) & 255;
    if (select >> 4 * i & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}

// --- a grid

static void run_block(int threads) {
  fibers.assign(threads, Fiber());
  of_block = Barrier(), of_warp.assign(threads / 32, Barrier()), exchanged.assign(threads, 0);
  alive = threads;
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.stack.resize(1 << 16), fiber.done = false, fiber.thread = {(unsigned)i, 0, 0};
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, run_fiber, 0);
  }
  current = 0, threadIdx = fibers[0].thread;
  swapcontext(&outside, &fibers[0].context);
}
static void run_grid(int blocks, int threads, int shared_bytes, int deep = 1) {
  gridDim = {(unsigned)blocks, 1, (unsigned)deep};
  for (int block = 0; block < blocks * deep; block++) {
    blockIdx = {(unsigned)(block % blocks), 0, (unsigned)(block / blocks)};
    block_shared = (uint8_t*)aligned_alloc(64, (shared_bytes + 127) / 64 * 64);
    memset(block_shared, 0xff, shared_bytes);  // NaN: nothing may count on what is there
    run_block(threads);
    free(block_shared);
  }
}
