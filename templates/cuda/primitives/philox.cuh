// Layer 3 of the CUDA primitives: the counter-based random numbers of dropout, Philox4x32-10 (Salmon et al., 2011).
//
// Contract, the same on every backend: counter = (j // 4, i, h, b), key = (low, high word of the seed); the word of the
// pair (b, h, i, j) is output word j % 4, and the pair is kept iff word >= threshold, threshold = round(p 2^32). All
// indices are global ones.
#pragma once
#include "fragments.cuh"

namespace fg {

struct Words {
  uint32_t word[4];
};

// The four words of the pairs (b, h, i, 4 quad … 4 quad + 3).
FG_DEVICE Words dropout_words(uint64_t seed, int32_t b, int32_t h, int32_t i, int32_t quad) {
  uint32_t c0 = uint32_t(quad), c1 = uint32_t(i), c2 = uint32_t(h), c3 = uint32_t(b);
  uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = wide_product(0xD2511F53u, c0), second = wide_product(0xCD9E8D57u, c2);
    c0 = uint32_t(second >> 32) ^ c1 ^ key0, c1 = uint32_t(second);
    c2 = uint32_t(first >> 32) ^ c3 ^ key1, c3 = uint32_t(first);
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
FG_DEVICE uint32_t dropout_word(const Words& words, int32_t j) {
  const uint32_t low = j & 1 ? words.word[1] : words.word[0], high = j & 1 ? words.word[3] : words.word[2];
  return j & 2 ? high : low;
}

// What a block draws its decisions from; b and h are the head's.
struct Dropout {
  uint64_t seed;
  int32_t b, h;
  uint32_t threshold;

  // Bit n: whether the pair (i, 4 quad + n) is kept.
  FG_DEVICE uint32_t keeps(int32_t i, int32_t quad) const {
    const Words words = dropout_words(seed, b, h, i, quad);
    uint32_t bits = 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) bits |= uint32_t(words.word[n] >= threshold) << n;
    return bits;
  }
  FG_DEVICE bool keeps_one(int32_t i, int32_t j) const {
    return dropout_word(dropout_words(seed, b, h, i, j >> 2), j) >= threshold;
  }
};

// The decisions for an array of accumulators, four bits each.
template <int m_tiles, int n_tiles> struct KeptPairs {
  static constexpr int count = m_tiles * n_tiles, at_once = 8;
  uint32_t bits[(count + at_once - 1) / at_once];

  FG_DEVICE bool at(int m, int n, int e) const {
    return bits[(m * n_tiles + n) / at_once] >> ((m * n_tiles + n) % at_once * 4 + e) & 1u;
  }
};

// What lanes have drawn, a row and four columns each of every accumulator, as the decisions for their own numbers. Rows are
// queries: neighbours have halves of two rows' quads.
FG_DEVICE uint32_t exchanged_in_rows(uint32_t own) {
  constexpr uint32_t low = 0x33333333u;
  const uint32_t theirs = shuffle_xor(own, 1);
  return lane_index() % 2 == 0 ? (own & low) | (theirs & low) << 2 : (theirs >> 2 & low) | (own & ~low);
}
// Columns are queries: quads have been drawn by the lanes 8 * quad + query.
FG_DEVICE uint32_t exchanged_in_columns(uint32_t own) {
  const int lane = lane_index(), key = lane / 4, pair = lane % 4;
  uint32_t bits = 0;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const uint32_t theirs = shuffle(own, (key / 4 + e / 2 * 2) * 8 + 2 * pair + e % 2);
    bits |= (theirs >> key % 4 & 0x11111111u) << e;
  }
  return bits;
}

// Where quads of keys begin in the first column (or row, where these are keys), every lane draws for one query and four keys, two
// accumulators at a time: rounds wait for one another. Elsewhere each pair is drawn by itself.
template <bool rows_are_keys, int m_tiles, int n_tiles>
FG_DEVICE void draw(KeptPairs<m_tiles, n_tiles>& kept, const Dropout& dropout, int32_t i, int32_t j) {
  using Kept = KeptPairs<m_tiles, n_tiles>;
  const int lane = lane_index(), across = lane / 4, pair = lane % 4;
#pragma unroll
  for (int word = 0; word * Kept::at_once < Kept::count; ++word) {
    constexpr int most = Kept::count < Kept::at_once ? Kept::count : Kept::at_once;
    const int first = word * Kept::at_once, count = min(Kept::count - first, most);
    uint32_t bits = 0;
    if (j % 4 == 0) {
      const int own_i = rows_are_keys ? lane % 8 : across + pair % 2 * 8, own_quad = rows_are_keys ? lane / 8 : pair / 2;
#pragma unroll 2
      for (int n = 0; n < count; ++n) {
        const int row = (first + n) / n_tiles * 16, column = (first + n) % n_tiles * 8;
        const int query = rows_are_keys ? column : row, key = rows_are_keys ? row : column;
        bits |= dropout.keeps(i + own_i + query, j / 4 + own_quad + key / 4) << 4 * n;
      }
      bits = rows_are_keys ? exchanged_in_columns(bits) : exchanged_in_rows(bits);
    } else {
#pragma unroll 1
      for (int n = 0; n < 4 * count; ++n) {
        const int m = first + n / 4, e = n % 4;
        const int row = m / n_tiles * 16 + across + e / 2 * 8, column = m % n_tiles * 8 + 2 * pair + e % 2;
        const bool keeps = rows_are_keys ? dropout.keeps_one(i + column, j + row) : dropout.keeps_one(i + row, j + column);
        bits |= uint32_t(keeps) << n;
      }
    }
    kept.bits[word] = bits;
  }
}

}  // namespace fg
