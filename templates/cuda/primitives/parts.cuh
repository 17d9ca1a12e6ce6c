// Layer 5 of the CUDA primitives: accumulators to global memory as they are, where others are added to what is written.
//
// Contract: rows are of float, `width` of them each, and lie where `row_of` says. A quad of lanes stores 32 bytes of a
// row, a whole sector, so that nothing is gained by a way through shared memory.
#pragma once
#include "fragments.cuh"

namespace fg {

// Stores accumulators of 16 rows, whose columns begin at `column`; there are `count` rows.
template <int width, class To, int n_tiles>
FG_DEVICE void store_sums(To to, const float (&d)[n_tiles][4], int row, int column, int count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + fragment_row(2 * half);
    if (at >= count) continue;
    float* const place = row_of<width>(to, at);
#pragma unroll
    for (int t = 0; t < n_tiles; ++t) {
      const int first = column + 8 * t + fragment_column(0);
      if (first >= width) continue;
      if constexpr (width % 2 == 0) {
        global_store(reinterpret_cast<float2*>(place + first), make_float2(d[t][2 * half], d[t][2 * half + 1]));
      } else {
        global_store(place + first, d[t][2 * half]);
        if (first + 1 < width) global_store(place + first + 1, d[t][2 * half + 1]);
      }
    }
  }
}

}  // namespace fg
