// Layer 2 of the CUDA primitives: the counter-based random numbers of dropout, Philox4x32-10 (Salmon et al., 2011).
//
// Contract, the same on every backend: counter = (j // 4, i, h, b), key = (low, high word of the seed); the word of the
// pair (b, h, i, j) is output word j % 4, and the pair is kept iff word >= threshold, threshold = round(p 2^32). All
// indices are global ones.
#pragma once
#include "types.cuh"

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

}  // namespace fg
