// The backward pass of forward mode. d_o and d_lse are what arrives at the tangents of o and lse; the gradients are
// those of q, k, v, of their tangents, and of what either captures. With X · Y for the sum over a row:
//   d(tP) = d(tO) Vᵀ   dP = d(tO) tVᵀ   delta = d(tO) · O - d(t(lse))   epsilon = d(tO) · tO
//   dV = tPᵀ d(tO)   d(tV) = Pᵀ d(tO)   and of dS, d(tS), which are formed of these:
//   dK = d(dot)ᵀ Q + d(tdot)ᵀ tQ   d(tK) = d(tdot)ᵀ Q   dQ = d(dot) K + d(tdot) tK   d(tQ) = d(tdot) K
//   d(dot) = dS ∘ ∂S/∂dot + d(tS) ∘ ∂tS/∂dot   d(tdot) = d(tS) ∘ ∂S/∂dot
#pragma once
#include "flashgen/cpu/backward.h"
#include "flashgen/cpu/tangents.h"

namespace {

template <class Spec, class KindOfProducts> struct ForwardModeBackwardTile : BackwardTile<Spec, KindOfProducts> {
  using Base = BackwardTile<Spec, KindOfProducts>;
  using Products = KindOfProducts;
  using Row = typename Spec::Row;
  using Later = typename Products::Later;
  using Tops = typename Base::Tops;
  using Base::BC, Base::rows, Base::ld, Base::OF_DK, Base::OF_DV, Base::OF_COLUMN;

  struct alignas(64) Scratch : Base::Scratch {
    typename Products::template Queries<rows, D, true> t_q;
    typename Products::template Keys<BC, D, true> t_k;
    typename Products::template Keys<BC, DV, false> t_v;
    typename Products::template Scores<BC, rows, true, false> t_p;  // dPᵀ of tV, then tPᵀ after dropout
    typename Products::template Scores<BC, rows, true, true> t_ds;  // t(dot)ᵀ, then what reaches it, transposed
    float t_dqt[DP * ld];                                           // of tQ
    // t(lse), and epsilon: of a row with one key the rest of its delta.
    float moved[Spec::normalised ? rows : 0], epsilon[Spec::normalised ? rows : 0];
    float t_qq[Spec::sqdist ? rows : 0], t_kk[Spec::sqdist ? BC : 0];                 // 2 q · tq and 2 k · tk
    float t_by_row[Spec::sqdist ? rows : 0], t_by_column[Spec::sqdist ? BC * W : 0];  // Σ d(tS) ∂S/∂|q|²
  };

  // Behind the sums of the backward pass: Σ d(tS) ∂S/∂|k|², and where the tangents of q, k and v have gradients d(tK),
  // d(tV).
  static constexpr int T_OF_COLUMN = 3, OF_T_K = Spec::sqdist ? 4 : 2, OF_T_V = OF_T_K + 1;
  static constexpr int width(int sum) { return sum == OF_T_K ? DP : sum == OF_T_V ? DVP : Base::width(sum); }
  static bool wanted(const Arguments& a) { return a.d_t_q != nullptr; }
  static int sums(const Arguments& a) { return wanted(a) ? OF_T_V + 1 : OF_T_K; }

  static void begin_rows(const Call& a, const QueryTile& of, Tops& tops, Scratch& t) {
    Base::begin_rows(a, of, tops, t);
    const int padded = of.vectors * W;
    begin_tangents_of_rows(a, of.b, of.h, of.row0, of.rows, padded, t);
    if constexpr (Spec::sqdist) std::fill_n(t.t_by_row, rows, 0.0f);
    if constexpr (Spec::normalised) {
      const HeadRows d_o = Base::gradients_of_o(a, of);
      const HeadRows o = outputs(a, of.b, of.h);
      const HeadRows t_o = rows_of_head(a.t_o, a.element, of.b, a.t_o_stride_b, of.h, a.t_o_stride_h, a.t_o_stride_n);
      for (int row = 0; row < padded; ++row) {
        const bool real = row < of.rows;
        t.moved[row] = a.t_lse[of.first_row + (real ? row : of.rows - 1)];
        bool one_key = false;
        if constexpr (Spec::divided) one_key = t.inverse[row] < 0.0f;
        const Features<DV> x(one_key ? o : t_o, of.row0 + std::min(row, of.rows - 1));
        t.epsilon[row] = real ? x.dot(Features<DV>(d_o, of.row0 + row)) : 0.0f;
      }
    }
    for (int d = 0; d < DP; ++d) std::fill_n(t.t_dqt + d * ld, padded, 0.0f);
  }

  static void begin_keys(const Call& a, const Launch& u, const QueryTile& of, const HeadRows& k, const HeadRows& v,
                         KeyRows keys, const Computed& part, Scratch& t) {
    Base::begin_keys(a, u, of, k, v, keys, part, t);
    begin_tangents_of_keys(a, of.b, of.hkv, k, keys, t);
    if constexpr (Spec::sqdist) std::fill_n(t.t_by_column, BC * W, 0.0f);
  }

  // Of what changes, in two parts: t(dot)ᵀ = tK Qᵀ + K tQᵀ, and dPᵀ of tV; dQᵀ += tKᵀ d(tdot)ᵀ, of tQ Kᵀ d(tdot)ᵀ.
  struct Multiplier : Base::Multiplier {
    using Of = typename Base::Multiplier;
    Scratch& t;
    const Call& a;
    fg::Ahead next_t_k, next_t_v;

    Multiplier(const Call& a, const QueryTile& of, const HeadRows& k, const HeadRows& v, KeyRows next,
               const Computed& part, int columns, Scratch& t)
        : Of(a, of, k, v, next, part, columns, t), t(t), a(a) {
      if (a.t_k) next_t_k = rows_ahead(tangents_of_keys(a, of.b, of.hkv), next, D);
      if (a.t_v) next_t_v = rows_ahead(tangents_of_values(a, of.b, of.hkv), next, DV);
    }
    Later scores_by_keys(int first) {
      return Of::template scores_of<D>(a.t_k, first, t.t_k, t.q, t.t_ds, fg::Begin::zero, next_t_k);
    }
    Later scores_by_queries(int first) {
      const fg::Begin begin = a.t_k ? fg::Begin::accumulate : fg::Begin::zero;
      return Of::template scores_of<D>(a.t_q, first, t.k, t.t_q, t.t_ds, begin, Of::none);
    }
    Later d_weights_by_values(int first) {
      return Of::template scores_of<DV>(a.t_v, first, t.t_v, t.d_o, t.t_p, fg::Begin::zero, next_t_v);
    }
    Later queries_by_keys(int first, int end) { return Of::queries_of(a.t_k, first, end, t.t_k, t.t_ds, t.dqt); }
    Later tangents_of_queries(int first, int end) {
      return Of::queries_of(wanted(a), first, end, t.k, t.t_ds, t.t_dqt);
    }
    void begin(int first) {
      Of::begin(first);
      scores_by_keys(first).finish();
      scores_by_queries(first).finish();
      d_weights_by_values(first).finish();
    }
    void end(int before) {
      Of::end(before);
      queries_by_keys(before, Of::part.last).finish();
      tangents_of_queries(before, Of::part.last).finish();
    }
    InTurn<Later, 8> beside(int before, int first, int end) {
      if (!a.t_k && !a.t_q) clear_scores(t.t_ds, first, end, 0, Of::columns);
      if (!a.t_v) clear_scores(t.t_p, first, end, 0, Of::columns);
      return {Of::queries(before, first),
              queries_by_keys(before, first),
              tangents_of_queries(before, first),
              Of::scores(end),
              Of::d_weights(end),
              scores_by_keys(end),
              scores_by_queries(end),
              d_weights_by_values(end)};
    }
    void clear() {
      Of::clear();
      t.t_p.clear(Of::columns, Of::padded);
      t.t_ds.clear(Of::columns, Of::padded);
    }
  };

  // The weight of a pair, the gradient of its product, and the tangents of both.
  struct Weights {
    fg::VecF p, ds, t_p, t_ds;
  };

  // dV += tPᵀ dO, dK += dSᵀ Q + d(tS)ᵀ tQ, d(tV) += Pᵀ dO, d(tK) += d(tS)ᵀ Q
  static void add_keys(const Call& a, const QueryTile& of, const Multiplier& m, int64_t column0, bool touched,
                       fg::Begin entered, fg::Ahead& next_dk, fg::Ahead& next_dv, Scratch& t, const Task& task) {
    const int first = m.part.first, depth = Products::depth(std::min((m.part.last - first) * W, of.rows - first * W));
    fg::Ahead none;
    const auto to_v = [&](auto& weights, int sum, fg::Ahead& ahead) {
      Products::product(m.padded, DVP / W, depth, weights.by_key(first), t.d_o.by_row(first),
                        task.at(sum, DVP, column0), DVP, entered, ahead);
    };
    const auto to_k = [&](auto& scores, auto& q, int sum, fg::Begin begin, fg::Ahead& ahead) {
      Products::product(m.padded, DP / W, depth, scores.by_key(first), q.by_row(first), task.at(sum, DP, column0), DP,
                        begin, ahead);
    };
    to_v(t.t_p, OF_DV, next_dv);
    to_k(t.ds, t.q, OF_DK, entered, next_dk);
    if (a.t_q) to_k(t.t_ds, t.t_q, OF_DK, fg::Begin::accumulate, none);
    if (wanted(a)) {
      to_v(t.p, OF_T_V, none);
      to_k(t.t_ds, t.q, OF_T_K, entered, none);
    }
    if constexpr (Spec::sqdist) {
      Base::add_columns(m, task.at(OF_COLUMN, 1, column0), touched, t.by_column);
      Base::add_columns(m, task.at(T_OF_COLUMN, 1, column0), touched, t.t_by_column);
    }
  }

  static void store_queries(const Call& a, const QueryTile& of, Scratch& t) {
    const RowStrides to = {a.d_t_q_stride_b, a.d_t_q_stride_h, a.d_t_q_stride_n};
    const auto store = [&](void* rows, const RowStrides& at, const float* dq) {
      store_rows(rows, a.element, at.at(of.b, of.h, of.row0), at.n, dq, DP, D, of.rows);
    };
    const auto transpose = [&](const float* dqt) { fg::transpose_to(t.dq, DP, dqt, ld, DP, of.vectors * W); };
    transpose(t.dqt);
    if constexpr (Spec::sqdist) {
      Base::add_norms_of_rows(t.dq, queries(a, of.b, of.h), of, t.by_row);
      if (a.t_q) Base::add_norms_of_rows(t.dq, ::tangents_of_queries(a, of.b, of.h), of, t.t_by_row);
    }
    store(a.dq, a.rows_of_dq, t.dq);
    if (!wanted(a)) return;
    transpose(t.t_dqt);
    if constexpr (Spec::sqdist) Base::add_norms_of_rows(t.dq, queries(a, of.b, of.h), of, t.t_by_row);
    store(a.d_t_q, to, t.dq);
  }

  static typename Base::OfSink of_sink(const Arguments& a, const Launch& u, const Head& x, const Row& r,
                                       fg::VecF weight, int n, const Scratch& t) {
    const fg::VecF delta = fg::load(t.delta + n * W);
    fg::VecF moved = -fg::load(t.moved + n * W);
    if constexpr (Spec::moves_sink) moved = Spec::sink_tangent_of(a, u, x, r) + moved;
    const fg::VecF by_sink = fg::load(t.epsilon + n * W) + delta * moved;
    const fg::VecB none = fg::eq(weight, 0.0f);
    return {fg::select(none, 0.0f, -weight * by_sink), fg::select(none, 0.0f, -weight * delta)};
  }

  static void store_keys(const Call& a, int64_t b, int64_t hkv, int64_t first, int count, float* const (&from)[6]) {
    Base::store_keys(a, b, hkv, first, count, from);
    if (!wanted(a)) return;
    const RowStrides k = {a.d_t_k_stride_b, a.d_t_k_stride_h, a.d_t_k_stride_n};
    const RowStrides v = {a.d_t_v_stride_b, a.d_t_v_stride_h, a.d_t_v_stride_n};
    store_rows(a.d_t_k, a.element, k.at(b, hkv, first), k.n, from[OF_T_K], DP, D, count);
    store_rows(a.d_t_v, a.element, v.at(b, hkv, first), v.n, from[OF_T_V], DVP, DV, count);
  }
  static void add_norms_of_keys(const Call& a, int64_t b, int64_t hkv, int64_t first, int64_t last, const Task& sum,
                                float* row) {
    Base::add_norms_of_keys(a, b, hkv, first, last, sum, row);
    const float* const t_by_column = sum.sums[T_OF_COLUMN];
    if (wanted(a)) Base::add_norms(keys_of(a, b, hkv), first, last, sum.sums[OF_T_K], t_by_column, row);
    if (a.t_k) Base::add_norms(tangents_of_keys(a, b, hkv), first, last, sum.sums[OF_DK], t_by_column, row);
  }
};

}  // namespace
