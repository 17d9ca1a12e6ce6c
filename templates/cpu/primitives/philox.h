// Layer 2 of the CPU primitives: the counter-based random numbers of dropout, Philox4x32-10 (Salmon et al., 2011).
//
// Contract, the same on every backend: counter = (j // 4, i, h, b), key = (low, high word of the seed); the word of the
// pair (b, h, i, j) is output word j % 4, and the pair is kept iff word >= threshold, threshold = round(p 2^32). All
// indices are global ones.
#pragma once
#include "vector.h"

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

// The four words of the pairs (b, h, i, 4 j_quad ... 4 j_quad + 3).
FG_INLINE void dropout_words(VecU out[4], uint64_t seed, int32_t b, int32_t h, VecI i, int32_t j_quad) {
  const VecUL two_lanes = reinterpret_cast<VecUL>(i);
  const uint64_t quad = static_cast<uint32_t>(j_quad);
  const uint64_t head = static_cast<uint32_t>(h), batch = static_cast<uint32_t>(b);
  const auto even = philox<10>(quad, two_lanes & uint64_t{0xffffffffu}, head, batch, philox_key(seed));
  const auto odd = philox<10>(quad, two_lanes >> 32, head, batch, philox_key(seed));
  for (int w = 0; w < 4; ++w) out[w] = reinterpret_cast<VecU>(even.word[w] | odd.word[w] << 32);
}
// The word of one pair.
FG_INLINE uint32_t dropout_word(uint64_t seed, int32_t b, int32_t h, int32_t i, int32_t j) {
  const uint64_t quad = static_cast<uint32_t>(j >> 2), row = static_cast<uint32_t>(i);
  const uint64_t head = static_cast<uint32_t>(h), batch = static_cast<uint32_t>(b);
  const auto words = philox<10>(quad, row, head, batch, philox_key(seed));
  return static_cast<uint32_t>(words.word[j & 3]);
}

// round(p 2^32), half to even, saturating.
FG_INLINE uint32_t dropout_threshold(double p) {
  const double scaled = __builtin_rint(p * 0x1p32);
  return scaled >= 0x1p32 ? 0xffffffffu : scaled > 0 ? static_cast<uint32_t>(scaled) : 0u;
}
FG_INLINE bool dropout_keeps(uint32_t word, uint32_t threshold) { return word >= threshold; }
FG_INLINE VecB dropout_keeps(VecU word, uint32_t threshold) { return {word >= threshold}; }

}  // namespace fg
