// A cache of 8 bits beside queries of more.
#pragma once
#include "flashgen/forward/state.cuh"
#include "flashgen/narrow_tile.cuh"

namespace fg::forward {

template <class Base> struct EightBitsOfCaches : Base {
  using typename Base::Spec;
  using Base::memory, Base::m_tiles, Base::s_tiles, Base::o_tiles, Base::o, Base::row_scale, Base::scaled;
  using Base::Base;

  FG_DEVICE float* units() const { return reinterpret_cast<float*>(memory + Base::Memory::UNITS); }  // of rows of Q
  // Q as operand, from all that threads have copied.
  FG_DEVICE void order_q() const { order_columns<Base::threads, typename Base::E>(this->q_tile(), units()); }
  // Products with K as it is stored to those with K.
  FG_DEVICE void to_dots(Accumulators<m_tiles, s_tiles>& s) const {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const float unit = shared_load(units() + Base::warp_row + 16 * (r / 2) + fragment_row(r % 2 * 2));
      s.for_row(r, [&](float& score) { score = score * unit * Base::k_factor; });
    }
  }
  // Sums over V as it is stored to what blocks over wider caches have at the end of their keys.
  FG_DEVICE void to_sums(float v_factor) {
    order_sums(o);
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      float factor = v_factor * Base::LESS_HEADROOM;
      if constexpr (scaled && !Spec::normalised) factor = row_scale[r] != 0.0f ? v_factor / row_scale[r] : v_factor;
      o.scale_row(r, factor);
    }
  }
};

}  // namespace fg::forward
