// Layer 3 of the CUDA primitives: rows of 8 bits, float8_e4m3fn, in shared memory, as operands of wider types.
//
// They lie there as they are read from memory, and are widened in the registers of the lanes that multiply them. A matrix
// of ldmatrix has two numbers in the place of each of 16 bits. So a lane that asks for B by its rows has four neighbours
// of one row, inner indices 4 pair … 4 pair + 3: the other operand has its columns in this order (`order_columns`). One
// that asks across the rows has two rows of two neighbouring columns: even columns become one operand, odd ones another,
// and sums come out in that order (`order_sums`).
//
// Contract: every such number is one of each element type, so that nothing is rounded here; what numbers are multiplied
// by goes to sums over them. They are multiplied as float16, not bfloat16: an instruction makes float16 of them.
#pragma once
#include "flashgen/fragments.cuh"
#include "flashgen/math.cuh"
#include "flashgen/narrow_instructions.cuh"

namespace fg {

template <class T> struct WidenedBeside {
  using type = half_t;
};
template <> struct WidenedBeside<float> {
  using type = float;
};
// What numbers of 8 bits are multiplied as, beside queries of type T.
template <class T> using Widened = typename WidenedBeside<T>::type;

// A tile of 8 bits that is read as one of T.
template <class T, int rows_, int columns_> struct NarrowTile {
  using element = T;
  using Stored = SharedTile<f8e4m3, rows_, columns_>;
  static constexpr int rows = rows_, columns = columns_;
  static constexpr int64_t bytes = Stored::bytes;

  Stored stored;
};

// The numbers of a word, the lowest first.
FG_DEVICE void widen(float (&values)[4], uint32_t word) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t pair = widen_e4m3(uint16_t(word >> 16 * half));
    values[2 * half] = to_float(half_t{uint16_t(pair)}), values[2 * half + 1] = to_float(half_t{uint16_t(pair >> 16)});
  }
}

// Two matrices of 8 rows, one below the other, by a chunk.
template <bool transposed, class Stored>
FG_DEVICE void load_pair(uint32_t (&r)[2], Stored tile, int row, int column, unsigned lane) {
  constexpr int group = 8 / Stored::row_chunks;  // rows that share 128 bytes
  const unsigned lane_row = lane % 16;
  const unsigned first = lane_row * Stored::row_chunks * 16 + lane_row / group % Stored::row_chunks * 16;
  const int panel = (column / Stored::width * Stored::rows + row) * Stored::row_chunks * 16;
  const char* const address =
      reinterpret_cast<const char*>(tile.base) + panel + (first ^ column % Stored::width / Stored::chunk * 16);
  if constexpr (transposed) load_matrix_x2_transposed(r, address);
  else load_matrix_x2(r, address);
}

// Of a word of load_pair the operands that it holds: of float16 one of depth 16, of float the one at `inner` of two.
FG_DEVICE Right<half_t> right_of(uint32_t word, int, half_t) {
  return {{widen_e4m3(uint16_t(word)), widen_e4m3(uint16_t(word >> 16))}};
}
FG_DEVICE Right<float> right_of(uint32_t word, int inner, float) {
  float values[4];
  widen(values, word);
  const bool second = inner % 16 != 0;
  return {{__float_as_uint(values[second ? 2 : 0]), __float_as_uint(values[second ? 3 : 1])}};
}

// As of wider tiles: rows row … row + 15 are columns of B, two operands. A's columns are in order.
template <class T, int rows, int columns>
FG_DEVICE void load_right(Right<T> (&b)[2], NarrowTile<T, rows, columns> tile, int row, int inner, unsigned lane) {
  uint32_t r[2];
  load_pair<false>(r, tile.stored, row, inner / 16 * 16, lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) b[i] = right_of(r[i], inner, T{});
}
// Rows row … row + 7 are columns of one B.
template <class T, int rows, int columns>
FG_DEVICE void load_last_right(Right<T>& b, NarrowTile<T, rows, columns> tile, int row, int inner, unsigned lane) {
  static_assert(sizeof(T) == 4, "16-bit operands come in pairs");
  const char* const word = place_of(tile.stored, row, inner / 16 * 16, lane / 4, lane % 4 * 4);
  b = right_of(shared_load(reinterpret_cast<const uint32_t*>(word)), inner, T{});
}
// Columns column … column + 15 are columns of B: the even ones of one operand, the odd ones of another.
template <class T, int rows, int columns>
FG_DEVICE void load_right_across(
    Right<T> (&b)[2], NarrowTile<T, rows, columns> tile, int inner, int column, unsigned lane) {
  if constexpr (sizeof(T) == 2) {
    uint32_t r[2];
    load_pair<true>(r, tile.stored, inner, column, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t word = even_bytes_first(r[i]);
      b[0].r[i] = widen_e4m3(uint16_t(word)), b[1].r[i] = widen_e4m3(uint16_t(word >> 16));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const char* const pair = place_of(tile.stored, inner, column, lane % 4 * 2 + i, lane / 4 * 2);
      float values[4];
      widen(values, shared_load(reinterpret_cast<const uint16_t*>(pair)));
      b[0].r[i] = __float_as_uint(values[0]), b[1].r[i] = __float_as_uint(values[1]);
    }
  }
}

