// Runs a CUDA kernel on a CPU, one thread block after another: every thread is a fiber that yields where it waits. A warp
// runs until it waits for another.
//
// simt.py puts this in front of a source whose inline assembly it has replaced. What hardware does at once happens in
// some order here, so a missing barrier may go unseen; wrong indices, shares and sums do not. Of copies that run ahead one half
// is done when it is asked for, the other when it is waited for: what is read too soon, or written over too soon, is wrong.

#include <setjmp.h>
#include <ucontext.h>

#include <array>
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
#define __launch_bounds__(...)

struct Dim { unsigned x, y, z; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static Dim threadIdx, blockIdx, gridDim;
static uint8_t* block_shared;

template <class A, class B> static auto min(A a, B b) { return a < (A)b ? a : (A)b; }
template <class A, class B> static auto max(A a, B b) { return a > (A)b ? a : (A)b; }

// --- fibers

struct Fiber {
  ucontext_t context;
  jmp_buf place;
  Dim thread;
  bool begun, done;
};
static std::vector<Fiber> fibers;
constexpr int STACK_BYTES = 1 << 16;
static std::vector<char*> stacks;  // of one block after another
static ucontext_t outside;
static int current, alive;
static void (*body)();

static int following(int from) {
  do from = (from + 1) % (int)fibers.size();
  while (fibers[from].done);
  return from;
}
static int beside(int from) {  // in its warp
  const int first = from / 32 * 32;
  do from = first + (from + 1) % 32;
  while (fibers[from].done);
  return from;
}
static void enter(Fiber& next) {  // a context is for the start alone: with it comes a call of the system
  if (next.begun) _longjmp(next.place, 1);
  next.begun = true;
  setcontext(&next.context);
}
static void yield(bool to_warp = false) {
  const int me = current, next = to_warp ? beside(me) : following(me);
  if (next == me) return;
  current = next, threadIdx = fibers[next].thread;
  if (!_setjmp(fibers[me].place)) enter(fibers[next]);
  current = me, threadIdx = fibers[me].thread;
}
static void run_fiber() {
  body();
  fibers[current].done = true;
  if (!--alive) setcontext(&outside);
  current = following(current), threadIdx = fibers[current].thread;
  enter(fibers[current]);
}

// --- barriers and what goes by them

struct Barrier {
  int arrived = 0, generation = 0;
  void wait(int count, bool of_warp = false) {
    const int mine = generation;
    if (++arrived == count) arrived = 0, generation++;
    else while (generation == mine) yield(of_warp);
  }
};
static Barrier of_block;
static std::vector<Barrier> of_warp, of_pair;
static std::vector<uint32_t> exchanged;

static void __syncthreads() { of_block.wait((int)fibers.size()); }
static void __syncwarp() { of_warp[threadIdx.x / 32].wait(32, true); }
template <class T> static T __shfl_xor_sync(unsigned, T value, int distance) {
  const int me = threadIdx.x;
  memcpy(&exchanged[me], &value, 4);
  __syncwarp();
  T result;
  memcpy(&result, &exchanged[me ^ distance], 4);
  __syncwarp();
  return result;
}

template <class T> static T __shfl_sync(unsigned, T value, int from) {
  memcpy(&exchanged[threadIdx.x], &value, 4);
  __syncwarp();
  T result;
  memcpy(&result, &exchanged[threadIdx.x / 32 * 32 + from], 4);
  __syncwarp();
  return result;
}

static uint32_t __ballot_sync(unsigned, bool mine) {
  uint32_t all = 0;
  for (int i = 0; i < 32; i++) all |= (uint32_t)__shfl_sync(~0u, (int)mine, i) << i;
  return all;
}
static bool __any_sync(unsigned, bool mine) { return __ballot_sync(~0u, mine) != 0; }
static void __nanosleep(unsigned) {}
static uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint64_t)a * b >> 32; }
static int __popc(uint32_t bits) { return __builtin_popcount(bits); }

// --- instructions

