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
    const uint64_t first = uint64_t(0xD2511F53u) * c0, second = uint64_t(0xCD9E8D57u) * c2;
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

// The decisions for this lane's four numbers of an accumulator, one bit each: rows are queries i, columns keys j. Where
// quads of keys begin in the first column, every lane draws for one row and four columns, and neighbours exchange
// halves.
FG_DEVICE uint32_t kept_of_rows(const Dropout& dropout, int32_t i, int32_t j) {
  const int lane = lane_index(), row = lane / 4, pair = lane % 4;
  if (j % 4 == 0) {
    const uint32_t own = dropout.keeps(i + row + pair % 2 * 8, j / 4 + pair / 2);
    const uint32_t theirs = shuffle_xor(own, 1);
    return pair % 2 == 0 ? (own & 3u) | (theirs & 3u) << 2 : theirs >> 2 | (own & 12u);
  }
  uint32_t bits = 0;
#pragma unroll 1
  for (int e = 0; e < 4; ++e) bits |= uint32_t(dropout.keeps_one(i + row + e / 2 * 8, j + 2 * pair + e % 2)) << e;
  return bits;
}
// The same where rows are keys and columns queries: every lane draws for one query and four keys.
FG_DEVICE uint32_t kept_of_columns(const Dropout& dropout, int32_t i, int32_t j) {
  const int lane = lane_index(), key = lane / 4, pair = lane % 4;
  uint32_t bits = 0;
  if (j % 4 == 0) {
    const uint32_t own = dropout.keeps(i + lane % 8, j / 4 + lane / 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t theirs = shuffle(own, (key / 4 + e / 2 * 2) * 8 + 2 * pair + e % 2);
      bits |= (theirs >> key % 4 & 1u) << e;
    }
    return bits;
  }
#pragma unroll 1
  for (int e = 0; e < 4; ++e) bits |= uint32_t(dropout.keeps_one(i + 2 * pair + e % 2, j + key + e / 2 * 8)) << e;
  return bits;
}

// The decisions for an array of accumulators, drawn in a loop that is not unrolled: four bits each.
template <int m_tiles, int n_tiles> struct KeptPairs {
  static constexpr int count = m_tiles * n_tiles;
  uint32_t bits[(count + 7) / 8];

  FG_DEVICE bool at(int m, int n, int e) const {
    return bits[(m * n_tiles + n) / 8] >> ((m * n_tiles + n) % 8 * 4 + e) & 1u;
  }
};
template <bool rows_are_keys, int m_tiles, int n_tiles>
FG_DEVICE void draw(KeptPairs<m_tiles, n_tiles>& kept, const Dropout& dropout, int32_t i, int32_t j) {
  using Kept = KeptPairs<m_tiles, n_tiles>;
#pragma unroll
  for (int word = 0; word < (Kept::count + 7) / 8; ++word) {
    uint32_t bits = 0;
#pragma unroll 1
    for (int n = 0; n < 8 && word * 8 + n < Kept::count; ++n) {
      const int row = (word * 8 + n) / n_tiles * 16, column = (word * 8 + n) % n_tiles * 8;
      bits |= (rows_are_keys ? kept_of_columns(dropout, i + column, j + row)
                             : kept_of_rows(dropout, i + row, j + column))
              << 4 * n;
    }
    kept.bits[word] = bits;
  }
}

}  // namespace fg
