// A block has a query tile, and works on one key tile after another, by warpgroups: where two share rows, and with products of tangents.
#pragma once
#include "flashgen/forward/one_tile.cuh"
#include "flashgen/warpgroup_spans.cuh"

namespace fg::forward {

template <class Base> struct ProductsOfWarpgroups : Base {
  using typename Base::Spec, typename Base::T;
  using Base::a, Base::o, Base::warp_row, Base::BC, Base::m_tiles, Base::s_tiles, Base::q_tile, Base::k_tile, Base::v_tile;
  using Base::Base;
  using Scores = Accumulators<m_tiles, s_tiles>;
  using Weights = LeftRows<T, 1, BC>;  // P of one tile, as an operand

  FG_DEVICE static void publish() { publish_shared(); }
  FG_DEVICE void multiply_keys(Scores& s, [[maybe_unused]] Scores& t_s, int n) {
    const int first = warp_row / 64 * 64;
    if constexpr (Spec::tangent) {
      begin_products(s, t_s);
      start_product(s, q_tile(), first, k_tile(n));
      if (a.t_q) start_product_onto(t_s, this->t_q_tile(), first, k_tile(n));
      if (a.t_k) start_product_onto(t_s, q_tile(), first, this->t_k_tile(n));
      warpgroup_commit();
      wait_products<0>(s, t_s);
    } else {
      begin_products(s);
      start_product(s, q_tile(), first, k_tile(n), Base::own_key());
      warpgroup_commit();
      wait_products<0>(s);
    }
  }
  FG_DEVICE void multiply_values(Scores& s, [[maybe_unused]] Scores& t_s, int n) {
    if constexpr (Spec::tangent) {
      auto& t_o = this->t_o;
      Weights p, t_p;
      round_into(p, s);
      round_into(t_p, t_s);
      begin_products(o, t_o, p, t_p);
      start_product_across(o, p, v_tile(n));
      start_product_across(t_o, t_p, v_tile(n));
      if (a.t_v) start_product_across(t_o, p, this->t_v_tile(n));
      warpgroup_commit();
      wait_products<0>(o, t_o, p, t_p);
    } else {
      Weights p;
      load(p, this->p_tile(), warp_row);
      begin_products(o, p);
      start_half_across(o, p, v_tile(n), this->part);
      warpgroup_commit();
      wait_products<0>(o, p);
    }
  }
};

template <class Weighing> using Block = KeyTilesInTurn<ProductsOfWarpgroups<Weighing>>;

}  // namespace fg::forward
