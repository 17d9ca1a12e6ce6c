// Forward mode: the forward pass, which takes along what tangents of its inputs change, in the same visit of a tile.
//
// A tangent of q, k or v that is null is 0 everywhere.
#pragma once
#include "flashgen/cpu/forward.h"
#include "flashgen/cpu/gradients.h"

namespace {

// What the squared norm of a row changes by, where the row changes by another.
inline float twice_product(const HeadRows& x, const HeadRows& t_x, int64_t row) {
  return 2.0f * Features<D>(x, row).dot(Features<D>(t_x, row));
}

template <class Spec, class KindOfProducts> struct ForwardModeTile : ForwardTile<Spec, KindOfProducts> {
  using Base = ForwardTile<Spec, KindOfProducts>;
  using Products = KindOfProducts;
  using Row = typename Spec::Row;
  using Later = typename Products::Later;
  using Base::BC, Base::maxima, Base::rows;

  struct alignas(64) Scratch : Base::Scratch {
    typename Products::template Queries<rows, D, false> t_q;
    typename Products::template Keys<BC, D, false> t_k;
    typename Products::template Keys<BC, DV, true> t_v;
    typename Products::template Scores<BC, rows, false, true> t_s;     // tSᵀ, then what weights change by, transposed
    typename Products::template Sums<rows, DVP> t_o;                   // of O, but for the denominator's part
    float t_sum[rows];                                                 // of row_sum, but for a factor
    float t_qq[Spec::sqdist ? rows : 0], t_kk[Spec::sqdist ? BC : 0];  // 2 q · tq and 2 k · tk
  };

  static HeadRows tangents_of_queries(const Call& a, const Place& place) {
    return rows_of_head(a.t_q, a.element, place.b, a.t_q_stride_b, place.h, a.t_q_stride_h, a.t_q_stride_n);
  }
  static HeadRows tangents_of_keys(const Call& a, const Place& place) {
    const int64_t hkv = place.h / (a.heads / a.kv_heads);
    return rows_of_head(a.t_k, a.element, place.b, a.t_k_stride_b, hkv, a.t_k_stride_h, a.t_k_stride_n);
  }
  static HeadRows tangents_of_values(const Call& a, const Place& place) {
    const int64_t hkv = place.h / (a.heads / a.kv_heads);
    return rows_of_head(a.t_v, a.element, place.b, a.t_v_stride_b, hkv, a.t_v_stride_h, a.t_v_stride_n);
  }

  static void begin_rows(const Call& a, const Place& place, Scratch& t) {
    Base::begin_rows(a, place, t);
    const HeadRows q = Base::queries(a, place), t_q = tangents_of_queries(a, place);
    const int padded = place.vectors * W;
    if (a.t_q) t.t_q.load(t_q, place.row0, place.rows, padded, PastEnd::last_row);
    if constexpr (Spec::sqdist)
      for (int row = 0; row < padded; ++row)
        t.t_qq[row] = a.t_q ? twice_product(q, t_q, place.row0 + std::min(row, place.rows - 1)) : 0.0f;
    clear_rows(t.t_o, place.vectors);
    std::fill_n(t.t_sum, rows, 0.0f);
  }

  static void begin_keys(const Call& a, const Launch& u, const Place& place, const HeadRows& k, const HeadRows& v,
                         KeyRows keys, const Computed& part, Scratch& t) {
    Base::begin_keys(a, u, place, k, v, keys, part, t);
    const HeadRows t_k = tangents_of_keys(a, place);
    if (a.t_k) t.t_k.load(t_k, keys);
    if (a.t_v) t.t_v.load(tangents_of_values(a, place), keys);
    if constexpr (Spec::sqdist)
      for (int j = 0; j < keys.count; ++j) t.t_kk[j] = a.t_k ? twice_product(k, t_k, keys.first + j) : 0.0f;
  }

  // Of what changes, in two parts each: tSᵀ = tK Qᵀ + K tQᵀ; of Oᵀ what weights change by with V, and P with tV.
  struct Multiplier : Base::Multiplier {
    Scratch& t;
    const Call& a;
    fg::Ahead none, next_t_k, next_t_v;

    Multiplier(const Call& a, const Place& place, KeyRows next, Scratch& t, fg::Ahead& next_k, fg::Ahead& next_v)
        : Base::Multiplier(a, place, next, t, next_k, next_v), t(t), a(a) {
      if (a.t_k) next_t_k = rows_ahead(tangents_of_keys(a, place), next, D);
      if (a.t_v) next_t_v = rows_ahead(tangents_of_values(a, place), next, DV);
    }
    Later scores_by_keys(const Strip& of) {
      return {a.t_k ? Products::key_rows(of.kept.end - of.kept.first) : 0,
              of.end - of.first,
              Products::depth(D),
              t.t_k.by_key(of.kept.first),
              t.q.by_feature(of.first),
              t.t_s.of(of.first, of.kept.first),
              t.t_s.ld,
              fg::Begin::zero,
              next_t_k};
    }
    Later scores_by_queries(const Strip& of) {
      return {a.t_q ? Products::key_rows(of.kept.end - of.kept.first) : 0,
              of.end - of.first,
              Products::depth(D),
              t.k.by_key(of.kept.first),
              t.t_q.by_feature(of.first),
              t.t_s.of(of.first, of.kept.first),
              t.t_s.ld,
              a.t_k ? fg::Begin::accumulate : fg::Begin::zero,
              none};
    }
    Later weighted_by_weights(const Strip& of) {
      const int count = of.kept.end - of.kept.first;
      return Products::values(of.first, of.end - of.first, of.kept.first, count, t.v, t.t_s, t.t_o, none);
    }
    Later weighted_by_values(const Strip& of) {
      const int count = a.t_v ? of.kept.end - of.kept.first : 0;
      return Products::values(of.first, of.end - of.first, of.kept.first, count, t.t_v, t.s, t.t_o, next_t_v);
    }
    void score(const Strip& strip) {
      Base::Multiplier::score(strip);
      scores_by_keys(strip).finish();
      scores_by_queries(strip).finish();
    }
    void add_values(const Strip& strip) {
      Base::Multiplier::add_values(strip);
      weighted_by_weights(strip).finish();
      weighted_by_values(strip).finish();
    }
  };
  using Beside = InTurn<Later, 6>;

  static void weigh(const Call& a, const Launch& u, const Place& place, Multiplier& multiplier, const Strip& before,
                    const Strip& strip, const Strip& next, int columns, Scratch& t) {
    const int first = strip.first, end = strip.end;
    const KeptKeys kept = strip.kept;
    for (int j = kept.first; j < kept.end && !a.t_k && !a.t_q; ++j)
      std::fill_n(t.t_s.of(first) + int64_t(j) * t.t_s.ld, (end - first) * W, 0.0f);
    Beside following{{multiplier.weighted(before), multiplier.weighted_by_weights(before),
                      multiplier.weighted_by_values(before), multiplier.scores(next), multiplier.scores_by_keys(next),
                      multiplier.scores_by_queries(next)}};
    const bool dropped = Spec::dropout && a.dropout_threshold != 0;
    const auto step = kept.masked ? (dropped ? pairs<true, Spec::dropout> : pairs<true, false>)
                                  : (dropped ? pairs<false, Spec::dropout> : pairs<false, false>);
    step(a, u, place.x, place.i0, place.places, first, end, kept, following, t);
    following.finish();
    t.s.clear(columns, Products::depth(columns));
    t.t_s.clear(columns, Products::depth(columns));
  }

  // The weight of a pair, and what it changes by.
  struct Weighed {
    fg::VecF p, t_p;
  };

  static FG_INLINE fg::VecF score_tangent(const Arguments& a, const Launch& u, const Head& x, const Row& r, int n,
                                          int64_t j, fg::VecF dot, fg::VecF t_dot, const Scratch& t) {
    const Column& c = t.columns[j];
    fg::VecF t_norms{};
    if constexpr (Spec::sqdist) t_norms = fg::load(t.t_qq + n * W) + t.t_kk[j];
    const Diagonals d = t.diagonals.of(n, j);
    return Spec::score_tangent(a, u, x, r, c, d, dot, squared_distance(r, c, dot), t_dot, t_norms);
  }

  // Sᵀ to Pᵀ and tSᵀ to what weights change by, as ForwardTile's `pairs`.
  template <bool masked, bool dropped>
  static void pairs(const Arguments& a, const Launch& u, const Head& x, int64_t i0, int rows, int first, int end,
                    KeptKeys keys, Beside& following, Scratch& t) {
    constexpr int ld = decltype(t.s)::ld;
    Spread<Beside> beside(following, (end - first) * (keys.end - keys.first));
    for (int n = first; n < end; ++n) {
      Row r = Spec::make_row(a, u, x, rows_of(i0, n, rows));
      if constexpr (Spec::sqdist) r.qq = fg::load(t.qq + n * W);
      float *const s = t.s.of(n), *const t_s = t.t_s.of(n);
      fg::VecF row_sum = fg::load(t.row_sum + n * W), t_sum = fg::load(t.t_sum + n * W), offset{}, moving{};
      const auto tangent_of = [&](int64_t j) {
        return score_tangent(a, u, x, r, n, j, fg::load(s + j * ld), fg::load(t_s + j * ld), t);
      };
      if constexpr (maxima) {
        const auto scored = [&](int64_t j) {
          fg::VecF e = fg::load(s + j * ld);
          if constexpr (!Spec::linear) {
            e = Base::score(a, u, x, r, n, j, e, t);
            fg::store(t_s + j * ld, tangent_of(j));
          }
          if (masked) e = fg::select(Spec::keep(a, u, x, r, t.columns[j], Diagonals{}), e, -INFINITY);
          fg::store(s + j * ld, e);
          return e;
        };
        const auto shrink_sums = [&](fg::VecF shrink) {
          row_sum = row_sum * shrink, t_sum = t_sum * shrink;
          multiply_rows(t.t_o, n, shrink);
        };
        offset = Base::raise_maxima(keys, n, beside, scored, shrink_sums, t);
      } else if constexpr (Spec::divided) {
        moving = fg::load(t.moving + n * W);
      }
      fg::VecU survivors{};
      fg::VecF odd_sum{};
      const auto weighed = [&](int64_t j, fg::VecF& sum) -> Weighed {
        const Column& c = t.columns[j];
        fg::VecF p, t_p;
        if constexpr (maxima) {
          p = fg::exp2_bounded(fg::load(s + j * ld) * Spec::SCORE_FACTOR - offset);
          // What is masked has no weight, and so changes nothing, whatever its score changes by.
          if constexpr (Spec::linear) t_p = fg::chained(tangent_of(j), p);
          else t_p = fg::chained(fg::load(t_s + j * ld), p);
        } else if constexpr (Spec::bounded_scores) {
          p = fg::exp2_normal(Base::score(a, u, x, r, n, j, fg::load(s + j * ld), t));
          if (masked) p = fg::select(Spec::keep(a, u, x, r, c, Diagonals{}), p, 0.0f);
          t_p = fg::chained(tangent_of(j), p);
        } else {
          const Diagonals d = t.diagonals.of(n, j);
          const fg::VecF e = Base::score(a, u, x, r, n, j, fg::load(s + j * ld), t);
          fg::VecB kept = fg::ne(e, -INFINITY);
          if (masked) kept = kept && Spec::keep(a, u, x, r, c, Diagonals{});
          const fg::VecF safe = fg::select(kept, e, 0.0f), d_score = Spec::weight_by_score(a, u, x, r, c, d, safe);
          p = fg::select(kept, Spec::weight(a, u, x, r, c, d, safe), 0.0f);
          fg::VecF moved = through<Spec>(d_score, tangent_of(j));
          fg::VecB moves = kept;
          if constexpr (Spec::moves_weight) moved = moved + Spec::weight_tangent(a, u, x, r, c, d, safe);
          else moves = kept && (fg::ne(p, 0.0f) || fg::ne(d_score, 0.0f));
          t_p = fg::select(kept, moved, 0.0f);
          if constexpr (Spec::divided) moving += fg::select(moves, 1.0f, 0.0f);
        }
        if constexpr (Spec::normalised) {
          sum += Spec::term(p);
          t_sum += Spec::share(p, t_p);
        }
        if constexpr (dropped) {
          if (j == keys.first || c.j % fg::dropout_columns == 0)
            survivors = fg::dropout_keeps(a.seed, x.b, x.h, r.i, c.j / fg::dropout_columns, a.dropout_threshold);
          const fg::VecB survives = fg::ne(survivors & fg::dropout_bit(c.j), 0u);
          p = fg::select(survives, p * a.dropout_scale, 0.0f), t_p = fg::select(survives, t_p * a.dropout_scale, 0.0f);
        }
        return {p, t_p};
      };
      const auto put = [&](int64_t j, const Weighed& low, const Weighed& high) {
        t.s.put(j, n, low.p, high.p);
        t.t_s.put(j, n, low.t_p, high.t_p);
      };
      int64_t j = keys.first;
      for (; j + 2 <= keys.end; j += 2) {
        if (!Spec::slow_scores) beside.pass(2);
        const Weighed low = weighed(j, row_sum);
        put(j, low, weighed(j + 1, odd_sum));
      }
      if (j < keys.end) put(j, weighed(j, row_sum), Weighed{});
      if constexpr (Spec::normalised) {
        fg::store(t.row_sum + n * W, row_sum + odd_sum);
        fg::store(t.t_sum + n * W, t_sum);
      }
      if constexpr (Spec::divided) fg::store(t.moving + n * W, moving);
    }
  }

  // O and lse, if they are wanted, and what they change by.
  static void close(const Call& a, const Launch& u, const Place& place, Scratch& t) {
    if constexpr (Spec::normalised) {
      for (int n = 0; n * W < place.rows; ++n) {
        const typename Base::Closed closed = Base::close_sums(a, u, place, n, t);
        // What lse changes by; of o all weights change by so much less.
        fg::VecF t_lse = fg::load(t.t_sum + n * W);
        for (int power = 0; power < Spec::degree(); ++power) t_lse = t_lse * closed.factor;
        if constexpr (Spec::moves_sink) {
          const Row r = Spec::make_row(a, u, place.x, rows_of(place.i0, n, place.rows));
          const fg::VecF inverse = fg::select(fg::eq(closed.denominator, 0.0f), 0.0f, 1.0f / closed.denominator);
          t_lse = t_lse + fg::chained(Spec::sink_tangent_of(a, u, place.x, r), closed.sunk * inverse);
        }
        for (int l = 0; a.t_lse && l < std::min(W, place.rows - n * W); ++l)
          a.t_lse[a.at(a.rows_of_lse, place.b, place.h, place.row0 + n * W + l)] = t_lse[l];
        multiply_rows(t.o, n, closed.factor);
        for (int d = 0; d < DVP; ++d) {
          fg::store(t.t_o.of(n, d), fg::load(t.t_o.of(n, d)) * t.o.beside(closed.factor, d) -
                                        t.o.beside(t_lse, d) * fg::load(t.o.of(n, d)));
        }
      }
    }
    const RowStrides to = {a.t_o_stride_b, a.t_o_stride_h, a.t_o_stride_n};
    t.t_o.store(a.t_o, a.element, to.at(place.b, place.h, place.row0), to.n, DV, place.rows);
    if (a.o) Base::store_o(a, place, t);
  }

  // Behind what the forward pass leaves of a vector of rows: t_sum and tO.
  static constexpr int vectors_left = Base::vectors_left + 1 + DVP;

  static void leave(float* at, int n, Scratch& t) {
    Base::leave(at, n, t);
    float* const own = at + Base::vectors_left * W;
    fg::store(own, fg::load(t.t_sum + n * W));
    for (int d = 0; d < DVP; ++d) fg::store(own + (1 + d) * W, fg::load(t.t_o.of(n, d)));
  }
  static void clear(int n, Scratch& t) {
    Base::clear(n, t);
    fg::store(t.t_sum + n * W, fg::VecF{});
    for (int d = 0; d < DVP; ++d) fg::store(t.t_o.of(n, d), fg::VecF{});
  }
  static void take(const float* at, int n, Scratch& t) {
    const typename Base::Shrunk by = Base::take(at, n, t);
    const float* const own = at + Base::vectors_left * W;
    Base::add_shrunk(t.t_sum + n * W, by.own, own, by.taken);
    for (int d = 0; d < DVP; ++d)
      Base::add_shrunk(t.t_o.of(n, d), t.o.beside(by.own, d), own + (1 + d) * W, t.o.beside(by.taken, d));
  }
};

}  // namespace
