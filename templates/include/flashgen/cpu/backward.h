// The backward pass: Algorithm 4 of FlashAttention with the loops of the forward pass. Query tiles are outside, so that
// dQ stays in a tile; dK, dV of one head are added to, float32, in the order of the query tiles. Scores are recomputed,
// never stored:
//   dV = Pᵀ dO   dK = (dS ∘ ∂S/∂dot)ᵀ Q   dQ = (dS ∘ ∂S/∂dot) K
//
// BackwardTile computes one tile. Backward walks over the tiles, cuts them into tasks, and adds up what tasks have.
#pragma once
#include "flashgen/cpu/gradients.h"
#include "flashgen/cpu/lists.h"
#include "flashgen/cpu/products.h"

namespace {

// A query tile of a head: rows row0 … of the call, which are positions i0 …
struct QueryTile {
  Head x;
  int64_t b, h, hkv, row0, i0, first_row;  // first_row: of lse
  int rows, vectors;
};

// Of one task the sums of dK, dV and what else belongs to keys, and where it adds captured gradients. They are its own
// until they are added up in the order of the tasks.
struct Task {
  float* sums[6];  // [Nk rounded up to BC, width of each]
  bool* touched;   // which key tiles of them hold anything; memory of others is never asked for
  fg::Gradient captured[std::tuple_size_v<decltype(Spec::captured(std::declval<Arguments>()))>];

