// Whom a router's logits choose, for who would else wait for a launch that says so: the best, the lower id where two are alike,
// and shares of e^logit among them. By one warp; up to 256 experts, at least 32.

struct Logits {
  const float* of;    // [rows][count], or none: ids are given
  const int* parent;  // [rows]; -2 is padding, which chooses nobody
  int count;
  float scale;
};

#define LISTED 8  // logits of a lane

__device__ __forceinline__ u32 most(u32 v) {  // of a warp
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, v);
#else
#pragma unroll
  for (int i = 16; i; i >>= 1) v = max(v, __shfl_xor_sync(~0u, v, i));
  return v;
#endif
}

// tell(place, id, logit) for each of `wanted`, the best first, in all lanes; of padding, -1 for all ids.
template <class Tell> __device__ __forceinline__ void choose(const Logits& logits, int row, int wanted, int lane, Tell tell) {
  u32 order[LISTED], head, own;  // integers of the same order; a lane's largest, and whose it is
  const bool padding = (int)load1(logits.parent + row) == -2;  // on its way beside the logits
#pragma unroll
  for (int i = 0; i < LISTED; i++) {
    const int at = i * 32 + lane;
    const u32 bits = at < logits.count ? load1(logits.of + (size_t)row * logits.count + at) : ~0u;
    order[i] = bits ^ ((int)bits < 0 ? ~0u : 0x80000000u);
  }
  auto look = [&]() {
    head = 0, own = lane;
#pragma unroll
    for (int i = 0; i < LISTED; i++)
      if (order[i] > head) head = order[i], own = i * 32 + lane;
  };
  look();
  for (int place = 0; place < wanted; place++) {
    const u32 top = most(head);
    const int id = (int)~most(head == top ? ~own : 0u);
    tell(place, padding ? -1 : id, __uint_as_float(top ^ ((int)top < 0 ? 0x80000000u : ~0u)));
#pragma unroll
    for (int i = 0; i < LISTED; i++) order[i] = i * 32 + lane == id ? 0u : order[i];  // an index would cost memory
    look();
  }
}
