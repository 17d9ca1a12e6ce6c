// Softmax: products to scores, these to exponentials that are counted from the running maxima of rows, and their sums.
#pragma once
#include "flashgen/forward/pairs.cuh"

namespace fg::forward {

template <class Base_> struct Exponentials : Pairs<Base_> {
  using Base = Pairs<Base_>;
  using typename Base::Spec, typename Base::P, typename Base::T, typename Base::Row, typename Base::Column, typename Base::Scores, typename Base::Place;
  using Base::a, Base::u, Base::x, Base::rows, Base::kv_len, Base::warp_row, Base::visits, Base::BC, Base::m_tiles, Base::s_tiles, Base::chains;
  using Base::divided, Base::bounded, Base::HEADROOM, Base::LESS_HEADROOM, Base::row_max, Base::row_sum;
  using Base::Base;
  using Sums = float[2 * m_tiles][chains];
  using OfRows = float[2 * m_tiles];

  // Whether a tanh is a polynomial where all of a tile have small arguments.
  static constexpr bool may_be_near = Spec::small_tanh && Base::overlaps;

  // Exponents are in base 2: what scores are multiplied by, or products where these are scores but for a factor.
  FG_DEVICE float factor() const {
    if constexpr (Spec::f8 && Spec::product) return Base::exponent_unit;
    else return Spec::factor(u);
  }
  // What maxima are multiplied by.
  FG_DEVICE float factor_of_top() const {
    if constexpr (Spec::f8 && Spec::product) return Base::exponent_unit;
    else return Spec::factor_of_top(u);
  }

  // Products to scores (less a constant factor, where they are no more), -inf where a pair is not kept, and the maxima of rows. O and the
  // sums shrink only where a maximum has grown by more than 2^lag since the last time: until then weights stay below 2^lag. Whether, and
  // by what. `tangents` sees each product before it becomes a score.
  template <bool masked, class Ahead = NoneAhead, class Tangents = NoTangents>
  FG_DEVICE bool scores(Scores& s, int n, OfRows& shrink, const Ahead& ahead = {}, const Tangents& tangents = {}) {
    const int column0 = visits.tile(n) * BC + Base::own_key();
    [[maybe_unused]] OfRows shift;
    if constexpr (Spec::bounded && !divided)
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) shift[r] = offset_of(row_max[r]);
    if constexpr (divided)
      if (!Base::weighs()) fill(s, Spec::hidden(u));
    if constexpr (bounded) {
      Sums sums = {};
      const bool begins = begins_rows();
      if constexpr (may_be_near) {
        if (are_near<masked>(s, n, column0, begins, ahead)) weigh_bounded<masked, true>(s, sums, n, column0, begins, shift, ahead, tangents);
        else weigh_bounded<masked, false>(s, sums, n, column0, begins, shift, ahead, tangents);
      } else {
        weigh_bounded<masked, false>(s, sums, n, column0, begins, shift, ahead, tangents);
      }
      return add_weights(s, sums, shrink);
    } else {
      if constexpr (may_be_near) {
        if (are_near<masked>(s, n, column0, false, ahead)) score_pairs<masked, true>(s, n, column0, shift, ahead, tangents);
        else score_pairs<masked, false>(s, n, column0, shift, ahead, tangents);
      } else if (Base::weighs()) {
        score_pairs<masked, false>(s, n, column0, shift, ahead, tangents);
      }
      hide<masked>(s, column0);
      if constexpr (Spec::f8 && Spec::product)
        if (!may_grow(s)) return false;
      return raise_maxima(s, shrink);
    }
  }

  // Whether scores of this warp's part of a tile need no special function: it is asked once, as a branch a pair would keep pairs from
  // running side by side.
  template <bool masked, class Ahead> FG_DEVICE bool are_near(const Scores& s, int n, int column0, bool begins, const Ahead& ahead) const {
    constexpr int ways = Spec::bounded ? 8 : 2;
    float most[ways] = {};
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Column c = Base::template make<masked>(n, column0, t, e, x);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& top = most[ways == 8 ? 4 * r + t % 2 * 2 + e : r];
          top = running_max(top, fabsf(near_argument(a, u, x, rows[r], ahead.of(c, r, t, e), s.at[0][t][2 * r + e])));
        }
      }
#pragma unroll
    for (int k = ways / 2; k > 0; k /= 2)