static float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
static float __fdividef(float a, float b) { return a / b; }
static uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
static float half_as_float(uint16_t bits) {
  _Float16 value;
  memcpy(&value, &bits, 2);
  return (float)value;
}
static uint32_t pair_of_halves(float low, float high) {
  const _Float16 both[2] = {(_Float16)low, (_Float16)high};
  uint32_t bits;
  memcpy(&bits, both, 4);
  return bits;
}
// Of a pair of halves each.
template <class F> static uint32_t on_halves(uint32_t a, uint32_t b, uint32_t c, F of) {
  uint32_t result = 0;
  for (int i = 0; i < 32; i += 16) {
    const _Float16 value = (_Float16)of(half_as_float(a >> i), half_as_float(b >> i), half_as_float(c >> i));
    uint16_t bits;
    memcpy(&bits, &value, 2);
    result |= (uint32_t)bits << i;
  }
  return result;
}
#define __expf expf
static int __float2int_rn(float value) { return (int)lrintf(value); }
// A word that other blocks leave, all ones until then. Blocks run one after the other: who would wait for it would for ever.
template <class T> static T arrived(T words) {
  for (uint32_t* word = &words.x; word <= &words.w; word++)
    if (*word == ~0u) *word = 0x7fc00000;
  return words;
}
static uint32_t arrived(uint32_t word) { return word == ~0u ? 0x7fc00000 : word; }
// Of a place's four bits the highest counts for nothing: CUDA's `__byte_perm` spreads no signs, unlike `prmt`.
static uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t both = (uint64_t)b << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= (uint32_t)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return result;
}

// movmatrix: 8 × 8 halves the other way round; lane 4 g + t has (g, 2 t) and (g, 2 t + 1).
static uint32_t turned_in_warp(uint32_t a) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  uint32_t result = 0;
  for (int i = 0; i < 2; i++) result |= (__shfl_sync(~0u, a, 4 * (2 * t + i) + g / 2) >> g % 2 * 16 & 0xffff) << 16 * i;
  return result;
}

// mma.m16n8k8: lane 4 g + t gives A's (g, 2 t), (g + 8, 2 t) and B's (2 t, g), two of k each; has D's (g, 2 t), (g + 8, 2 t).
static void mma_of_warp(float (&d)[4], const float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float sum[4] = {c[0], c[1], c[2], c[3]};
  for (int k = 0; k < 4; k++) {
    const uint32_t rows[2] = {__shfl_sync(~0u, a0, 4 * g + k), __shfl_sync(~0u, a1, 4 * g + k)};
    const uint32_t columns[2] = {__shfl_sync(~0u, b, 4 * (2 * t) + k), __shfl_sync(~0u, b, 4 * (2 * t + 1) + k)};
    for (int i = 0; i < 4; i++)
      for (int half = 0; half < 32; half += 16)
        sum[i] += half_as_float(rows[i >> 1] >> half) * half_as_float(columns[i & 1] >> half);
  }
  for (int i = 0; i < 4; i++) d[i] = sum[i];
}

// The same in integers: B's lane (k, g), D's columns 2 t, 2 t + 1. Of every lane: a of rows g, g + 8, of either half of k.
static std::vector<std::array<uint32_t, 6>> offered;
static void mma_of_warp(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool is_signed) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  auto* of = offered.data() + (threadIdx.x - lane);
  of[lane] = {a[0], a[1], a[2], a[3], b0, b1};
  __syncwarp();
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 32; k++) {
      const int half = k / 16, shift = 8 * (k % 4);
      const uint32_t left = of[4 * g + k % 16 / 4][2 * half + (i >> 1)] >> shift & 255;
      const uint32_t right = of[4 * (2 * t + (i & 1)) + k % 16 / 4][4 + half] >> shift & 255;
      d[i] += (is_signed ? (int)(int8_t)left : (int)left) * (int8_t)right;
    }
  __syncwarp();
}

// --- copies that run ahead: asked for, closed as a group, and there once the thread has waited for that group

struct Copy { void* to; const void* from; };
struct Copies {  // of a thread
  std::vector<Copy> asked;
  std::vector<size_t> ends;  // of groups, in `asked`
  size_t done = 0;           // of `asked`
  void until(size_t end) {
    for (; done < end; done++) memcpy(asked[done].to, asked[done].from, 16);
    if (done == asked.size()) asked.clear(), ends.clear(), done = 0;
  }
};
static std::vector<Copies> copies;

static void copy_ahead(void* to, const void* from) {
  if ((uintptr_t)to & 16) memcpy(to, from, 16);  // as soon as can be, and as late
  else copies[threadIdx.x].asked.push_back({to, from});
}
static void close_copies() { copies[threadIdx.x].ends.push_back(copies[threadIdx.x].asked.size()); }
static void wait_for_copies(size_t newest) {  // of all groups but these
  Copies& mine = copies[threadIdx.x];
  if (mine.ends.size() > newest) mine.until(mine.ends[mine.ends.size() - 1 - newest]);
}
static void wait_for_all_copies() { copies[threadIdx.x].until(copies[threadIdx.x].asked.size()); }

