// The same of forward mode's backward pass: what tangents change goes beside it.
#pragma once
#include "flashgen/backward/by_warps.cuh"
#include "flashgen/backward/moving_pair.cuh"
#include "flashgen/products_of_both.cuh"

namespace backward {

template <class Base> struct MovingByWarps : Base {
  using typename Base::Spec, typename Base::T, typename Base::KeptPairs, typename Base::Memory, typename Base::Notes, typename Base::Place, typename Base::QTile, typename Base::Row, typename Base::RowWords, typename Base::Sums, typename Base::Team, typename Base::VTile;
  using Base::BR, Base::D, Base::DV, Base::atomic, Base::dropped, Base::m_tiles, Base::s_tiles, Base::stages, Base::threads;
  using Base::a, Base::columns, Base::dk, Base::dv, Base::kv_len, Base::memory, Base::part, Base::q_len, Base::u, Base::visits, Base::warp_key, Base::x;
  using Base::begin_of_tile, Base::d_o_tile, Base::ds_tile, Base::k_tile, Base::key, Base::q_tile, Base::rows, Base::t_ds_tile, Base::t_k_tile, Base::v_tile;
  using Base::Base;
  static_assert(Base::split == 1, "a warp has whole rows of Q's tangents");

  FG_DEVICE VTile t_v_tile() const { return {reinterpret_cast<T*>(memory + Memory::T_V)}; }
  FG_DEVICE QTile t_q_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::T_Q + fg::stage_of<stages>(n) * QTile::bytes)}; }

  FG_DEVICE void copy_keys(const Place& place) const {
    Base::copy_keys(place);
    if (a.t_k) fg::copy_rows_async<threads, D>(t_k_tile(), rows_of_t_k<T>(a, first_of_t_k(a, place.b, place.hkv)), place.column0, place.count);
    if (a.t_v) fg::copy_rows_async<threads, DV>(t_v_tile(), rows_of_t_v<T>(a, first_of_t_v(a, place.b, place.hkv)), place.column0, place.count);
  }
  FG_DEVICE void load_q(int n) {
    if (n < visits.count()) {
      const int first = visits.tile(n) * BR;
      Base::copy_q(n, first);
      if (a.t_q) {
        const int head = visits.noted(&Notes::head), b = unsigned(head) / unsigned(a.heads);
        fg::copy_rows_async<threads, D>(t_q_tile(n), rows_of_t_q<T>(a, first_of_t_q(a, b, head - b * int(a.heads))), first, q_len - first);
      }
    }
    fg::copy_async_commit();
  }

  FG_DEVICE void visit() { Base::visit(*this); }
  template <bool masked> FG_DEVICE void step(int n) {
    fg::copy_async_wait<stages - 1>();
    Team::barrier();
    if (stages == 2) load_q(n + 1);
    // Sᵀ = K Qᵀ, and what it changes by: t(dot)ᵀ = tK Qᵀ + K tQᵀ
    fg::Accumulators<m_tiles, s_tiles> s, dp, t_s, t_p;
    fg::clear(s);
    fg::clear(t_s);
    fg::clear(t_p);
    if (a.t_k && a.t_q) {
      fg::product_and_tangent(s, t_s, k_tile(), t_k_tile(), warp_key, q_tile(n), t_q_tile(n));
    } else {
      fg::product(s, k_tile(), warp_key, q_tile(n), 0);
      if (a.t_k) fg::product(t_s, t_k_tile(), warp_key, q_tile(n), 0);
      if (a.t_q) fg::product(t_s, k_tile(), warp_key, t_q_tile(n), 0);
    }
    fg::copy_async_wait<stages - 1>();
    Team::barrier();
    const KeptPairs kept_pairs = Base::drawn_pairs(n);
    fg::clear(dp);
    if (a.t_v) fg::product_of_both(dp, t_p, v_tile(), t_v_tile(), warp_key, d_o_tile(n));
    else fg::product(dp, v_tile(), warp_key, d_o_tile(n), 0);
    pairs<masked>(s, dp, t_s, t_p, kept_pairs, n);
    Base::fetch_rows(n + 1);

    // dV += tPᵀ d(tO), dK += d(dot)ᵀ Q + d(tdot)ᵀ tQ
    if constexpr (atomic) {
      const int lane = fg::again(fg::lane_index());
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int t = 0; t < s_tiles; ++t) {
          fg::store_fragment(ds_tile(n), warp_key + 16 * m, 8 * t, dp.at[m][t], lane);
          fg::store_fragment(t_ds_tile(), warp_key + 16 * m, 8 * t, t_s.at[m][t], lane);
        }
    }
    fg::product_across(dv, t_p, d_o_tile(n), 0);
    Team::barrier();  // dS is there, dO and the rows are used up
    Base::load_d_o(n + 1);
    Base::put_rows(n + 1);
    fg::product_across(dk, dp, q_tile(n), 0);
    if (a.t_q) fg::product_across(dk, t_s, t_q_tile(n), 0);
    if constexpr (atomic) Base::add_to_dq(n);
    if (stages == 1) {
      Team::barrier();
      load_q(n + 1);
    }
  }

  // Products to Pᵀ (in s), dP (in dp) to what reaches the product, dP of tV (in t_p) to tPᵀ, t(dot) (in t_s) to what reaches it.
  template <bool masked>
  FG_DEVICE void pairs(fg::Accumulators<m_tiles, s_tiles>& s, fg::Accumulators<m_tiles, s_tiles>& dp, fg::Accumulators<m_tiles, s_tiles>& t_s, fg::Accumulators<m_tiles, s_tiles>& t_p, const KeptPairs& kept_pairs, int n) {
    const int row0 = visits.tile(n) * BR;
    typename Sums::template OfTile<masked> of_tile;
    of_tile.find(*this, row0);
    of_tile.begin(*this, row0);
    if constexpr (Spec::marked)
      if (Base::any_extreme(n)) Base::count_from_marks(s, n);
    const int keys = kv_len - Base::column0();
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = part * 8 * s_tiles + 8 * t + fg::fragment_column(e);
        Row r = Base::template make<masked>(n, row0, row);
        place_as_sum<Spec, masked>(r, x, begin_of_tile(row0), 8 * t + e);
        const MovingRow state = state_of_row<Spec, RowWords>(*this, n, r, row);
#pragma unroll
        for (int k = 0; k < 2 * m_tiles; ++k) {
          const int m = k / 2, at = k % 2 * 2 + e;
          MovingPair<Spec, masked, dropped> pair = {{a, u, x, r, columns[k], 1.0f, true}};
          if (masked) pair.kept = row0 + row < q_len && key(k) < keys && keep(a, u, x, r, columns[k]);
          if constexpr (dropped) pair.survivor = kept_pairs.of(m, t, at, a.dropout_scale);
          pair.differentiate(s.at[m][t][at], dp.at[m][t][at], t_s.at[m][t][at], t_p.at[m][t][at], state);
          of_tile.add(*this, pair, t, e, k);
        }
      }
    of_tile.end(*this);
  }
};

template <class Spec, class T, bool in_bounds, bool dropped, bool atomic, Adding how>
using MovingBlock = KeyVisits<MovingByWarps<ByWarps<Keys<Spec, T, in_bounds, dropped, atomic, how>>>>;

}  // namespace backward
