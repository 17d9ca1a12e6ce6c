// Layer 3 of the CUDA primitives: which of a lane's elements of a row of a tile are kept, as bits.
//
// A lane has the elements 8 t + e (e = 0, 1) behind its first one, as accumulators have them; element 2 t + e is a bit.
// Selections by neighbouring bits are one instruction for seven of them and one each.
#pragma once
#include "flashgen/fragments.cuh"
#include "flashgen/math.cuh"

namespace fg {

// An end of a run, from which a position may be taken in 32 bits.
FG_DEVICE int position(int64_t end) {
  constexpr int64_t most = 1 << 30;  // positions are fewer
  return int(end < -most ? -most : end < most ? end : most);
}

template <int n_tiles> struct LaneBits {
  static constexpr int words = (2 * n_tiles + 31) / 32;
  uint32_t at[words];

  FG_DEVICE LaneBits() {
#pragma unroll
    for (int w = 0; w < words; ++w) at[w] = 0;
  }
  // Adds what lies before `end`, or from `begin` on and before `end`, in elements of the row behind the lane's first.
  FG_DEVICE void add_before(int end) {
    const int ends = elements(end);
#pragma unroll
    for (int w = 0; w < words; ++w) at[w] |= low_bits(ends - 32 * w);
  }
  FG_DEVICE void add(int begin, int end) {
    const int begins = elements(begin), ends = elements(end);
#pragma unroll
    for (int w = 0; w < words; ++w) at[w] |= low_bits(ends - 32 * w) & ~low_bits(begins - 32 * w);
  }
  FG_DEVICE bool has(int t, int e) const { return (at[(2 * t + e) / 32] & 1u << (2 * t + e) % 32) != 0; }

 private:
  FG_DEVICE static int elements(int end) {  // of the lane, before it
    const int row = max(end, 0);
    return row / 8 * 2 + min(row % 8, 2);
  }
  FG_DEVICE static uint32_t low_bits(int n) { return n >= 32 ? ~0u : n > 0 ? (1u << n) - 1 : 0u; }
};

}  // namespace fg
