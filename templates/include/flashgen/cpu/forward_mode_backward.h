// The backward pass of forward mode. d_o and d_lse are what arrives at the tangents of o and lse; the gradients are
// those of q, k, v, of their tangents, and of what either captures. With X · Y for the sum over a row:
//   d(tP) = d(tO) Vᵀ   dP = d(tO) tVᵀ   delta = d(tO) · O - d(t(lse))   epsilon = d(tO) · tO
//   dV = tPᵀ d(tO)   d(tV) = Pᵀ d(tO)   and of dS, d(tS), which are formed of these:
//   dK = d(dot)ᵀ Q + d(tdot)ᵀ tQ   d(tK) = d(tdot)ᵀ Q   dQ = d(dot) K + d(tdot) tK   d(tQ) = d(tdot) K
//   d(dot) = dS ∘ ∂S/∂dot + d(tS) ∘ ∂tS/∂dot   d(tdot) = d(tS) ∘ ∂S/∂dot
#pragma once
#include "flashgen/cpu/backward.h"

namespace {

// What the squared norm of a row changes by, where the row changes by another.
inline float twice_product(const HeadRows& x, const HeadRows& t_x, int64_t row) {
  return 2.0f * Features<D>(x, row).dot(Features<D>(t_x, row));
}

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

  static HeadRows tangents_of_queries(const Call& a, const QueryTile& of) {
    return rows_of_head(a.t_q, a.element, of.b, a.t_q_stride_b, of.h, a.t_q_stride_h, a.t_q_stride_n);
  }
  static HeadRows tangents_of_keys(const Call& a, int64_t b, int64_t hkv) {
    return rows_of_head(a.t_k, a.element, b, a.t_k_stride_b, hkv, a.t_k_stride_h, a.t_k_stride_n);
  }
  static HeadRows tangents_of_values(const Call& a, int64_t b, int64_t hkv) {
    return rows_of_head(a.t_v, a.element, b, a.t_v_stride_b, hkv, a.t_v_stride_h, a.t_v_stride_n);
  }

