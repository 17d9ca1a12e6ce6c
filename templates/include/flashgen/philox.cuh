// Layer 3 of the CUDA primitives: the counter-based random numbers of dropout, Philox4x32-7 (Salmon et al., 2011).
//
// Contract, the same on every backend: a call draws for sixteen pairs of two squares of 16 x 16 side by side, rows r and r + 8
// by columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of each. counter = (h, 8 (i // 16) + i % 8, b, 4 (j // 32) + j % 8 // 2), key = (low,
// high word of the seed). The number of the pair (b, h, i, j) is in output word 2 (j % 16 // 8) + i % 16 // 8, which in the right
// square (j // 16 odd) is rotated to the left by eight bits: the low 15 bits of its half j % 2. The pair is kept iff
// number >= threshold, threshold = round(p 2^15). All indices are global ones.
//
// So words are the registers of a lane that has a square of accumulators, or of an operand of them.
#pragma once
#include "flashgen/dropout_instructions.cuh"
#include "flashgen/fragments.cuh"
#include "flashgen/math.cuh"

namespace fg {

struct Words {
  uint32_t word[4];
};

// A number of the counter for rows, and one for columns: those of a lane's pairs.
FG_DEVICE uint32_t dropout_row(int32_t i) { return uint32_t(i >> 4) * 8 + (i & 7); }
FG_DEVICE uint32_t dropout_column(int32_t j) { return uint32_t(j >> 5) * 4 + (j >> 1 & 3); }
// Whether a column, or a square that begins with it, is in the right one of two squares.
FG_DEVICE bool right_square(int32_t j) { return (j & 16) != 0; }

// What a block draws its decisions from; b and h are the head's. Of three rounds, half follow from the row alone, half from the
// column; the first multiplies neither.
struct Dropout {
  uint64_t seed;
  int32_t b, h;
  uint32_t threshold;

  // Most numbers that are compared by halves: above are those that are no numbers to the instruction.
  static constexpr uint32_t most_by_halves = 0x7c00;
  static constexpr uint32_t times0 = 0xD2511F53, times1 = 0xCD9E8D57;

  struct OfRow {
    uint32_t c0, c1, c2;
  };
  struct OfColumn {
    uint32_t c0, c2, c3;
  };

  FG_DEVICE uint32_t key0(int round) const { return uint32_t(seed) + round * 0x9E3779B9u; }
  FG_DEVICE uint32_t key1(int round) const { return uint32_t(seed >> 32) + round * 0xBB67AE85u; }
  FG_DEVICE static uint32_t high(uint64_t product) { return uint32_t(product >> 32); }

  FG_DEVICE OfRow row_of(uint32_t number) const {
    const uint64_t of_h = wide_product(times0, uint32_t(h)), of_b = wide_product(times1, uint32_t(b));
    const uint64_t first = wide_product(times0, high(of_b) ^ number ^ key0(0));
    const uint64_t second = wide_product(times1, high(first) ^ uint32_t(of_h) ^ key1(1));
    return {high(second) ^ key0(2), uint32_t(second), uint32_t(first) ^ key1(2)};
  }
  FG_DEVICE OfColumn column_of(uint32_t number) const {
    const uint64_t of_h = wide_product(times0, uint32_t(h)), of_b = wide_product(times1, uint32_t(b));
    const uint64_t second = wide_product(times1, high(of_h) ^ number ^ key1(0));
    const uint64_t first = wide_product(times0, high(second) ^ uint32_t(of_b) ^ key0(1));
    return {uint32_t(second), high(first), uint32_t(first)};
  }
  FG_DEVICE Words words(const OfRow& row, const OfColumn& column) const {
    uint32_t c0 = row.c0 ^ column.c0, c1 = row.c1, c2 = row.c2 ^ column.c2, c3 = column.c3;
#pragma unroll
    for (int round = 3; round < 7; ++round) {
      const uint64_t first = wide_product(times0, c0), second = wide_product(times1, c2);
      c0 = high(second) ^ c1 ^ key0(round), c1 = uint32_t(second);
      c2 = high(first) ^ c3 ^ key1(round), c3 = uint32_t(first);
    }
    return {{c0, c1, c2, c3}};
  }

