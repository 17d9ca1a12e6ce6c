// The forward pass where rows would not fill the lanes of a vector: keys are its lanes, of scores and weights, S[i][j],
// and features of O[i][d]. Rows are queries of one head, or of all heads that share its keys; K and V are read where
// they lie.
#pragma once
#include "flashgen/cpu/forward.h"

namespace {

// multiply(first, rows, ld, ahead) for the runs of key rows that lie as far apart, float32 or bfloat16 where it lies,
// else a copy in `scratch`, where nothing is ahead; `first` is counted from theirs.
template <int width, class Multiply>
void for_each_run(const HeadRows& from, KeyRows rows, KeyRows next, float* scratch, int ld, const Multiply& multiply) {
  for (int first = 0, count; first < rows.count; first += count) {
    count = from.run_of(rows.first + first, rows.count - first);
    const auto in_place = [&](const auto* at) {
      const auto* const ahead = first < next.count ? at + from.offset(next.first + first) : nullptr;
      multiply(first, count, at + from.offset(rows.first + first), from.stride, ahead);
    };
    if (from.element == F32) {
      in_place(static_cast<const float*>(from.at));
    } else if (from.element == BF16) {
      in_place(static_cast<const fg::bf16*>(from.at));
    } else {
      load_rows(scratch, ld, width, from, rows.first + first, count, count);
      multiply(first, count, static_cast<const float*>(scratch), int64_t(ld), static_cast<const float*>(nullptr));
    }
  }
}

template <class Spec, class Tile> struct FewRows {
  using ByKey = typename Spec::ByKey;
  using Row = typename ByKey::Row;
  using Column = typename ByKey::Column;
  using Diagonals = typename ByKey::Diagonals;
  using Scratch = typename Tile::Scratch;

  // One row of scores of `count` keys, S to P, and what its O and sum shrink by on the way. In `sum` lanes are sums of
  // their own.
  template <bool masked>
  static void weigh_row(const Arguments& a, const Launch& u, const Head& x, const Row& r, const Column* columns,
                        int count, float* s, [[maybe_unused]] float& max, fg::VecF& sum, float* o) {
    const int vectors = int(ceil_div(count, W));
    [[maybe_unused]] const auto kept = [&](int n) {
      return ByKey::keep(a, u, x, r, columns[n], Diagonals{}) && fg::lt(n * W + fg::iota(), count);
    };
    const auto score = [&](int n) {
      const fg::VecF dot = fg::load(s + n * W);
      const Column& c = columns[n];
      if constexpr (Spec::linear) return dot;
      else
        return ByKey::score(a, u, x, r, c, ByKey::make_diagonals(a, u, x, r.i - c.j), dot, squared_distance(r, c, dot));
    };
    [[maybe_unused]] fg::VecF offset{};
    if constexpr (Tile::maxima) {
      const fg::VecF old_max = fg::broadcast(max);
      fg::VecF top = old_max;
      for (int n = 0; n < vectors; ++n) {
        fg::VecF e = score(n);
        if (masked) e = fg::select(kept(n), e, -INFINITY);
        if (masked || !Spec::linear) fg::store(s + n * W, e);
        top = fg::running_max(top, e);
      }
      if (fg::any(fg::gt(top, old_max + Spec::MOST_GROWTH))) {
        max = fg::horizontal_max(top);
        const fg::VecF shrink = fg::exp2_bounded((old_max - max) * Spec::SCORE_FACTOR);
        sum *= shrink;
        for (int d = 0; d < DVP; d += W) fg::store(o + d, fg::load(o + d) * shrink);
      }
      const fg::VecF row_max = fg::broadcast(max);
      offset = offset_of<Spec>(row_max);
      if (fg::any(is_far<Spec>(row_max))) count_from_maxima<Spec>(s, W, vectors, row_max);
    }
    for (int n = 0; n < vectors; ++n) {
      fg::VecF p;
      if constexpr (Tile::maxima) {
        p = fg::exp2_bounded(fg::load(s + n * W) * Spec::SCORE_FACTOR - offset);
      } else if constexpr (Spec::bounded_scores) {
        p = fg::exp2_normal(score(n));
        if (masked) p = fg::select(kept(n), p, 0.0f);
      } else {
        const fg::VecF e = score(n);
        const Column& c = columns[n];
        // A score of -inf counts as masked: the weight function never sees it.
        fg::VecB is_kept = fg::ne(e, -INFINITY);
        if (masked) is_kept = is_kept && kept(n);
        const auto d = ByKey::make_diagonals(a, u, x, r.i - c.j);
        p = fg::select(is_kept, ByKey::weight(a, u, x, r, c, d, fg::select(is_kept, e, 0.0f)), 0.0f);
      }
      if constexpr (Spec::normalised) sum += Spec::term(p);
      fg::store(s + n * W, p);
    }
  }

  // O, the sums and maxima of a query tile over its visits from `visit` on, before `end`, left in `t` as those of more
  // rows are.
  static void visit_keys(const Call& a, const Launch& u, const Place& place, const HeadRows& k, const HeadRows& v,
                         const Visit* visit, const Visit* end, Scratch& t) {
    static_assert(Tile::rows >= fg::most_few_rows, "few rows fit where more of them are kept");
    constexpr int BC = Tile::BC, lds = int(round_up(BC, W)) + W;
    constexpr int ldq = decltype(t.q)::ld, ldk = decltype(t.k)::ld, ldv = decltype(t.v)::ld;
    const Head& x = place.x;
    const int rows = place.rows;
    float *const q = t.q.copy, *const o = t.o.new_rows();
    float so_far[fg::most_few_rows * DVP];
    alignas(64) float s[fg::most_few_rows * lds];
    Row of_rows[fg::most_few_rows];
    fg::VecF row_sum[fg::most_few_rows] = {};
    float row_max[fg::most_few_rows];
    if constexpr (Tile::maxima) std::fill_n(row_max, rows, -INFINITY);
    for (int row = 0; row < rows; ++row) {
      const int64_t head = a.head_of(place.h, place.row0 + row), query = a.query_of(place.row0 + row);
      const HeadRows from = rows_of_head(a.q, a.element, place.b, a.q_stride_b, head, a.q_stride_h, a.q_stride_n);
      load_rows(q + row * ldq, ldq, D, from, query, 1, 1);
      of_rows[row] = ByKey::make_row(a, u, x, int(a.q_start + query));
      if constexpr (Spec::sqdist) of_rows[row].qq = squared_norm(from, query);
    }
    std::fill_n(o, rows * DVP, 0.0f);

    for (; visit < end; ++visit) {
      const KeyRows keys = key_rows(a, *visit, BC), next = visit + 1 < end ? key_rows(a, visit[1], BC) : KeyRows{};
      Column columns[ceil_div(BC, W)];
      [[maybe_unused]] float norms[round_up(BC, W)];
      if constexpr (Spec::sqdist) squared_norms(norms, k, keys.first, keys.count, int(round_up(keys.count, W)));
      for (int n = 0; n * W < keys.count; ++n) {
        columns[n] = ByKey::make_column(a, u, x, rows_of(a.kv_start + keys.first, n, keys.count));
        if constexpr (Spec::sqdist) columns[n].kk = fg::load(norms + n * W);
      }
      for_each_run<D>(
          k, keys, next, t.k.copy, ldk, [&](int first, int count, const auto* at, int64_t ld, const auto* ahead) {
            fg::rows_together(rows, [&](int row, auto together) {
              const auto* const asked = row == 0 ? ahead : nullptr;
              fg::scores_of_rows<together, D>(count, at, ld, q + row * ldq, ldq, s + row * lds + first, lds, asked);
            });
          });
      const bool all = visit->first == 0 && visit->last >= ceil_div(place.places, W) && keys.count % W == 0;
      const auto weigh = visit->masked || !all ? weigh_row<true> : weigh_row<false>;
      for (int row = 0; row < rows; ++row)
        weigh(a, u, x, of_rows[row], columns, keys.count, s + row * lds, row_max[row], row_sum[row], o + row * DVP);
      for_each_run<DV>(v, keys, next, t.v.copy, ldv,
                       [&](int first, int count, const auto* at, int64_t ld, const auto* ahead) {
                         fg::rows_together(rows, [&](int row, auto together) {
                           const fg::RunOfKeys run = {so_far + row * DVP, first == 0, first + count == keys.count};
                           const auto* const asked = row == 0 ? ahead : nullptr;
                           fg::values_of_rows<together, DV>(count, at, ld, s + row * lds + first, lds, o + row * DVP,
                                                            DVP, run, asked);
                         });
                       });
    }
    t.o.take_rows(rows);
    if constexpr (Tile::maxima) {
      std::fill_n(t.row_max, Tile::rows, -INFINITY);
      std::copy_n(row_max, rows, t.row_max);
    }
    std::fill_n(t.row_sum, Tile::rows, 0.0f);
    if constexpr (Spec::divided) std::fill_n(t.moving, Tile::rows, 0.0f);  // which a backward pass alone would want
    for (int row = 0; row < rows; ++row) t.row_sum[row] = fg::horizontal_sum(row_sum[row]);
    if constexpr (Tile::apart) std::copy_n(t.row_sum, Tile::rows, t.divisor);
  }
};

}  // namespace
