// Layer 3 of the CUDA primitives: a tile of rows in shared memory.
//
// Contract: rows lie in panels of up to 128 bytes; within a panel the 16-byte chunks of a row are permuted by the row's
// number (an XOR), so that the 8 rows that one phase of ldmatrix reads fall into 8 different groups of banks. `columns`
// are padded to whole matrix instructions; what lies beyond the width of the data is zero.
#pragma once
#include "flashgen/types.cuh"

namespace fg {

FG_CONSTEXPR int panel_chunks(int chunks) { return chunks >= 5 ? 8 : chunks >= 3 ? 4 : 2; }

FG_CONSTEXPR int power_of_two_above(int n, int most) {
  int power = 1;
  while (power < n && power < most) power *= 2;
  return power;
}

// Which stage of a ring number n >= 0 is in. Without a sign: a remainder is one instruction, and addresses that follow
// from it stay in uniform registers.
template <int stages> FG_CONSTEXPR unsigned stage_of(int n) { return unsigned(n) % stages; }

template <class T, int rows_, int columns_> struct SharedTile {
  using element = T;
  static constexpr int rows = rows_, columns = columns_;
  static constexpr int chunk = 16 / sizeof(T);                         // columns of one chunk
  static constexpr int row_chunks = panel_chunks(columns / chunk);     // of one panel
  static constexpr int width = row_chunks * chunk;                     // columns of one panel
  static constexpr int panels = (columns + width - 1) / width;
  static constexpr int64_t elements = int64_t(panels) * rows * width, bytes = elements * sizeof(T);
  static_assert(columns % 16 == 0 && rows % 8 == 0, "whole matrix instructions");
  static_assert(bytes % 128 == 0, "tiles follow each other at multiples of 128 bytes");

  T* base;

  // Element (row, column). Within aligned groups of 8 rows and of one chunk the permutation moves whole chunks only.
  FG_DEVICE T* at(unsigned row, unsigned column) const {  // unsigned: remainders are one instruction
    const unsigned group = 8 / row_chunks;  // rows that share 128 bytes
    const unsigned place = ((column % width) / chunk) ^ ((row / group) % row_chunks);
    return base + (column / width * rows + row) * width + place * chunk + column % chunk;
  }
};

// Rows of global memory: the first at base + offset, `stride` elements from one to the next, all of them within 2^31.
// Where a row of the data is a whole number of chunks, every row starts at a multiple of 16 bytes; the caller sees to
// it.
template <class T> struct GlobalRows {
  const T* base;
  int offset, stride;

  FG_DEVICE const T* at(int row, int column) const { return base + uint32_t(offset + row * stride + column); }
};
template <class T> FG_DEVICE GlobalRows<T> global_rows(const void* base, int64_t offset, int64_t stride) {
  return {static_cast<const T*>(base), int(offset), int(stride)};
}

// Where rows are written: `stride` elements from one to the next; packed ones of `width` elements from a pointer on.
template <class T> struct StridedRows {
  T* base;
  int64_t stride;

  FG_DEVICE StridedRows from(int column) const { return {base + column, stride}; }
};
template <int width, class T> FG_DEVICE T* row_of(T* to, int row) { return to + int64_t(row) * width; }
template <int width, class T> FG_DEVICE T* row_of(StridedRows<T> to, int row) { return to.base + row * to.stride; }

// How many rows a tile is copied at a time.
template <int threads, class Tile> FG_CONSTEXPR int rows_at_a_time() {
  constexpr int lanes = power_of_two_above(Tile::columns / Tile::chunk, threads);
  static_assert(threads % lanes == 0, "a row is copied by neighbouring threads");
  return threads / lanes;
}

// Starts the copy of rows first … first + count - 1 of `width` elements into the tile; the rest of it becomes zero. Where
// a row lies `from.at` says.
// Rows that are no whole number of chunks go element by element. `threads` threads take part, `thread` of which is this
// one.
template <int threads, int width, class Tile, class From>
FG_DEVICE void copy_rows_async(Tile to, From from, int first, int count, int thread) {
  using T = typename Tile::element;
  constexpr int chunk = Tile::chunk, chunks = Tile::columns / chunk, step = rows_at_a_time<threads, Tile>();
  constexpr int lanes = threads / step;
  static_assert(width <= Tile::columns, "a tile has all columns");
  const int row0 = unsigned(thread) / lanes, column0 = unsigned(thread) % lanes * chunk, rows_left = count - row0;
#pragma unroll
  for (int part = 0; part < chunks; part += lanes) {
    const int column = column0 + part * chunk;
    if (chunks % lanes != 0 && column >= Tile::columns) continue;
#pragma unroll
    for (int row = 0; row < Tile::rows; row += step) {
      if (Tile::rows % step != 0 && row0 + row >= Tile::rows) continue;
      // the permutation repeats every 8 rows
      T* const place = to.at(row0 + row % 8, column) + row / 8 * 8 * Tile::width;
      if constexpr (width % chunk == 0) {
        copy_async_16(
            place, from.at(first + row0 + row, column), row < rows_left && (width == Tile::columns || column < width));
      } else {
        Chunk<T> values;
#pragma unroll
        for (int e = 0; e < chunk; ++e) {
          values.element[e] = T{};
          if (row < rows_left && column + e < width)
            values.element[e] = global_load(from.at(first + row0 + row, column + e));
        }
        shared_store(reinterpret_cast<Chunk<T>*>(place), values);
      }
    }
  }
}

// Copies rows by all threads of a block.
template <int threads, int width, class Tile, class From>
FG_DEVICE void copy_rows_async(Tile to, From from, int first, int count) {
  copy_rows_async<threads, width>(to, from, first, count, again(int(threadIdx.x)));
}

// Copies rows that all are there and as wide as the tile, by all threads of a block: nothing is asked of a row but where
// it lies. `from(row0, column)` says so of a thread's first one, `next(place, row0, column, row)` of the one that is `row`
// further, from where that before it lies.
template <int threads, class Tile, class From, class Next>
FG_DEVICE void copy_all_rows_async(Tile to, const From& from, const Next& next) {
  constexpr int chunk = Tile::chunk, chunks = Tile::columns / chunk, step = rows_at_a_time<threads, Tile>();
  constexpr int lanes = threads / step;
  const int thread = again(int(threadIdx.x)), row0 = unsigned(thread) / lanes, column0 = unsigned(thread) % lanes * chunk;
#pragma unroll
  for (int part = 0; part < chunks; part += lanes) {
    const int column = column0 + part * chunk;
    if (chunks % lanes != 0 && column >= Tile::columns) continue;
    auto place = from(row0, column);
#pragma unroll
    for (int row = 0; row < Tile::rows; row += step) {
      if (Tile::rows % step != 0 && row0 + row >= Tile::rows) continue;
      if (row > 0) place = next(place, row0, column, row);
      // the permutation repeats every 8 rows
      copy_async_16(to.at(row0 + row % 8, column) + row / 8 * 8 * Tile::width, place, true);
    }
  }
}

// Stores rows 0 … count - 1 of `width` elements where `row_of` says.
template <int threads, int width, class Tile, class To>
FG_DEVICE void store_rows(To to, Tile from, int thread, int first, int rows, int count) {
  using T = typename Tile::element;
  constexpr int chunk = Tile::chunk, chunks = (width + chunk - 1) / chunk, lanes = power_of_two_above(chunks, threads);
  static_assert(threads % lanes == 0, "a row is stored by neighbouring threads");
  const int row0 = first + unsigned(thread) / lanes, column0 = unsigned(thread) % lanes * chunk;
#pragma unroll
  for (int part = 0; part < chunks; part += lanes)
#pragma unroll 4
  for (int row = row0; row < first + rows; row += threads / lanes) {
    const int column = column0 + part * chunk;
    if (row >= count || (chunks % lanes != 0 && column >= width)) continue;
    const Chunk<T> values = shared_load(reinterpret_cast<const Chunk<T>*>(from.at(row, column)));
    T* const place = row_of<width>(to, row) + column;
    if (width % chunk == 0) {
      global_store(reinterpret_cast<Chunk<T>*>(place), values);
    } else {
#pragma unroll
      for (int e = 0; e < chunk; ++e)
        if (column + e < width) global_store(place + e, values.element[e]);
    }
  }
}

// Element `number` of a word.
FG_DEVICE float element_of_word(float, uint32_t word, int) { return __uint_as_float(word); }
FG_DEVICE float element_of_word(half_t, uint32_t word, int number) { return unpack_f16(uint16_t(word >> 16 * number)); }
FG_DEVICE float element_of_word(bfloat_t, uint32_t word, int number) {
  return __uint_as_float(number ? word & 0xffff0000u : word << 16);
}

// |row|² of a row that is in shared memory, by two sums that do not wait for each other.
template <class Tile> FG_DEVICE float squared_norm(Tile tile, int row) {
  using T = typename Tile::element;
  constexpr int chunk = Tile::chunk, of_word = 4 / int(sizeof(T));
  static_assert(Tile::columns % (2 * chunk) == 0, "chunks come in pairs");
  float sums[2] = {0.0f, 0.0f};
#pragma unroll 1
  for (int column = 0; column < Tile::columns; column += 2 * chunk)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 values = shared_load(reinterpret_cast<const uint4*>(tile.at(row, column + half * chunk)));
      const uint32_t words[4] = {values.x, values.y, values.z, values.w};
#pragma unroll
      for (int e = 0; e < chunk; ++e) {
        const float x = element_of_word(T(), words[e / of_word], e % of_word);
        sums[half] = __fmaf_rn(x, x, sums[half]);
      }
    }
  return sums[0] + sums[1];
}

}  // namespace fg