  // Of a call's words, the numbers of its left or its right square.
  FG_DEVICE static uint32_t numbers(uint32_t word, bool right) { return __funnelshift_l(word, word, right ? 8 : 0); }
  // All bits of the halves whose pairs are kept. The threshold is at most `most_by_halves`.
  FG_DEVICE Words keeps(const Words& words, bool right) const {
    Words kept;
#pragma unroll
    for (int n = 0; n < 4; ++n)
      kept.word[n] = halves_not_below(numbers(words.word[n], right), threshold | threshold << 16);
    return kept;
  }
  // One pair, for any threshold.
  FG_DEVICE bool keeps_one(int32_t i, int32_t j) const {
    const Words all = words(row_of(dropout_row(i)), column_of(dropout_column(j)));
    const uint32_t low = i & 8 ? all.word[1] : all.word[0], high = i & 8 ? all.word[3] : all.word[2];
    return (numbers(j & 8 ? high : low, right_square(j)) >> (j & 1) * 16 & 0x7fffu) >= threshold;
  }
  // Whether lanes draw for the pairs that they have: squares of the contract, or two side by side, begin where those of
  // accumulators do.
  template <int together> FG_DEVICE bool draws_squares(int32_t i, int32_t j) const {
    return (i & 15 | j & 16 * together - 1) == 0 && threshold <= most_by_halves;
  }
};

// How many of so many squares side by side a lane draws for by a call.
FG_CONSTEXPR int squares_together(int squares) { return squares % 2 == 0 ? 2 : 1; }
// The number of a lane's columns in a square: `column` is the lane's first one in the first square.
template <int together> FG_DEVICE uint32_t dropout_column_of(int32_t column, int square) {
  return together == 2 ? dropout_column(column) + 2 * square : dropout_column(column + 16 * square);
}

// The decisions for an array of accumulators: of a square of two a word's halves have four bits each. One tile of columns is a half
// of a square.
template <bool rows_are_keys, int m_tiles, int n_tiles> struct KeptPairs {
  static_assert(n_tiles == 1 || n_tiles % 2 == 0, "accumulators are squares, or halves of them");
  static constexpr int beside = (n_tiles + 1) / 2, squares = m_tiles * beside, at_once = 4;
  static constexpr int together = squares_together(rows_are_keys ? m_tiles : beside);  // their keys side by side
  uint32_t bits[(squares + at_once - 1) / at_once];

  // x where the pair is kept, else 0.
  FG_DEVICE float of(int m, int n, int e, float x) const {
    const int square = m * beside + n / 2, word = rows_are_keys ? e / 2 * 2 + n % 2 : n % 2 * 2 + e / 2;
    return where_bit(bits[square / at_once], 1u << (square % at_once * 4 + word + e % 2 * 16), x);
  }
  // All bits of the halves whose pairs are kept, as `Dropout::keeps`.
  FG_DEVICE uint32_t halves(int square, int word) const {
    return (bits[square / at_once] >> (square % at_once * 4 + word) & 0x10001u) * 0xffffu;
  }
};

// Lanes have drawn for queries lane / 4 and + 8, columns are queries: halves become neighbours among these.
FG_DEVICE uint32_t exchanged_in_columns(uint32_t own) {
  const int lane = lane_index(), key = lane / 4, from = lane % 4 * 8 + key / 2;
  const uint32_t even = shuffle(own, from), odd = shuffle(own, from + 4);
  return __byte_perm(even, odd, key % 2 == 0 ? 0x5410 : 0x7632);
}

// Each pair by itself: where squares of the contract begin elsewhere.
template <bool rows_are_keys, int m_tiles, int n_tiles>
FG_DEVICE void draw_pairs(KeptPairs<rows_are_keys, m_tiles, n_tiles>& kept, const Dropout& dropout, int32_t i, int32_t j) {
  using Kept = KeptPairs<rows_are_keys, m_tiles, n_tiles>;
  const int across = lane_index() / 4, pair = lane_index() % 4;
#pragma unroll
  for (int first = 0; first < Kept::squares; first += Kept::at_once) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int n = 0; n < 8 * min(Kept::squares - first, Kept::at_once); ++n) {
      const int square = first + n / 8, word = n / 2 % 4, half = n % 2;
      const int down = rows_are_keys ? word / 2 : word % 2, along = rows_are_keys ? word % 2 : word / 2;
      const int row = square / Kept::beside * 16 + down * 8 + across;
      const int column = square % Kept::beside * 16 + along * 8 + 2 * pair + half;
      const bool keeps = rows_are_keys ? dropout.keeps_one(i + column, j + row) : dropout.keeps_one(i + row, j + column);
      bits |= uint32_t(keeps) << (n / 8 * 4 + word + 16 * half);
    }
    kept.bits[first / Kept::at_once] = bits;
  }
}

