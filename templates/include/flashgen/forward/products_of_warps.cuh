// Products of one key tile by warps: with rows of their own, where some share rows, with those of tangents.
#pragma once
#include "flashgen/forward/state.cuh"

namespace fg::forward {

template <class Base> struct ProductsOfWarps : Base {
  using typename Base::Spec, typename Base::P;
  using Base::a, Base::o, Base::warp_row, Base::m_tiles, Base::s_tiles, Base::o_tiles, Base::divided, Base::q_tile, Base::k_tile, Base::v_tile;
  using Base::Base;
  using Scores = Accumulators<m_tiles, s_tiles>;

  FG_DEVICE static void publish() {}
  // S = Q Kᵀ; tS = tQ Kᵀ + Q tKᵀ.
  FG_DEVICE void multiply_keys(Scores& s, [[maybe_unused]] Scores& t_s, int n) {
    if constexpr (Spec::tangent) {
      if (a.t_q) product_of_both(s, t_s, q_tile(), this->t_q_tile(), warp_row, k_tile(n));
      else product(s, q_tile(), warp_row, k_tile(n), 0);
      if (a.t_k) product(t_s, q_tile(), warp_row, this->t_k_tile(n), 0);
    } else if constexpr (divided) {
      if (Base::weighs()) product(s, Base::ordered_q(), warp_row, k_tile(n), Base::own_key());
    } else if constexpr (P::q_in_registers) {
      product(s, Base::q_rows, k_tile(n), 0);
    } else {
      product(s, Base::ordered_q(), warp_row, k_tile(n), 0);
    }
  }
  // O += P V; tO += tP V + P tV. Where rows are shared each warp has S of its part of the keys, and its part of O's columns.
  FG_DEVICE void multiply_values(Scores& s, [[maybe_unused]] Scores& t_s, int n) {
    if constexpr (Spec::tangent) {
      products_across(o, this->t_o, s, t_s, v_tile(n));
      if (a.t_v) product_across(this->t_o, s, this->t_v_tile(n), 0);
    } else if constexpr (divided) {
      product_across<false>(o, this->p_tile(), warp_row, v_tile(n), this->part * 8 * o_tiles);
    } else {
      product_across(o, s, v_tile(n), 0);
    }
  }
};

}  // namespace fg::forward
