// Layer 3 of the CUDA primitives, Hopper's part: products and copies of some of a tile's panels.
//
// Contract: as in warpgroup.cuh and tensor_copies.cuh.
#pragma once
#include "flashgen/tensor_copies.cuh"
#include "flashgen/warpgroup.cuh"

namespace fg {

// Starts D = A Bᵀ over the inner dimension from column `begin` on, up to `end`; from another column than 0 on D += A Bᵀ. A from row `row`
// of its tile on.
template <int begin, int end, int n_tiles, class TileA, class TileB>
FG_DEVICE void start_product_along(Accumulators<1, n_tiles>& d, TileA a, int row, TileB b) {
  using T = typename TileA::element;
  static_assert(TileA::columns == TileB::columns && TileB::rows == 8 * n_tiles && begin < end && end <= TileA::columns,
                "operands are of one inner dimension");
  const SharedMatrix left = matrix_of(a, row, 0), right = matrix_of(b, 0, 0);
#pragma unroll
  for (int inner = begin; inner < end; inner += 16)
    warpgroup_multiply<T, false, false>(
        d.at[0], advance(left, bytes_along<TileA>(inner)), advance(right, bytes_along<TileB>(inner)), inner > 0);
}

// The two halves of a tile's panels: of an odd number the first one has more.
template <class Tile> struct PanelHalf {
  static constexpr int middle = (Tile::panels + 1) / 2, panel_bytes = Tile::bytes / Tile::panels;
  static_assert(Tile::panels > 1, "both have some");
  FG_DEVICE static constexpr int begin(int half) { return half == 0 ? 0 : middle; }
  FG_DEVICE static constexpr int end(int half) { return half == 0 ? middle : Tile::panels; }
  FG_DEVICE static constexpr int bytes(int half) { return (end(half) - begin(half)) * panel_bytes; }
};

}  // namespace fg
