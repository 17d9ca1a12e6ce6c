// Layer 2 of the CPU primitives: the counter-based random numbers of dropout, Philox4x32-7 (Salmon et al., 2011).
//
// Contract, the same on every backend: a call draws for sixteen pairs of two squares of 16 x 16 side by side, rows r and
// r + 8 by columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of each. counter = (h, 8 (i // 16) + i % 8, b, 4 (j // 32) + j % 8 // 2),
// key = (low, high word of the seed). The number of the pair (b, h, i, j) is in output word 2 (j % 16 // 8) + i % 16 // 8,
// which in the right square (j // 16 odd) is rotated to the left by eight bits: the low 15 bits of its half j % 2. The pair is
// kept iff number >= threshold, threshold = round(p 2^15). All indices are global ones.
#pragma once
#include "flashgen/cpu/vector.h"

namespace fg {

// A word of the counter sits in 64 bits: a scalar as long as it is the same in all lanes, then a vector of W/2 lanes,
// the even or the odd ones of W (on a little-endian machine, as are all of these).
typedef uint64_t VecUL __attribute__((vector_size(4 * W)));

struct PhiloxKey {
  uint32_t low, high;
};
FG_INLINE PhiloxKey philox_key(uint64_t seed) {
  return {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
}

template <class Word> struct PhiloxWords {
  Word word[4];
};

// `rounds` rounds; every word may be uint64_t or VecUL, so that the first rounds stay scalar where the counter is.
template <int rounds, class C0, class C1, class C2, class C3>
FG_INLINE auto philox(C0 c0, C1 c1, C2 c2, C3 c3, PhiloxKey key) {
  if constexpr (rounds == 0) {
    return PhiloxWords<C0>{{c0, c1, c2, c3}};
  } else {
    constexpr uint64_t word = 0xffffffffu;
    const auto a = c0 * uint64_t{0xD2511F53};
    const auto b = c2 * uint64_t{0xCD9E8D57};
    return philox<rounds - 1>((b >> 32) ^ c1 ^ uint64_t{key.low}, b & word,  //
                              (a >> 32) ^ c3 ^ uint64_t{key.high}, a & word,
                              PhiloxKey{key.low + 0x9E3779B9u, key.high + 0xBB67AE85u});
  }
}

// Whether pairs of a row and 32 columns are kept: column j is bit j % 32 / 2, of odd columns 16 + j % 32 / 2.
constexpr int dropout_columns = 32;
FG_INLINE uint32_t dropout_bit(int32_t j) { return 1u << ((j & 31) / 2 + (j & 1) * 16); }

// Of a word's halves, each of which is a number, bit n of the half for the left square, and bit n + 8 for the right one.
FG_INLINE VecU dropout_bits(VecU words, int n, uint32_t threshold) {
  const uint32_t carries = (0x8000u - threshold) * 0x10001u;  // into bit 15 of what is kept
  const VecU rotated = words << 8 | words >> 24;
  return (((words & 0x7fff7fffu) + carries) >> (15 - n) & (0x10001u << n)) |
         (((rotated & 0x7fff7fffu) + carries) >> (7 - n) & (0x1000100u << n));
}

// Bits of the columns 32 block ... 32 block + 31 for any rows i.
FG_INLINE VecU dropout_keeps_of_rows(uint64_t seed, int32_t b, int32_t h, VecI i, int32_t block, uint32_t threshold) {
  const VecUL rows = reinterpret_cast<VecUL>((i >> 4 << 3) | (i & 7));
  const uint64_t head = static_cast<uint32_t>(h), batch = static_cast<uint32_t>(b);
  const VecB lower = ne(i & 8, 0);
  VecU kept{};
  FG_UNROLL
  for (int c = 0; c < 4; ++c) {
    const uint64_t column = static_cast<uint32_t>(4 * block + c);
    const auto even = philox<7>(head, rows & uint64_t{0xffffffffu}, batch, column, philox_key(seed));
    const auto odd = philox<7>(head, rows >> 32, batch, column, philox_key(seed));
    VecU words[4];
    for (int w = 0; w < 4; ++w) words[w] = reinterpret_cast<VecU>(even.word[w] | odd.word[w] << 32);
    for (int right = 0; right < 2; ++right)
      kept |= dropout_bits(select(lower, words[2 * right + 1], words[2 * right]), 4 * right + c, threshold);
  }
  return kept;
}
#if FG_LANES == 16
// The kept pairs of rows that begin a square: a call's words are those of two lanes.
FG_INLINE VecU dropout_keeps_of_square(uint64_t seed, int32_t b, int32_t h, int32_t first, int32_t block, uint32_t threshold) {
  const uint64_t head = static_cast<uint32_t>(h), batch = static_cast<uint32_t>(b), row = static_cast<uint32_t>(first >> 1);
  const VecUL rows = row + VecUL{0, 1, 2, 3, 4, 5, 6, 7};
  VecU kept{};
  FG_UNROLL
  for (int c = 0; c < 4; ++c) {
    const uint64_t column = static_cast<uint32_t>(4 * block + c);
    const auto drawn = philox<7>(head, rows, batch, column, philox_key(seed));
    for (int right = 0; right < 2; ++right)
      kept |= dropout_bits(reinterpret_cast<VecU>(drawn.word[2 * right] | drawn.word[2 * right + 1] << 32), 4 * right + c, threshold);
  }
  return FG_SHUFFLE(kept, kept, 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
}
#endif
// Rows i count up by one.
FG_INLINE VecU dropout_keeps(uint64_t seed, int32_t b, int32_t h, VecI i, int32_t block, uint32_t threshold) {
#if FG_LANES == 16
  if (i[0] % 16 == 0) return dropout_keeps_of_square(seed, b, h, i[0], block, threshold);
#endif
  return dropout_keeps_of_rows(seed, b, h, i, block, threshold);
}

}  // namespace fg