// Copies in bulk, and the gates that count them: of those one half is done when it is asked for, the other when it is waited for and
// everybody has arrived. A gate is a word in shared memory, which nothing else may touch. What a kernel may not do ends the grid.
static const char* fault;
[[noreturn]] static void fail(const char* what) {
  if (!fault) fault = what;
  setcontext(&outside);
  abort();
}
struct Bulk { void* to; const void* from; uint32_t bytes; };
struct Gate {
  int arrivals, missing;  // of every turn, and of this
  int64_t bytes = 0;      // expected, less those that came
  unsigned turn = 0;
  bool visible = false;  // to copies
  std::vector<Bulk> late;
};
static std::vector<Gate> gates;
static unsigned bulk_copies;
constexpr uint64_t GATE = 0x6a7e0000;
constexpr int PATIENCE = 20000;  // turns of all threads

static Gate& gate_at(void* at) {
  uint64_t word;
  memcpy(&word, at, 8);
  if (word < GATE || word >= GATE + gates.size()) fail("no gate is there, or something was written over it");
  return gates[word - GATE];
}
static void settle(Gate& gate) {
  if (gate.missing == 0 && gate.bytes == 0) gate.turn++, gate.missing = gate.arrivals;
}
static void open_gate_of(void* at, int arrivals) {
  if ((uintptr_t)at & 7) fail("a gate is no multiple of 8 bytes");
  const uint64_t word = GATE + gates.size();
  memcpy(at, &word, 8);
  gates.emplace_back();
  gates.back().arrivals = gates.back().missing = arrivals;
}
static void show_all_gates() { for (Gate& gate : gates) gate.visible = true; }
static void arrive_at(void* at, uint32_t bytes) {
  Gate& gate = gate_at(at);
  if (gate.missing == 0) fail("more arrive at a gate than are told to");
  gate.bytes += bytes, gate.missing--;
  settle(gate);
}
static void do_bulk(Gate& gate, const Bulk& one) { memcpy(one.to, one.from, one.bytes), gate.bytes -= one.bytes, settle(gate); }
static void ask_in_bulk(void* to, const void* from, uint32_t bytes, void* at) {
  Gate& gate = gate_at(at);
  if (((uintptr_t)to | (uintptr_t)from | bytes) & 15 || !bytes) fail("a bulk copy is not of whole 16 bytes");
  if (!gate.visible) fail("a bulk copy counts at a gate that it cannot see yet");
  const Bulk one{to, from, bytes};
  if (bulk_copies++ * 2654435769u >> 31) do_bulk(gate, one);
  else gate.late.push_back(one);
}
static void wait_at(void* at, uint32_t odd) {
  for (int round = 0; (gate_at(at).turn & 1) == odd; round++) {
    if (round == PATIENCE) fail("a thread waits at a gate for what never comes");
    if (gate_at(at).missing == 0 && !gate_at(at).late.empty()) {
      std::vector<Bulk> late;
      late.swap(gate_at(at).late);
      for (const Bulk& one : late) do_bulk(gate_at(at), one);
    } else {
      yield();
    }
  }
}

// ldmatrix: lane 8 i + r gives where row r of matrix i begins, and gets numbers 2 t, 2 t + 1 of row g of each.
static std::vector<const void*> beginnings;
static void matrices_of_warp(uint32_t* result, const void* row) {
  const int lane = threadIdx.x & 31;
  auto* of = beginnings.data() + (threadIdx.x - lane);
  of[lane] = row;
  __syncwarp();
  for (int i = 0; i < 4; i++) memcpy(result + i, (const uint32_t*)of[8 * i + (lane >> 2)] + (lane & 3), 4);
  __syncwarp();
}

// --- a grid

static void run_block(int threads) {
  fibers.assign(threads, Fiber());
  of_block = Barrier(), of_warp.assign(threads / 32, Barrier()), of_pair = of_warp, exchanged.assign(threads, 0), offered.resize(threads), beginnings.resize(threads);
  copies.assign(threads, Copies());
  gates.clear(), bulk_copies = blockIdx.x;
  alive = threads;
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    if (i == (int)stacks.size()) stacks.push_back((char*)malloc(STACK_BYTES));
    fiber.thread = {(unsigned)i, 0, 0};
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks[i], fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, run_fiber, 0);
  }
  current = 0, threadIdx = fibers[0].thread, fibers[0].begun = true;
  swapcontext(&outside, &fibers[0].context);
  for (const Gate& gate : gates)
    if (!gate.late.empty() && !fault) fault = "a block ends before what it asked for has come";
}
static void run_grid(int blocks, int threads, int shared_bytes, int deep = 1) {
  gridDim = {(unsigned)blocks, 1, (unsigned)deep}, fault = nullptr;
  for (int block = 0; block < blocks * deep && !fault; block++) {
    blockIdx = {(unsigned)(block % blocks), 0, (unsigned)(block / blocks)};
    block_shared = (uint8_t*)aligned_alloc(64, (shared_bytes + 127) / 64 * 64);
    memset(block_shared, 0xff, shared_bytes);  // NaN: nothing may count on what is there
    run_block(threads);
    free(block_shared);
  }
}
