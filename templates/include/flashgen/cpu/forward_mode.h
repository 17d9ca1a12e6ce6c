// Forward mode: the forward pass, which takes along what tangents of its inputs change, in the same visit of a tile.
//
// A tangent of q, k or v that is null is 0 everywhere.
#pragma once
#include "flashgen/cpu/forward.h"
#include "flashgen/cpu/tangents.h"

namespace {

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

  static void begin_rows(const Call& a, const Place& place, Scratch& t) {
    Base::begin_rows(a, place, t);
    begin_tangents_of_rows(a, place.b, place.h, place.row0, place.rows, place.vectors * W, t);
    clear_rows(t.t_o, place.vectors);
    std::fill_n(t.t_sum, rows, 0.0f);
  }

  static void begin_keys(const Call& a, const Launch& u, const Place& place, const HeadRows& k, const HeadRows& v,
                         KeyRows keys, const Computed& part, Scratch& t) {
    Base::begin_keys(a, u, place, k, v, keys, part, t);
    begin_tangents_of_keys(a, place.b, a.kv_head(place.h), k, keys, t);
  }

  // Of what changes, in two parts each: tSᵀ = tK Qᵀ + K tQᵀ; of Oᵀ what weights change by with V, and P with tV.
  struct Multiplier : Base::Multiplier {
    Scratch& t;
    const Call& a;
    fg::Ahead none, next_t_k, next_t_v;

    Multiplier(const Call& a, const Place& place, KeyRows next, Scratch& t, fg::Ahead& next_k, fg::Ahead& next_v)
        : Base::Multiplier(a, place, next, t, next_k, next_v), t(t), a(a) {
      if (a.t_k) next_t_k = rows_ahead(tangents_of_keys(a, place.b, a.kv_head(place.h)), next, D);
      if (a.t_v) next_t_v = rows_ahead(tangents_of_values(a, place.b, a.kv_head(place.h)), next, DV);
    }
    Later scores_by_keys(const Strip& of) {
      return Base::Multiplier::scores_of(a.t_k, of, t.t_k, t.q, t.t_s, fg::Begin::zero, next_t_k);
    }
    Later scores_by_queries(const Strip& of) {
      const fg::Begin begin = a.t_k ? fg::Begin::accumulate : fg::Begin::zero;
      return Base::Multiplier::scores_of(a.t_q, of, t.k, t.t_q, t.t_s, begin, none);
    }
    Later weighted_by_weights(const Strip& of) { return values_of_strip<Products>(of, t.v, t.t_s, t.t_o, none); }
    Later weighted_by_values(const Strip& of) {
      return values_of_strip<Products>(a.t_v ? of : Strip{of.first, of.end, {}}, t.t_v, t.s, t.t_o, next_t_v);
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
    InTurn<Later, 6> beside(const Strip& before, const Strip& strip, const Strip& next) {
      if (!a.t_k && !a.t_q) clear_scores(t.t_s, strip.first, strip.end, strip.kept.first, strip.kept.end);
      return {Base::Multiplier::weighted(before), weighted_by_weights(before), weighted_by_values(before),
              Base::Multiplier::scores(next),     scores_by_keys(next),        scores_by_queries(next)};
    }
    void clear(int columns) {
      Base::Multiplier::clear(columns);
      t.t_s.clear(columns, Products::depth(columns));
    }
  };

  static FG_INLINE fg::VecF score_tangent(const Arguments& a, const Launch& u, const Head& x, const Row& r, int n,
                                          int64_t j, fg::VecF dot, Scratch& t) {
    const Column& c = t.columns[j];
    const fg::VecF t_dot = fg::load(t.t_s.of(n) + j * t.t_s.ld), t_norms = tangent_of_norms(t, n, j);
    return Spec::score_tangent(a, u, x, r, c, t.diagonals.of(n, j), dot, squared_distance(r, c, dot), t_dot, t_norms);
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
