// Layer 3 of the CUDA primitives, Hopper's part: products of more columns than an instruction has, or of half of a tile's,
// span by span.
//
// Contract: as in warpgroup.cuh. An instruction has at most 256 columns, and those that are read across the rows of a
// tile do not begin in one panel and end in another; so half of a tile's columns is up to three spans.
#pragma once
#include "flashgen/warpgroup.cuh"

namespace fg {

// Half of a tile's columns: of its whole panels, of the one that is left, of what is no whole panel.
template <class Tile> struct Half {
  static constexpr int width = Tile::width, panels = Tile::columns / width;
  static constexpr int whole = panels / 2 * width, odd = panels % 2 * width / 2, rest = Tile::columns % width / 2;
  static constexpr int columns = whole + odd + rest, tiles = columns / 8, spans = 3;
  static_assert(2 * columns == Tile::columns && odd % 8 == 0 && rest % 8 == 0 && whole <= 256, "whole tiles of columns");

  // Of a span: its columns, how many the half has before it, and where it begins in the tile.
  FG_DEVICE static constexpr int size(int span) { return span == 0 ? whole : span == 1 ? odd : rest; }
  FG_DEVICE static constexpr int begin(int span) { return span == 0 ? 0 : span == 1 ? whole : whole + odd; }
  FG_DEVICE static constexpr int first(int span, int half) { return 2 * begin(span) + half * size(span); }
  // Of its own tiles from t on, how many lie side by side, up to so many.
  FG_DEVICE static constexpr int tiles_together(int t, int most) {
    const int end = (8 * t < whole ? whole : 8 * t < whole + odd ? whole + odd : columns) / 8;
    return end - t < most ? end - t : most;
  }
  // Where the half's own tile t of 8 columns begins.
  FG_DEVICE static constexpr int column(int half, int t) {
    const int span = 8 * t < whole ? 0 : 8 * t < whole + odd ? 1 : 2;
    return first(span, half) + 8 * t - begin(span);
  }
};

// Where the tiles of a half's accumulators begin.
template <class H> struct ColumnsOfHalf {
  int half;
  FG_DEVICE int operator()(int tile) const { return H::column(half, tile); }
};

// The accumulators of a span; of an empty one any.
template <class H, int span, int n_tiles> FG_DEVICE auto& accumulators_of(float (&d)[n_tiles][4]) {
  constexpr int tiles = H::size(span) > 0 ? H::size(span) / 8 : 1, first = H::size(span) > 0 ? H::begin(span) / 8 : 0;
  static_assert(first + tiles <= n_tiles, "the accumulators have all spans");
  return reinterpret_cast<float (&)[tiles][4]>(d[first]);
}

template <int span, bool transposed, int n_tiles, class TileA, class TileB>
FG_DEVICE void start_span_across(Accumulators<1, n_tiles>& d, TileA a, TileB b, int half, bool adds) {
  using H = Half<TileB>;
  if constexpr (H::size(span) > 0) {
    const SharedMatrix left = matrix_of(a, 0, 0), right = matrix_of(b, 0, H::first(span, half));
#pragma unroll
    for (int inner = 0; inner < TileB::rows; inner += 16)
      warpgroup_multiply<typename TileA::element, transposed, true>(
          accumulators_of<H, span>(d.at[0]), advance(left, transposed ? bytes_across<TileA>(inner) : bytes_along<TileA>(inner)),
          advance(right, bytes_across<TileB>(inner)), adds || inner > 0);
  }
}
// Starts D += A B, or with `transposed` D = Aᵀ B, over the rows of B; D's columns are a half of B's.
template <bool transposed, int n_tiles, class TileA, class TileB>
FG_DEVICE void start_half_across(Accumulators<1, n_tiles>& d, TileA a, TileB b, int half) {
  static_assert((transposed ? TileA::rows : TileA::columns) == TileB::rows && n_tiles == Half<TileB>::tiles,
                "operands are of one inner dimension");
  static_assert((transposed ? TileA::columns : TileA::rows) == 64, "a warpgroup has 64 rows");
  start_span_across<0, transposed>(d, a, b, half, !transposed);
  start_span_across<1, transposed>(d, a, b, half, !transposed);
  start_span_across<2, transposed>(d, a, b, half, !transposed);
}

template <int span, int n_tiles, class T, int inner_size, class TileB>
FG_DEVICE void start_span_across(Accumulators<1, n_tiles>& d, const LeftRows<T, 1, inner_size>& a, TileB b, int half) {
  using H = Half<TileB>;
  if constexpr (H::size(span) > 0) {
    const SharedMatrix right = matrix_of(b, 0, H::first(span, half));
#pragma unroll
    for (int inner = 0; inner < inner_size; inner += 16)
      warpgroup_multiply<T, true>(
          accumulators_of<H, span>(d.at[0]), a.at[0][inner / 16].r, advance(right, bytes_across<TileB>(inner)), true);
  }
}
// Starts D += A B with A in registers.
template <int n_tiles, class T, int inner_size, class TileB>
FG_DEVICE void start_half_across(Accumulators<1, n_tiles>& d, const LeftRows<T, 1, inner_size>& a, TileB b, int half) {
  static_assert(TileB::rows == inner_size && n_tiles == Half<TileB>::tiles, "operands are of one inner dimension");
  start_span_across<0>(d, a, b, half);
  start_span_across<1>(d, a, b, half);
  start_span_across<2>(d, a, b, half);
}

// Starts D += A B over all columns of B, 256 at a time; A in registers.
template <int first = 0, int n_tiles, class T, int inner_size, class TileB>
FG_DEVICE void start_wide_across(Accumulators<1, n_tiles>& d, const LeftRows<T, 1, inner_size>& a, TileB b) {
  static_assert(TileB::rows == inner_size && 8 * n_tiles == TileB::columns, "operands are of one inner dimension");
  constexpr int tiles = n_tiles - first < 32 ? n_tiles - first : 32;
  const SharedMatrix right = matrix_of(b, 0, 8 * first);
#pragma unroll
  for (int inner = 0; inner < inner_size; inner += 16)
    warpgroup_multiply<T, true>(reinterpret_cast<float (&)[tiles][4]>(d.at[0][first]), a.at[0][inner / 16].r,
                                advance(right, bytes_across<TileB>(inner)), true);
  if constexpr (first + tiles < n_tiles) start_wide_across<first + tiles>(d, a, b);
}

template <class H, int span, int width, Kept kept, class T, int n_tiles>
FG_DEVICE void store_span(T* row, const float (&d)[n_tiles][4], int half, int part, bool stores) {
  constexpr int first = H::begin(span) / 8, tiles = H::size(span) / 8, wide = tiles / 4 * 4;  // those go by fours
  const int column = H::first(span, part), lane = lane_index() % 4;
#pragma unroll
  for (int t = 0; t < wide; t += 4) {
    uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) words[k] = Element<T>::pack(d[first + t + k][2 * half], d[first + t + k][2 * half + 1]);
    transpose_quad(words, lane);
    const int at = column + 8 * (t + lane);
    if (!stores || at >= width) continue;
    uint4* const four = reinterpret_cast<uint4*>(row + at);
    if constexpr (kept == Kept::briefly) global_stream(four, make_uint4(words[0], words[1], words[2], words[3]));
    else global_store(four, make_uint4(words[0], words[1], words[2], words[3]));
  }
#pragma unroll
  for (int t = wide; t < tiles; ++t) {
    const int at = column + 8 * t + fragment_column(0);
    if (stores && at < width)
      global_store(reinterpret_cast<uint32_t*>(row + at), Element<T>::pack(d[first + t][2 * half], d[first + t][2 * half + 1]));
  }
}
// Stores this half's columns of a warp's 16 rows, rounded to T, as store_fragments does those of a whole row; `width`
// is a multiple of 8.
template <class T, class H, int width, Kept kept, class To, int n_tiles>
FG_DEVICE void store_half(To to, const float (&d)[n_tiles][4], int part, int row, int count) {
  static_assert(sizeof(T) == 2 && width % 8 == 0 && n_tiles == H::tiles, "rows are whole numbers of 16 bytes");
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + fragment_row(2 * half);
    T* const place = row_of<width>(to, at);
    store_span<H, 0, width, kept>(place, d, half, part, at < count);
    store_span<H, 1, width, kept>(place, d, half, part, at < count);
    store_span<H, 2, width, kept>(place, d, half, part, at < count);
  }
}

}  // namespace fg
