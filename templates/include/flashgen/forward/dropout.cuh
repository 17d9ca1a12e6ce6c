// Dropout: which pairs survive.
#pragma once
#include "flashgen/forward/state.cuh"
#include "flashgen/philox.cuh"

namespace fg::forward {

template <class Base> struct WithDropout : Base {
  using Base::a, Base::u, Base::x, Base::m_tiles, Base::s_tiles;
  using Base::Base;
  using Scores = Accumulators<m_tiles, s_tiles>;

  FG_DEVICE Dropout dropout() const { return {u.seed, x.b, x.h, a.dropout_threshold}; }
  FG_DEVICE int first_row_of_warp() const { return int(a.q_start) + Base::place().row0 + Base::warp_row; }
  // P' = P where a pair survives, else 0; O is scaled at the end. In forward mode the same of what P changes by.
  template <class... More> FG_DEVICE void drop(int column0, Scores& p, More&... more) {
    KeptPairs<false, m_tiles, s_tiles> kept;
    draw(kept, dropout(), first_row_of_warp(), int(a.kv_start) + column0);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) p.at[m][t][e] = kept.of(m, t, e, p.at[m][t][e]), ((more.at[m][t][e] = kept.of(m, t, e, more.at[m][t][e])), ...);
  }
};

}  // namespace fg::forward
