// Whom a router's logits choose, for who would else wait for a launch that says so: the best, the lower id where two are alike,
// and shares of e^logit among them. By one warp; up to 256 experts, at least 32.

struct Logits {
  const float* of;    // [rows][count], or none: ids are given
  const int* parent;  // [rows]; -2 is padding, which chooses nobody
  int count;
  float scale;
};

#define LISTED 8  // logits of a lane: neighbours, so of two alike the lower lane's has the lower id

__device__ __forceinline__ u32 most(u32 v) {  // of a warp
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, v);
#else
#pragma unroll
  for (int i = 16; i; i >>= 1) v = max(v, __shfl_xor_sync(~0u, v, i));
  return v;
#endif
}

// An integer of the same order, and back.
__device__ __forceinline__ u32 order_of(u32 bits) { return bits ^ ((int)bits < 0 ? ~0u : 0x80000000u); }
__device__ __forceinline__ float logit_of(u32 order) { return __uint_as_float(order ^ ((int)order < 0 ? 0x80000000u : ~0u)); }

struct Listed { u32 order; int id; };
__device__ __forceinline__ void in_order(Listed& a, Listed& b) {  // the better first
  const bool swaps = b.order > a.order || (b.order == a.order && b.id < a.id);
  const Listed first = swaps ? b : a;
  b = swaps ? a : b;
  a = first;
}

// tell(place, id, logit) for each of `wanted`, the best first, in one lane: whose it is. Of padding, -1 for all ids.
// Every lane sorts its own, and the one whose first is the best of all puts it away: one answer of the whole warp a place.
template <class Tell> __device__ __forceinline__ void choose(const Logits& logits, int row, int wanted, int lane, Tell tell) {
  const bool padding = (int)load1(logits.parent + row) == -2;  // on its way beside the logits
  const float* from = logits.of + (size_t)row * logits.count;
  const int first = lane * LISTED;
  Listed mine[LISTED];
  if (logits.count % 4 == 0) {
#pragma unroll
    for (int i = 0; i < LISTED; i += 4) {
      if (first + i < logits.count) {
        const float4 v = load4(from + first + i);
        mine[i].order = order_of(__float_as_uint(v.x)), mine[i + 1].order = order_of(__float_as_uint(v.y));
        mine[i + 2].order = order_of(__float_as_uint(v.z)), mine[i + 3].order = order_of(__float_as_uint(v.w));
      } else {
        mine[i].order = mine[i + 1].order = mine[i + 2].order = mine[i + 3].order = 0;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < LISTED; i++) mine[i].order = first + i < logits.count ? order_of(load1(from + first + i)) : 0;
  }
#pragma unroll
  for (int i = 0; i < LISTED; i++) mine[i].id = first + i;
#pragma unroll
  for (int step = 0; step < 19; step++) {
    constexpr int PAIRS[19] = {002, 013, 046, 057, 004, 015, 026, 037, 001, 023, 045, 067, 024, 035, 014, 036, 012, 034, 056};
    in_order(mine[PAIRS[step] >> 3], mine[PAIRS[step] & 7]);
  }
#pragma unroll 1
  for (int place = 0; place < wanted; place++) {
    const bool best = mine[0].order == most(mine[0].order);
    const u32 alike = __ballot_sync(~0u, best);
    const bool own = best && !(alike & ((1u << lane) - 1));
    if (own) tell(place, padding ? -1 : mine[0].id, logit_of(mine[0].order));
#pragma unroll
    for (int i = 1; i < LISTED; i++) mine[i - 1] = own ? mine[i] : mine[i - 1];
    if (own) mine[LISTED - 1].order = 0;
  }
}
