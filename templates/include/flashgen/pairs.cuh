// Layer 3 of the CUDA primitives: elements of a captured tensor that the pairs of a tile read, two neighbouring columns of a
// row at once.
//
// Contract: E has 1 or 2 bytes. Word t of row r has columns 8 t + fragment_column(0) of the tile and the next one.
#pragma once
#include "flashgen/fragments.cuh"
#include "flashgen/math.cuh"

namespace fg {

FG_DEVICE bool element_of_word(uint8_t, uint32_t word, int number) { return (word >> 8 * number & 0xffu) != 0; }

template <class A, class B> constexpr bool are_alike = false;
template <class A> constexpr bool are_alike<A, A> = true;

template <class E, int rows, int tiles> struct PairElements {
  using element = E;
  uint32_t at[rows][tiles];
  FG_DEVICE auto operator()(int r, int t, int e) const { return element_of_word(E(), at[r][t], e); }
};

// Of one row, from what this lane's first column reads on; columns behind number `last` from there repeat that one.
// `together`: two lie side by side, on an address of both, and none is behind the last.
template <class E, int tiles>
FG_DEVICE void load_pairs(uint32_t (&words)[tiles], const E* first, int64_t stride, bool together, int last) {
  struct alignas(2 * sizeof(E)) Both {
    E element[2];
  };
  if (together) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) words[t] = to_word(global_load(reinterpret_cast<const Both*>(first + 8 * t)));
  } else {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      words[t] = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        words[t] |= to_word(global_load(first + min(8 * t + e, last) * stride)) << 8 * sizeof(E) * e;
    }
  }
}
template <class E> FG_DEVICE bool lie_together(const E* first, int64_t stride) {
  return stride == 1 && uintptr_t(first) % (2 * sizeof(E)) == 0;
}


// The rows of a warp's fragments in shared memory, each an odd number of chunks of 16 bytes, so that 8 of them at one
// column lie in different banks. The warp alone copies and reads them; a warp_barrier stands between the two.
template <class E, int columns> struct StagedPairs {
  static constexpr int chunk = 16 / int(sizeof(E)), chunks = columns / chunk;
  static constexpr int row_bytes = 16 * (chunks | 1), bytes = 16 * row_bytes;
  static constexpr int lanes = power_of_two_above(chunks, 32), step = 32 / lanes;  // of a row; rows at a time
  static_assert(columns % 16 == 0 && chunks <= 32 && step <= 16, "a row is copied by neighbouring lanes");
  char* base;

  // Which row and column this lane copies first.
  FG_DEVICE static int own_row() { return lane_index() / lanes; }
  FG_DEVICE static int own_column() { return lane_index() % lanes * chunk; }
  // Whether rows so far apart begin where chunks do, one of which `own` is.
  FG_DEVICE static bool are_chunks(const E* own, int64_t stride) {
    return (uintptr_t(own) | uintptr_t(stride * int64_t(sizeof(E)))) % 16 == 0;
  }
  // Starts the copy of 16 rows, of which there are so many rows and columns; zeros in the place of others.
  FG_DEVICE void copy_async(const E* own, int64_t stride, int row_count, int column_count) const {
    const bool takes_part = lanes == chunks || own_column() < columns;
    char* const place = base + own_row() * row_bytes + own_column() * int(sizeof(E));
    if (row_count >= 16 && column_count >= columns) {
#pragma unroll
      for (int row = 0; row < 16; row += step, own += step * stride)
        if (takes_part) copy_async_16(place + row * row_bytes, own, true);
    } else {
      const E* const first = own - own_row() * stride - own_column();
      const int rest = column_count / chunk * chunk;  // where a chunk begins of which some are there
#pragma unroll 1
      for (int row = 0; row < 16; row += step, own += step * stride)
        if (takes_part && own_column() != rest)
          copy_async_16(place + row * row_bytes, own, row + own_row() < row_count && own_column() < rest);
      constexpr int each = 2 / int(sizeof(E));
      struct alignas(2) Few {
        E element[each];
      };
#pragma unroll 1
      for (int n = lane_index(); n < 16 * 8 && rest < columns; n += 32) {
        const int row = n / 8, column = rest + n % 8 * each;
        Few values = {};
#pragma unroll
        for (int e = 0; e < each; ++e)
          if (row < row_count && column + e < column_count)
            values.element[e] = global_load(first + row * stride + column + e);
        shared_store(reinterpret_cast<Few*>(base + row * row_bytes + column * int(sizeof(E))), values);
      }
    }
    copy_async_commit();
  }
  // Of rows from here on, over others behind: word t of r has rows 8 t + fragment_column(0) and the next one, at
  // column first + fragment_row(2 r).
  template <int tiles> FG_DEVICE void load_transposed(uint32_t (&words)[2][tiles], int first) const {
    static_assert(sizeof(E) == 2 && tiles % 2 == 0, "four matrices at once");
    const int lane = lane_index();
    const char* const own = base + (lane / 16 * 8 + lane % 8) * row_bytes + 2 * (first + lane / 8 % 2 * 8);
#pragma unroll
    for (int t = 0; t < tiles; t += 2) {
      uint32_t r[4];
      load_matrix_x4_transposed(r, own + 8 * t * row_bytes);
      words[0][t] = r[0], words[1][t] = r[1], words[0][t + 1] = r[2], words[1][t + 1] = r[3];
    }
  }
  template <int tiles> FG_DEVICE void load(uint32_t (&words)[2][tiles]) const {
    static_assert(tiles * 8 == columns, "a fragment for each 8 columns");
    if constexpr (sizeof(E) == 2) {
      const char* const row = base + lane_index() % 16 * row_bytes + lane_index() / 16 * 16;
#pragma unroll
      for (int t = 0; t < tiles; t += 2) {
        uint32_t r[4];
        load_matrix_x4(r, row + 16 * t);
        words[0][t] = r[0], words[1][t] = r[1], words[0][t + 1] = r[2], words[1][t + 1] = r[3];
      }
    } else {
      const char* const row = base + fragment_row(0) * row_bytes + fragment_column(0);
#pragma unroll
      for (int t = 0; t < tiles; ++t)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          words[r][t] = shared_load(reinterpret_cast<const uint16_t*>(row + 8 * r * row_bytes + 8 * t));
    }
  }
};

}  // namespace fg
