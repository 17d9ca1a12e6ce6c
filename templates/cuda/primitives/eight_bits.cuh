// Layer 3 of the CUDA primitives: rows of a cache of 8 bits, float8_e4m3fn, into a tile of shared memory.
//
// Contract: every such number is one of each element type of a tile, so that nothing is rounded here; what numbers are
// multiplied by goes to sums over them. No instruction knows the type: integers are shifted to a float32 of fewer
// exponents, one product makes up for these.
#pragma once
#include "shared_tile.cuh"

namespace fg {

struct f8e4m3 {  // sign, four bits of exponent, three of mantissa; all of both set: no number
  uint8_t bits;
};

template <bool first, class A, class B> struct ChoiceOf {
  using type = A;
};
template <class A, class B> struct ChoiceOf<false, A, B> {
  using type = B;
};
template <bool first, class A, class B> using Choice = typename ChoiceOf<first, A, B>::type;

// The four numbers of a word, the lowest first.
FG_DEVICE void to_floats(float (&values)[4], uint32_t word) {
  const float scale = __uint_as_float(0x7b800000u);  // 2^120: exponents begin at 2^-126, those of 8 bits at 2^-6
#pragma unroll
  for (int e = 0; e < 4; ++e)
    values[e] = __fmul_rn(__uint_as_float(uint32_t(int32_t(word << (24 - 8 * e)) >> 4) & 0x87f00000u), scale);
  if ((((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) == 0) return;
#pragma unroll
  for (int e = 0; e < 4; ++e)
    if ((word >> 8 * e & 0x7fu) == 0x7fu) values[e] = __uint_as_float(0x7fc00000u);
}

// Numbers of words from `first` on that fill a chunk of a tile.
template <class T> FG_DEVICE Chunk<T> widened(const Chunk<uint32_t>& words, int first) {
  Chunk<T> chunk;
  uint32_t made[4];
#pragma unroll
  for (int n = 0; n < Chunk<T>::size / 4; ++n) {
    float values[4];
    to_floats(values, words.element[first + n]);
    if constexpr (sizeof(T) == 2) {
      made[2 * n] = Element<T>::pack(values[0], values[1]), made[2 * n + 1] = Element<T>::pack(values[2], values[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) made[e] = __float_as_uint(values[e]);
    }
  }
  memcpy(&chunk, made, 16);
  return chunk;
}

// How threads share the bytes of a tile: 16 numbers of a row each, neighbours of a row by neighbouring threads. Until
// these are widened they lie in the first chunk of the room that they are going to fill.
template <int threads, class Tile> struct Narrow {
  using T = typename Tile::element;
  static constexpr int group = 16, groups = Tile::columns / group, lanes = power_of_two_above(groups, threads);
  static constexpr int step = threads / lanes;  // rows at a time
  static_assert(threads % lanes == 0, "a row is shared by neighbouring threads");

  int row0, column0;

  FG_DEVICE explicit Narrow(int thread) : row0(unsigned(thread) / lanes), column0(unsigned(thread) % lanes * group) {}
  // Whether there are such numbers of this thread, `part` and `row` from its first ones.
  FG_DEVICE bool has(int part) const { return groups % lanes == 0 || column0 + part * group < Tile::columns; }
  FG_DEVICE bool has_row(int row) const { return Tile::rows % step == 0 || row0 + row < Tile::rows; }
  FG_DEVICE T* at(Tile tile, int part, int row, int column) const {  // the permutation repeats every 8 rows
    return tile.at(row0 + row % 8, column0 + part * group + column) + row / 8 * 8 * Tile::width;
  }
};

// Starts the copy of rows first … first + count - 1 of `width` numbers of 8 bits into the tile; the rest of it becomes
// zero. Where a row lies `from.at` says: rows of whole groups of 16 numbers at multiples of 16 bytes, others go element
// by element. Once a thread's copies have landed, `widen_rows` follows.
template <int threads, int width, class Tile, class From>
FG_DEVICE void copy_narrow_rows_async(Tile to, From from, int first, int count) {
  using Own = Narrow<threads, Tile>;
  static_assert(width <= Tile::columns, "a row of the tile has room for it");
  const Own own(again(int(threadIdx.x)));
#pragma unroll
  for (int part = 0; part < Own::groups; part += Own::lanes) {
    if (!own.has(part)) continue;
    const int column = own.column0 + part * Own::group;
#pragma unroll
    for (int row = 0; row < Tile::rows; row += Own::step) {
      if (!own.has_row(row)) continue;
      const bool is_row = own.row0 + row < count;
      auto* const place = own.at(to, part, row, 0);
      if constexpr (width % Own::group == 0) {
        const bool valid = is_row && (width == Tile::columns || column < width);
        copy_async_16(place, from.at(first + own.row0 + row, column), valid);
      } else {
        Chunk<uint32_t> words = {};
#pragma unroll
        for (int e = 0; e < Own::group; ++e)
          if (is_row && column + e < width)
            words.element[e / 4] |= uint32_t(global_load(from.at(first + own.row0 + row, column + e)).bits) << e % 4 * 8;
        shared_store(reinterpret_cast<Chunk<uint32_t>*>(place), words);
      }
    }
  }
}

// Turns what this thread has copied into elements of the tile, for everyone after the next barrier.
template <int threads, class Tile> FG_DEVICE void widen_rows(Tile tile) {
  using Own = Narrow<threads, Tile>;
  using T = typename Tile::element;
  const Own own(again(int(threadIdx.x)));
#pragma unroll
  for (int part = 0; part < Own::groups; part += Own::lanes) {
    if (!own.has(part)) continue;
#pragma unroll 4
    for (int row = 0; row < Tile::rows; row += Own::step) {
      if (!own.has_row(row)) continue;
      const auto words = shared_load(reinterpret_cast<const Chunk<uint32_t>*>(own.at(tile, part, row, 0)));
#pragma unroll
      for (int column = 0; column < Own::group; column += Tile::chunk)
        shared_store(reinterpret_cast<Chunk<T>*>(own.at(tile, part, row, column)), widened<T>(words, column / 4));
    }
  }
}

}  // namespace fg
