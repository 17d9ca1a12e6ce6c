// Captured gradients: sums of a lane, and how they leave.
#pragma once
#include "flashgen/backward/spec.cuh"

namespace backward {

template <class Spec, Adding how> struct Adder {
  static constexpr int count = Spec::captured_count;
  uint32_t largest[count > 0 ? count : 1] = {};  // of this thread, the bits of a float
  bool adds = true;                              // of the blocks of a cluster, which have the same pairs, one

  template <int k, class Arguments> FG_DEVICE void add(const Arguments& a, float* target, int64_t offset, float value) {
    if constexpr (Spec::divides_columns)
      if (!adds) return;
    if constexpr (how == Adding::measure) largest[k] = fg::larger(largest[k], fg::is_finite(value) ? __float_as_uint(fabsf(value)) : 0);
    else if (how == Adding::atomic || !fg::is_finite(value)) fg::global_add(target + offset, value);
    else fg::global_add(exact_sums(a, k) + offset, fg::fixed_point(value, fg::global_load(largest_of(a) + k)));
  }
  template <class Arguments> FG_DEVICE void finish(const Arguments& a) {
    if constexpr (how == Adding::measure)
#pragma unroll
      for (int k = 0; k < count; ++k) {
        for (int mask = 16; mask > 0; mask /= 2) largest[k] = fg::larger(largest[k], fg::shuffle_xor(largest[k], mask));
        if (fg::lane_index() == 0) fg::global_max(largest_of(a) + k, largest[k]);
      }
  }
};

// The sums of each gradient of a list, of which a lane has as many.
template <class Of, int count> struct SumsOf {
  float of[count];
};
template <class List, int count> struct Sums;
template <class... Of, int count> struct Sums<GradientList<Of...>, count> : SumsOf<Of, count>... {
  FG_DEVICE void clear([[maybe_unused]] int n) { ((SumsOf<Of, count>::of[n] = 0.0f), ...); }
  // What a pair adds to sum n.
  template <class Pair> FG_DEVICE void add([[maybe_unused]] const Pair& pair, [[maybe_unused]] int n) { (add_to<Of>(pair, n), ...); }
  template <class One, class Pair> FG_DEVICE void add_to(const Pair& pair, int n) {
    if constexpr (One::of_pairs)
      if (pair.kept) SumsOf<One, count>::of[n] += One::of_pair(pair.a, pair.u, pair.x, pair.r, pair.c, pair.terms);
  }
  // `leave` takes each gradient's sums to where they are added up.
  template <class Block> FG_DEVICE void leave([[maybe_unused]] Block& block) { (block.template leave<Of>(SumsOf<Of, count>::of), ...); }
};

}  // namespace backward