#pragma unroll
      for (int n = 0; n < k; ++n) most[n] = running_max(most[n], most[n + k]);
    return ballot(begins || most[0] > Spec::small_argument(a, u, x)) == 0;
  }
  template <bool masked, bool near, class Ahead, class Tangents>
  FG_DEVICE void score_pairs(Scores& s, int n, int column0, [[maybe_unused]] const OfRows& shift, const Ahead& ahead, const Tangents& tangents) const {
    Base::template for_pairs<masked>(n, column0, [&](const Column& c, int r, int t, int e) {
      [[maybe_unused]] float& value = s.at[r / 2][t][r % 2 * 2 + e];
      tangents.move(c, r, t, e, value);
      if constexpr (bounded) value = Base::template exponent_of<near>(ahead.of(c, r, t, e), r, value) - shift[r];
      else if constexpr (!Spec::product) value = Base::template score_of<near>(ahead.of(c, r, t, e), r, value);
      if constexpr (masked && !Spec::keys_of_row)
        if (!Base::is_kept(ahead.of(c, r, t, e), r)) value = Spec::hidden(u);
    });
  }

  template <bool masked, bool near, class Ahead, class Tangents>
  FG_DEVICE void weigh_bounded(Scores& s, Sums& sums, int n, int column0, [[maybe_unused]] bool begins, const OfRows& shift, const Ahead& ahead, const Tangents& tangents) {
    score_pairs<masked, near>(s, n, column0, shift, ahead, tangents);
    hide<masked>(s, column0);
    if constexpr (!near)
      if (ballot(begins) != 0) begin_maxima(s);
    exponentials(s, sums);         // beside the polynomials, if any: they take another unit
    if constexpr (near) again(0);  // or else the compiler takes exponentials out of both branches
  }

  // What the mask hides of a tile beyond its pairs. Where it tells what a row keeps: what rows do not keep, and what lies past the last key;
  // by rows, so that a lane's neighbouring bits are asked together. Else the keys past the last one, which few tiles have.
  template <bool masked> FG_DEVICE void hide(Scores& s, int column0) const {
    if constexpr (masked && Spec::keys_of_row) {
      const int first = column0 + fragment_column(0);
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) {
        const auto kept = keys_of_row<s_tiles>(a, u, Base::head_of_row(r), rows[r], int(a.kv_start) + first, kv_len - first);
#pragma unroll
        for (int t = 0; t < s_tiles; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!kept.has(t, e)) s.at[r / 2][t][r % 2 * 2 + e] = Spec::hidden(u);
      }
    } else if constexpr (masked) {
      if (column0 + BC <= kv_len) return;
      const int count = again(kv_len - column0);  // a branch: the compiler would make it a selection a pair
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * t + fragment_column(e) >= count)
#pragma unroll
            for (int r = 0; r < 2 * m_tiles; ++r) s.at[r / 2][t][r % 2 * 2 + e] = Spec::hidden(u);
    }
  }

  // The maxima, where they have grown.
  FG_DEVICE bool raise_maxima(const Scores& s, OfRows& shrink) {
    float tops[2 * m_tiles][chains];
    if constexpr (Spec::sign_of_factor) {
      if (Spec::sign(u) > 0.0f) find_tops<1>(s, tops);
      else find_tops<-1>(s, tops);
    } else {
      find_tops<1>(s, tops);
    }
    OfRows top;
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
#pragma unroll
      for (int n = chains / 2; n > 0; n /= 2)
#pragma unroll
        for (int k = 0; k < n; ++k) tops[r][k] = running_max(tops[r][k], tops[r][k + n]);
      top[r] = Spec::f8 ? tops[r][0] : fg::row_max(tops[r][0]);
      if constexpr (!divided) grown = grown || grows(top, r);
    }
    if constexpr (divided) {
      Base::over_parts(top, Larger());
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) grown = grown || grows(top, r);
    }
    if (ballot(grown) == 0) return false;
    bool far = false;
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      top[r] = running_max(row_max[r], Spec::f8 ? fg::row_max(top[r]) : top[r]);
      shrink[r] = top[r] == -INFINITY ? 1.0f : exp2_approximate((row_max[r] - top[r]) * factor_of_top());
      row_max[r] = top[r];
      row_sum[r] *= shrink[r];
      if constexpr (Spec::tangent) Base::t_sum[r] *= shrink[r];
      if constexpr (Spec::f8) Base::row_shift[r] = offset_of(top[r]) - HEADROOM, far = far || is_far(top[r]);
    }
    if constexpr (Spec::f8) Base::are_far = ballot(far) != 0;
    return true;
  }
  FG_DEVICE bool grows(const OfRows& top, int r) const {
    if constexpr ((Spec::f8 && Spec::product) || Spec::sign_of_factor) return (top[r] - row_max[r]) * factor_of_top() > float(Spec::lag);
    else return top[r] > row_max[r] + Spec::lag_of_top;
  }
  // Of a lane's products, which a factor of this sign makes scores.
  template <int direction> FG_DEVICE static void find_tops(const Scores& s, Sums& tops) {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
#pragma unroll
      for (int n = 0; n < chains; ++n) tops[r][n] = -INFINITY;
#pragma unroll
      for (int n = 0; n < 2 * s_tiles; ++n) {
        float& top = tops[r][n % chains];
        top = running_max(top, direction * s.at[r / 2][n / 2][r % 2 * 2 + n % 2]);
      }
    }
  }
  // Of 8 bits: whether a maximum of this warp's may have grown by more than 2^lag. Floats from 0 on are ordered as their bits are, of
  // which an instruction takes the largest of three; of others bits say no more than that none is above 0.
  FG_DEVICE bool may_grow(const Scores& s) const {
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      int tops[chains];
#pragma unroll
      for (int n = 0; n < s_tiles; ++n) {
        const int a = __float_as_int(s.at[r / 2][n][r % 2 * 2]), b = __float_as_int(s.at[r / 2][n][r % 2 * 2 + 1]);
        tops[n % chains] = n < chains ? larger(a, b) : largest(tops[n % chains], a, b);
      }
#pragma unroll
      for (int n = 1; n < chains; ++n) tops[0] = larger(tops[0], tops[n]);
      const bool is_unsure = tops[0] < 0 && !(row_max[r] >= 0.0f);
      grown = grown || is_unsure || (__int_as_float(tops[0]) - row_max[r]) * Base::exponent_unit > float(Spec::lag);
    }
    return ballot(grown) != 0;
  }
  FG_DEVICE static void fill(Scores& s, float value) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) s.at[m][t][e] = value;
  }

  // What a row's exponents are less: its maximum in base 2. Where that is so large that its rounding would show, and where nothing is
  // kept so far (exp2(-inf + inf) would be NaN), it is 0, and scores are counted from the maximum itself.
  FG_DEVICE bool is_far(float top) const { return !(fg::abs(top * factor_of_top()) <= MOST_OFFSET); }
  FG_DEVICE float offset_of(float top) const { return is_far(top) ? 0.0f : top * factor_of_top(); }
  FG_DEVICE void count_from_maxima(Scores& s) const {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const float top = is_far(row_max[r]) && row_max[r] != -INFINITY ? row_max[r] : 0.0f;
      s.for_row(r, [&](float& score) { score = __fadd_rn(score, -Spec::sign(u) * top); });
    }
  }
  // What weights counted from one maximum are multiplied by where they are counted from a higher one.
  FG_DEVICE float shrink_of(float from, float top) const {
    const bool far = is_far(from) || is_far(top);
    const float shrink = exp2_approximate(far ? (from - top) * factor_of_top() : offset_of(from) - offset_of(top));
    return from == top ? 1.0f : shrink;  // none of both, perhaps
  }

  // Where scores are bounded exponents are counted from a row's first maximum, and from another one once weights of a lane add up to
  // more than 2^lag. They are at most 2^80 either way: a row has begun once no weight can be infinite.
  FG_DEVICE bool begins_rows() const {
    bool begins = false;
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) begins = begins || row_max[r] < -40.0f * LN_2;
    return begins;
  }
  FG_DEVICE static void exponentials(Scores& s, Sums& sums) {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& value = s.at[m][t][e];
          value = exp2_approximate(value);
          sums[2 * m + e / 2][(2 * t + e % 2) % chains] += value;
        }
  }
  // Whether O shrinks, and by what: P does, too.
  FG_DEVICE bool add_weights(Scores& s, Sums& sums, OfRows& shrink) {
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
#pragma unroll
      for (int n = 1; n < chains; ++n) sums[r][0] += sums[r][n];
      row_sum[r] += sums[r][0];
      grown = grown || sums[r][0] > float(1 << Spec::lag);
    }
    if (ballot(grown) == 0) return false;
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const float most = top_of_row(s, r, 1.0f), top = row_max[r] + (most > 1.0f ? fg::log2(most) * LN_2 : 0.0f);
      shrink[r] = most > 1.0f ? exp2_approximate((row_max[r] - top) * factor_of_top()) : 1.0f;
      row_max[r] = top;
      row_sum[r] *= shrink[r];
      s.scale_row(r, shrink[r]);
    }
    return true;
  }
  // Of rows that have not begun. What one had of low maxima is nothing beside a weight of 2^60: it need not shrink for one above 2^110.
  FG_DEVICE void begin_maxima(Scores& s) {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const float top = top_of_row(s, r, -INFINITY), before = offset_of(row_max[r]);
      const bool first = row_max[r] == -INFINITY;
      if (first ? top == -INFINITY : top <= 110.0f) continue;
      row_max[r] = first ? top * LN_2 : row_max[r] + 50.0f * LN_2;
      const float shift = offset_of(row_max[r]) - before;
      s.for_row(r, [shift](float& score) { score -= shift; });
    }
  }
  FG_DEVICE static float top_of_row(Scores& s, int r, float top) {
    s.for_row(r, [&](float score) { top = running_max(top, score); });
    return fg::row_max(top);
  }

  // Weights of exponents that are `shift` less for each row, and their sums.
  FG_DEVICE void exponentials(Scores& s, const OfRows& shift, Sums& sums) const {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& value = s.at[m][t][e];
          value = exp2_approximate(value * factor() - shift[2 * m + e / 2]);
          sums[2 * m + e / 2][(2 * t + e % 2) % chains] += value;
        }
  }
  // P = exp(S - max) 2^HEADROOM, of scores that are not weights already.
  FG_DEVICE void exponentials(Scores& s) {
    if constexpr (bounded) return;
    Sums sums = {};
    if constexpr (Spec::f8) {
      if (Base::are_far) count_from_maxima(s);
      exponentials(s, Base::row_shift, sums);
    } else {
      OfRows shift;
      bool far = false;
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) {
        shift[r] = Spec::headroom ? offset_of(row_max[r]) - HEADROOM : offset_of(row_max[r]);
        far = far || is_far(row_max[r]);
      }
      if (ballot(far) != 0) count_from_maxima(s);
      exponentials(s, shift, sums);
    }
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r)
#pragma unroll
      for (int n = 0; n < chains; ++n) row_sum[r] += sums[r][n];
  }

  // Writes the log-sum-exps; what O is to be multiplied by, and in forward mode what lse changes by, less t_base.
  FG_DEVICE void close_rows(const Place& place, OfRows& factors) const {
    OfRows none;
    close_rows(place, factors, none);
  }
  FG_DEVICE void close_rows(const Place& place, OfRows& factors, [[maybe_unused]] OfRows& t_lse) const {
    [[maybe_unused]] float value_unit;
    if constexpr (Spec::f8) value_unit = Base::factor_of(a.v_factors, place) * LESS_HEADROOM;
    const int count = Base::row_count(place), warp_row = Base::first_own_row();
    const int64_t first_row = Base::first_row(place);
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const int row = warp_row + 16 * (r / 2) + fragment_row(r % 2 * 2);
      const int64_t at = Base::place_of_row(place, r, row, first_row);
      const float sum = (Base::split > 1 ? row_sum[r] : fg::row_sum(row_sum[r])) * LESS_HEADROOM;
      [[maybe_unused]] float most = row_max[r], in_common = 0.0f, sink = 0.0f;
      [[maybe_unused]] Row of_row = rows[r];
      if constexpr ((Spec::sink || Spec::split_score) && !Spec::rows_of_heads) {
        of_row = make_row(a, u, x, int(a.q_start) + place.row0 + min(row, count - 1));
        if constexpr (Spec::norms) of_row.qq = rows[r].qq;
      }
      if constexpr (Spec::split_score) in_common = row_score(a, u, Base::head_of_row(r), of_row);
      [[maybe_unused]] const bool empty = sum == 0.0f;
      bool far;
      if constexpr (Spec::sink) {
        if (empty) most = 0.0f;  // what keeps no key is counted from 0
        // The sink joins the denominator alone: exp(sink) is one more term, with no value behind it.
        sink = sink_score(a, u, Base::head_of_row(r), of_row);
        if constexpr (Spec::split_score) sink = sink - in_common;
        far = is_far(most) || !(fg::abs(sink * LOG2_E) <= MOST_OFFSET);
      } else {
        far = is_far(most);
      }
      // What exponents in the sum are counted from: in base 2, where it is far in base e.
      const float from = far ? __fmul_rn(most, natural_of_top()) : offset_of(most);
      float top = from, denominator = sum, shrink = 1.0f;
      [[maybe_unused]] float unit, of_sink, base, above = 0.0f;
      if constexpr (Spec::sink) {
        unit = far ? LOG2_E : 1.0f, of_sink = far ? sink : sink * LOG2_E;
        const float seen = empty ? -INFINITY : from;  // of a row that keeps no key the sink is all that there is
        top = max(seen, of_sink), base = top == -INFINITY ? 0.0f : top, shrink = exp2_approximate((seen - base) * unit);
        denominator = sum * shrink + exp2_approximate((of_sink - base) * unit);
        above = min(__fmul_rn(base - from, unit), MOST_FLOAT);  // as the backward pass rounds it, where the sink is all
      }
      // A denominator is at least 2^-lag; what O is rounded to is coarser by far than the quotient.
      if constexpr (sizeof(T) == 2) factors[r] = denominator == 0.0f ? 0.0f : shrink * reciprocal_approximate(denominator);
      else factors[r] = denominator == 0.0f ? 0.0f : shrink / denominator;
      if (a.lse && row < count && fragment_column(0) == 0 && Base::writes_rows()) {
        const float log = fg::log2(denominator);
        float whole;
        if constexpr (Spec::split_score) whole = far ? (in_common + top) + log * LN_2 : in_common + (top + log) * LN_2;  // large ones cancel first
        else whole = far ? top + log * LN_2 : (top + log) * LN_2;
        const float lse = denominator == 0.0f ? -INFINITY : whole;
        global_store(Base::of_row(a.lse, at, row), lse);
        if (a.lse_parts) {
          float2 parts = {0.0f, 0.0f};
          if (is_extreme(lse)) {
            const float below = far ? 0.0f : __fmaf_rn(-most, factor_of_top(), from);  // the offset that sums began at was rounded
            if constexpr (Spec::split_score) {
              const float both = most + in_common, rounded = most - (both - in_common);
              parts = {both, log + below + rounded * LOG2_E};
            } else if constexpr (Spec::sign_of_factor) {
              // As a score: the backward pass, and others that add parts, do not know the launch.
              const float score = __fmul_rn(most, natural_of_top());
              parts = {score, log + below + __fmaf_rn(most, natural_of_top(), -score) * LOG2_E};
            } else {
              parts = {most, log + below};
            }
            if constexpr (Spec::sink) parts.y += above;
          }
          global_store(Base::of_row(reinterpret_cast<float2*>(a.lse_parts), at, row), parts);
        }
      }
      if constexpr (Spec::f8) factors[r] *= value_unit;
      if constexpr (Spec::tangent) {
        t_lse[r] = fg::row_sum(Base::t_sum[r]) * factors[r];
        if constexpr (Spec::sink) {
          const float sunk = denominator == 0.0f ? 0.0f : exp2_approximate((of_sink - base) * unit) / denominator;
          if constexpr (Spec::moves_sink) t_lse[r] += chained(sink_tangent(a, u, x, of_row) - Base::t_base[r], sunk);
          else t_lse[r] += chained(-Base::t_base[r], sunk);
        }
        if (a.t_lse && row < count && fragment_column(0) == 0) global_store(Base::of_row(a.t_lse, at, row), t_lse[r] + Base::t_base[r]);
      }
      if constexpr (Spec::dropout)
        if (Base::dropped) factors[r] = finite(factors[r] * a.dropout_scale);
    }
  }
  // In base e what `factor` is in base 2.
  FG_DEVICE float natural_of_top() const {
    if constexpr (Spec::f8 && Spec::product) return Base::exponent_unit * LN_2;
    else return Spec::natural_of_top(u);
  }

  // Few tiles bring a score that matters beyond what a row's exponents are counted from, and weights tell: their sum is large. So
  // a tile of which all is kept is weighed by the maxima of before. A warp whose sums are too large, or no numbers, looks for maxima.

  // Whether exponents of all of this warp's rows can be counted from their maxima, and by what they are less.
  FG_DEVICE bool counts_on(float (&shift)[2]) const {
    bool far = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shift[r] = row_max[r] * factor_of_top();
      far = far || is_far(row_max[r]);
    }
    return ballot(far) == 0;
  }
  // P, and its sums; not so where a weight may be more than 2^lag.
  FG_DEVICE bool weigh_by_maxima(Scores& s, const float (&shift)[2]) {
    Sums sums = {};
    exponentials(s, shift, sums);
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = chains / 2; n > 0; n /= 2)
#pragma unroll
        for (int k = 0; k < n; ++k) sums[r][k] += sums[r][k + n];
      grown = grown || !(sums[r][0] <= float((1 << Spec::lag) * BC / 4));  // one of so many is above 2^lag
    }
    if (ballot(grown) != 0) return false;
    row_sum[0] += sums[0][0], row_sum[1] += sums[1][0];
    return true;
  }
  // By instructions of a warp: others of its warpgroup may have no need.
  FG_DEVICE void multiply_again(Scores& s, int n) const {
    clear(s);
    product(s, Base::q_tile(), warp_row, Base::k_tile(n), 0);
  }
};

}  // namespace fg::forward
