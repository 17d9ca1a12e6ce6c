// One pair, for all kernels of the backward pass: P, dS, and what it adds to captured gradients.
#pragma once
#include "flashgen/backward/rows.cuh"
#include "flashgen/norms.cuh"

namespace backward {

// The exponent of a score, in base 2. Where passes add to one captured gradient, terms that cancel do so only if P is the same in all of
// them to the last bit: no fused subtraction of lse. What a score is rounded to matters where scores are extreme.
template <class Spec, bool in_bounds = false>
FG_DEVICE float exponent_of(const typename Spec::Launch& u, float score, [[maybe_unused]] float top, float lse) {
  if constexpr (Spec::tops && !in_bounds) score = __fadd_rn(score, -top);
  if constexpr (Spec::captured) return __fmaf_rn(score, Spec::factor(u), -lse);
  else return score * Spec::factor(u) - lse;
}

// Of a pair of row r and column c, in the loops over pairs of a tile.
template <class Spec, bool masked, bool dropped, bool in_bounds> struct Pair {
  using Row = typename Spec::Row;
  const typename Spec::Arguments& a;
  const typename Spec::Launch& u;
  const typename Spec::Head& x;
  const Row& r;
  const typename Spec::Column& c;
  float survivor;  // what dropout makes of it
  bool kept;
  PairTerms terms{};

  FG_DEVICE float own_score() const {
    if constexpr (Spec::sqdist && !Spec::norms) return score(a, u, x, r, c, terms.dot, terms.sqdist);
    else return score(a, u, x, r, c, terms.dot);
  }
  FG_DEVICE float by_dot() const {
    if constexpr (Spec::sqdist) return score_by_dot(a, u, x, r, c, terms.dot, terms.sqdist);
    else return score_by_dot(a, u, x, r, c, terms.dot);
  }
  // What arrives at |q|², and at |k|².
  FG_DEVICE float d_norm() const {
    return chained<Spec>(terms.d_score, score_by_sqdist(a, u, x, r, c, terms.dot, terms.sqdist));
  }
  // Of its product P, before dropout.
  FG_DEVICE float weigh(float dot, [[maybe_unused]] RowState row) {
    terms.dot = dot;
    if constexpr (Spec::sqdist) terms.sqdist = fg::squared_distance(r, c, dot);
    if constexpr (Spec::product) {
      const float p = fg::exp2_approximate(dot * Spec::factor(u) - row.lse);
      return masked && !kept ? 0.0f : p;
    } else {
      const float e = own_score();
      kept = kept && e != -INFINITY;
      if constexpr (Spec::exponential) {
        return kept ? fg::exp2_approximate(exponent_of<Spec, in_bounds>(u, e, row.top, row.lse)) : 0.0f;
      } else {
        terms.safe = kept ? e : 0.0f;
        float p = weight(a, u, x, r, c, terms.safe);
        if constexpr (Spec::divided) p *= fg::abs(row.lse);
        return kept ? p : 0.0f;
      }
    }
  }
  // From its product in `value`, and dP in `d_value`, to P after dropout and dS ∘ ∂S/∂dot, but for a constant slope.
  FG_DEVICE void differentiate(float& value, float& d_value, RowState row) {
    float p = weigh(value, row), d_weight = d_value, d_score;
    if constexpr (dropped) d_weight *= survivor;
    if constexpr (Spec::exponential) {
      d_score = Spec::reaching(d_weight, p, row.delta, 0.0f);
    } else {
      const float inverse = fg::abs(row.lse);
      if constexpr (Spec::divided)
        if (row.lse < 0.0f) d_weight = 0.0f;  // a row's one key
      d_weight = kept ? Spec::reaching(d_weight, p, row.delta, inverse) : 0.0f;
      const float slope = weight_by_score(a, u, x, r, c, terms.safe);
      d_score = kept ? d_weight * slope : 0.0f;
    }
    terms.d_weight = d_weight, terms.d_score = d_score;
    if constexpr (dropped) p *= survivor;
    value = p;
    if constexpr (Spec::constant_slope) d_value = terms.d_score;
    else d_value = kept ? chained<Spec>(terms.d_score, by_dot()) : 0.0f;
  }
};

}  // namespace backward
