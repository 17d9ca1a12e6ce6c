// Layer 3 of the CUDA primitives: elements of a captured tensor that the pairs of a tile read, two neighbouring columns of a
// row at once.
//
// Contract: E has 1 or 2 bytes. Word t of row r has columns 8 t + fragment_column(0) of the tile and the next one.
#pragma once
#include "fragments.cuh"

namespace fg {

FG_DEVICE bool element_of_word(uint8_t, uint32_t word, int number) { return (word >> 8 * number & 0xffu) != 0; }

template <class A, class B> constexpr bool are_alike = false;
template <class A> constexpr bool are_alike<A, A> = true;

template <class E, int rows, int tiles> struct PairElements {
  uint32_t at[rows][tiles];
  FG_DEVICE auto operator()(int r, int t, int e) const { return element_of_word(E(), at[r][t], e); }
};

// Of one row, from what this lane's first column reads on; columns behind number `last` from there repeat that one.
// `together`: two lie side by side, on an address of both, and none is behind the last.
template <class E, int tiles>
FG_DEVICE void load_pairs(uint32_t (&words)[tiles], const E* first, int64_t stride, bool together, int last) {
  struct alignas(2 * sizeof(E)) Both {
    E element[2];
  };
  if (together) {
#pragma unroll
    for (int t = 0; t < tiles; ++t) words[t] = to_word(global_load(reinterpret_cast<const Both*>(first + 8 * t)));
  } else {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      words[t] = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        words[t] |= to_word(global_load(first + min(8 * t + e, last) * stride)) << 8 * sizeof(E) * e;
    }
  }
}
template <class E> FG_DEVICE bool lie_together(const E* first, int64_t stride) {
  return stride == 1 && uintptr_t(first) % (2 * sizeof(E)) == 0;
}

}  // namespace fg
