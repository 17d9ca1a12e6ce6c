// Layer 3 of the CUDA primitives, Hopper's part: operands of 8 bits, float8_e4m3fn, of warpgroups' products.
//
// Such products read both operands along their rows, and have 32 inner indices in the place of 16. Of O += P V that are
// keys, which run across the rows of V: so V is turned, its columns become rows, with keys in the order that accumulators
// have as operand A. A lane has columns 2p and 2p + 1 of each tile of 8 in P, and as operand 4p … 4p + 3 of 16: within 16
// keys, number 8u + 2p + v takes place 4p + 2u + v of both. Of 16 columns of V the even ones come first: so a lane of O
// has 4p … 4p + 3 of them, which it stores together.
//
// Contract: as warpgroup.cuh.
#pragma once
#include "flashgen/eight_bits_instructions.cuh"
#include "flashgen/warpgroup.cuh"

namespace fg {

template <> struct Element<f8e4m3> {
  using Sum = float;
  static constexpr int depth = 32, unroll = 8;
  static constexpr bool narrow = true;
};

template <int rows, int columns> FG_DEVICE SharedMatrix rows_of(SharedTile<f8e4m3, rows, columns> tile, int row) {
  constexpr int row_bytes = SharedTile<f8e4m3, rows, columns>::width;
  return shared_matrix<row_bytes>(tile.base + row * row_bytes, rows * row_bytes, 8 * row_bytes);
}
// Bytes from the first columns of a tile to those from `inner` on.
template <int rows, int columns> FG_CONSTEXPR int bytes_along_f8(SharedTile<f8e4m3, rows, columns>, int inner) {
  constexpr int width = SharedTile<f8e4m3, rows, columns>::width;
  return inner / width * rows * width + inner % width;
}

// Starts D = A Bᵀ over the whole inner dimension; A from row `row` of its tile on, B's columns are the rows of its tile.
template <int n_tiles, int a_rows, int b_rows, int inner_size>
FG_DEVICE void start_product(Accumulators<1, n_tiles>& d, SharedTile<f8e4m3, a_rows, inner_size> a, int row,
                             SharedTile<f8e4m3, b_rows, inner_size> b) {
  static_assert(b_rows == 8 * n_tiles && inner_size % 32 == 0, "whole products");
  const SharedMatrix left = rows_of(a, row), right = rows_of(b, 0);
#pragma unroll
  for (int inner = 0; inner < inner_size; inner += 32)
    warpgroup_multiply<f8e4m3, false, false>(d.at[0], advance(left, bytes_along_f8(a, inner)),
                                             advance(right, bytes_along_f8(b, inner)), inner > 0);
}
// Starts D += A Bᵀ of an A in registers; B's columns are the rows of its tile.
template <int n_tiles, int inner_size, int b_rows>
FG_DEVICE void start_product_across(Accumulators<1, n_tiles>& d, const LeftRows<f8e4m3, 1, inner_size>& a,
                                    SharedTile<f8e4m3, b_rows, inner_size> b) {
  static_assert(b_rows == 8 * n_tiles && inner_size % 32 == 0, "whole products");
  const SharedMatrix right = rows_of(b, 0);
#pragma unroll
  for (int inner = 0; inner < inner_size; inner += 32)
    warpgroup_multiply<f8e4m3, false>(d.at[0], a.at[0][inner / 32].r, advance(right, bytes_along_f8(b, inner)), true);
}

// A row of accumulators, rounded, as operand A; keys in the order that is said above.
template <int inner, int n_tiles>
FG_DEVICE void round_into(LeftRows<f8e4m3, 1, inner>& a, const Accumulators<1, n_tiles>& d) {
  static_assert(inner == 8 * n_tiles && inner % 32 == 0, "the accumulators' columns are the inner dimension");
#pragma unroll
  for (int step = 0; step < inner / 32; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto &even = d.at[0][4 * step + i / 2 * 2], &odd = d.at[0][4 * step + i / 2 * 2 + 1];
      const int e = i % 2 * 2;
      a.at[0][step].r[i] = pack_e4m3(even[e], even[e + 1], odd[e], odd[e + 1]);
    }
}

// Turns 16 keys of 4 columns, of which a word is one key's: a row of 16 bytes each, keys in the order that is said above.
FG_DEVICE void turn(uint4 (&rows)[4], const uint32_t (&keys)[16]) {
  uint32_t turned[4][4];
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t a = keys[2 * p], b = keys[2 * p + 1], c = keys[2 * p + 8], d = keys[2 * p + 9];
    const uint32_t low[2] = {__byte_perm(a, b, 0x5140), __byte_perm(c, d, 0x5140)};
    const uint32_t high[2] = {__byte_perm(a, b, 0x7362), __byte_perm(c, d, 0x7362)};
    turned[0][p] = __byte_perm(low[0], low[1], 0x5410), turned[1][p] = __byte_perm(low[0], low[1], 0x7632);
    turned[2][p] = __byte_perm(high[0], high[1], 0x5410), turned[3][p] = __byte_perm(high[0], high[1], 0x7632);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) rows[e] = make_uint4(turned[e][0], turned[e][1], turned[e][2], turned[e][3]);
}
// The row of a column of V, once it is turned: of 16 the even ones come first.
FG_DEVICE int row_of_turned(int column) { return column / 16 * 16 + column % 2 * 8 + column % 16 / 2; }

// Starts the copy of a tile of V as it is turned: keys first … are columns. The map's box is one panel.
template <int rows, int columns>
FG_DEVICE void copy_turned_async(SharedTile<f8e4m3, rows, columns> to, const TensorMap& map, int first, int slab,
                                 uint64_t* signal) {
  using Tile = SharedTile<f8e4m3, rows, columns>;
  static_assert(rows <= 256, "a panel is one box");
#pragma unroll
  for (int panel = 0; panel < Tile::panels; ++panel)
    copy_panel_async(to.base + panel * rows * Tile::width, map, first + panel * Tile::width, 0, slab, signal);
}

// Stores rows of O, whose columns are those of V as it is turned, from row `row` of `width` elements on; there are `count`
// rows.
template <int width, class To, int n_tiles>
FG_DEVICE void store_turned_fragments(To to, const float (&d)[n_tiles][4], int row, int count) {
  static_assert(width % 16 == 0 && width <= 8 * n_tiles, "whole groups of columns");
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + fragment_row(2 * half);
    if (at >= count) continue;
    auto* const place = row_of<width>(to, at) + lane_index() % 4 * 4;
#pragma unroll
    for (int t = 0; t < width / 8; t += 2) {
      const auto &even = d[t], &odd = d[t + 1];
      const uint2 four = make_uint2(Element<bfloat_t>::pack(even[2 * half], odd[2 * half]),
                                    Element<bfloat_t>::pack(even[2 * half + 1], odd[2 * half + 1]));
      global_store(reinterpret_cast<uint2*>(place + 8 * t), four);
    }
  }
}

}  // namespace fg
