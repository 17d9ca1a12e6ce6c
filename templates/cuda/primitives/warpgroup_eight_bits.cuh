// Layer 3 of the CUDA primitives, Hopper's part: operands of 8 bits, float8_e4m3fn, of warpgroups' products.
//
// Such products read both operands along their rows, and have 32 inner indices in the place of 16. Of O += P V that are
// keys, which run across the rows of V: so V is transposed, and in the order that accumulators have as operand A. A lane has
// columns 2p and 2p + 1 of each tile of 8 in P, and as operand 4p … 4p + 3 of 16: within 16 keys, number 8u + 2p + v
// takes place 4p + 2u + v of both. The columns of V are rows of what was transposed in an order of their own, so that a
// lane's words fall into banks of their own: of 16 the even ones come first. A lane of O has so the columns 4p … 4p + 3.
//
// Contract: as warpgroup.cuh. What transpose() stores is there for products after publish_shared() and a signal.
#pragma once
#include "eight_bits_instructions.cuh"
#include "warpgroup.cuh"

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
// Starts D = A Bᵀ of an A in registers; B's columns are rows row_b … of its tile.
template <int n_tiles, int inner_size, int b_rows>
FG_DEVICE void start_product_of_rows(Accumulators<1, n_tiles>& d, const LeftRows<f8e4m3, 1, inner_size>& a,
                                     SharedTile<f8e4m3, b_rows, inner_size> b, int row_b) {
  static_assert(b_rows % (8 * n_tiles) == 0 && inner_size % 32 == 0, "whole products");
  const SharedMatrix right = rows_of(b, row_b);
#pragma unroll
  for (int inner = 0; inner < inner_size; inner += 32)
    warpgroup_multiply<f8e4m3, false>(d.at[0], a.at[0][inner / 32].r, advance(right, bytes_along_f8(b, inner)),
                                      inner > 0);
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

// Transposes a tile of keys, by so many threads of which this is one, 16 keys by 32 columns a warp at a time. Warps take turns
// along the keys: what is a warp's own are then two addresses, all else constants.
template <int threads, int rows, int columns>
FG_DEVICE void transpose(SharedTile<f8e4m3, columns, rows> to, SharedTile<f8e4m3, rows, columns> from, int thread) {
  static_assert(threads == 64 && rows % 32 == 0 && columns % 32 == 0, "two warps have squares side by side");
  const unsigned lane = unsigned(thread) % 32, own_key = unsigned(thread) / 32 * 16;
  const SharedTile<f8e4m3, rows, columns> own{from.base + own_key * SharedTile<f8e4m3, rows, columns>::width};
#pragma unroll
  for (int column = 0; column < columns; column += 32)
#pragma unroll
    for (int key = 0; key < rows; key += 32) {
      uint32_t r[4];
      load_square<Order::down, true>(r, own, key, column, lane);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = column + 16 * half;
        const unsigned own_place = own_key + lane % 4 * 4;
        shared_store(reinterpret_cast<uint32_t*>(place_of(to, row, key, lane / 4, own_place)),
                     __byte_perm(r[2 * half], r[2 * half + 1], 0x6420));
        shared_store(reinterpret_cast<uint32_t*>(place_of(to, row + 8, key, lane / 4, own_place)),
                     __byte_perm(r[2 * half], r[2 * half + 1], 0x7531));
      }
    }
}

// Stores rows of O, whose columns are those of what was transposed, from row `row` of `width` elements on; there are `count`
// rows.
template <int width, class To, int n_tiles>
FG_DEVICE void store_transposed_fragments(To to, const float (&d)[n_tiles][4], int row, int count) {
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
