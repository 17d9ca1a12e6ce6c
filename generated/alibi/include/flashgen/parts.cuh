// Layer 5 of the CUDA primitives: accumulators to global memory as they are, where others are added to what is written.
//
// Contract: rows are of float, `width` of them each, and lie where `row_of` says. A quad of lanes stores 32 bytes of a
// row, a whole sector, so that nothing is gained by a way through shared memory.
#pragma once
#include "flashgen/fragments.cuh"

namespace fg {

// Where tiles of 8 columns begin that lie side by side.
struct ColumnsFrom {
  int first;
  FG_DEVICE int operator()(int tile) const { return first + 8 * tile; }
};

// Stores accumulators of 16 rows, whose tiles of columns begin where `column_of` says; there are `count` rows.
template <int width, class To, class ColumnOf, int n_tiles>
FG_DEVICE void store_sums(To to, const float (&d)[n_tiles][4], int row, ColumnOf column_of, int count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + fragment_row(2 * half);
    if (at >= count) continue;
    float* const place = row_of<width>(to, at);
#pragma unroll
    for (int t = 0; t < n_tiles; ++t) {
      const int first = column_of(t) + fragment_column(0);
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