  static void begin_rows(const Call& a, const QueryTile& of, Tops& tops, Scratch& t) {
    Base::begin_rows(a, of, tops, t);
    const HeadRows q = Base::queries(a, of), t_q = tangents_of_queries(a, of);
    const int padded = of.vectors * W;
    if (a.t_q) t.t_q.load(t_q, of.row0, of.rows, padded, PastEnd::last_row);
    if constexpr (Spec::sqdist) {
      for (int row = 0; row < padded; ++row)
        t.t_qq[row] = a.t_q ? twice_product(q, t_q, of.row0 + std::min(row, of.rows - 1)) : 0.0f;
      std::fill_n(t.t_by_row, rows, 0.0f);
    }
    if constexpr (Spec::normalised) {
      const HeadRows d_o = Base::gradients_of_o(a, of);
      const HeadRows o = rows_of_head(a.o, a.element, of.b, a.o_stride_b, of.h, a.o_stride_h, a.o_stride_n);
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
    const HeadRows t_k = tangents_of_keys(a, of.b, of.hkv);
    if (a.t_k) t.t_k.load(t_k, keys);
    if (a.t_v) t.t_v.load(tangents_of_values(a, of.b, of.hkv), keys);
    if constexpr (Spec::sqdist) {
      for (int j = 0; j < keys.count; ++j) t.t_kk[j] = a.t_k ? twice_product(k, t_k, keys.first + j) : 0.0f;
      std::fill_n(t.t_by_column, BC * W, 0.0f);
    }
  }

  // Of what changes, in two parts: t(dot)ᵀ = tK Qᵀ + K tQᵀ, and dPᵀ of tV; dQᵀ += tKᵀ d(tdot)ᵀ, of tQ Kᵀ d(tdot)ᵀ.
  struct Multiplier : Base::Multiplier {
    using Of = typename Base::Multiplier;
    Scratch& t;
    const Call& a;
    fg::Ahead nothing, next_t_k, next_t_v;

    Multiplier(const Call& a, const QueryTile& of, const HeadRows& k, const HeadRows& v, KeyRows next,
               const Computed& part, int columns, Scratch& t)
        : Of(a, of, k, v, next, part, columns, t), t(t), a(a) {
      if (a.t_k) next_t_k = rows_ahead(tangents_of_keys(a, of.b, of.hkv), next, D);
      if (a.t_v) next_t_v = rows_ahead(tangents_of_values(a, of.b, of.hkv), next, DV);
    }
    Later scores_by_keys(int first) {
      return {a.t_k ? Of::keys_of(first) : 0,
              Of::vectors_of(first),
              Products::depth(D),
              t.t_k.by_key(),
              t.q.by_feature(first),
              t.t_ds.of(first),
              t.t_ds.ld,
              fg::Begin::zero,
              next_t_k};
    }
    Later scores_by_queries(int first) {
      return {a.t_q ? Of::keys_of(first) : 0,
              Of::vectors_of(first),
              Products::depth(D),
              t.k.by_key(),
              t.t_q.by_feature(first),
              t.t_ds.of(first),
              t.t_ds.ld,
              a.t_k ? fg::Begin::accumulate : fg::Begin::zero,
              nothing};
    }
    Later d_weights_by_values(int first) {
      return {a.t_v ? Of::keys_of(first) : 0,
              Of::vectors_of(first),
              Products::depth(DV),
              t.t_v.by_key(),
              t.d_o.by_feature(first),
              t.t_p.of(first),
              t.t_p.ld,
              fg::Begin::zero,
              next_t_v};
    }
    Later queries_by_keys(int first, int end) {
      return {a.t_k && first < end ? DP : 0,
              end - first,
              Products::depth(Of::columns),
              t.t_k.by_feature(),
              t.t_ds.of_keys(first),
              t.dqt + first * W,
              ld,
              fg::Begin::accumulate,
              nothing};
    }
    Later tangents_of_queries(int first, int end) {
      return {wanted(a) && first < end ? DP : 0,
              end - first,
              Products::depth(Of::columns),
              t.k.by_feature(),
              t.t_ds.of_keys(first),
              t.t_dqt + first * W,
              ld,
              fg::Begin::accumulate,
              nothing};
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
  };
  using Beside = InTurn<Later, 8>;

  static void weigh(const Call& a, const Launch& u, const QueryTile& of, Multiplier& m, int before, int first, int end,
                    Scratch& t, const Task& task) {
    for (int j = 0; j < m.columns && !a.t_k && !a.t_q; ++j)
      std::fill_n(t.t_ds.of(first) + int64_t(j) * t.t_ds.ld, (end - first) * W, 0.0f);
    for (int j = 0; j < m.columns && !a.t_v; ++j)
      std::fill_n(t.t_p.of(first) + int64_t(j) * t.t_p.ld, (end - first) * W, 0.0f);
    Beside following{{m.queries(before, first), m.queries_by_keys(before, first), m.tangents_of_queries(before, first),
                      m.scores(end), m.d_weights(end), m.scores_by_keys(end), m.scores_by_queries(end),
                      m.d_weights_by_values(end)}};
    const bool dropped = Spec::dropout && a.dropout_threshold != 0;
    const auto step = m.part.masked ? (dropped ? pairs<true, Spec::dropout> : pairs<true, false>)
                                    : (dropped ? pairs<false, Spec::dropout> : pairs<false, false>);
    step(a, u, of.x, of.i0, of.rows, first, end, m.columns, following, t, task);
    following.finish();
    t.p.clear(m.columns, m.padded);
    t.ds.clear(m.columns, m.padded);
    t.t_p.clear(m.columns, m.padded);
    t.t_ds.clear(m.columns, m.padded);
  }

  // The weight of a pair, the gradient of its product, and the tangents of both.
  struct Weights {
    fg::VecF p, ds, t_p, t_ds;
  };

  template <bool masked, bool dropped>
  static void pairs(const Arguments& a, const Launch& u, const Head& x, int64_t i0, int rows, int first, int end,
                    int columns, Beside& following, Scratch& t, const Task& task) {
    Spread<Beside> beside(following, (end - first) * columns);
    for (int n = first; n < end; ++n) {
      Row r = Spec::make_row(a, u, x, rows_of(i0, n, rows));
      fg::VecF by_row{}, t_by_row{}, row_inverse{}, row_delta{}, row_epsilon{}, moved{}, lse{}, lse_rest{};
      fg::VecB one_key{};
      if constexpr (Spec::sqdist) {
        r.qq = fg::load(t.qq + n * W);
        by_row = fg::load(t.by_row + n * W), t_by_row = fg::load(t.t_by_row + n * W);
      }
      const float *const s = t.p.of(n), *const dp = t.ds.of(n), *const t_s = t.t_ds.of(n),
                         *const dp_of_t_v = t.t_p.of(n);
      if constexpr (Spec::normalised) {
        moved = fg::load(t.moved + n * W), row_epsilon = fg::load(t.epsilon + n * W);
        row_delta = fg::load(t.delta + n * W);
      }
      if constexpr (Spec::divided) {
        const fg::VecF signed_inverse = fg::load(t.inverse + n * W);
        row_inverse = fg::abs(signed_inverse), one_key = fg::lt(signed_inverse, 0.0f);
      }
      if constexpr (Spec::exponential) lse = fg::load(t.lse + n * W), lse_rest = fg::load(t.lse_rest + n * W);
      typename AllSums<typename Spec::Gradients, Base::rows, BC>::OfVector sums;
      const int valid = std::max(0, std::min(W, rows - n * W));
      [[maybe_unused]] fg::VecU survivors{};
      const auto weighed = [&](int64_t j) -> Weights {
        const Column& c = t.columns[j];
        const Diagonals d = t.diagonals.of(n, j);
        const fg::VecF dot = fg::load(s + j * t.p.ld), sqdist = squared_distance(r, c, dot);
        fg::VecF e = dot, t_norms{};
        if constexpr (!Spec::linear) e = Spec::score(a, u, x, r, c, d, dot, sqdist);
        fg::VecB kept = fg::broadcast(true);
        if constexpr (!Spec::bounded_scores) kept = fg::ne(e, -INFINITY);
        if (masked) kept = kept && Spec::keep(a, u, x, r, c, d);
        const fg::VecF t_dot = fg::load(t_s + j * t.t_ds.ld);
        if constexpr (Spec::sqdist) t_norms = fg::load(t.t_qq + n * W) + t.t_kk[j];
        const fg::VecF t_e = fg::select(kept, Spec::score_tangent(a, u, x, r, c, d, dot, sqdist, t_dot, t_norms), 0.0f);
        fg::VecF d_weight = fg::load(dp_of_t_v + j * t.t_p.ld), d_t_weight = fg::load(dp + j * t.ds.ld);
        fg::VecF drop = fg::broadcast(1.0f);
        if constexpr (dropped) {
          if (j == 0 || c.j % fg::dropout_columns == 0)
            survivors = fg::dropout_keeps(a.seed, x.b, x.h, r.i, c.j / fg::dropout_columns, a.dropout_threshold);
          drop = fg::select(fg::ne(survivors & fg::dropout_bit(c.j), 0u), a.dropout_scale, 0.0f);
          d_weight = d_weight * drop, d_t_weight = d_t_weight * drop;
        }
        fg::VecF p, t_p, d_score, d_t_score, safe{}, delta = row_delta, epsilon = row_epsilon;
        const auto reaches_tangent = [&] {
          return fg::select(kept, Spec::backward(p, d_t_weight, delta, row_inverse), 0.0f);
        };
        const auto reaches_weight = [&](fg::VecF of_t_weight) {
          return Spec::tangent_backward(p, d_weight, delta, row_inverse, moved, epsilon, t_p, of_t_weight);
        };
        if constexpr (Spec::exponential) {
          p = fg::select(kept, Base::probability(e, lse, lse_rest), 0.0f);
          t_p = fg::chained(t_e - moved, p);
          d_t_score = reaches_tangent();
          d_score = fg::select(kept, reaches_weight(d_t_score) + fg::chained(t_e - moved, d_t_score), 0.0f);
        } else {
          safe = fg::select(kept, e, 0.0f);
          p = Spec::weight(a, u, x, r, c, d, safe);
          if constexpr (Spec::divided) p = p * row_inverse;
          p = fg::select(kept, p, 0.0f);
          const fg::VecF slope = Spec::weight_by_score(a, u, x, r, c, d, safe);
          fg::VecF t_w = through<Spec>(slope, t_e);
          if constexpr (Spec::moves_weight) t_w = t_w + Spec::weight_tangent(a, u, x, r, c, d, safe);
          t_w = fg::select(kept, t_w, 0.0f), t_p = t_w;
          if constexpr (Spec::divided) {
            const fg::VecB lone = one_key && fg::ne(p, 0.0f);
            t_p = fg::select(lone, 0.0f, t_w * row_inverse - p * moved),
            epsilon = fg::select(one_key, 0.0f, row_epsilon);
            delta = fg::select(one_key && !lone, row_delta + row_epsilon, row_delta);
            d_weight = fg::select(lone, 0.0f, d_weight), d_t_weight = fg::select(lone, 0.0f, d_t_weight);
          }
          d_t_weight = reaches_tangent();
          d_weight = fg::select(kept, reaches_weight(d_t_weight), 0.0f);
          d_t_score = fg::select(kept, d_t_weight * slope, 0.0f);
          const fg::VecF by_weight =
              through<Spec>(d_t_weight, Spec::weight_tangent_by_score(a, u, x, r, c, d, safe, t_e));
          d_score = fg::select(kept, d_weight * slope + by_weight, 0.0f);
        }
        const fg::VecF of_dot = Spec::score_by_dot(a, u, x, r, c, d, dot, sqdist);
        const fg::VecF of_t_dot = Spec::score_tangent_by_dot(a, u, x, r, c, d, dot, sqdist, t_dot, t_norms);
        if constexpr (Spec::sqdist) {
          const fg::VecF of_sqdist = Spec::score_by_sqdist(a, u, x, r, c, d, dot, sqdist);
          const fg::VecF of_t_sqdist = Spec::score_tangent_by_sqdist(a, u, x, r, c, d, dot, sqdist, t_dot, t_norms);
          const fg::VecF both = through<Spec>(d_score, of_sqdist) + through<Spec>(d_t_score, of_t_sqdist);
          const fg::VecF by_sqdist = fg::select(kept, both, 0.0f);
          const fg::VecF by_norms = fg::select(kept, through<Spec>(d_t_score, of_sqdist), 0.0f);
          by_row += by_sqdist, t_by_row += by_norms;
          fg::store(t.by_column + j * W, fg::load(t.by_column + j * W) + by_sqdist);
          fg::store(t.t_by_column + j * W, fg::load(t.t_by_column + j * W) + by_norms);
        }
        const fg::PairTerms of_pairs{dot, sqdist, d_score, d_weight, safe, t_dot, t_norms, t_e, d_t_score, d_t_weight};
        t.gradients.add(sums, task, a, u, x, r, c, d, of_pairs, kept, n, j, valid);
        const fg::VecF by_dot = through<Spec>(d_score, of_dot) + through<Spec>(d_t_score, of_t_dot);
        const fg::VecF by_t_dot = fg::select(kept, through<Spec>(d_t_score, of_dot), 0.0f);
        return {p * drop, fg::select(kept, by_dot, 0.0f), t_p * drop, by_t_dot};
      };
      const auto put = [&](int64_t j, const Weights& low, const Weights& high) {
        t.p.put(j, n, low.p, high.p);
        t.ds.put(j, n, low.ds, high.ds);
        t.t_p.put(j, n, low.t_p, high.t_p);
        t.t_ds.put(j, n, low.t_ds, high.t_ds);
      };
      int64_t j = 0;
      for (; j + 2 <= columns; j += 2) {
        beside.pass(2);
        const Weights low = weighed(j);
        put(j, low, weighed(j + 1));
      }
      if (j < columns) put(j, weighed(j), Weights{});
      if constexpr (Spec::sqdist) {
        fg::store(t.by_row + n * W, by_row);
        fg::store(t.t_by_row + n * W, t_by_row);
      }
      t.gradients.end_vector(sums, n, columns - 1);
    }
  }

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
      Base::add_norms_of_rows(t.dq, Base::queries(a, of), of, t.by_row);
      if (a.t_q) Base::add_norms_of_rows(t.dq, tangents_of_queries(a, of), of, t.t_by_row);
    }
    store(a.dq, a.rows_of_dq, t.dq);
    if (!wanted(a)) return;
    transpose(t.t_dqt);
    if constexpr (Spec::sqdist) Base::add_norms_of_rows(t.dq, Base::queries(a, of), of, t.t_by_row);
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
    if (wanted(a)) Base::add_norms(Base::keys(a, b, hkv), first, last, sum.sums[OF_T_K], t_by_column, row);
    if (a.t_k) Base::add_norms(tangents_of_keys(a, b, hkv), first, last, sum.sums[OF_DK], t_by_column, row);
  }
};

}  // namespace
