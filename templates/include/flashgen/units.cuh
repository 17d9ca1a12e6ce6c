// Layer 5 of the CUDA primitives: parts of rows between kernels, rounded, as lanes hold them.
//
// Contract: a unit are 8 rows, half of a row of accumulators. A lane has words of 16 bytes of it, which lie beside those of
// its neighbours, so that a warp moves 512 bytes at a time, and needs no other memory to bring them into an order.
#pragma once
#include "flashgen/fragments.cuh"

namespace fg {

template <class T> FG_DEVICE uint32_t word_of(T, float low, float high) { return Element<T>::pack(low, high); }
FG_DEVICE uint32_t word_of(float, float low, float) { return __float_as_uint(low); }

template <class T, int n_tiles> struct Unit {
  static constexpr int of_word = 4 / sizeof(T), words = 2 * n_tiles / of_word, chunks = (words + 3) / 4, bytes = 512 * chunks;
  uint4 chunk[chunks];
};

// Rows 0 … 7 of accumulators, or with `half` 1 the others, multiplied by a factor.
template <class T, int n_tiles> FG_DEVICE void store_unit(char* to, const float (&d)[n_tiles][4], int half, float factor) {
  using U = Unit<T, n_tiles>;
  uint4* const place = reinterpret_cast<uint4*>(to) + lane_index();
#pragma unroll
  for (int n = 0; n < U::chunks; ++n) {
    uint32_t words[4] = {};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int first = (4 * n + k) * U::of_word, last = first + U::of_word - 1;  // of the lane's numbers of a row
      if (first < 2 * n_tiles) words[k] = word_of(T(), d[first / 2][2 * half + first % 2] * factor, d[last / 2][2 * half + last % 2] * factor);
    }
    global_stream(place + 32 * n, make_uint4(words[0], words[1], words[2], words[3]));
  }
}
template <class T, int n_tiles> FG_DEVICE void load_unit(Unit<T, n_tiles>& unit, const char* from) {
  const uint4* const place = reinterpret_cast<const uint4*>(from) + lane_index();
#pragma unroll
  for (int n = 0; n < Unit<T, n_tiles>::chunks; ++n) unit.chunk[n] = global_load(place + 32 * n);
}
template <class T, int n_tiles> FG_DEVICE void add_unit(float (&d)[n_tiles][4], int half, const Unit<T, n_tiles>& unit, float weight) {
  using U = Unit<T, n_tiles>;
#pragma unroll
  for (int n = 0; n < U::chunks; ++n) {
    const uint32_t words[4] = {unit.chunk[n].x, unit.chunk[n].y, unit.chunk[n].z, unit.chunk[n].w};
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int e = 0; e < U::of_word; ++e) {
        const int number = (4 * n + k) * U::of_word + e;
        if (number >= 2 * n_tiles) continue;
        float& sum = d[number / 2][2 * half + number % 2];
        sum = __fmaf_rn(element_of_word(T(), words[k], e), weight, sum);
      }
  }
}

}  // namespace fg
