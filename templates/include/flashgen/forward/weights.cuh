// Products to weights that are a function of scores, and what they are divided by.
#pragma once
#include "flashgen/forward/pairs.cuh"

namespace fg::forward {

template <class Base_> struct FunctionsOfScores : Pairs<Base_> {
  using Base = Pairs<Base_>;
  using typename Base::Spec, typename Base::Column, typename Base::Scores, typename Base::Place;
  using Base::a, Base::u, Base::rows, Base::kv_len, Base::visits, Base::BC, Base::m_tiles, Base::s_tiles, Base::o_tiles, Base::o;
  using Base::row_sum, Base::row_moving, Base::row_scale, Base::kept, Base::scaled;
  using Base::Base;
  using OfRows = float[2 * m_tiles];

  // Products to weights, not yet normalised. A score of -inf counts as masked: the weight function never sees it. `tangents` sees each
  // product, and its score, 0 where it is not kept; whether that moves the weight.
  template <bool masked, class Ahead = NoneAhead, class Tangents = NoTangents>
  FG_DEVICE void weigh(Scores& s, int n, const Ahead& ahead = {}, const Tangents& tangents = {}) {
    const int column0 = visits.tile(n) * BC + Base::own_key();
    if (!Base::weighs()) return;  // all are 0
    Base::template for_pairs<masked>(n, column0, [&](const Column& c, int r, int t, int e) {
      const auto& seen = ahead.of(c, r, t, e);
      const int column = column0 + 8 * t + fragment_column(e);
      float& value = s.at[r / 2][t][r % 2 * 2 + e];
      const float score = Base::score_of(seen, r, value);
      bool kept = score != -INFINITY;
      if (masked) kept = kept && column < kv_len && Base::is_kept(seen, r);
      const float safe = kept ? score : 0.0f;
      [[maybe_unused]] const bool moves = tangents.move(c, r, t, e, value, kept, safe);
      const float p = weight(a, u, Base::head_of_row(r), rows[r], seen, safe);
      value = kept ? p : 0.0f;
      if constexpr (Spec::divided) row_sum[r] += Spec::term(value);
      if constexpr (Spec::divided && Spec::tangent) {
        tangents.add(r, t, e, value);
        row_moving[r] += kept && (value != 0.0f || moves) ? 1.0f : 0.0f;
      } else if constexpr (Spec::divided && masked && !Spec::cached) {
        row_moving[r] += kept ? 1.0f : 0.0f;
      }
    });
    if constexpr (Spec::divided && !masked && !Spec::tangent && !Spec::cached)
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) row_moving[r] += float(2 * s_tiles);
  }

  // Weights to scaled weights. The scale lags behind until weights reach 2^8.
  FG_DEVICE void scale(Scores& p) {
    OfRows top;
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      top[r] = 0.0f;
      p.for_row(r, [&](float weight) { top[r] = running_max(top[r], fg::abs(weight)); });
      top[r] = fg::row_max(top[r]);
      if constexpr (!Base::divided) grown = grown || outgrows(top, r);
    }
    if constexpr (Base::divided) {
      Base::over_parts(top, Larger());
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) grown = grown || outgrows(top, r);
    }
    if (ballot(grown) != 0) {
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) {
        if (top[r] * row_scale[r] <= 1.0f && (row_scale[r] != 0.0f || top[r] == 0.0f)) continue;
        const uint32_t exponent = __float_as_uint(top[r]) & 0x7f800000u;
        float fitting = __uint_as_float(0x7f000000u - (exponent < 0x7e800000u ? exponent : 0x7e800000u));
        if constexpr (Spec::f8) fitting = min(32.0f * fitting, 0x1p126f);
        const float shrink = row_scale[r] == 0.0f ? 1.0f : fitting / row_scale[r];
        row_scale[r] = fitting;
        if constexpr (Spec::f8) kept[r] *= shrink;
        o.scale_row(r, shrink);
      }
    }
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) p.scale_row(r, row_scale[r]);
  }
  FG_DEVICE bool outgrows(const OfRows& top, int r) const { return top[r] * row_scale[r] > 256.0f || (row_scale[r] == 0.0f && top[r] > 0.0f); }
  // What sums of weights that were multiplied by one number are multiplied by where another one is theirs; 0: by none yet.
  FG_DEVICE static float shrink_of(float from, float to) { return scaled && from != 0.0f ? to / from : 1.0f; }

  // Writes the log-sum-exps; what O is to be multiplied by, and in forward mode what lse changes by.
  FG_DEVICE void close_rows(const Place& place, OfRows& factors) const {
    OfRows none;
    close_rows(place, factors, none);
  }
  FG_DEVICE void close_rows(const Place& place, OfRows& factors, [[maybe_unused]] OfRows& t_lse) const {
    [[maybe_unused]] float value_unit;
    if constexpr (Spec::f8) value_unit = Base::factor_of(a.v_factors, place);
    [[maybe_unused]] int count, warp_row;
    [[maybe_unused]] int64_t first_row;
    if constexpr (Spec::divided) count = Base::row_count(place), warp_row = Base::first_own_row(), first_row = Base::first_row(place);
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      if constexpr (Spec::divided) {
        const int row = warp_row + 16 * (r / 2) + fragment_row(r % 2 * 2);
        const int64_t at = Base::place_of_row(place, r, row, first_row);
        const bool writes = row < count && fragment_column(0) == 0 && Base::writes_rows();
        const float denominator = Spec::denominator(Base::split > 1 ? row_sum[r] : fg::row_sum(row_sum[r]));
        factors[r] = denominator == 0.0f ? 0.0f : finite(1.0f / denominator);
        float inverse = factors[r];  // what the backward pass reads: less than 0 where one key alone has a weight
        if constexpr (!Spec::cached)
          if ((Base::split > 1 ? row_moving[r] : fg::row_sum(row_moving[r])) == 1.0f) inverse = -inverse;
        if constexpr (scaled && !Spec::tangent) factors[r] = row_scale[r] == 0.0f ? factors[r] : factors[r] / row_scale[r];
        if (a.lse && writes) {
          global_store(Base::of_row(a.lse, at, row), fg::log(denominator));
          if (a.lse_parts) global_store(Base::of_row(reinterpret_cast<float2*>(a.lse_parts), at, row), make_float2(inverse, 0.0f));
        }
        if constexpr (Spec::tangent) {
          t_lse[r] = fg::row_sum(Base::t_sum[r]);
#pragma unroll
          for (int k = 0; k < Spec::degree; ++k) t_lse[r] *= factors[r];
          if (a.t_lse && writes) global_store(Base::of_row(a.t_lse, at, row), t_lse[r]);
        }
      } else {
        factors[r] = 1.0f;
        if constexpr (Spec::scaled_weights && !Spec::cached) factors[r] = row_scale[r] == 0.0f ? 0.0f : 1.0f / row_scale[r];
      }
      if constexpr (Spec::f8) factors[r] *= value_unit;
      if constexpr (Spec::dropout)
        if (Base::dropped) factors[r] = finite(factors[r] * a.dropout_scale);
    }
  }
};

}  // namespace fg::forward