// Sums of products across a narrow tile, whose columns come out even ones first of each 16, as those of wider tiles.
template <int m_tiles, int n_tiles> FG_DEVICE void order_sums(Accumulators<m_tiles, n_tiles>& d) {
  const int quad = lane_index() / 4 * 4, pair = lane_index() % 4;
#pragma unroll
  for (int m = 0; m < m_tiles; ++m)
#pragma unroll
    for (int n = 0; n < n_tiles; n += 2)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // A lane has columns 4 pair … 4 pair + 3 of the 16.
        float(&even)[4] = d.at[m][n], (&odd)[4] = d.at[m][n + 1];
        const float own[4] = {even[2 * half], odd[2 * half], even[2 * half + 1], odd[2 * half + 1]};
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const int from = quad + 2 * tile + pair / 2;  // who has columns 8 tile + 2 pair, + 1
          float of[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) of[e] = shuffle(own[e], from);
#pragma unroll
          for (int e = 0; e < 2; ++e) d.at[m][n + tile][2 * half + e] = pair % 2 ? of[2 + e] : of[e];
        }
      }
}

// Rows of a tile of T as operands beside a narrow one, in their place: as `To`, of 16 columns each in the order that
// `load_right` has. float16 has fewer exponents than bfloat16: there a row is multiplied by a power of two that brings the
// largest number near 2^14; numbers below 2^-39 of it are rounded. `units`: what products with a row are to be multiplied
// by. Everyone sees all after the next barrier.
template <int threads, class To, class Tile> FG_DEVICE void order_columns(Tile tile, float* units) {
  using T = typename Tile::element;
  using Ordered = SharedTile<To, Tile::rows, Tile::columns>;
  static_assert(sizeof(To) == sizeof(T), "rows stay where they are");
  constexpr int groups = Tile::columns / 16, lanes = power_of_two_above(groups, 32), parts = (groups + lanes - 1) / lanes;
  constexpr int chunks = 16 / Tile::chunk, step = threads / lanes;  // chunks of a group; rows at a time
  constexpr bool scales = Element<To>::narrow && !Element<T>::narrow;
  const int thread = again(int(threadIdx.x)), own = unsigned(thread) % lanes;
  const Ordered ordered = {reinterpret_cast<To*>(tile.base)};
#pragma unroll 1
  for (int first = 0; first < Tile::rows; first += step) {
    const int row = first + int(unsigned(thread) / lanes);  // warps have whole rows, and go on together
    float values[parts][16], top = 0.0f;
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int group = own + part * lanes;
      if (row >= Tile::rows || group >= groups) continue;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        const auto chunk = shared_load(reinterpret_cast<const Chunk<T>*>(tile.at(row, 16 * group + c * Tile::chunk)));
#pragma unroll
        for (int e = 0; e < Tile::chunk; ++e) {
          const float value = to_float(chunk.element[e]);
          values[part][c * Tile::chunk + e] = value;
          if (scales && abs(value) <= MOST_FLOAT) top = running_max(top, abs(value));
        }
      }
    }
    float factor = 1.0f;
    if constexpr (scales) {
#pragma unroll
      for (int mask = lanes / 2; mask > 0; mask /= 2) top = running_max(top, shuffle_xor(top, mask));
      const uint32_t exponent = __float_as_uint(top) >> 23;  // 2^14 / 2^(exponent - 127), if that is a number
      if (top != 0.0f) factor = __uint_as_float((exponent < 15 ? 253u : 268u - exponent) << 23);
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      const int group = own + part * lanes;
      if (row >= Tile::rows || group >= groups) continue;
#pragma unroll
      for (int c = 0; c < chunks; ++c) {
        Chunk<To> chunk;
#pragma unroll
        for (int e = 0; e < Tile::chunk; ++e) {
          // Of inner index n of an operand, 4 pair … 4 pair + 3 are those of a lane's word.
          const int n = c * Tile::chunk + e;
          const int from = sizeof(T) == 2 ? n % 8 / 2 * 4 + n / 8 * 2 + n % 2 : n % 4 * 4 + n / 8 * 2 + n / 4 % 2;
          chunk.element[e] = Element<To>::round(values[part][from] * factor);
        }
        shared_store(reinterpret_cast<Chunk<To>*>(ordered.at(row, 16 * group + c * Tile::chunk)), chunk);
      }
    }
    if (row < Tile::rows && own == 0) shared_store(units + row, 1.0f / factor);
  }
}

// |row|² of a row that is in shared memory.
template <class T, int rows, int columns> FG_DEVICE float squared_norm(NarrowTile<T, rows, columns> tile, int row) {
  float sum = 0.0f;
#pragma unroll 1
  for (int column = 0; column < columns; column += 16) {
    const auto words = shared_load(reinterpret_cast<const Chunk<uint32_t>*>(tile.stored.at(row, column)));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float values[4];
      widen(values, words.element[n]);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum += values[e] * values[e];
    }
  }
  return sum;
}

}  // namespace fg
