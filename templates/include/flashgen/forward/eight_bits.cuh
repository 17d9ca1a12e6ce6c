// Q, K and V of 8 bits: what their numbers are multiplied by, and O as the sum of products of 8 bits.
#pragma once
#include "flashgen/forward/state.cuh"

namespace fg::forward {

template <class Base> struct EightBits : Base {
  using typename Base::Spec, typename Base::Memory;
  using Base::a, Base::dot_unit, Base::exponent_unit, Base::memory, Base::kept, Base::o, Base::m_tiles, Base::o_tiles;
  using Base::Base;

  template <int columns> FG_DEVICE static void multiply_sums(Accumulators<m_tiles, columns>& sums, float factor) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int t = 0; t < columns; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums.at[m][t][e] *= factor;
  }
  // What numbers of 8 bits of a head are multiplied by.
  FG_DEVICE float factor_of(const float* factors, const Place& place) const {
    const unsigned group = unsigned(a.heads) / unsigned(a.kv_heads);
    return factors ? global_load(factors + unsigned(place.head) / group) : 1.0f;
  }
  FG_DEVICE void take_factors(const Place& place) {
    dot_unit = factor_of(a.q_factors, place) * factor_of(a.k_factors, place);
    if constexpr (Spec::product) {
      // Exponents take it in, where the largest product then makes the largest exponent, and differences stay finite.
      const bool folds = dot_unit > 0x1p-60f && dot_unit < 0x1p60f;
      exponent_unit = folds ? Spec::factor_of_dot * dot_unit : Spec::factor_of_dot;
      if (folds) dot_unit = 1.0f;
    }
  }
  FG_DEVICE void store_o(const Place& place, int warp_row, int count) const {
    store_turned_fragments<Base::DV>(rows_of_o<bfloat_t>(a, place.head, place.row0), o.at[0], warp_row, count);
  }
  FG_DEVICE void begin_row(int r) { Base::row_shift[r] = -Base::HEADROOM, Base::are_far = false; }

  // Products of 8 bits keep 14 bits of what they add up. So those of a few tiles are added up at a time, in O. What O has then goes to
  // sums in shared memory, where each lane has its own and nobody else's. They are rounded to bfloat16, which takes half the time, and
  // what that leaves over stays in O: nothing is lost.
  static_assert(o_tiles % 2 == 0, "8 sums are a word of 16 bytes");
  FG_DEVICE uint4* kept_sums(int t) const { return reinterpret_cast<uint4*>(memory + Memory::SUMS) + t / 2 * Base::threads + threadIdx.x; }
  FG_DEVICE void clear_kept_sums() {
#pragma unroll
    for (int t = 0; t < o_tiles; t += 2) shared_store(kept_sums(t), make_uint4(0, 0, 0, 0));
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) kept[r] = 1.0f;
  }
  FG_DEVICE void add_kept_sums() {
#pragma unroll
    for (int t = 0; t < o_tiles; t += 2) add_sums(t, shared_load(kept_sums(t)));
  }
  FG_DEVICE void keep_sums() {
#pragma unroll
    for (int t = 0; t < o_tiles; t += 2) {
      add_sums(t, shared_load(kept_sums(t)));
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float &low = o.at[0][t + k / 2][k % 2 * 2], &high = o.at[0][t + k / 2][k % 2 * 2 + 1];
        words[k] = Element<bfloat_t>::pack(low, high);
        low -= low_of(words[k]), high -= high_of(words[k]);
      }
      shared_store(kept_sums(t), make_uint4(words[0], words[1], words[2], words[3]));
    }
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) kept[r] = 1.0f;
  }
  FG_DEVICE void add_sums(int t, uint4 sums) {
    const uint32_t words[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float &low = o.at[0][t + k / 2][k % 2 * 2], &high = o.at[0][t + k / 2][k % 2 * 2 + 1];
      low += low_of(words[k]) * kept[k % 2], high += high_of(words[k]) * kept[k % 2];
    }
  }
  FG_DEVICE static float low_of(uint32_t word) { return __uint_as_float(word << 16); }
  FG_DEVICE static float high_of(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }
};

}  // namespace fg::forward
