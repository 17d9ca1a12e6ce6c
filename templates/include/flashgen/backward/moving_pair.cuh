// One pair of forward mode's backward pass.
#pragma once
#include "flashgen/backward/pair.cuh"

namespace backward {

template <class Spec, bool masked, bool dropped> struct MovingPair : Pair<Spec, masked, dropped, false> {
  using Base = Pair<Spec, masked, dropped, false>;
  using Base::a, Base::u, Base::x, Base::r, Base::c, Base::survivor, Base::kept, Base::terms;

  // From its product in `value`, dP in `d_value`, what its product changes by in `t_value` and dP of tV in `v_value` to P after dropout,
  // what reaches its product and that change, and tP.
  FG_DEVICE void differentiate(float& value, float& d_value, float& t_value, float& v_value, MovingRow row) {
    const float p = Base::weigh(value, row), t_dot = t_value;
    terms.t_dot = t_dot, terms.t_e = kept ? score_tangent(a, u, x, r, c, terms.dot, t_dot) : 0.0f;
    float d_weight = v_value, d_t_weight = d_value, t_p;
    if constexpr (dropped) d_weight *= survivor, d_t_weight *= survivor;
    const float inverse = fg::abs(row.lse), t_e = terms.t_e;
    if constexpr (Spec::exponential) {
      t_p = fg::chained(t_e - row.moved, p);
      terms.d_t_score = Spec::reaching(d_t_weight, p, row.delta, inverse);
      terms.d_score = Spec::reaching_of_tangent(d_weight, p, row.delta, inverse, row.moved, row.epsilon, t_p, d_t_weight) + fg::chained(t_e - row.moved, terms.d_t_score);
    } else {
      const float slope = kept ? weight_by_score(a, u, x, r, c, terms.safe) : 0.0f;
      float t_w = 0.0f, delta = row.delta, epsilon = row.epsilon;
      if (kept) {
        t_w = chained<Spec>(slope, t_e);
        if constexpr (Spec::moves_weight) t_w = t_w + weight_tangent(a, u, x, r, c, terms.safe);
      }
      if constexpr (Spec::divided) {
        const bool one_key = row.lse < 0.0f, lone = one_key && p != 0.0f;
        epsilon = one_key ? 0.0f : row.epsilon, delta = one_key && !lone ? row.delta + row.epsilon : row.delta;
        t_p = lone ? 0.0f : t_w * inverse - p * row.moved;
        d_weight = lone ? 0.0f : d_weight, d_t_weight = lone ? 0.0f : d_t_weight;
      } else {
        t_p = t_w;
      }
      d_t_weight = kept ? Spec::reaching(d_t_weight, p, delta, inverse) : 0.0f;
      d_weight = kept ? Spec::reaching_of_tangent(d_weight, p, delta, inverse, row.moved, epsilon, t_p, d_t_weight) : 0.0f;
      terms.d_t_score = kept ? d_t_weight * slope : 0.0f;
      terms.d_score = kept ? d_weight * slope + chained<Spec>(d_t_weight, weight_tangent_by_score(a, u, x, r, c, terms.safe, t_e)) : 0.0f;
    }
    terms.d_weight = d_weight, terms.d_t_weight = d_t_weight;
    if constexpr (dropped) t_p *= survivor;
    v_value = t_p;
    if constexpr (Spec::constant_slope) {
      d_value = terms.d_score, t_value = terms.d_t_score;
    } else {
      d_value = kept ? chained<Spec>(terms.d_score, Base::by_dot()) + chained<Spec>(terms.d_t_score, score_tangent_by_dot(a, u, x, r, c, terms.dot, t_dot)) : 0.0f;
      t_value = kept ? chained<Spec>(terms.d_t_score, Base::by_dot()) : 0.0f;
    }
  }
};

}  // namespace backward
