// The loop over key tiles where each is multiplied, weighed and multiplied again.
#pragma once
#include "flashgen/forward/pairs.cuh"
#include "flashgen/norms.cuh"

namespace fg::forward {

template <class Base> struct Mainloop : Base {
  using typename Base::Spec, typename Base::P, typename Base::Scores;
  using Base::a, Base::visits, Base::warp_row, Base::BC, Base::stages, Base::threads, Base::m_tiles, Base::s_tiles, Base::divided, Base::dropped, Base::k_tile, Base::own_key;
  using Base::Base;

  FG_DEVICE static void await_tile() {
    copy_async_wait<2 * (stages - 1)>();
    Base::publish();
    block_barrier();
  }

  // The tiles of one window; in parts, where their first copies have been started.
  FG_DEVICE void multiply_window() {
    this->load_first();
    multiply_tiles();
  }
  FG_DEVICE void multiply_tiles() {
    if constexpr (P::q_in_registers) {
      copy_async_wait<2 * (stages - 1)>();
      block_barrier();
      load(Base::q_rows, this->ordered_q(), warp_row);
    }
    int n = 0;
#pragma unroll 1
    for (; n < visits.partials(); ++n) step<true>(n);
#pragma unroll 1
    for (; n < visits.count(); ++n) step<false>(n);
  }

  // One key tile. The copies run in the order K0 V0 K1 V1 …; each starts where a barrier says that everyone is done
  // with its place, and all but the newest 2 (stages - 1) have landed where one is needed.
  template <bool masked> FG_DEVICE void step(int n) {
    const int column0 = visits.tile(n) * BC;
    await_tile();
    this->load_v(n + stages - 1);
    if constexpr (Spec::sqdist) {
      Base::template measure<threads>(n, int(threadIdx.x));
      if constexpr (Spec::tangent) twice_products<threads>(this->t_norms(n), k_tile(n), this->t_k_tile(n), a.t_k != nullptr);
      block_barrier();
    }
    Scores s;
    clear(s);
    [[maybe_unused]] Scores t_s;
    if constexpr (Spec::tangent) clear(t_s);
    this->multiply_keys(s, t_s, n);
    if constexpr (Spec::f8_cached) this->to_dots(s);
    if constexpr (Spec::exponential) {
      float shrink[2 * m_tiles];
      bool grown;
      if constexpr (Spec::tangent) grown = this->template scores_of_both<masked>(s, t_s, n, shrink);
      else grown = this->template scores<masked>(s, n, shrink);
      if (grown) this->rescale(shrink);
      this->exponentials(s);
      if constexpr (Spec::tangent) this->template move<masked>(s, t_s, n, grown);
    } else if constexpr (Spec::tangent) {
      this->template weigh<masked>(s, n, NoneAhead(), MovingPairs<Base>{*this, t_s, n});
    } else {
      this->template weigh<masked>(s, n);
      if constexpr (Base::scaled) this->scale(s);
    }
    if constexpr (dropped && Spec::tangent) this->drop(column0 + own_key(), s, t_s);
    else if constexpr (dropped) this->drop(column0 + own_key(), s);
    if constexpr (divided)
      if (Base::weighs()) {
        const int lane = again(lane_index());
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
#pragma unroll
          for (int t = 0; t < s_tiles; ++t) store_fragment(this->p_tile(), warp_row + 16 * m, own_key() + 8 * t, s.at[m][t], lane);
      }
    await_tile();
    this->load_k(n + stages);
    this->multiply_values(s, t_s, n);
  }
};

}  // namespace fg::forward