  // Of key j.
  float* at(int sum, int width, int64_t j) const { return sums[sum] + j * width; }
};

template <class Spec, class KindOfProducts> struct BackwardTile {
  using Products = KindOfProducts;
  using Row = typename Spec::Row;
  using Column = typename Spec::Column;
  using Later = typename Products::Later;
  static constexpr int BR = Products::tile(Plan::BACKWARD_BR), BC = Products::tile(Plan::BACKWARD_BC);
  static constexpr int rows = int(round_up(BR, Products::row_vectors* W)), ld = rows + W;

  // An array of no elements takes no memory.
  struct alignas(64) Scratch {
    typename Products::template Queries<rows, D, true> q;
    typename Products::template Queries<rows, DV, true> d_o;
    typename Products::template Keys<BC, D, true> k;
    typename Products::template Keys<BC, DV, false> v;
    typename Products::template Scores<BC, rows, true, false> p;  // Sᵀ, then Pᵀ after dropout
    typename Products::template Scores<BC, rows, true, true> ds;  // dPᵀ, then (dS ∘ ∂S/∂dot)ᵀ
    float dqt[DP * ld];                                           // dQᵀ
    float dq[rows * DP];
    // 1 / Z; less than 0 where one key alone has a weight: its P is 1 or -1, and delta is of d_lse alone.
    float inverse[Spec::divided ? rows : 0];
    // lse in base 2, and what its rounding left over. Where scores are neither linear nor bounded a weight is
    // exp2((score - lse) · log2(e) - lse_rest); of a row whose scores are extreme lse is a maximum of these.
    float lse[Spec::exponential ? rows : 0], lse_rest[Spec::exponential ? rows : 0];
    float delta[Spec::normalised ? rows : 0];
    float qq[Spec::sqdist ? rows : 0], by_row[Spec::sqdist ? rows : 0];  // by_row: Σ_j dS ∂S/∂|q|²
    float by_column[Spec::sqdist ? BC * W : 0];                          // Σ_i dS ∂S/∂|k|², one partial sum a lane
    [[no_unique_address]] AllSums<typename Spec::Gradients, rows, BC> gradients;
    Column columns[BC];
    [[no_unique_address]] TileDiagonals<rows, BC> diagonals;
  };

  // The sums of keys: dK, dV, and Σ dS ∂S/∂|k|² where scores depend on it.
  static constexpr int OF_DK = 0, OF_DV = 1, OF_COLUMN = 2;
  static constexpr int width(int sum) { return sum == OF_DK ? DP : sum == OF_DV ? DVP : 1; }
  static int sums(const Arguments& /*a*/) { return Spec::sqdist ? 3 : 2; }

  // ---- Before the first key tile, and before each ------------------------------------------------------------------

  static HeadRows gradients_of_o(const Call& a, const QueryTile& of) {
    return rows_of_head(a.d_o, a.element, of.b, a.d_o_stride_b, of.h, a.d_o_stride_h, a.d_o_stride_n);
  }
  // From what the products of rows are counted whose scores are extreme: what the forward pass has counted them from.
  struct Tops {
    float of_rows[Spec::linear ? rows : 0];
    bool any = false;

    __attribute__((noinline)) void subtract(Scratch& t, int first, int end, int columns) const {
      for (int n = first; n < end; ++n) {
        float* const s = t.p.of(n);
        for (int j = 0; j < columns; ++j)
          fg::store(s + int64_t(j) * t.p.ld, fg::load(s + int64_t(j) * t.p.ld) - fg::load(of_rows + n * W));
      }
    }
  };

  static FG_INLINE void begin_rows(const Call& a, const QueryTile& of, Tops& tops, Scratch& t) {
    const HeadRows q = queries(a, of.b, of.h), d_o = gradients_of_o(a, of);
    const int padded = of.vectors * W;
    t.q.load(q, of.row0, of.rows, padded, PastEnd::last_row);
    // Lanes past the last row get no gradient, and so contribute none.
    t.d_o.load(d_o, of.row0, of.rows, padded, PastEnd::zeros);
    if constexpr (Spec::sqdist) {
      squared_norms(t.qq, q, of.row0, of.rows, padded);
      std::fill_n(t.by_row, rows, 0.0f);
    }
    if constexpr (Spec::normalised) {
      const HeadRows o = outputs(a, of.b, of.h);
      for (int row = 0; row < padded; ++row) {
        const bool real = row < of.rows;
        const int64_t place = of.first_row + (real ? row : of.rows - 1);
        const float of_lse = real && a.d_lse ? a.d_lse[place] : 0.0f;
        const float of_o = real ? Features<DV>(o, of.row0 + row).dot(Features<DV>(d_o, of.row0 + row)) : 0.0f;
        t.delta[row] = of_o - of_lse;
        if constexpr (Spec::divided) {
          // Through o nothing reaches the weight of a row's one key; what rounding leaves of it, Z would divide.
          t.inverse[row] = a.lse_parts[2 * place];
          if (t.inverse[row] < 0.0f) t.delta[row] = -of_lse;
        } else {
          const float stored = a.lse[place];
          const bool extreme = is_extreme(stored);
          if constexpr (Spec::linear) {
            tops.of_rows[row] = extreme ? a.lse_parts[2 * place] : 0.0f;
            tops.any = tops.any || extreme;
          }
          if (extreme) {
            t.lse[row] = Spec::linear ? 0.0f : a.lse_parts[2 * place];
            t.lse_rest[row] = a.lse_parts[2 * place + 1];
            continue;
          }
          // A row that keeps nothing has lse -inf; with +inf every weight comes out 0.
          const double in_base = Spec::linear || Spec::bounded_scores ? stored * LOG2_E : stored;
          const double lse = stored == -INFINITY ? INFINITY : in_base;
          t.lse[row] = float(lse);
          t.lse_rest[row] = std::isinf(lse) ? 0.0f : float(lse - double(t.lse[row]));
        }
      }
    }
    for (int d = 0; d < DP; ++d) std::fill_n(t.dqt + d * ld, padded, 0.0f);
    t.gradients.for_each([](auto& sums) { sums.begin_rows(); });
  }

  static FG_INLINE void begin_keys(const Call& a, const Launch& u, const QueryTile& of, const HeadRows& k,
                                   const HeadRows& v, KeyRows keys, const Computed& part, Scratch& t) {
    lay_out_keys(a, u, of.x, of.i0, of.rows, k, v, keys, part, t);
    if constexpr (Spec::sqdist) std::fill_n(t.by_column, BC * W, 0.0f);
    t.gradients.for_each([](auto& sums) { sums.begin_keys(); });
  }

  // What is multiplied for one key tile, of the strip that begins with vector `first`, or of none: Sᵀ = K Qᵀ and
  // dPᵀ = V dOᵀ, dQᵀ += Kᵀ dSᵀ.
  struct Multiplier {
    static constexpr int strip = decltype(Scratch::p)::strip;
    Scratch& t;
    Computed part;
    int columns, padded = int(round_up(columns, Products::key_multiple));
    fg::Ahead none, next_k, next_v;

    Multiplier(const Call&, const QueryTile&, const HeadRows& k, const HeadRows& v, KeyRows next, const Computed& part,
               int columns, Scratch& t)
        : t(t), part(part), columns(columns), next_k(rows_ahead(k, next, D)), next_v(rows_ahead(v, next, DV)) {}
    // Those of keys in `left` and rows in `right`, of the strip that begins with vector `first`, if they are `given`.
    template <int features, class Left, class Right, class To>
    FG_INLINE Later scores_of(bool given, int first, Left& left, Right& right, To& to, fg::Begin begin,
                              fg::Ahead& ahead) {
      const int keys = given && first < part.last ? padded : 0;
      return Later(keys, part.end_of_strip(first, strip) - first, Products::depth(features), left.by_key(),
                   right.by_feature(first), to.of(first), to.ld, begin, ahead);
    }
    template <class Keys, class Slopes>
    FG_INLINE Later queries_of(bool given, int first, int end, Keys& k, Slopes& ds, float* dqt) {
      return Later(given && first < end ? DP : 0, end - first, Products::depth(columns), k.by_feature(),
                   ds.of_keys(first), dqt + first * W, ld, fg::Begin::accumulate, none);
    }
    FG_INLINE Later scores(int first) { return scores_of<D>(true, first, t.k, t.q, t.p, fg::Begin::zero, next_k); }
    FG_INLINE Later d_weights(int first) {
      return scores_of<DV>(true, first, t.v, t.d_o, t.ds, fg::Begin::zero, next_v);
    }
    FG_INLINE Later queries(int first, int end) { return queries_of(true, first, end, t.k, t.ds, t.dqt); }
    // The first strip alone, and what the last one leaves.
    FG_INLINE void begin(int first) {
      scores(first).finish();
      d_weights(first).finish();
    }
    FG_INLINE void end(int before) { queries(before, part.last).finish(); }
    // Beside the weights of vectors first … end - 1: dS of the strip before them with K, then S and dP of the next.
    FG_INLINE InTurn<Later, 3> beside(int before, int first, int end) {
      return {queries(before, first), scores(end), d_weights(end)};
    }
    // Rows past the last key have no weight.
    FG_INLINE void clear() {
      t.p.clear(columns, padded);
      t.ds.clear(columns, padded);
    }
  };

  // Weighs vectors first … end - 1, beside what else is multiplied. Tile: this, or that of forward mode.
  template <class Tile>
  static FG_INLINE void weigh(const Call& a, const Launch& u, const QueryTile& of,
                              typename Tile::Multiplier& multiplier, int before, int first, int end,
                              typename Tile::Scratch& t, const Task& task) {
    auto following = multiplier.beside(before, first, end);
    using Beside = decltype(following);
    const bool dropped = Spec::dropout && a.dropout_threshold != 0;
    const auto step = multiplier.part.masked
                          ? (dropped ? pairs<Tile, Beside, true, Spec::dropout> : pairs<Tile, Beside, true, false>)
                          : (dropped ? pairs<Tile, Beside, false, Spec::dropout> : pairs<Tile, Beside, false, false>);
    step(a, u, of.x, of.i0, of.rows, first, end, multiplier.columns, following, t, task);
    following.finish();
    multiplier.clear();
  }

  // ---- Weights, and what reaches scores ----------------------------------------------------------------------------

  // The weight of a pair, and the gradient of its product.
  struct Weights {
    fg::VecF p, ds;
  };

  template <class Tile, class Beside, bool masked, bool dropped>
  static void pairs(const Arguments& a, const Launch& u, const Head& x, int64_t i0, int rows, int first, int end,
                    int columns, Beside& following, typename Tile::Scratch& t, const Task& task) {
    Spread<Beside> beside(following, (end - first) * columns);
    for (int n = first; n < end; ++n) {
      Row r = Spec::make_row(a, u, x, rows_of(i0, n, rows));
      fg::VecF by_row{}, inverse{}, row_delta{}, lse{}, lse_rest{};
      [[maybe_unused]] fg::VecF t_by_row{}, row_epsilon{}, moved{};
      [[maybe_unused]] fg::VecB one_key{};
      if constexpr (Spec::sqdist) r.qq = fg::load(t.qq + n * W), by_row = fg::load(t.by_row + n * W);
      const float *const s = t.p.of(n), *const dp = t.ds.of(n);
      if constexpr (Spec::normalised) row_delta = fg::load(t.delta + n * W);
      if constexpr (Spec::exponential) lse = fg::load(t.lse + n * W), lse_rest = fg::load(t.lse_rest + n * W);
      if constexpr (Spec::divided) {
        const fg::VecF signed_inverse = fg::load(t.inverse + n * W);
        inverse = fg::abs(signed_inverse), one_key = fg::lt(signed_inverse, 0.0f);
      }
      if constexpr (Spec::tangent && Spec::sqdist) t_by_row = fg::load(t.t_by_row + n * W);
      if constexpr (Spec::tangent && Spec::normalised)
        moved = fg::load(t.moved + n * W), row_epsilon = fg::load(t.epsilon + n * W);
      typename AllSums<typename Spec::Gradients, BackwardTile::rows, BC>::OfVector sums;
      const int valid = std::max(0, std::min(W, rows - n * W));
      [[maybe_unused]] fg::VecU survivors{};
      const auto weighed = [&](int64_t j) -> typename Tile::Weights {
        const Column& c = t.columns[j];
        const Diagonals d = t.diagonals.of(n, j);
        const fg::VecF dot = fg::load(s + j * t.p.ld), sqdist = squared_distance(r, c, dot);
        fg::VecF e = dot;
        if constexpr (!Spec::linear) e = Spec::score(a, u, x, r, c, d, dot, sqdist);
        fg::VecB kept = fg::broadcast(true);
        if constexpr (!Spec::bounded_scores) kept = fg::ne(e, -INFINITY);
        if (masked) kept = kept && Spec::keep(a, u, x, r, c, d);
        // In forward mode what arrives at o's tangent reaches P's by V, and P by V's.
        fg::VecF d_weight = fg::load(dp + j * t.ds.ld), drop = fg::broadcast(1.0f), d_t_weight = d_weight;
        if constexpr (Spec::tangent) d_weight = fg::load(t.t_p.of(n) + j * t.t_p.ld);
        if constexpr (dropped) {
          if (j == 0 || c.j % fg::dropout_columns == 0)
            survivors = fg::dropout_keeps(a.seed, x.b, x.h, r.i, c.j / fg::dropout_columns, a.dropout_threshold);
          drop = fg::select(fg::ne(survivors & fg::dropout_bit(c.j), 0u), a.dropout_scale, 0.0f);
          d_weight = d_weight * drop, d_t_weight = d_t_weight * drop;
        }
        fg::VecF p, d_score, safe{}, t_dot{}, t_norms{}, t_e{}, t_p{}, d_t_score{};
        if constexpr (Spec::tangent) {
          t_dot = fg::load(t.t_ds.of(n) + j * t.t_ds.ld), t_norms = tangent_of_norms(t, n, j);
          t_e = fg::select(kept, Spec::score_tangent(a, u, x, r, c, d, dot, sqdist, t_dot, t_norms), 0.0f);
        }
        const auto reaches = [&](fg::VecF of_weight, fg::VecF delta) {
          return fg::select(kept, Spec::backward(p, of_weight, delta, inverse), 0.0f);
        };
        if constexpr (Spec::exponential) {
          p = fg::select(kept, probability(e, lse, lse_rest), 0.0f);
          if constexpr (Spec::tangent) {
            t_p = fg::chained(t_e - moved, p), d_t_score = reaches(d_t_weight, row_delta);
            const fg::VecF of_weight =
                Spec::tangent_backward(p, d_weight, row_delta, inverse, moved, row_epsilon, t_p, d_t_score);
            d_score = fg::select(kept, of_weight + fg::chained(t_e - moved, d_t_score), 0.0f);
          } else {
            d_score = reaches(d_weight, row_delta);
          }
        } else {
          safe = fg::select(kept, e, 0.0f);
          p = Spec::weight(a, u, x, r, c, d, safe);
          if constexpr (Spec::divided) p = p * inverse;
          p = fg::select(kept, p, 0.0f);
          const fg::VecF slope = Spec::weight_by_score(a, u, x, r, c, d, safe);
          if constexpr (Spec::tangent) {
            fg::VecF delta = row_delta, epsilon = row_epsilon, t_w = through(slope, t_e);
            if constexpr (Spec::moves_weight) t_w = t_w + Spec::weight_tangent(a, u, x, r, c, d, safe);
            t_w = fg::select(kept, t_w, 0.0f), t_p = t_w;
            if constexpr (Spec::divided) {
              const fg::VecB lone = one_key && fg::ne(p, 0.0f);
              t_p = fg::select(lone, 0.0f, t_w * inverse - p * moved);
              epsilon = fg::select(one_key, 0.0f, row_epsilon);
              delta = fg::select(one_key && !lone, row_delta + row_epsilon, row_delta);
              d_weight = fg::select(lone, 0.0f, d_weight), d_t_weight = fg::select(lone, 0.0f, d_t_weight);
            }
            d_t_weight = reaches(d_t_weight, delta);
            const fg::VecF of_weight =
                Spec::tangent_backward(p, d_weight, delta, inverse, moved, epsilon, t_p, d_t_weight);
            d_weight = fg::select(kept, of_weight, 0.0f), d_t_score = fg::select(kept, through(d_t_weight, slope), 0.0f);
            const fg::VecF of_slope = Spec::weight_tangent_by_score(a, u, x, r, c, d, safe, t_e);
            d_score = fg::select(kept, through(d_weight, slope) + through(d_t_weight, of_slope), 0.0f);
          } else {
            if constexpr (Spec::divided) d_weight = fg::select(one_key, 0.0f, d_weight);
            d_weight = reaches(d_weight, row_delta);
            d_score = fg::select(kept, through(d_weight, slope), 0.0f);
          }
        }
        if constexpr (Spec::sqdist) {
          const fg::VecF of_sqdist = Spec::score_by_sqdist(a, u, x, r, c, d, dot, sqdist);
          fg::VecF by = through(d_score, of_sqdist);
          if constexpr (Spec::tangent) {
            const fg::VecF of_t = Spec::score_tangent_by_sqdist(a, u, x, r, c, d, dot, sqdist, t_dot, t_norms);
            by = by + through(d_t_score, of_t);
            const fg::VecF by_norms = fg::select(kept, through(d_t_score, of_sqdist), 0.0f);
            t_by_row += by_norms;
            fg::store(t.t_by_column + j * W, fg::load(t.t_by_column + j * W) + by_norms);
          }
          const fg::VecF by_sqdist = fg::select(kept, by, 0.0f);
          by_row += by_sqdist;
          fg::store(t.by_column + j * W, fg::load(t.by_column + j * W) + by_sqdist);
        }
        const fg::PairTerms of_pairs{dot, sqdist, d_score, d_weight, safe, t_dot, t_norms, t_e, d_t_score, d_t_weight};
        t.gradients.add(sums, task, a, u, x, r, c, d, of_pairs, kept, n, j, valid);
        const fg::VecF of_dot = Spec::score_by_dot(a, u, x, r, c, d, dot, sqdist);
        fg::VecF by_dot = through(d_score, of_dot);
        if constexpr (Spec::tangent) {
          const fg::VecF of_t_dot = Spec::score_tangent_by_dot(a, u, x, r, c, d, dot, sqdist, t_dot, t_norms);
          by_dot = fg::select(kept, by_dot + through(d_t_score, of_t_dot), 0.0f);
          return {p * drop, by_dot, t_p * drop, fg::select(kept, through(d_t_score, of_dot), 0.0f)};
        } else {
          return {p * drop, fg::select(kept, by_dot, 0.0f)};
        }
      };
      const auto put = [&](int64_t j, const auto& low, const auto& high) {
        t.p.put(j, n, low.p, high.p);
        t.ds.put(j, n, low.ds, high.ds);
        if constexpr (Spec::tangent) t.t_p.put(j, n, low.t_p, high.t_p), t.t_ds.put(j, n, low.t_ds, high.t_ds);
      };
      int64_t j = 0;
      for (; j + 2 <= columns; j += 2) {
        beside.pass(2);
        const auto low = weighed(j);
        put(j, low, weighed(j + 1));
      }
      if (j < columns) put(j, weighed(j), typename Tile::Weights{});
      if constexpr (Spec::sqdist) fg::store(t.by_row + n * W, by_row);
      if constexpr (Spec::tangent && Spec::sqdist) fg::store(t.t_by_row + n * W, t_by_row);
      t.gradients.end_vector(sums, n, columns - 1);
    }
  }

  // P of exponential weights.
  static FG_INLINE fg::VecF probability(fg::VecF e, fg::VecF lse, fg::VecF lse_rest) {
    if constexpr (Spec::linear) return fg::exp2_bounded((e * Spec::SCORE_FACTOR - lse) - lse_rest);
    if constexpr (Spec::bounded_scores) return fg::exp2_bounded((e - lse) - lse_rest);
    return fg::exp2_bounded((fg::settled(e) - lse) * Spec::SCORE_FACTOR - lse_rest);
  }

  // ---- Behind each key tile, and behind the last -------------------------------------------------------------------

  // dV += Pᵀ dO, dK += dSᵀ Q
  static FG_INLINE void add_keys(const Call& /*a*/, const QueryTile& of, const Multiplier& m, int64_t column0,
                                 bool touched, fg::Begin entered, fg::Ahead& next_dk, fg::Ahead& next_dv, Scratch& t,
                                 const Task& task) {
    const int first = m.part.first, depth = Products::depth(std::min((m.part.last - first) * W, of.rows - first * W));
    Products::product(m.padded, DVP / W, depth, t.p.by_key(first), t.d_o.by_row(first), task.at(OF_DV, DVP, column0),
                      DVP, entered, next_dv);
    Products::product(m.padded, DP / W, depth, t.ds.by_key(first), t.q.by_row(first), task.at(OF_DK, DP, column0), DP,
                      entered, next_dk);
    if constexpr (Spec::sqdist) add_columns(m, task.at(OF_COLUMN, 1, column0), touched, t.by_column);
  }
  static void add_columns(const Multiplier& m, float* sums, bool touched, const float* by_column) {
    for (int j = 0; j < m.columns; ++j)
      sums[j] = (touched ? sums[j] : 0.0f) + fg::horizontal_sum(fg::load(by_column + j * W));
  }

  static FG_INLINE void store_queries(const Call& a, const QueryTile& of, Scratch& t) {
    const int64_t to = a.rows_of_dq.at(of.b, of.h, of.row0);
    if constexpr (Spec::sqdist) {
      fg::transpose_to(t.dq, DP, t.dqt, ld, DP, of.vectors * W);
      add_norms_of_rows(t.dq, queries(a, of.b, of.h), of, t.by_row);
      store_rows(a.dq, a.element_of_rows(), to, a.rows_of_dq.n, t.dq, DP, D, of.rows);
    } else {
      store_transposed(a.dq, a.element_of_rows(), to, a.rows_of_dq.n, t.dqt, ld, t.dq, DP, D, of.rows);
    }
  }
  // ∂|q|²/∂q = 2 q
  static void add_norms_of_rows(float* dq, const HeadRows& q, const QueryTile& of, const float* by_row) {
    for (int row = 0; row < of.rows; ++row) {
      const Features<D> x(q, of.row0 + row);
      for (int d = 0; d < D; ++d) dq[row * DP + d] += 2.0f * by_row[row] * x.values[d];
    }
  }

  // What the sink of vector n of rows weighs, as a share of the row's sum.
  static fg::VecF weight_of_sink(fg::VecF sink, const Tops& tops, int n, const Scratch& t) {
    const fg::VecF lse = fg::load(t.lse + n * W), rest = fg::load(t.lse_rest + n * W);
    if constexpr (Spec::linear || Spec::bounded_scores) {
      if constexpr (Spec::linear) sink = sink - fg::settled(fg::load(tops.of_rows + n * W) * Spec::SCALE);
      return fg::exp2((fg::min(fg::settled(sink * SCORES_IN_BASE_2), MOST_FLOAT) - lse) - rest);
    } else {
      return fg::exp2(fg::min(fg::settled((fg::settled(sink) - lse) * SCORES_IN_BASE_2), MOST_FLOAT) - rest);
    }
  }
  // What reaches the sink, and in forward mode its tangent.
  struct OfSink {
    fg::VecF d_sink, d_t_sink;
  };
  static OfSink of_sink(const Call&, const Launch&, const Head&, const Row&, fg::VecF weight, int n, const Scratch& t) {
    return {fg::select(fg::eq(weight, 0.0f), 0.0f, -weight * fg::load(t.delta + n * W)), fg::VecF{}};
  }

  // What tasks have of keys first … first + count - 1, as rows of the results.
  static void store_keys(const Call& a, int64_t b, int64_t hkv, int64_t first, int count, float* const (&from)[6]) {
    const auto& [dk, dv] = std::tie(a.rows_of_dk, a.rows_of_dv);
    store_rows(a.dk, a.element_of_keys(), dk.at(b, hkv, first), dk.n, from[OF_DK], DP, D, count);
    store_rows(a.dv, a.element_of_keys(), dv.at(b, hkv, first), dv.n, from[OF_DV], DVP, DV, count);
  }
  // ∂|k|²/∂k = 2 k, of keys first … last - 1.
  static void add_norms_of_keys(const Call& a, int64_t b, int64_t hkv, int64_t first, int64_t last, const Task& sum,
                                float* row) {
    add_norms(keys_of(a, b, hkv), first, last, sum.sums[OF_DK], sum.sums[OF_COLUMN], row);
  }
  static void add_norms(const HeadRows& k, int64_t first, int64_t last, float* dk, const float* by_column, float* row) {
    for (int64_t j = first; j < last; ++j) {
      load_rows(row, DP, D, k, j, 1, 1);
      for (int d = 0; d < D; ++d) dk[j * DP + d] += 2.0f * by_column[j] * row[d];
    }
  }
};

// A pass over all tiles of a call. Tile: BackwardTile, or that of forward mode.
template <class Spec, class Tile> struct Backward {
  using Products = typename Tile::Products;
  using Scratch = typename Tile::Scratch;
  static constexpr int BR = Tile::BR, BC = Tile::BC;
  static constexpr int captured_values = int(sizeof(Task::captured) / sizeof(fg::Gradient));

  static void tile(const Call& a, const Launch& u, int64_t b, int64_t h, int64_t query_tile, const Lookup& lookup,
                   Scratch& t, const Task& task) {
    const int64_t hkv = a.kv_head(h), row0 = query_tile * BR;
    const int rows = int(std::min<int64_t>(BR, a.q_len - row0));
    const int vectors = int(round_up(ceil_div(rows, W), Products::row_vectors));
    const QueryTile of = {make_head(a, u, b, h),        b,    h,      hkv, row0, a.q_start + row0,
                          a.rows_of_lse.at(b, h, row0), rows, vectors};
    const HeadRows k = keys_of(a, b, hkv), v = values_of(a, b, hkv);
    const Visits visits = visits_of(a, u, of.x, b, h, query_tile, BR, row0, rows, BC, lookup);
    typename Tile::Tops tops;
    Tile::begin_rows(a, of, tops, t);
    for (int n = 0; n < visits.count; ++n) {
      const Visit& visit = visits.at[n];
      const KeyRows keys = key_rows(a, visit, BC),
                    next = n + 1 < visits.count ? key_rows(a, visits.at[n + 1], BC) : KeyRows{};
      const Computed part = computed<Products>(visit);
      Tile::begin_keys(a, u, of, k, v, keys, part, t);
      typename Tile::Multiplier multiplier(a, of, k, v, next, part, keys.count, t);
      fg::Ahead next_dk = rows_ahead({task.sums[Tile::OF_DK], DP, 0}, next, DP);
      fg::Ahead next_dv = rows_ahead({task.sums[Tile::OF_DV], DVP, 0}, next, DVP);
      // While one strip is weighed, the one before it is finished and the next one begun.
      multiplier.begin(part.first);
      int before = part.first;
      for (int first = part.first, end; first < part.last; before = first, first = end) {
        end = part.end_of_strip(first, multiplier.strip);
        if constexpr (Spec::linear)
          if (tops.any) tops.subtract(t, first, end, keys.count);
        Tile::template weigh<Tile>(a, u, of, multiplier, before, first, end, t, task);
      }
      multiplier.end(before);
      bool& touched = task.touched[visit.tile];
      // Whole register blocks reach into the next tile, where they may add nothing.
      constexpr bool is_whole = BC % Products::key_multiple == 0;
      if (!is_whole && !touched) clear_sums(a, task, keys.first, keys.first + keys.count);
      const fg::Begin entered = touched || !is_whole ? fg::Begin::accumulate : fg::Begin::zero;
      Tile::add_keys(a, of, multiplier, keys.first, touched, entered, next_dk, next_dv, t, task);
      touched = true;
      t.gradients.for_each([&](auto& sums) { sums.end_keys(task, a, u, of.x, t, keys.count); });
    }
    Tile::store_queries(a, of, t);
    if constexpr (decltype(t.gradients)::close_rows) {
      for (int n = 0; n * W < rows; ++n) {
        const int valid = std::min(W, rows - n * W);
        const Row r = Spec::make_row(a, u, of.x, rows_of(of.i0, n, rows));
        if constexpr (decltype(t.gradients)::of_sink) {
          const fg::VecF weight = Tile::weight_of_sink(Spec::sink_of(a, u, of.x, r), tops, n, t);
          const auto reaching = Tile::of_sink(a, u, of.x, r, weight, n, t);
          t.gradients.for_each([&](auto& sums) { sums.add_sink(a, u, of.x, r, n, valid, reaching); });
        }
        t.gradients.for_each([&](auto& sums) { sums.end_rows(task, a, u, of.x, r, n, valid); });
      }
    }
    t.gradients.for_each([&](auto& sums) { sums.end_head(task, a, u, of.x); });
  }

  // ---- How the work is cut -----------------------------------------------------------------------------------------
  // A task is the query heads that share a key/value head, and one of `chunks` runs of the query tiles of each.

  // Where everything lies in the workspace: offsets and sizes in floats.
  struct Layout {
    int64_t chunks, tasks, padded_keys, slots;
    int64_t key_tiles, slot, sums, touched, scratch, thread, trees, runs, total;
    int64_t copies[captured_values];  // of captured gradients the tasks' own, -1: tasks write to the result
    int threads;
    bool in_order;
  };

  // Tasks' own copies of a captured gradient take at most this many doubles; beyond it tasks add to the result, one
  // after another where it has to be repeatable, otherwise by atomic additions.
  static constexpr int64_t MOST_COPIES = int64_t(1) << 23;
  // The chunks' own dK and dV take at most this many floats; beyond it there are fewer chunks than threads.
  static constexpr int64_t MOST_PARTIAL_SUMS = int64_t(1) << 28;

  // Gradients that are to be the same bit by bit on any number of threads are cut for this many, whatever there are,
  // into chunks of so many query rows at least (or two): to add one up then takes little beside it.
  static constexpr int REPEATABLE_THREADS = 16;
  static constexpr int64_t REPEATABLE_ROWS = 512;

  static Arguments with_useful_threads(const Arguments& a) {
    return ::with_useful_threads(a, a.batch * a.kv_heads * ceil_div(a.q_len, BR));
  }

  // Into how many runs the query tiles of a head are cut.
  static int64_t chunks_of(Arguments a, int64_t slot) {
    const int64_t heads = a.batch * a.kv_heads;
    int64_t most = ceil_div(a.q_len, BR), chunks = 1;
    if (a.deterministic) {
      a.threads = REPEATABLE_THREADS;
      a = with_useful_threads(a);
      most = std::min(most, std::max<int64_t>(2, a.q_len / REPEATABLE_ROWS));
    }
    // Enough tasks to keep every thread busy to the end: heads alone where they are many or divide evenly.
    while (chunks < most && heads * chunks < 2 * a.threads && heads * chunks % a.threads != 0 &&
           (a.deterministic || heads * (chunks + 1) * slot <= MOST_PARTIAL_SUMS))
      ++chunks;
    return chunks;
  }

  // The keys that the sums of a head hold, and the floats that they take.
  static int64_t padded_keys_of(int64_t kv_len) {
    return (ceil_div(kv_len, BC) - 1) * BC + round_up(BC, Products::key_multiple);
  }
  static int64_t floats_of_sums(const Arguments& a, int64_t padded_keys) {
    int64_t widths = 0;
    for (int sum = 0; sum < Tile::sums(a); ++sum) widths += Tile::width(sum);
    return padded_keys * widths;
  }

  static Layout make_layout(const Arguments& a) {
    Layout l{};
    l.threads = a.threads;
    l.key_tiles = ceil_div(a.kv_len, BC);
    l.padded_keys = padded_keys_of(a.kv_len);
    l.slot = floats_of_sums(a, l.padded_keys);
    l.chunks = chunks_of(a, l.slot);
    l.tasks = a.batch * a.kv_heads * l.chunks;
    int64_t at = 0, *copies_of = l.copies;
    for (const fg::Captured& each : Spec::captured(a)) {
      const bool apart = each.owned_by_head ? l.chunks == 1 : l.tasks == 1;
      const bool copies = !(each.owned_by_head && apart) && l.tasks * each.elements <= MOST_COPIES;
      *copies_of++ = each.gradient && copies ? at : -1;
      if (each.gradient && copies) at += 2 * l.tasks * each.elements;
      else if (each.gradient && !apart && a.deterministic) l.threads = 1;
    }
    // One chunk a head: a thread's slot is free again after each task. Several: they are added up at the end, or in
    // their order as they are done. Then each thread has one, and each of its heads and of the one that is begun the
    // sum of it.
    l.in_order = a.deterministic && l.chunks > 1;
    const auto slots_of = [&](int threads) { return std::min<int64_t>(2 * threads + 1, l.tasks); };
    while (l.in_order && l.threads > 1 && slots_of(l.threads) * l.slot > MOST_PARTIAL_SUMS) --l.threads;
    l.slots = l.chunks == 1 ? l.threads : l.in_order ? slots_of(l.threads) : l.tasks;
    l.sums = round_up(at, 16);
    l.touched = round_up(l.sums + l.slots * l.slot, 16);
    l.scratch = l.touched + round_up(l.slots * l.key_tiles, 64) / 4;
    l.thread = round_up(int64_t(sizeof(Scratch) + sizeof(Visit) * size_t(ceil_div(a.kv_len, BC))), 64) / 4;
    l.trees = l.scratch + l.threads * l.thread;
    l.runs = l.total = l.trees + bytes_of_trees(a, BC) / 4;
    // For each mask where the chunks' query tiles begin, then the work of each query tile.
    if (!Spec::keep_everything && l.chunks > 1)
      l.total += round_up(Spec::masks_of(a) * (l.chunks + 1 + ceil_div(a.q_len, BR)), 16);
    return l;
  }

  // A task whose sums are in these places.
  static Task summing(const Arguments& a, float* sums, bool* touched, int64_t padded_keys) {
    Task t{};
    t.touched = touched;
    for (int sum = 0; sum < Tile::sums(a); ++sum) t.sums[sum] = sums, sums += padded_keys * Tile::width(sum);
    return t;
  }

  // Says where a task adds captured gradients: to its copy, number `own`, of what has copies_of(n), or to the result.
  template <class CopiesOf>
  static void capture(Task& t, const Arguments& a, const CopiesOf& copies_of, int64_t own, bool shared, bool cut) {
    int n = 0;
    for (const fg::Captured& each : Spec::captured(a)) {
      double* const copies = copies_of(n);
      if (copies) t.captured[n++] = {copies + own * each.elements};
      else t.captured[n++] = {nullptr, each.gradient, shared && (!each.owned_by_head || cut)};
    }
  }
  // The sum of `count` such copies of element e.
  static float sum_of_copies(const double* copies, int64_t count, const fg::Captured& each, int64_t e) {
    double sum = 0.0;
    for (int64_t n = 0; n < count; ++n) sum += copies[n * each.elements + e];
    return float(sum);
  }

  static Task make_task(const Arguments& a, const Layout& l, float* workspace, int64_t task, int64_t slot) {
    bool* const touched = reinterpret_cast<bool*>(workspace + l.touched) + slot * l.key_tiles;
    Task t = summing(a, workspace + l.sums + slot * l.slot, touched, l.padded_keys);
    const auto copies = [&](int n) {
      return l.copies[n] < 0 ? nullptr : reinterpret_cast<double*>(workspace + l.copies[n]);
    };
    capture(t, a, copies, task, l.threads > 1, l.chunks > 1);
    return t;
  }

  // Makes the sums of keys first … last - 1 begin at 0.
  static void clear_sums(const Arguments& a, const Task& task, int64_t first, int64_t last) {
    for (int sum = 0; sum < Tile::sums(a); ++sum) {
      const int width = Tile::width(sum);
      std::fill(task.at(sum, width, first), task.at(sum, width, last), 0.0f);
    }
  }

  // Adds the sums of key tile `tile` of one chunk to those of another.
  static void add(const Arguments& a, const Task& sum, const Task& more, int64_t tile) {
    const int64_t first = tile * BC, last = std::min(first + BC, a.kv_len);
    for (int n = 0; n < Tile::sums(a); ++n) {
      float* const to = sum.sums[n];
      const float* const from = more.sums[n];
      for (int64_t e = first * Tile::width(n); e < last * Tile::width(n); ++e) to[e] += from[e];
    }
  }

  // The chunks of each head are added up in their order, as they are done, in the slot of the first.
  struct InOrder {
    std::atomic<int64_t> next{0};  // the task to begin: the one before has begun, so that it can be waited for
    std::atomic<int64_t> done[2 * REPEATABLE_THREADS]{};  // chunks of each head; more heads are not cut
    int64_t sums[2 * REPEATABLE_THREADS];                 // their slots
    std::mutex lock;
    std::vector<int64_t> free;

    explicit InOrder(const Layout& l) {
      for (int64_t slot = l.in_order ? l.slots : 0; slot-- > 0;) free.push_back(slot);
    }
    int64_t claim() {
      const std::lock_guard<std::mutex> guard(lock);
      const int64_t slot = free.back();
      free.pop_back();
      return slot;
    }
    void release(int64_t slot) {
      const std::lock_guard<std::mutex> guard(lock);
      free.push_back(slot);
    }
    void wait(int64_t head, int64_t chunk) {
      while (done[head].load(std::memory_order_acquire) != chunk) std::this_thread::yield();
    }
  };

  // Writes what keys of one key tile of a head have: the sum of `chunks` tasks, task_of(0) and those behind it.
  template <class TaskOf>
  static void finish(const Call& a, int64_t head, const TaskOf& task_of, int64_t chunks, int64_t tile, float* row) {
    const int64_t b = head / a.kv_heads, hkv = head % a.kv_heads;
    const int64_t first = tile * BC, last = std::min(first + BC, a.kv_len);
    Task sum = task_of(0);
    for (int64_t chunk = 1; chunk < chunks; ++chunk) {
      const Task more = task_of(chunk);
      if (!more.touched[tile]) continue;
      if (!sum.touched[tile]) sum = more;
      else add(a, sum, more, tile);
    }
    if (!sum.touched[tile]) {
      std::fill_n(row, std::max(DP, DVP), 0.0f);
      float* const zeros[6] = {row, row, row, row, row, row};
      for (int64_t j = first; j < last; ++j) Tile::store_keys(a, b, hkv, j, 1, zeros);
      return;
    }
    if constexpr (Spec::sqdist) Tile::add_norms_of_keys(a, b, hkv, first, last, sum, row);
    float* from[6] = {};
    for (int n = 0; n < Tile::sums(a); ++n) from[n] = sum.at(n, Tile::width(n), first);
    Tile::store_keys(a, b, hkv, first, int(last - first), from);
  }

  // The query tiles of a chunk, from `first` on, before `end`; `runs`: of all chunks, for each mask.
  struct Run {
    int64_t first, end;
  };
  static Run run_of(const Call& a, int64_t b, int64_t h, int64_t tiles, int64_t chunk, int64_t chunks,
                    const int32_t* runs) {
    if (Spec::keep_everything) return {tiles * chunk / chunks, tiles * (chunk + 1) / chunks};
    const int32_t* const run = runs + Spec::mask_of(a, b, h) * (chunks + 1) + chunk;
    return {chunks == 1 ? 0 : run[0], chunks == 1 ? tiles : run[1]};
  }

  // ---- A call ------------------------------------------------------------------------------------------------------

  static int64_t workspace_bytes(const Arguments& a) {
    return make_layout(with_useful_threads(a)).total * int64_t(sizeof(float)) + 64;
  }

  static void run(const Arguments& arguments) {
    const Call a = packed(with_useful_threads(arguments));
    const Launch u = make_launch(a);
    const Layout l = make_layout(a);
    const int64_t tiles = ceil_div(a.q_len, BR), group = a.heads / a.kv_heads;
    float* const workspace = reinterpret_cast<float*>(aligned_workspace(a));
    const auto lists = lists_of<Spec>(a, u, BR, BC);
    auto* const trees = reinterpret_cast<ColumnBounds*>(workspace + l.trees);
    auto* const runs = reinterpret_cast<int32_t*>(workspace + l.runs);
    InOrder in_order(l);
    run_in_team(l.threads, [&] {
      const fg::FlushSubnormals flush;
      [[maybe_unused]] const typename Products::Thread thread;
      auto& scratch = *reinterpret_cast<Scratch*>(workspace + l.scratch + l.thread * thread_index());
      const Lookup lookup = {trees, lists.get(), reinterpret_cast<Visit*>(&scratch + 1)};
      alignas(64) float row[DP > DVP ? DP : DVP];
      if constexpr (Spec::observed_columns) build_trees(a, u, BC, trees);
      if constexpr (!Spec::keep_everything) {
        int32_t* const work = runs + Spec::masks_of(a) * (l.chunks + 1);
        if (l.chunks > 1) {
#pragma omp for schedule(static)
          for (int64_t n = 0; n < Spec::masks_of(a) * tiles; ++n)
            work[n] = work_of_tile(a, u, n, tiles, BR, BC, lookup);
#pragma omp for schedule(static)
          for (int64_t mask = 0; mask < Spec::masks_of(a); ++mask)
            cut_evenly(runs + mask * (l.chunks + 1), l.chunks, work + mask * tiles, tiles);
        }
      }
      const auto perform = [&](int64_t task, int64_t slot) {
        const int64_t head = task / l.chunks, chunk = task % l.chunks;
        const Task own = make_task(a, l, workspace, task, slot);
        std::fill_n(own.touched, l.key_tiles, false);
        const fg::Gradient* captured = own.captured;
        for (const fg::Captured& each : Spec::captured(a))
          if (double* const copy = captured++->own) std::fill_n(copy, each.elements, 0.0);
        const int64_t b = head / a.kv_heads, first_head = head % a.kv_heads * group;
        for (int64_t h = first_head; h < first_head + group; ++h) {
          const Run run = run_of(a, b, h, tiles, chunk, l.chunks, runs);
          for (int64_t query_tile = run.first; query_tile < run.end; ++query_tile)
            tile(a, u, b, h, query_tile, lookup, scratch, own);
        }
      };
      const auto finish_head = [&](int64_t head, int64_t slot) {
        const auto sum = [&](int64_t) { return make_task(a, l, workspace, 0, slot); };
        for (int64_t tile = 0; tile < l.key_tiles; ++tile) finish(a, head, sum, 1, tile, row);
      };
      if (l.in_order) {
        for (int64_t task; (task = in_order.next++) < l.tasks;) {
          const int64_t head = task / l.chunks, chunk = task % l.chunks, slot = in_order.claim();
          perform(task, slot);
          in_order.wait(head, chunk);
          if (chunk == 0) in_order.sums[head] = slot;
          const int64_t sums = in_order.sums[head];
          if (chunk > 0) {
            const Task sum = make_task(a, l, workspace, 0, sums), more = make_task(a, l, workspace, 0, slot);
            for (int64_t tile = 0; tile < l.key_tiles; ++tile) {
              if (!more.touched[tile]) continue;
              if (!sum.touched[tile]) clear_sums(a, sum, tile * BC, std::min((tile + 1) * BC, a.kv_len));
              sum.touched[tile] = true;
              add(a, sum, more, tile);
            }
            in_order.release(slot);
          }
          if (chunk + 1 == l.chunks) {
            finish_head(head, sums);
            in_order.release(sums);
          }
          in_order.done[head].store(chunk + 1, std::memory_order_release);
        }
      } else if (l.chunks == 1) {
        divide_tasks(l.threads, l.tasks, [&](int64_t task) {
          perform(task, thread_index());
          finish_head(task, thread_index());
        });
      } else {
        divide_tasks(l.threads, l.tasks, [&](int64_t task) { perform(task, task); });
#pragma omp for schedule(static)
        for (int64_t n = 0; n < a.batch * a.kv_heads * l.key_tiles; ++n) {
          const int64_t head = n / l.key_tiles;
          const auto chunk_of = [&](int64_t chunk) { return make_task(a, l, workspace, 0, head * l.chunks + chunk); };
          finish(a, head, chunk_of, l.chunks, n % l.key_tiles, row);
        }
      }
    });
    const int64_t* copies = l.copies;
    for (const fg::Captured& each : Spec::captured(a)) {
      const int64_t at = *copies++;
      const auto* const own = reinterpret_cast<const double*>(workspace + std::max<int64_t>(at, 0));
      for (int64_t e = 0; at >= 0 && e < each.elements; ++e) each.gradient[e] = sum_of_copies(own, l.tasks, each, e);
    }
  }
};

}  // namespace
