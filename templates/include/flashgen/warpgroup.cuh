// Layer 3 of the CUDA primitives, Hopper's part: products of a warpgroup over whole tiles.
//
// A warpgroup has 64 rows of D, 16 a warp, as accumulators of one row of fragments each. Contract: products are started
// between begin_products and warpgroup_commit, and wait_products names every accumulator and operand in registers whose
// products it waits for.
#pragma once
#include "flashgen/fragments.cuh"
#include "flashgen/warpgroup_instructions.cuh"

namespace fg {

// This thread's warpgroup, of so many. One is number 0 for the compiler, too: what follows from it stays in uniform
// registers.
template <int groups> FG_DEVICE int warpgroup_index() { return groups == 1 ? 0 : warp_index() / 4; }

template <int n_tiles> FG_DEVICE void touch(Accumulators<1, n_tiles>& d) {
#pragma unroll
  for (int n = 0; n < n_tiles; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) touch(d.at[0][n][e]);
}
template <class T, int inner> FG_DEVICE void touch(LeftRows<T, 1, inner>& a) {
#pragma unroll
  for (int step = 0; step < LeftRows<T, 1, inner>::steps; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) touch(a.at[0][step].r[i]);
}
template <class T, int inner, int n> FG_DEVICE void touch(LeftRows<T, 1, inner> (&all)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) touch(all[i]);
}
template <class... Registers> FG_DEVICE void begin_products(Registers&... registers) {
  (touch(registers), ...);
  warpgroup_arrive();
}
template <int pending, class... Registers> FG_DEVICE void wait_products(Registers&... registers) {
  warpgroup_wait<pending>();
  (touch(registers), ...);
}

// The part of a tile from (row, column) on. What is read across the rows does not begin in one panel and end in
// another.
template <class Tile> FG_DEVICE SharedMatrix matrix_of(Tile tile, int row, int column) {
  static_assert(sizeof(typename Tile::element) == 2, "operands of 16 bits");
  constexpr int row_bytes = Tile::row_chunks * 16;
  const auto* const start = tile.base + (column / Tile::width * Tile::rows + row) * Tile::width + column % Tile::width;
  return shared_matrix<row_bytes>(start, Tile::rows * row_bytes, 8 * row_bytes);
}
// Bytes from the part at column 0, or row 0, to that at `inner`.
template <class Tile> FG_CONSTEXPR int bytes_along(int inner) {
  return (inner / Tile::width * Tile::rows * Tile::width + inner % Tile::width) * 2;
}
template <class Tile> FG_CONSTEXPR int bytes_across(int inner) { return inner * Tile::width * 2; }

// Starts D = A Bᵀ over the whole inner dimension; A from row `row` of its tile on, B's columns are rows `row_b` … of
// its tile.
template <int n_tiles, class TileA, class TileB>
FG_DEVICE void start_product(Accumulators<1, n_tiles>& d, TileA a, int row, TileB b, int row_b = 0) {
  using T = typename TileA::element;
  static_assert(
      TileA::columns == TileB::columns && TileB::rows % (8 * n_tiles) == 0, "operands are of one inner dimension");
  const SharedMatrix left = matrix_of(a, row, 0), right = matrix_of(b, row_b, 0);
#pragma unroll
  for (int inner = 0; inner < TileA::columns; inner += 16)
    warpgroup_multiply<T, false, false>(
        d.at[0], advance(left, bytes_along<TileA>(inner)), advance(right, bytes_along<TileB>(inner)), inner > 0);
}
// Starts D += A B; B's rows from `row` of its tile on are the inner dimension, its columns those of its tile: more than an
// instruction has are those of all rows.
template <int n_tiles, class T, int inner_size, class TileB>
FG_DEVICE void start_product_across(
    Accumulators<1, n_tiles>& d, const LeftRows<T, 1, inner_size>& a, TileB b, int row = 0) {
  static_assert(TileB::rows % inner_size == 0 && 8 * n_tiles == TileB::columns, "operands are of one inner dimension");
  if constexpr (n_tiles > 32) {
    start_wide_across(d, a, b);
  } else {
    const SharedMatrix right = matrix_of(b, row, 0);
#pragma unroll
    for (int inner = 0; inner < inner_size; inner += 16)
      warpgroup_multiply<T, true>(d.at[0], a.at[0][inner / 16].r, advance(right, bytes_across<TileB>(inner)), true);
  }
}
// Starts D = Aᵀ B, or one that is added, over the rows of both tiles; D's rows are columns row … of A, its columns are columns column …
// of B.
template <int n_tiles, class TileA, class TileB>
FG_DEVICE void start_product_across(Accumulators<1, n_tiles>& d, TileA a, int row, TileB b, int column, bool adds = false) {
  using T = typename TileA::element;
  static_assert(TileA::rows == TileB::rows, "operands are of one inner dimension");
  const SharedMatrix left = matrix_of(a, 0, row), right = matrix_of(b, 0, column);
#pragma unroll
  for (int inner = 0; inner < TileA::rows; inner += 16)
    warpgroup_multiply<T, true, true>(
        d.at[0], advance(left, bytes_across<TileA>(inner)), advance(right, bytes_across<TileB>(inner)), adds || inner > 0);
}

// A row of accumulators, rounded to T, as operand A.
template <class T, int inner, int n_tiles>
FG_DEVICE void round_into(LeftRows<T, 1, inner>& a, const Accumulators<1, n_tiles>& d) {
  static_assert(inner == 8 * n_tiles, "the accumulators' columns are the inner dimension");
#pragma unroll
  for (int step = 0; step < inner / 16; ++step) a.at[0][step] = left_of<T>(d.at[0], step);
}

// Stores a left operand, 16 x 16 of 16 bits, to a tile.
template <class Tile>
FG_DEVICE void store_left(Tile tile, int row, int column, const Left<typename Tile::element>& left, unsigned lane) {
  static_assert(sizeof(typename Tile::element) == 2, "two elements a register");
  store_matrix_x4(place_of_square<Order::down>(tile, row, column, lane), left.r);
}

}  // namespace fg
