// Norms of rows of shared memory, and the distances of scores that depend on |q - k|².
#pragma once
#include "flashgen/shared_tile.cuh"

namespace fg {

// ‖q - k‖² = |q|² + |k|² - 2 q·k; rounding may leave a negative number where q = k. By one instruction less than a product and a
// difference, and as exact: twice a number is not rounded.
template <class Row, class Column> FG_DEVICE float squared_distance(const Row& r, const Column& c, float dot) {
  return max(__fmaf_rn(-2.0f, dot, r.qq + c.kk), 0.0f);
}
// The norms of all rows of a tile, for everyone after the next barrier.
template <int threads, class Tile> FG_DEVICE void squared_norms(float* norms, Tile tile) {
  for (int row = int(threadIdx.x); row < Tile::rows; row += threads) shared_store(norms + row, squared_norm(tile, row));
}

// In forward mode, what they change by, where rows change by those of another tile, if there is one.
template <class Tile> FG_DEVICE float twice_product(Tile tile, Tile t_tile, int row, bool is_there) {
  using Chunk = fg::Chunk<typename Tile::element>;
  float sum = 0.0f;
#pragma unroll 1
  for (int column = 0; is_there && column < Tile::columns; column += Tile::chunk) {
    const auto x = shared_load(reinterpret_cast<const Chunk*>(tile.at(row, column)));
    const auto t_x = shared_load(reinterpret_cast<const Chunk*>(t_tile.at(row, column)));
#pragma unroll
    for (int e = 0; e < Tile::chunk; ++e) sum += to_float(x.element[e]) * to_float(t_x.element[e]);
  }
  return 2.0f * sum;
}
template <int threads, class Tile>
FG_DEVICE void twice_products(float* to, Tile tile, Tile t_tile, bool is_there, int thread = int(threadIdx.x)) {
  for (int row = thread; row < Tile::rows; row += threads) shared_store(to + row, twice_product(tile, t_tile, row, is_there));
}

}  // namespace fg
