// Whom a router's logits choose, for who would else wait for a launch that says so: the best, the lower id where two are alike,
// and shares of e^logit among them. By one warp; up to 256 experts, at least 32.

struct Logits {
  const float* of;    // [rows][count], or none: ids are given
  const int* parent;  // [rows]; -2 is padding, which chooses nobody
  int count;
  float scale;
};

#define LISTED 8  // logits of a lane: neighbours, so of two alike the lower lane's has the lower id

// An integer of the same order, and back.
__device__ __forceinline__ u32 order_of(u32 bits) { return bits ^ ((int)bits < 0 ? ~0u : 0x80000000u); }
__device__ __forceinline__ float logit_of(u32 order) { return __uint_as_float(order ^ ((int)order < 0 ? 0x80000000u : ~0u)); }

// Where a lane reads: known before the logits are.
struct Looks { const float* own; const int* parent; };
__device__ __forceinline__ Looks look_at(const Logits& logits, int row, int lane) {
  return {settled(logits.of + (size_t)row * logits.count + lane * LISTED), settled(logits.parent + row)};
}

// tell(place, id, logit) of places `from` .. `until` - 1, the best has 0, in one lane: whose it is. Of padding, -1 for all ids.
// Every lane sorts its own, and the one whose first is the best of all puts it away: one answer of the whole warp a place.
template <class Tell> __device__ __forceinline__ void choose(const Logits& logits, const Looks& at, int from, int until, int lane, Tell tell) {
  const bool padding = (int)load1(at.parent) == -2;  // on its way beside the logits
  const int first = lane * LISTED;
  u32 given[LISTED], order[LISTED];
  if (logits.count % 4 == 0) {
#pragma unroll
    for (int i = 0; i < LISTED; i += 4) {
      float4 v = {__uint_as_float(~0u), __uint_as_float(~0u), __uint_as_float(~0u), __uint_as_float(~0u)};  // below all others
      if (first + i < logits.count) v = load4(at.own + i);
      given[i] = order_of(__float_as_uint(v.x)), given[i + 1] = order_of(__float_as_uint(v.y));
      given[i + 2] = order_of(__float_as_uint(v.z)), given[i + 3] = order_of(__float_as_uint(v.w));
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < LISTED; i++) {
#pragma unroll
      for (int j = 1; j < LISTED; j++) given[j - 1] = given[j];
      given[LISTED - 1] = order_of(first + i < logits.count ? load1(at.own + i) : ~0u);
    }
  }
#pragma unroll
  for (int i = 0; i < LISTED; i++) order[i] = given[i];
#pragma unroll
  for (int step = 0; step < 19; step++) {
    constexpr int PAIRS[19] = {002, 013, 046, 057, 004, 015, 026, 037, 001, 023, 045, 067, 024, 035, 014, 036, 012, 034, 056};
    u32 &one = order[PAIRS[step] >> 3], &other = order[PAIRS[step] & 7];
    const u32 better = max(one, other);
    other = min(one, other), one = better;
  }
  int alike = 0;  // of a lane's first, those put away
  auto has_best = [&]() {
    const bool best = order[0] == most(order[0]);
    const u32 all = __ballot_sync(~0u, best);
    return best && !(all & ((1u << lane) - 1));
  };
  auto put_away = [&](bool it) {
    if (it) alike = order[0] == order[1] ? alike + 1 : 0;
#pragma unroll
    for (int i = 1; i < LISTED; i++) order[i - 1] = it ? order[i] : order[i - 1];
    order[LISTED - 1] = it ? 0 : order[LISTED - 1];
  };
  int place = 0;
#pragma unroll 1
  for (; place < from; place++) put_away(has_best());
#pragma unroll 1
  for (; place < until; place++) {
    const bool mine = has_best();
    if (mine) {
      int id = first, before = alike;
#pragma unroll
      for (int i = 0; i < LISTED; i++)
        if (given[i] == order[0] && before-- == 0) id = first + i;
      tell(place, padding ? -1 : id, logit_of(order[0]));
    }
    put_away(mine);
  }
}
