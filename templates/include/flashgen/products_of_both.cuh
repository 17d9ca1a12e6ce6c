// Layer 3 of the CUDA primitives, of forward mode: products that have operands in common, whose fragments are read once.
#pragma once
#include "flashgen/fragments.cuh"

namespace fg {

// D += A Bᵀ and E += C Bᵀ over the whole inner dimension; A and C from row `row` of their tiles on.
template <int m_tiles, int n_tiles, class TileA, class TileB>
FG_DEVICE void product_of_both(Accumulators<m_tiles, n_tiles>& d, Accumulators<m_tiles, n_tiles>& e, TileA a, TileA c, int row, TileB b) {
  using T = typename TileA::element;
  static_assert(TileA::columns == TileB::columns && n_tiles % 2 == 0, "operands come in pairs, of one inner dimension");
  const int lane = again(lane_index());
#pragma unroll Element<T>::unroll
  for (int inner = 0; inner < TileA::columns; inner += Element<T>::depth) {
    Left<T> left[m_tiles], other[m_tiles];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
      left[m] = load_left(a, row + 16 * m, inner, lane), other[m] = load_left(c, row + 16 * m, inner, lane);
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      Right<T> right[2];
      load_right(right, b, 8 * n, inner, lane);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) multiply(d.at[m][n + i], left[m], right[i]), multiply(e.at[m][n + i], other[m], right[i]);
    }
  }
}

// D += A Bᵀ and E += C Bᵀ + A Fᵀ: a product, and what it changes by as both of its operands do.
template <int m_tiles, int n_tiles, class TileA, class TileB>
FG_DEVICE void product_and_tangent(Accumulators<m_tiles, n_tiles>& d, Accumulators<m_tiles, n_tiles>& e, TileA a, TileA c, int row, TileB b, TileB f) {
  using T = typename TileA::element;
  static_assert(TileA::columns == TileB::columns && n_tiles % 2 == 0, "operands come in pairs, of one inner dimension");
  const int lane = again(lane_index());
#pragma unroll Element<T>::unroll
  for (int inner = 0; inner < TileA::columns; inner += Element<T>::depth) {
    Left<T> left[m_tiles], other[m_tiles];
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
      left[m] = load_left(a, row + 16 * m, inner, lane), other[m] = load_left(c, row + 16 * m, inner, lane);
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2) {
      Right<T> right[2], moved[2];
      load_right(right, b, 8 * n, inner, lane);
      load_right(moved, f, 8 * n, inner, lane);
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          multiply(d.at[m][n + i], left[m], right[i]);
          multiply(e.at[m][n + i], other[m], right[i]);
          multiply(e.at[m][n + i], left[m], moved[i]);
        }
    }
  }
}

// D += P B and E += R B, P and R rows of accumulators rounded to B's type.
template <int m_tiles, int p_tiles, int n_tiles, class TileB>
FG_DEVICE void products_across(Accumulators<m_tiles, n_tiles>& d, Accumulators<m_tiles, n_tiles>& e, const Accumulators<m_tiles, p_tiles>& p,
                               const Accumulators<m_tiles, p_tiles>& r, TileB b) {
  using T = typename TileB::element;
  static_assert(n_tiles % 2 == 0 && 8 * p_tiles == TileB::rows, "operands come in pairs, of one inner dimension");
  if constexpr (sizeof(T) == 4) {  // whose sums are chains
    product_across(d, p, b, 0);
    product_across(e, r, b, 0);
  } else {
    const int lane = again(lane_index());
#pragma unroll
    for (int step = 0; step < 8 * p_tiles / Element<T>::depth; ++step) {
      Left<T> left[m_tiles], other[m_tiles];
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) left[m] = left_of<T>(p.at[m], step), other[m] = left_of<T>(r.at[m], step);
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
        Right<T> right[2];
        load_right_across(right, b, step * Element<T>::depth, 8 * n, lane);
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i) multiply(d.at[m][n + i], left[m], right[i]), multiply(e.at[m][n + i], other[m], right[i]);
      }
    }
  }
}

}  // namespace fg
