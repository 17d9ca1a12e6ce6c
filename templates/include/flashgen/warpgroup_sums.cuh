// Layer 3 of the CUDA primitives, Hopper's part of forward mode: products of a warpgroup that are added to others.
#pragma once
#include "flashgen/warpgroup.cuh"

namespace fg {

// Starts D += A Bᵀ over the whole inner dimension; A from row `row` of its tile on, B's columns are the rows of its tile.
template <int n_tiles, class TileA, class TileB>
FG_DEVICE void start_product_onto(Accumulators<1, n_tiles>& d, TileA a, int row, TileB b) {
  using T = typename TileA::element;
  static_assert(TileA::columns == TileB::columns && TileB::rows == 8 * n_tiles, "operands are of one inner dimension");
  const SharedMatrix left = matrix_of(a, row, 0), right = matrix_of(b, 0, 0);
#pragma unroll
  for (int inner = 0; inner < TileA::columns; inner += 16)
    warpgroup_multiply<T, false, false>(d.at[0], advance(left, bytes_along<TileA>(inner)), advance(right, bytes_along<TileB>(inner)), true);
}

}  // namespace fg
