// The forward pass: query tiles outside, key tiles inside, Algorithm 1 of FlashAttention-2. O is kept unnormalised.
//
// ForwardTile computes one tile: its memory, scores, weights, and what closes its rows. Forward walks over the tiles.
// Both are written over the spec, what multiplies (products.h) and the plan's tiles.
#pragma once
#include "flashgen/cpu/lists.h"
#include "flashgen/cpu/products.h"

namespace {

// A query tile of a head: rows … of its results, which are positions i0, i0 + 1, … or heads at the first of them.
struct Place {
  Head x;
  int64_t b, h, query_tile, row0, place0, i0;
  int rows = 0, places = 0, vectors = 0;
};

// Some of the key tiles: from `first` on, before `end`.
struct KeyTiles {
  int64_t first, end;
};
constexpr int64_t ALL_KEYS = INT64_MAX;

// What an offset of a row, which its exponents are less, is in base 2: its maximum. Where that is so large that its
// rounding would show, and where nothing is kept so far (exp2(-inf + inf) would be NaN), it is 0, and scores are
// counted from the maximum itself.
template <class Spec> FG_INLINE fg::VecB is_far(fg::VecF row_max) {
  return !fg::le(fg::abs(row_max * Spec::SCORE_FACTOR), MOST_OFFSET);
}
template <class Spec> FG_INLINE fg::VecF offset_of(fg::VecF row_max) {
  return fg::select(is_far<Spec>(row_max), 0.0f, row_max * Spec::SCORE_FACTOR);
}
template <class Spec>
__attribute__((noinline)) void count_from_maxima(float* s, int ld, int columns, fg::VecF row_max) {
  const fg::VecF top = fg::select(is_far<Spec>(row_max) && fg::ne(row_max, -INFINITY), row_max, 0.0f);
  for (int j = 0; j < columns; ++j) fg::store(s + int64_t(j) * ld, fg::load(s + int64_t(j) * ld) - top);
}

// All of O of the rows of a vector times a number of each; and zeros for those of the first ones.
template <class Sums> FG_INLINE void multiply_rows(Sums& o, int vector, const fg::VecF& by) {
  for (int d = 0; d < DVP; ++d) fg::store(o.of(vector, d), fg::load(o.of(vector, d)) * o.beside(by, d));
}
template <class Sums> FG_INLINE void clear_rows(Sums& o, int vectors) {
  for (int n = 0; n < vectors; ++n)
    for (int d = 0; d < DVP; ++d) fg::store(o.of(n, d), fg::VecF{});
}

template <class Spec, class KindOfProducts> struct ForwardTile {
  using Products = KindOfProducts;
  using Row = typename Spec::Row;
  using Column = typename Spec::Column;
  using Later = typename Products::Later;
  static constexpr int BR = Products::tile(Plan::BR), BC = Products::tile(Plan::BC);
  static constexpr int rows = int(round_up(BR, Products::row_vectors* W));
  static constexpr bool maxima = Spec::exponential && !Spec::bounded_scores;  // of rows, which exponents are less
  // No weight of a row is 1 by itself: sums are of weights as they are multiplied, too.
  static constexpr bool apart = Spec::normalised && !maxima && !Spec::tangent;

  // An array of no elements takes no memory.
  struct alignas(64) Scratch {
    typename Products::template Queries<rows, D, false> q;
    typename Products::template Keys<BC, D, false> k;
    typename Products::template Keys<BC, DV, true> v;
    typename Products::template Scores<BC, rows, false, true> s;  // Sᵀ, then Pᵀ
    typename Products::template Sums<rows, DVP> o;                // unnormalised
    float row_max[maxima ? rows : 0], row_sum[rows];
    // row_sum of weights as they are multiplied: O is divided by it, so that a row of one key has its value
    float divisor[apart ? rows : 0];
    float moving[Spec::divided ? rows : 0];  // how many keys are kept, or in forward mode move the row's total
    float qq[Spec::sqdist ? rows : 0];
    Column columns[BC];
    [[no_unique_address]] TileDiagonals<rows, BC> diagonals;
  };

  // ---- Before the first key tile, and before each ------------------------------------------------------------------

  static FG_INLINE void begin_rows(const Call& a, const Place& place, Scratch& t) {
    const HeadRows q = queries(a, place.b, place.h);
    t.q.load(q, place.row0, place.rows, place.vectors * W, PastEnd::last_row);
    if constexpr (Spec::sqdist) squared_norms(t.qq, q, place.row0, place.rows, place.vectors * W);
    clear_rows(t.o, place.vectors);
    if constexpr (maxima) std::fill_n(t.row_max, rows, -INFINITY);
    std::fill_n(t.row_sum, rows, 0.0f);
    if constexpr (apart) std::fill_n(t.divisor, rows, 0.0f);
    if constexpr (Spec::divided) std::fill_n(t.moving, rows, 0.0f);
  }

  static FG_INLINE void begin_keys(const Call& a, const Launch& u, const Place& place, const HeadRows& k,
                                   const HeadRows& v, KeyRows keys, const Computed& part, Scratch& t) {
    lay_out_keys(a, u, place.x, place.i0, place.places, k, v, keys, part, t);
  }

  // What is multiplied for one key tile, of vectors first … end - 1, or of none, and some keys: Sᵀ = K Qᵀ, O += P V.
  struct Multiplier {
    Scratch& t;
    fg::Ahead &next_k, &next_v;

    Multiplier(const Call&, const Place&, KeyRows /*next*/, Scratch& t, fg::Ahead& next_k, fg::Ahead& next_v)
        : t(t), next_k(next_k), next_v(next_v) {}
    // Of these K and Q, if they are `given`.
    template <class Keys, class Queries, class To>
    static FG_INLINE Later scores_of(bool given, const Strip& of, Keys& k, Queries& q, To& to, fg::Begin begin,
                                     fg::Ahead& ahead) {
      const int keys = given ? Products::key_rows(of.kept.end - of.kept.first) : 0;
      return Later(keys, of.end - of.first, Products::depth(D), k.by_key(of.kept.first), q.by_feature(of.first),
                   to.of(of.first, of.kept.first), to.ld, begin, ahead);
    }
    FG_INLINE Later scores(const Strip& of) { return scores_of(true, of, t.k, t.q, t.s, fg::Begin::zero, next_k); }
    FG_INLINE Later weighted(const Strip& of) { return values_of_strip<Products>(of, t.v, t.s, t.o, next_v); }
    // Of a strip alone.
    FG_INLINE void score(const Strip& strip) { scores(strip).finish(); }
    FG_INLINE void add_values(const Strip& strip) { weighted(strip).finish(); }
    // Beside the weights of `strip`: those of the one before it with V, then the scores of the next.
    FG_INLINE InTurn<Later, 2> beside(const Strip& before, const Strip& /*strip*/, const Strip& next) {
      return {weighted(before), scores(next)};
    }
    // Keys behind the last have no weight.
    FG_INLINE void clear(int columns) { t.s.clear(columns, Products::depth(columns)); }
  };

  // Weighs a strip, while the one before it meets V and the next one is scored. Tile: this, or that of forward mode.
  template <class Tile>
  static FG_INLINE void weigh(const Call& a, const Launch& u, const Place& place, typename Tile::Multiplier& multiplier,
                              const Strip& before, const Strip& strip, const Strip& next, int columns,
                              typename Tile::Scratch& t) {
    auto following = multiplier.beside(before, strip, next);
    using Beside = decltype(following);
    const bool dropped = Spec::dropout && a.dropout_threshold != 0;
    const auto step = strip.kept.masked
                          ? (dropped ? pairs<Tile, Beside, true, Spec::dropout> : pairs<Tile, Beside, true, false>)
                          : (dropped ? pairs<Tile, Beside, false, Spec::dropout> : pairs<Tile, Beside, false, false>);
    step(a, u, place.x, place.i0, place.places, strip.first, strip.end, strip.kept, following, t);
    following.finish();
    multiplier.clear(columns);
  }

  // ---- Weights -----------------------------------------------------------------------------------------------------

  // Pairs (n, j): the score, from the product that is at hand.
  static FG_INLINE fg::VecF score(const Arguments& a, const Launch& u, const Head& x, const Row& r, int n, int64_t j,
                                  fg::VecF dot, const Scratch& t) {
    const Column& c = t.columns[j];
    return Spec::score(a, u, x, r, c, t.diagonals.of(n, j), dot, squared_distance(r, c, dot));
  }

  // Sᵀ to Pᵀ for the keys of one tile: with maxima exp2(S - max), online, else the weights themselves. Row sums on the
  // way; in forward mode also tSᵀ to what weights change by.
  template <class Tile, class Beside, bool masked, bool dropped>
  static void pairs(const Arguments& a, const Launch& u, const Head& x, int64_t i0, int rows, int first, int end,
                    KeptKeys keys, Beside& following, typename Tile::Scratch& t) {
    constexpr int ld = decltype(t.s)::ld;
    // What is dropped adds to the sum, too, and the others are rounded once they are scaled.
    constexpr bool rounds = apart && Products::round && !dropped;
    Spread<Beside> beside(following, (end - first) * (keys.end - keys.first));  // in the slower of two loops
    for (int n = first; n < end; ++n) {
      Row r = Spec::make_row(a, u, x, rows_of(i0, n, rows));
      if constexpr (Spec::sqdist) r.qq = fg::load(t.qq + n * W);
      float* const s = t.s.of(n);
      fg::VecF row_sum = fg::load(t.row_sum + n * W), offset{};
      [[maybe_unused]] fg::VecF moving{}, t_sum{};
      if constexpr (Spec::tangent) t_sum = fg::load(t.t_sum + n * W);
      [[maybe_unused]] const auto tangent_of = [&](int64_t j) {
        if constexpr (Spec::tangent) return Tile::score_tangent(a, u, x, r, n, j, fg::load(s + j * ld), t);
      };
      if constexpr (maxima) {
        const auto scored = [&](int64_t j) {
          // Linear scores are kept less their constant factor, which exponents bring along.
          if (!masked && Spec::linear) return fg::load(s + j * ld);
          fg::VecF e = fg::load(s + j * ld);
          if constexpr (!Spec::linear) {
            e = score(a, u, x, r, n, j, e, t);
            if constexpr (Spec::tangent) fg::store(t.t_s.of(n) + j * ld, tangent_of(j));
          }
          if (masked) e = fg::select(Spec::keep(a, u, x, r, t.columns[j], Diagonals{}), e, -INFINITY);
          fg::store(s + j * ld, e);
          return e;
        };
        const fg::VecF old_max = fg::load(t.row_max + n * W);
        fg::VecF row_max = old_max;
        // Maxima of four in a tree: one after another, each would wait for the last. NaN shows in the sum.
        int64_t key = keys.first;  // of 64 bits: addresses then move on, instead of being formed anew for every key
        for (; key + 4 <= keys.end; key += 4) {
          const fg::VecF low = fg::running_max(scored(key), scored(key + 1));
          row_max = fg::running_max(row_max, fg::running_max(low, fg::running_max(scored(key + 2), scored(key + 3))));
          if (Spec::slow_scores) beside.pass(4);
        }
        for (; key < keys.end; ++key) row_max = fg::running_max(row_max, scored(key));
        const fg::VecB grown = fg::gt(row_max, old_max + Spec::MOST_GROWTH);
        row_max = fg::select(grown, row_max, old_max), offset = offset_of<Spec>(row_max);
        if (fg::any(is_far<Spec>(row_max)))
          count_from_maxima<Spec>(s + int64_t(keys.first) * ld, ld, keys.end - keys.first, row_max);
        if (fg::any(grown)) {
          const fg::VecF shrink = fg::select(grown, fg::exp2_bounded((old_max - row_max) * Spec::SCORE_FACTOR), 1.0f);
          row_sum = row_sum * shrink;
          if constexpr (Spec::tangent) t_sum = t_sum * shrink, multiply_rows(t.t_o, n, shrink);
          multiply_rows(t.o, n, shrink);
          fg::store(t.row_max + n * W, row_max);
        }
      } else if constexpr (Spec::divided) {
        moving = fg::load(t.moving + n * W);
        if (!masked && !Spec::tangent) moving += float(keys.end - keys.first);
      }
      [[maybe_unused]] fg::VecU survivors{};
      fg::VecF odd_sum{};  // of every other key: one after another, each addition would wait for the last
      [[maybe_unused]] fg::VecF divisor{}, odd_divisor{};
      // The weight of a pair, and what it changes by.
      const auto weighed = [&](int64_t j, [[maybe_unused]] fg::VecF& sum, [[maybe_unused]] fg::VecF& t_p) {
        [[maybe_unused]] const Column& c = t.columns[j];
        fg::VecF p;
        if constexpr (maxima) {
          p = fg::exp2_bounded(fg::load(s + j * ld) * Spec::SCORE_FACTOR - offset);
          // What is masked has no weight, and so changes nothing, whatever its score changes by.
          if constexpr (Spec::tangent)
            t_p = fg::chained(Spec::linear ? tangent_of(j) : fg::load(t.t_s.of(n) + j * ld), p);
        } else if constexpr (Spec::bounded_scores) {
          p = fg::exp2_normal(score(a, u, x, r, n, j, fg::load(s + j * ld), t));
          if (masked) p = fg::select(Spec::keep(a, u, x, r, c, Diagonals{}), p, 0.0f);
          if constexpr (Spec::tangent) t_p = fg::chained(tangent_of(j), p);
        } else {
          const Diagonals d = t.diagonals.of(n, j);
          const fg::VecF e = score(a, u, x, r, n, j, fg::load(s + j * ld), t);
          // A score of -inf counts as masked: the weight function never sees it.
          fg::VecB kept = fg::ne(e, -INFINITY);
          if (masked) kept = kept && Spec::keep(a, u, x, r, c, Diagonals{});
          const fg::VecF safe = fg::select(kept, e, 0.0f);
          p = fg::select(kept, Spec::weight(a, u, x, r, c, d, safe), 0.0f);
          [[maybe_unused]] fg::VecB moves = kept;
          if constexpr (Spec::tangent) {
            const fg::VecF d_score = Spec::weight_by_score(a, u, x, r, c, d, safe);
            fg::VecF moved = through(d_score, tangent_of(j));
            if constexpr (Spec::moves_weight) moved = moved + Spec::weight_tangent(a, u, x, r, c, d, safe);
            else moves = kept && (fg::ne(p, 0.0f) || fg::ne(d_score, 0.0f));
            t_p = fg::select(kept, moved, 0.0f);
          }
          if (Spec::divided && (masked || Spec::tangent)) moving += fg::select(moves, 1.0f, 0.0f);
        }
        if constexpr (Spec::normalised) sum += Spec::term(p);
        if constexpr (Spec::normalised && Spec::tangent) t_sum += Spec::share(p, t_p);
        if constexpr (dropped) {
          if (j == keys.first || c.j % fg::dropout_columns == 0)
            survivors = fg::dropout_keeps(a.seed, x.b, x.h, r.i, c.j / fg::dropout_columns, a.dropout_threshold);
          const fg::VecB survives = fg::ne(survivors & fg::dropout_bit(c.j), 0u);
          p = fg::select(survives, p * a.dropout_scale, 0.0f);
          if constexpr (Spec::tangent) t_p = fg::select(survives, t_p * a.dropout_scale, 0.0f);
        }
        return p;
      };
      [[maybe_unused]] fg::VecF t_low{}, t_high{};
      const auto put = [&](int64_t j, fg::VecF p, fg::VecF next) {
        [[maybe_unused]] const Multiplied multiplied = t.s.put(j, n, p, next);
        if constexpr (rounds) divisor += Spec::term(multiplied.first), odd_divisor += Spec::term(multiplied.second);
        if constexpr (Spec::tangent) t.t_s.put(j, n, t_low, t_high);
      };
      int64_t j = keys.first;
      for (; j + 2 <= keys.end; j += 2) {
        if (!Spec::slow_scores) beside.pass(2);
        const fg::VecF p = weighed(j, row_sum, t_low);
        put(j, p, weighed(j + 1, odd_sum, t_high));
      }
      if (j < keys.end) t_high = fg::VecF{}, put(j, weighed(j, row_sum, t_low), fg::VecF{});
      if constexpr (Spec::normalised) fg::store(t.row_sum + n * W, row_sum + odd_sum);
      if constexpr (Spec::normalised && Spec::tangent) fg::store(t.t_sum + n * W, t_sum);
      if constexpr (apart) {
        const fg::VecF all = rounds ? fg::load(t.divisor + n * W) + (divisor + odd_divisor) : row_sum + odd_sum;
        fg::store(t.divisor + n * W, all);
      }
      if constexpr (Spec::divided) fg::store(t.moving + n * W, moving);
    }
  }

  // ---- Closing the rows of a query tile ----------------------------------------------------------------------------

  // Z of vector n, what O is multiplied by, and where the sink is, its share of the sum. Writes lse, if it is wanted.
  struct Closed {
    fg::VecF denominator, factor, sunk;
  };
  static FG_INLINE Closed close_sums(const Call& a, const Launch& u, const Place& place, int n, Scratch& t) {
    fg::VecF denominator = Spec::denominator(fg::load(t.row_sum + n * W)), divisor = denominator, sunk{};
    if constexpr (apart) divisor = Spec::denominator(fg::load(t.divisor + n * W));
    const int count = std::min(W, place.rows - n * W);
    const auto row_of = [&](int l) { return a.at(a.rows_of_lse, place.b, place.h, place.row0 + n * W + l); };
    if constexpr (Spec::divided) {
      const fg::VecF inverse = fg::select(fg::eq(denominator, 0.0f), 0.0f, 1.0f / denominator);
      const fg::VecF factor = apart ? fg::select(fg::eq(denominator, 0.0f), 0.0f, 1.0f / divisor) : inverse;
      for (int l = 0; a.lse && l < count; ++l) {
        const int64_t row = row_of(l);
        a.lse[row] = float(std::log(double(denominator[l])));
        // What the backward pass reads: 1 / Z, less than 0 where one key alone has a weight.
        if (!a.lse_parts) continue;
        a.lse_parts[2 * row] = t.moving[n * W + l] == 1.0f ? -inverse[l] : inverse[l], a.lse_parts[2 * row + 1] = 0.0f;
      }
      return {denominator, factor, sunk};
    } else {
      fg::VecF row_max{}, offset{}, shrink = fg::broadcast(1.0f), above{};
      fg::VecB far = fg::broadcast(false);
      [[maybe_unused]] const fg::VecB empty = fg::eq(denominator, 0.0f);
      if constexpr (maxima) {
        row_max = fg::load(t.row_max + n * W);
        if (Spec::sink) row_max = fg::select(empty, 0.0f, row_max);  // what keeps no key is counted from 0
        far = is_far<Spec>(row_max), offset = offset_of<Spec>(row_max);
      }
      fg::VecF sink_score{};
      if constexpr (Spec::sink) {
        const fg::VecI row = fg::min(n * W + fg::iota(), place.rows - 1) + int32_t(place.row0 - place.place0);
        const Row r = Spec::make_row(a, u, place.x, int32_t(place.i0) + row % place.places);
        sink_score = Spec::sink_of(a, u, place.x, r);
        far = far || !fg::le(fg::abs(sink_score * SCORES_IN_BASE_2), MOST_OFFSET);
        sink_score = fg::select(far, sink_score, sink_score * SCORES_IN_BASE_2);
      }
      // What exponents in the sum are counted from: in base 2, where it is far in base e.
      const fg::VecF from = fg::select(far, fg::settled(row_max * Spec::SCALE), offset);
      fg::VecF top = from;
      if constexpr (Spec::sink) {
        // The sink joins the denominator alone: exp(sink) is one more term, with no value behind it.
        const fg::VecF unit = fg::select(far, SCORES_IN_BASE_2, 1.0f);
        // Of a row that keeps no key the sink is all that there is.
        const fg::VecF seen = fg::select(empty, -INFINITY, from);
        top = fg::max(seen, sink_score);
        const fg::VecF base = fg::select(fg::eq(top, -INFINITY), 0.0f, top);
        shrink = fg::exp2((seen - base) * unit), sunk = fg::exp2((sink_score - base) * unit);
        denominator = denominator * shrink + sunk;
        divisor = divisor * shrink + sunk;
        above = fg::min(fg::settled((base - from) * unit),
                        MOST_FLOAT);  // as the backward pass rounds it, where the sink is all
      }
      const fg::VecF factor = fg::select(fg::eq(denominator, 0.0f), 0.0f, shrink / divisor);
      // Logarithms are formed in double: the backward pass multiplies their error by every weight of the row.
      for (int l = 0; a.lse && l < count; ++l) {
        const int64_t row = row_of(l);
        const double log = std::log2(double(denominator[l]));
        const double in_base_e = far.lanes[l] ? top[l] + log * LN_2 : (top[l] + log) * LN_2;
        const float lse = denominator[l] == 0.0f ? -INFINITY : float(in_base_e);
        a.lse[row] = lse;
        if (!a.lse_parts) continue;
        const bool extreme = is_extreme(lse);
        const double below = far.lanes[l] ? 0.0 : double(from[l]) - double(row_max[l]) * Spec::SCORE_FACTOR;
        a.lse_parts[2 * row] = extreme ? row_max[l] : 0.0f;
        a.lse_parts[2 * row + 1] = extreme ? float(Spec::sink ? above[l] + below + log : below + log) : 0.0f;
      }
      return {denominator, factor, sunk};
    }
  }

  static FG_INLINE void store_o(const Call& a, const Place& place, Scratch& t) {
    if (a.queries == a.q_len) {
      t.o.store(a.o, a.element_of_rows(), a.rows_of_o.at(place.b, place.h, place.row0), a.rows_of_o.n, DV, place.rows);
      return;
    }
    const float* const o = t.o.as_rows(int(ceil_div(place.rows, W)));
    for (int row = 0; row < place.rows; ++row) {
      const int64_t to = a.at(a.rows_of_o, place.b, place.h, place.row0 + row);
      store_rows(a.o, a.element_of_rows(), to, 0, o + row * DVP, DVP, DV, 1);
    }
  }

  // O and lse of what `t` holds.
  static void close(const Call& a, const Launch& u, const Place& place, Scratch& t) {
    if constexpr (Spec::normalised)
      for (int n = 0; n * W < place.rows; ++n) multiply_rows(t.o, n, close_sums(a, u, place, n, t).factor);
    store_o(a, place, t);
  }

  // ---- What a split of the keys leaves, and takes of others --------------------------------------------------------

  // Of each vector of rows: the maxima or divisors, row_sum, O, and how many keys have a weight.
  static constexpr int vectors_left = 2 + DVP + (Spec::divided ? 1 : 0);

  static void leave(float* at, int n, Scratch& t) {
    if constexpr (maxima) fg::store(at, fg::load(t.row_max + n * W));
    if constexpr (apart) fg::store(at, fg::load(t.divisor + n * W));
    fg::store(at + W, fg::load(t.row_sum + n * W));
    for (int d = 0; d < DVP; ++d) fg::store(at + (2 + d) * W, fg::load(t.o.of(n, d)));
    if constexpr (Spec::divided) fg::store(at + (2 + DVP) * W, fg::load(t.moving + n * W));
  }
  static void clear(int n, Scratch& t) {
    if constexpr (maxima) fg::store(t.row_max + n * W, fg::broadcast(-INFINITY));
    if constexpr (apart) fg::store(t.divisor + n * W, fg::VecF{});
    if constexpr (Spec::divided) fg::store(t.moving + n * W, fg::VecF{});
    fg::store(t.row_sum + n * W, fg::VecF{});
    for (int d = 0; d < DVP; ++d) fg::store(t.o.of(n, d), fg::VecF{});
  }
  // By how much the sums so far, and those that are taken, shrink: they are counted from the larger maximum.
  struct Shrunk {
    fg::VecF own, taken;
  };
  static FG_INLINE Shrunk take(const float* at, int n, Scratch& t) {
    Shrunk by = {fg::broadcast(1.0f), fg::broadcast(1.0f)};
    if constexpr (maxima) {
      const fg::VecF row_max = fg::load(t.row_max + n * W), other = fg::load(at), top = fg::running_max(row_max, other);
      const auto counted_from_top = [&](fg::VecF max) {
        return fg::select(fg::eq(max, top), 1.0f, fg::exp2_bounded((max - top) * Spec::SCORE_FACTOR));
      };
      by = {counted_from_top(row_max), counted_from_top(other)};
      fg::store(t.row_max + n * W, top);
    }
    if constexpr (apart) fg::store(t.divisor + n * W, fg::load(t.divisor + n * W) + fg::load(at));
    if constexpr (Spec::divided) fg::store(t.moving + n * W, fg::load(t.moving + n * W) + fg::load(at + (2 + DVP) * W));
    add_shrunk(t.row_sum + n * W, by.own, at + W, by.taken);
    for (int d = 0; d < DVP; ++d)
      add_shrunk(t.o.of(n, d), t.o.beside(by.own, d), at + (2 + d) * W, t.o.beside(by.taken, d));
    return by;
  }
  static FG_INLINE void add_shrunk(float* sum, fg::VecF own, const float* more, fg::VecF taken) {
    fg::store(sum, maxima ? fg::load(sum) * own + fg::load(more) * taken : fg::load(sum) + fg::load(more));
  }
};

template <class Spec, class Tile> struct FewRows;  // few_query_rows.h

// A pass over all tiles of a call. Tile: ForwardTile, or that of forward mode.
template <class Spec, class Tile> struct Forward {
  using Products = typename Tile::Products;
  using Scratch = typename Tile::Scratch;
  static constexpr int BR = Tile::BR, BC = Tile::BC;

  // The rows of a query tile: BR, or fewer where threads would find no tile of their own.
  static int tile_rows(const Arguments& a) {
    const int64_t tiles = ceil_div(a.threads, std::max<int64_t>(1, a.batch * a.heads));  // of a head, at least
    const int64_t rows = std::max<int64_t>(Products::fewest_rows, round_up(ceil_div(a.q_len, tiles), W));
    return int(std::min<int64_t>(BR, rows));
  }

  static Place place_of(const Call& a, const Launch& u, int64_t b, int64_t h, int64_t query_tile) {
    const int most_rows = tile_rows(a);
    const bool together = a.queries < a.q_len;  // rows of several heads, which have the places of one
    const int64_t row0 = query_tile * most_rows, place0 = together ? 0 : row0;
    Place of = {make_head(a, u, b, h), b, h, query_tile, row0, place0, a.q_start + place0};
    of.rows = int(std::min<int64_t>(most_rows, a.q_len - row0)), of.places = together ? int(a.queries) : of.rows;
    of.vectors = int(round_up(ceil_div(of.rows, W), Products::row_vectors));
    return of;
  }

  // O, unnormalised, and the sums of a query tile over some key tiles, in `t`. False: it visits none, and `t` is as it was.
  static bool visit_keys(const Call& a, const Launch& u, const Place& place, KeyTiles among, const Lookup& lookup,
                         Scratch& t) {
    const Head& x = place.x;
    const int64_t b = place.b, h = place.h, hkv = a.kv_head(h), row0 = place.row0;
    const HeadRows k = keys_of(a, b, hkv), v = values_of(a, b, hkv);
    const Visits visits =
        visits_of(a, u, x, b, h, place.query_tile, tile_rows(a), place.place0, place.places, BC, lookup);
    int from = 0, to = visits.count;
    while (from < to && visits.at[from].tile < among.first) ++from;
    while (from < to && visits.at[to - 1].tile >= among.end) --to;
    if (from == to && among.end < ALL_KEYS) return false;
    if constexpr (Products::have_few_rows && !Spec::tangent) {
      if (are_few(a, a.queries)) {
        FewRows<Spec, Tile>::visit_keys(a, u, place, k, v, visits.at + from, visits.at + to, t);
        return true;
      }
    }
    Tile::begin_rows(a, place, t);

    // Asked for in the last visits, where K and V leave time: what this thread takes next if tasks are about as long,
    // keys and rows of Q, and the rows of O. Keys are those that lie as far from the first ones here as the rows do,
    // and of which there are some.
    constexpr int LAST_VISITS = 4;
    fg::Ahead tile_k, tile_v, next_q, own_o;
    if (a.queries == a.q_len) {
      const int64_t most_rows = tile_rows(a), step = a.threads * most_rows;
      const int64_t next_row0 = Spec::keep_everything ? row0 + step : row0 - step;
      if (next_row0 >= 0 && next_row0 + most_rows <= a.q_len) {
        next_q = rows_ahead(queries(a, b, h), {next_row0, int(most_rows)}, D);
        KeyRows keys{};
        if constexpr (Spec::keep_everything) {
          if (from < to) keys = key_rows(a, visits.at[from], BC);
        } else {
          for (int n = from; n < to && keys.count == 0; ++n) {
            const KeyRows here = key_rows(a, visits.at[n], BC);
            if (here.first >= row0 - next_row0) keys = {here.first - (row0 - next_row0), here.count};
          }
        }
        tile_k = rows_ahead(k, keys, D), tile_v = rows_ahead(v, keys, DV);
      }
      if (a.o) own_o = rows_ahead(outputs(a, b, h), {row0, place.rows}, DV);
    }
    tile_k.then = &next_q, tile_v.then = &own_o;

    for (int n = from; n < to; ++n) {
      const Visit& visit = visits.at[n];
      const KeyRows keys = key_rows(a, visit, BC), next = n + 1 < to ? key_rows(a, visits.at[n + 1], BC) : KeyRows{};
      const int columns = keys.count;
      const Computed part = computed<Products>(visit);
      Tile::begin_keys(a, u, place, k, v, keys, part, t);
      fg::Ahead next_k = rows_ahead(k, next, D), next_v = rows_ahead(v, next, DV);
      if (to - n <= LAST_VISITS) next_k.then = &tile_k, next_v.then = &tile_v;
      typename Tile::Multiplier multiplier(a, place, next, t, next_k, next_v);
      // On the border of the mask a narrow strip leaves out keys; those that two neighbours meet are scored at once.
      if constexpr (Spec::trimmed && Products::trimmed_strip > 0) {
        if (part.masked) {
          const ColumnBounds& bounds = leaf_of(a, tree_of(a, lookup.trees, b, h, BC), visit.tile, BC);
          const auto strip_at = [&](int first) -> Strip {
            if (first >= part.last) return {first, first, {}};
            const int end = part.end_of_strip(first, Products::trimmed_strip);
            return {first, end, kept_keys(a, u, x, place.i0, place.places, first, end, keys, bounds)};
          };
          for (int first = part.first; first < part.last;) {
            const Strip upper = strip_at(first), lower = strip_at(upper.end);
            for_each_block(upper, lower, [&](const Strip& strip) { multiplier.score(strip); });
            for (const Strip* strip : {&upper, &lower}) {
              if (strip->kept.first == strip->kept.end) continue;
              Tile::template weigh<Tile>(a, u, place, multiplier, {}, *strip, {}, columns, t);
              multiplier.add_values(*strip);
            }
            first = lower.end;
          }
          continue;
        }
      }
      const auto strip_from = [&](int first) -> Strip {
        const KeptKeys kept = first < part.last ? KeptKeys{0, columns, part.masked} : KeptKeys{};
        return {first, part.end_of_strip(first, decltype(t.s)::strip), kept};
      };
      Strip before = {part.first, part.first, {}}, strip = strip_from(part.first);
      multiplier.score(strip);
      for (; strip.first < part.last;) {
        const Strip next_strip = strip_from(strip.end);
        Tile::template weigh<Tile>(a, u, place, multiplier, before, strip, next_strip, columns, t);
        before = strip, strip = next_strip;
      }
      multiplier.add_values(before);
    }
    return true;
  }

  static void tile(const Call& a, const Launch& u, int64_t b, int64_t h, int64_t query_tile, const Lookup& lookup,
                   Scratch& t) {
    const Place place = place_of(a, u, b, h, query_tile);
    visit_keys(a, u, place, {0, ALL_KEYS}, lookup, t);
    Tile::close(a, u, place, t);
  }

  // ---- Split-KV ----------------------------------------------------------------------------------------------------
  // Few query rows over many keys: threads share the keys of a head. Each split leaves what it has of O and the sums,
  // and their maximum; then splits are merged. Lengths alone say how many there are: threads change no bit.

  static constexpr int64_t KEYS_OF_SPLIT = 2048, MOST_SPLITS = 64;
  static int64_t splits_of(const Arguments& a, int64_t wanted) {
    const int64_t tiles = std::max<int64_t>(1, ceil_div(a.kv_len, BC));
    if (wanted > 0) return std::min(wanted, tiles);
    if (a.q_len > std::max(W, fg::most_few_rows)) return 1;
    return std::min(tiles, std::max<int64_t>(1, std::min(a.kv_len / KEYS_OF_SPLIT, MOST_SPLITS)));
  }
  static KeyTiles tiles_of_split(const Arguments& a, int64_t split, int64_t splits) {
    const int64_t tiles = ceil_div(a.kv_len, BC);
    return {tiles * split / splits, tiles * (split + 1) / splits};
  }

  // What a split leaves: whether it visited any keys, as a number, then what its tile has of each vector of rows.
  static int64_t floats_of_split(const Arguments& a) {
    return W + Tile::vectors_left * round_up(ceil_div(tile_rows(a), W), Products::row_vectors) * W;
  }

  static void split(const Call& a, const Launch& u, int64_t b, int64_t h, int64_t query_tile, KeyTiles among,
                    const Lookup& lookup, float* left, Scratch& t) {
    const Place place = place_of(a, u, b, h, query_tile);
    const bool any = visit_keys(a, u, place, among, lookup, t);
    *left = any ? 1.0f : 0.0f;
    if (!any) return;
    for (int n = 0; n < place.vectors; ++n) Tile::leave(left + W + n * Tile::vectors_left * W, n, t);
  }

  // The results of a query tile, of what its splits left one behind the other.
  static void merge(const Call& a, const Launch& u, int64_t b, int64_t h, int64_t query_tile, const float* left,
                    int64_t splits, Scratch& t) {
    const Place place = place_of(a, u, b, h, query_tile);
    const int64_t each = floats_of_split(a);
    for (int n = 0; n < place.vectors; ++n) {
      Tile::clear(n, t);
      for (int64_t s = 0; s < splits; ++s)
        if (left[s * each] != 0.0f) Tile::take(left + s * each + W + n * Tile::vectors_left * W, n, t);
    }
    Tile::close(a, u, place, t);
  }

  // ---- A call ------------------------------------------------------------------------------------------------------

  // Each thread's share of the workspace: its scratch, then its list of visits.
  static int64_t thread_bytes(const Arguments& a) {
    return round_up(int64_t(sizeof(Scratch)) + ceil_div(a.kv_len, BC) * int64_t(sizeof(Visit)), 64);
  }

  // Whether a long query tile could be the last to begin: few heads for the threads that share them.
  static bool is_ordered(const Arguments& a) {
    if (Spec::keep_everything) return false;
    return a.threads > 1 && a.batch * a.heads < 4 * a.threads && a.q_len > a.threads * tile_rows(a);
  }

  // For each mask the work of all query tiles, then their order.
  static int64_t order_bytes(const Arguments& a) {
    if (!is_ordered(a)) return 0;
    return round_up(2 * Spec::masks_of(a) * ceil_div(a.q_len, tile_rows(a)) * int64_t(sizeof(int32_t)), 64);
  }

  static Arguments with_useful_threads(const Arguments& a) {
    return ::with_useful_threads(a, a.batch * a.heads * ceil_div(a.q_len, tile_rows(a)) * splits_of(a, 0));
  }

  static int64_t workspace_bytes(const Arguments& arguments) {
    const Arguments a = with_useful_threads(arguments);
    return bytes_of_trees(a, BC) + order_bytes(a) + thread_bytes(a) * a.threads + 64;
  }

  static void run(const Arguments& arguments) {
    Call a = packed(with_useful_threads(arguments));
    put_heads_into_rows(a);
    const Launch u = make_launch(a);
    const int64_t tiles = ceil_div(a.q_len, tile_rows(a)), splits = splits_of(a, 0);
    const int64_t query_tiles = a.batch * a.heads * tiles, each = floats_of_split(a);
    const Memory left(splits > 1 ? query_tiles * splits * each * int64_t(sizeof(float)) : 0);
    const auto lists = lists_of<Spec>(a, u, tile_rows(a), BC);
    char* const workspace = aligned_workspace(a);
    auto* const trees = reinterpret_cast<ColumnBounds*>(workspace);
    auto* const work = reinterpret_cast<int32_t*>(workspace + bytes_of_trees(a, BC));
    int32_t* const order = work + Spec::masks_of(a) * tiles;
    char* const shares = workspace + bytes_of_trees(a, BC) + order_bytes(a);
    const bool ordered = is_ordered(a);
    run_in_team(a.threads, [&] {
      const fg::FlushSubnormals flush;
      [[maybe_unused]] const typename Products::Thread thread;
      char* const mine = shares + thread_bytes(a) * thread_index();
      auto& scratch = *reinterpret_cast<Scratch*>(mine);
      const Lookup lookup = {trees, lists.get(), reinterpret_cast<Visit*>(mine + sizeof(Scratch))};
      if constexpr (Spec::observed_columns) build_trees(a, u, BC, trees);
      if constexpr (!Spec::keep_everything) {
        if (ordered) {
#pragma omp for schedule(static)
          for (int64_t n = 0; n < Spec::masks_of(a) * tiles; ++n)
            work[n] = work_of_tile(a, u, n, tiles, tile_rows(a), BC, lookup);
#pragma omp for schedule(static)
          for (int64_t mask = 0; mask < Spec::masks_of(a); ++mask)
            longest_first(order + mask * tiles, work + mask * tiles, tiles);
        }
      }
      const auto place_of_task = [&](int64_t task, const auto& perform) {
        const int64_t b = task / tiles / a.heads, h = task / tiles % a.heads, number = task % tiles;
        // The last query tiles of a head first, where they are not ordered: under a causal mask they are the longest.
        if constexpr (Spec::keep_everything) perform(b, h, number);
        else perform(b, h, ordered ? order[Spec::mask_of(a, b, h) * tiles + number] : tiles - 1 - number);
      };
      const auto left_by = [&](int64_t task, int64_t n) {
        return reinterpret_cast<float*>(left.at(0)) + (task * splits + n) * each;
      };
      divide_tasks(a.threads, query_tiles * splits, [&](int64_t number) {
        const int64_t task = number / splits, n = number % splits;
        place_of_task(task, [&](int64_t b, int64_t h, int64_t query_tile) {
          if (splits == 1) tile(a, u, b, h, query_tile, lookup, scratch);
          else split(a, u, b, h, query_tile, tiles_of_split(a, n, splits), lookup, left_by(task, n), scratch);
        });
      });
      if (splits == 1) return;
      divide_tasks(a.threads, query_tiles, [&](int64_t task) {
        place_of_task(task, [&](int64_t b, int64_t h, int64_t query_tile) {
          merge(a, u, b, h, query_tile, left_by(task, 0), splits, scratch);
        });
      });
    });
  }
};

}  // namespace
