// Forward mode by warpgroups for which others copy.
#pragma once
#include "flashgen/forward/tangents.cuh"
#include "flashgen/forward/with_producers.cuh"

namespace fg::forward {

// Which tangents there are. Kernels for one kind of call know: with branches between them no two products would overlap.
template <class Base> struct MovingOperands : Base {
  using Base::a;
  using Base::Base;
  FG_DEVICE bool moves_q() const { return FLASHGEN_MOVING < 0 ? a.t_q != nullptr : FLASHGEN_MOVING & 1; }
  FG_DEVICE bool moves_k() const { return FLASHGEN_MOVING < 0 ? a.t_k != nullptr : FLASHGEN_MOVING >> 1 & 1; }
  FG_DEVICE bool moves_v() const { return FLASHGEN_MOVING < 0 ? a.t_v != nullptr : FLASHGEN_MOVING >> 2 & 1; }
};

// Registers hold O and its tangent, beside them either P and its tangent with S, or S with its tangent: products with V of one
// tile and S of the next are started together, and the tangent of S once P is used up. Where weights come first exponentials run beside
// that product. While a warpgroup weighs, another multiplies. Parts are those of the forward pass, each with its tangents.
template <class Base> struct WarpgroupsOfTangents : Base {
  using typename Base::Spec, typename Base::T, typename Base::Scores;
  using Base::visits, Base::o, Base::t_o, Base::BC, Base::q_tile, Base::k_tile, Base::v_tile, Base::t_q_tile, Base::t_k_tile, Base::group, Base::await_part, Base::release_part, Base::release_q;
  using Base::moves_q, Base::moves_k, Base::moves_v;
  using Base::Base;
  using Weights = LeftRows<T, 1, BC>;  // P of one tile, or its tangent, as an operand

  FG_DEVICE void multiply_window(int) {
    this->await_q();
    if (visits.count() == 0) return release_q();
    if constexpr (Spec::sqdist) this->take_norms_of_rows();
    Weights p, t_p;
    if (visits.partials() > 0) step<true, true>(p, t_p, 0);
    else step<false, true>(p, t_p, 0);
    int n = 1;
#pragma unroll 1
    for (; n < visits.partials(); ++n) step<true, false>(p, t_p, n);
#pragma unroll 1
    for (; n < visits.count(); ++n) step<false, false>(p, t_p, n);
    release_q();
    await_part(n);
    begin_products(o, t_o, p, t_p);
    start_products_across(p, t_p, n - 1);
    warpgroup_commit();
    wait_products<0>(o, t_o, p, t_p);
    release_part(n);
  }

  template <bool masked, bool first> FG_DEVICE void step(Weights& p, Weights& t_p, int n) {
    const int row = 64 * group();
    await_part(n);
    Scores s, t_s;
    if constexpr (first) {
      begin_products(s);
      start_product(s, q_tile(), row, k_tile(n));
      warpgroup_commit();
    } else {
      begin_products(s, o, t_o, p, t_p);
      start_products_across(p, t_p, n - 1);
      warpgroup_commit();
      start_product(s, q_tile(), row, k_tile(n));
      warpgroup_commit();
      wait_products<1>(o, t_o, p, t_p);
    }
    // tS = tQ Kᵀ + Q tKᵀ
    begin_products(t_s);
    if (moves_q()) start_product(t_s, t_q_tile(), row, k_tile(n));
    if (moves_q() && moves_k()) start_product_onto(t_s, q_tile(), row, t_k_tile(n));
    else if (moves_k()) start_product(t_s, q_tile(), row, t_k_tile(n));
    else if (!moves_q()) clear(t_s);
    warpgroup_commit();
    if constexpr (masked && Base::shows_columns) this->await_columns(n);
    if constexpr (Spec::sqdist) this->take_norms(n);
    if constexpr (Spec::weighs_first) wait_products<1>(s);
    else wait_products<0>(s, t_s);
    if constexpr (Spec::exponential) {
      float shrink[2];
      const bool grown = this->template scores_of_both<masked>(s, t_s, n, shrink);
      if (grown) this->rescale(shrink);
      this->exponentials(s);
      if constexpr (Spec::weighs_first) wait_products<0>(t_s);
      this->template move<masked>(s, t_s, n, grown);
    } else {
      this->template weigh<masked>(s, n, NoneAhead(), MovingPairs<Base>{*this, t_s, n});
    }
    if constexpr (Base::dropped) this->drop(visits.tile(n) * BC, s, t_s);
    release_part(n);
    round_into(p, s);
    round_into(t_p, t_s);
  }

  // O += P V and tO += tP V + P tV, of part n + 1.
  FG_DEVICE void start_products_across(const Weights& p, const Weights& t_p, int n) {
    start_product_across(o, p, v_tile(n));
    start_product_across(t_o, t_p, v_tile(n));
    if (moves_v()) start_product_across(t_o, p, this->t_v_tile(n));
  }
};

template <class Weighing> using Block = WithProducers<WarpgroupsOfTangents<Producers<CopiesOfTiles<MovingOperands<Weighing>>>>>;

}  // namespace fg::forward
