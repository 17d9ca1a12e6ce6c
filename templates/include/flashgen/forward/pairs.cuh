// The pairs of a key tile: what hooks know of a key, from a product to a score, and what the mask hides.
#pragma once
#include "flashgen/forward/state.cuh"

namespace fg::forward {

// Of pairs that have read nothing ahead, and of scores that nothing else goes by.
struct NoneAhead {
  using element = uint8_t;
  template <class Column> FG_DEVICE const Column& of(const Column& c, int, int, int) const { return c; }
};
struct NoTangents {
  template <class... Pair> FG_DEVICE bool move(const Pair&...) const { return false; }
};
template <class Block> struct MovingPairs;  // of forward mode

template <class Base> struct Pairs : Base {
  using typename Base::Spec, typename Base::P, typename Base::Row, typename Base::Column, typename Base::Head;
  using Base::a, Base::u, Base::x, Base::rows, Base::kv_len, Base::BC, Base::m_tiles, Base::s_tiles, Base::visits;
  using Base::Base;
  using Scores = Accumulators<m_tiles, s_tiles>;

  // Key `column`, counted from the first; past the last key it repeats that one, so that no hook leaves its tensors.
  template <bool masked> FG_DEVICE Column make([[maybe_unused]] int n, int column0, int t, int e, const Head& x) const {
    const int column = column0 + 8 * t + fragment_column(e), j = int(a.kv_start) + (masked ? min(column, kv_len - 1) : column);
    Column c;
    if constexpr (masked && Base::shows_columns) {
      uint32_t seen[Base::SEEN];
#pragma unroll
      for (int k = 0; k < Base::SEEN; ++k) seen[k] = shared_load(Base::columns(n) + k * BC + 8 * t + fragment_column(e));
      c = make_column(a, u, x, j, seen);
    } else {
      c = make_column(a, u, x, j);
    }
    // A position as a sum whose second part is a literal where loops over t and e are unrolled: one conversion for the whole tile. Where
    // positions are clamped it need not be right: such pairs are not kept.
    [[maybe_unused]] const int begin = int(a.kv_start) + column0 + fragment_column(0);
    if constexpr (Spec::distance) c.near = to_float(begin - x.origin), c.step = float(8 * t + e);
    if constexpr (Spec::diagonals && !masked) c.begin = begin, c.offset = 8 * t + e;
    return c;
  }
  // The column with what scores have of its norm, which is multiplied by so much.
  template <bool masked> FG_DEVICE Column measured(int n, int column0, int t, int e, const Head& x) const {
    Column c = make<masked>(n, column0, t, e, x);
    if constexpr (Spec::sqdist) {
      float kk = shared_load(Base::norms(n) + Base::own_key() + 8 * t + fragment_column(e));
      if constexpr (Spec::f8_cached) kk = kk * (Base::k_factor * Base::k_factor);
      if constexpr (!Spec::norms) c.kk = kk;
      else if constexpr (!Spec::tangent) c.from_norm = kk;
      else c.kk = kk, c.from_norm = from_norm(a, u, x, kk);
    }
    return c;
  }

  // visit(c, r, t, e) for the pairs that a lane has of tile n, from key `column0` on, all rows of a key after another.
  template <bool masked, class Visit> FG_DEVICE void for_pairs(int n, int column0, const Visit& visit) const {
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        Column c;
        if constexpr (!Spec::rows_of_heads) c = measured<masked>(n, column0, t, e, x);
#pragma unroll
        for (int r = 0; r < 2 * m_tiles; ++r) {
          if constexpr (Spec::rows_of_heads) c = measured<masked>(n, column0, t, e, Base::heads[r]);
          visit(c, r, t, e);
        }
      }
  }

  // From a pair's product its score, and the same in base 2 where scores are bounded; `near`: by formulas that need no special function.
  // `c` has what was read ahead.
  template <bool near = false, class C> FG_DEVICE float score_of(const C& c, int r, float dot) const {
    if constexpr (near && Spec::sqdist) return near_score(a, u, x, rows[r], c, dot, squared_distance(rows[r], c, dot));
    else if constexpr (near) return near_score(a, u, x, rows[r], c, dot);
    else if constexpr (Spec::sqdist && !Spec::norms) return score(a, u, Base::head_of_row(r), rows[r], c, dot, squared_distance(rows[r], c, dot));
    else return score(a, u, Base::head_of_row(r), rows[r], c, dot);
  }
  template <bool near, class C> FG_DEVICE float exponent_of(const C& c, int r, float dot) const {
    if constexpr (near && Spec::sqdist) return near_exponent(a, u, x, rows[r], c, dot, squared_distance(rows[r], c, dot));
    else if constexpr (near) return near_exponent(a, u, x, rows[r], c, dot);
    else if constexpr (Spec::sqdist) return exponent(a, u, x, rows[r], c, dot, squared_distance(rows[r], c, dot));
    else return exponent(a, u, x, rows[r], c, dot);
  }
  template <class C> FG_DEVICE bool is_kept(const C& c, int r) const { return keep(a, u, Base::head_of_row(r), rows[r], c); }
};

}  // namespace fg::forward