template <bool rows_are_keys, int m_tiles, int n_tiles>
FG_DEVICE void draw_squares(KeptPairs<rows_are_keys, m_tiles, n_tiles>& kept, const Dropout& dropout, int32_t i, int32_t j) {
  using Kept = KeptPairs<rows_are_keys, m_tiles, n_tiles>;
  const uint32_t row = dropout_row(i + lane_index() / 4);
  const int32_t column = j + lane_index() % 4 * 2;
#pragma unroll
  for (uint32_t& bits : kept.bits) bits = 0;
#pragma unroll
  for (int square = 0; square < Kept::squares; ++square) {
    const int down = square / Kept::beside, along = square % Kept::beside;
    const int keys = rows_are_keys ? down : along, queries = rows_are_keys ? along : down;
    if (keys % Kept::together != 0) continue;
    const Words words = dropout.words(dropout.row_of(row + 8 * queries), dropout.column_of(dropout_column_of<Kept::together>(column, keys)));
#pragma unroll
    for (int n = 0; n < Kept::together; ++n) {
      const bool right = Kept::together == 2 ? n == 1 : right_square(j + 16 * keys);
      const Words all = dropout.keeps(words, right);
      const int own = square + n * (rows_are_keys ? Kept::beside : 1);
#pragma unroll
      for (int w = 0; w < 4; ++w) kept.bits[own / Kept::at_once] |= all.word[w] & 0x10001u << (own % Kept::at_once * 4 + w);
    }
  }
  if constexpr (rows_are_keys) {
#pragma unroll
    for (uint32_t& bits : kept.bits) bits = exchanged_in_columns(bits);
  }
}

template <bool rows_are_keys, int m_tiles, int n_tiles>
FG_DEVICE void draw(KeptPairs<rows_are_keys, m_tiles, n_tiles>& kept, const Dropout& dropout, int32_t i, int32_t j) {
  const int32_t within = n_tiles == 1 ? (rows_are_keys ? i : j) & 8 : 0;  // a square, the half that is wanted
  (rows_are_keys ? i : j) -= within;
  if (dropout.template draws_squares<KeptPairs<rows_are_keys, m_tiles, n_tiles>::together>(i, j)) draw_squares(kept, dropout, i, j);
  else draw_pairs(kept, dropout, i, j);
  if (within == 0) return;
#pragma unroll
  for (uint32_t& bits : kept.bits) bits >>= rows_are_keys ? 1 : 2;
}

// What is dropped of an operand whose rows are queries becomes 0.
template <class T, int inner> FG_DEVICE void drop(LeftRows<T, 1, inner>& p, const Dropout& dropout, int32_t i, int32_t j) {
  static_assert(sizeof(T) == 2, "a register has two columns");
  constexpr int squares = inner / 16, together = squares_together(squares);
  if (dropout.template draws_squares<together>(i, j)) {
    const auto row = dropout.row_of(dropout_row(i + lane_index() / 4));
    const int32_t column = j + lane_index() % 4 * 2;
#pragma unroll
    for (int first = 0; first < squares; first += together) {
      const Words words = dropout.words(row, dropout.column_of(dropout_column_of<together>(column, first)));
#pragma unroll
      for (int n = first; n < first + together; ++n) {
        const Words kept = dropout.keeps(words, together == 2 ? n > first : right_square(j + 16 * n));
#pragma unroll
        for (int w = 0; w < 4; ++w) p.at[0][n].r[w] &= kept.word[w];
      }
    }
  } else {
    KeptPairs<false, 1, inner / 8> kept;
    draw_pairs(kept, dropout, i, j);
#pragma unroll
    for (int n = 0; n < squares; ++n)
#pragma unroll
      for (int w = 0; w < 4; ++w) p.at[0][n].r[w] &= kept.halves(n, w);
  }
}

}  // namespace fg
