// dK and dV, and with `atomic` dQ, where warps multiply. Warps may share keys: then P and dS go through shared memory. In forward mode
// what tangents change goes beside it.
#pragma once
#include "flashgen/backward/keys.cuh"
#include "flashgen/products_of_both.cuh"

namespace backward {

template <class Base> struct ByWarps : Base {
  using typename Base::Spec, typename Base::T, typename Base::P, typename Base::KeptPairs, typename Base::Notes, typename Base::Place, typename Base::Row, typename Base::RowWords, typename Base::Scores, typename Base::Team;
  using typename Base::KTile, typename Base::Memory, typename Base::OTile, typename Base::PTile, typename Base::QTile, typename Base::VTile;
  using Base::BC, Base::BINS, Base::BR, Base::COPIED_K, Base::COPIED_V, Base::D, Base::DP, Base::DV, Base::atomic, Base::ds_stages, Base::k_tiles, Base::m_tiles, Base::more_stages, Base::row_bytes, Base::s_tiles, Base::split, Base::stages, Base::threads, Base::v_tiles;
  using Base::a, Base::dk, Base::dv, Base::kv_len, Base::memory, Base::part, Base::q_len, Base::u, Base::visits, Base::warp_key, Base::x;
  using Base::d_o_tile, Base::ds_tile, Base::k_tile, Base::p_tile, Base::put_rows, Base::q_tile, Base::rows, Base::v_tile, Base::weighs;
  using Base::Base;
  KEY_MEMORY_IS_PLANNED

  static_assert(!Spec::tangent || split == 1, "a warp has whole rows of Q's tangents");

  FG_DEVICE QTile t_q_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::T_Q + fg::stage_of<stages>(n) * QTile::bytes)}; }
  FG_DEVICE VTile t_v_tile() const { return {reinterpret_cast<T*>(memory + Memory::T_V)}; }
  FG_DEVICE KTile t_k_tile() const { return {reinterpret_cast<T*>(memory + Memory::T_K)}; }
  FG_DEVICE PTile t_ds_tile() const { return {reinterpret_cast<T*>(memory + Memory::T_DS)}; }

  // ---- copies ----
  FG_DEVICE void copy_keys(const Place& place) const {
    Base::copy_keys(place);
    if constexpr (Spec::tangent) {
      if (a.t_k) fg::copy_rows_async<threads, D>(t_k_tile(), rows_of_t_k<T>(a, first_of_t_k(a, place.b, place.hkv)), place.column0, place.count);
      if (a.t_v) fg::copy_rows_async<threads, DV>(t_v_tile(), rows_of_t_v<T>(a, first_of_t_v(a, place.b, place.hkv)), place.column0, place.count);
    }
  }
  FG_DEVICE void load_q(int n) {
    if (n < visits.count()) {
      const int first = visits.tile(n) * BR;
      const auto q = rows_of_q<T>(a, visits.noted(&Notes::q));
      fg::copy_rows_async<threads, COPIED_K>(q_tile(n), q, first, q_len - first);
      if constexpr (Spec::tangent)
        if (a.t_q) {
          const int head = visits.noted(&Notes::head), b = unsigned(head) / unsigned(a.heads);
          fg::copy_rows_async<threads, D>(t_q_tile(n), rows_of_t_q<T>(a, first_of_t_q(a, b, head - b * int(a.heads))), first, q_len - first);
        }
    }
    fg::copy_async_commit();
  }
  FG_DEVICE void load_d_o(int n) {
    if (n < visits.count()) {
      const int first = visits.tile(n) * BR;
      const auto d_o = rows_of_d_o<T>(a, visits.noted(&Notes::d_o));
      fg::copy_rows_async<threads, COPIED_V>(d_o_tile(n), d_o, first, q_len - first);
    }
    fg::copy_async_commit();
  }
  // |q|² of the rows of tile n. What their scores are counted from is less what pairs do not have of these.
  FG_DEVICE void take_norms(int n) const {
    for (int row = int(threadIdx.x); row < BR; row += threads) {
      Row r = Base::template make<true>(n, visits.tile(n) * BR, row);
      r.qq = fg::squared_norm(q_tile(n), row);
      fg::shared_store(rows(RowWords::qq, n) + row, r.qq);
      float* const top = rows(RowWords::top, n) + row;
      fg::shared_store(top, fg::shared_load(top) - row_score(a, u, x, r));
    }
  }

  // ---- mainloop ----
  // The tiles of one window.
  FG_DEVICE void visit() {
    load_q(0);
    load_d_o(0);
    Base::fetch_rows(0);
    put_rows(0);
    int n = 0;
#pragma unroll 1
    for (; n < visits.partials(); ++n) step<true>(n);
#pragma unroll 1
    for (; n < visits.count(); ++n) step<false>(n);
  }

  // One query tile. Copies run in the order Q0 dO0 Q1 dO1 …, dO one tile ahead, Q as many as there are stages.
  template <bool masked> FG_DEVICE void step(int n) {
    fg::copy_async_wait<stages - 1>();
    Team::barrier();
    if (stages == 2) load_q(n + 1);
    if constexpr (Spec::sqdist) {
      if constexpr (Spec::norms) take_norms(n);
      else fg::squared_norms<threads>(rows(RowWords::qq, n), q_tile(n));
      Team::barrier();
    }
    // Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, for this warp's keys and its part of the queries
    Scores s, dp;
    fg::clear(s);
    [[maybe_unused]] Scores t_s, t_p;  // and what it changes by: t(dot)ᵀ = tK Qᵀ + K tQᵀ
    if constexpr (Spec::tangent) {
      fg::clear(t_s);
      fg::clear(t_p);
      if (a.t_k && a.t_q) {
        fg::product_and_tangent(s, t_s, k_tile(), t_k_tile(), warp_key, q_tile(n), t_q_tile(n));
      } else {
        fg::product(s, k_tile(), warp_key, q_tile(n), 0);
        if (a.t_k) fg::product(t_s, t_k_tile(), warp_key, q_tile(n), 0);
        if (a.t_q) fg::product(t_s, k_tile(), warp_key, t_q_tile(n), 0);
      }
    } else if (weighs()) fg::product(s, k_tile(), warp_key, q_tile(n), part * 8 * s_tiles);
    fg::copy_async_wait<stages - 1>();
    Team::barrier();
    const KeptPairs kept_pairs = weighs() ? Base::drawn_pairs(n) : KeptPairs{};
    fg::clear(dp);
    if constexpr (Spec::tangent) {
      if (a.t_v) fg::product_of_both(dp, t_p, v_tile(), t_v_tile(), warp_key, d_o_tile(n));
      else fg::product(dp, v_tile(), warp_key, d_o_tile(n), 0);
      Base::template pairs<masked, MovingPair<Spec, masked, Base::dropped>>(s, dp, kept_pairs, n, t_s, t_p);
    } else if (weighs()) {
      fg::product(dp, v_tile(), warp_key, d_o_tile(n), part * 8 * s_tiles);
      Base::template pairs<masked>(s, dp, kept_pairs, n);
    }
    Base::fetch_rows(n + 1);

    // dV += Pᵀ dO, dK += dSᵀ Q, and, if it is wanted, this tile's part of dQ = dS K
    if constexpr (atomic || split > 1)
      if (weighs()) {
        const int lane = fg::again(fg::lane_index());
#pragma unroll
        for (int m = 0; m < m_tiles; ++m)
#pragma unroll
          for (int t = 0; t < s_tiles; ++t) {
            const int column = part * 8 * s_tiles + 8 * t;
            fg::store_fragment(ds_tile(n), warp_key + 16 * m, column, dp.at[m][t], lane);
            if constexpr (Spec::tangent) fg::store_fragment(t_ds_tile(), warp_key + 16 * m, column, t_s.at[m][t], lane);
            if constexpr (split > 1) fg::store_fragment(p_tile(), warp_key + 16 * m, column, s.at[m][t], lane);
          }
      }
    if constexpr (Spec::tangent) {
      fg::product_across(dv, t_p, d_o_tile(n), 0);
    } else if constexpr (split == 1) {
      fg::product_across(dv, s, d_o_tile(n), 0);
    } else {
      Team::barrier();
      fg::product_across<false>(dv, p_tile(), warp_key, d_o_tile(n), part * 8 * v_tiles);
    }
    Team::barrier();  // dS is there, dO and the rows are used up
    load_d_o(n + 1);
    put_rows(n + 1);
    if constexpr (split == 1) fg::product_across(dk, dp, q_tile(n), 0);
    else fg::product_across<false>(dk, ds_tile(n), warp_key, q_tile(n), part * 8 * k_tiles);
    if constexpr (Spec::tangent)
      if (a.t_q) fg::product_across(dk, t_s, t_q_tile(n), 0);
    if constexpr (atomic) add_to_dq(n);
    if (stages == 1) {
      Team::barrier();
      load_q(n + 1);
    }
  }

  // dQ += dS K: the warps divide the tile into rows and, where there are more of them, into columns.
  FG_DEVICE void add_to_dq(int n) {
    const int row0 = visits.tile(n) * BR;
    constexpr int row_warps = fg::largest_divisor(BR / 16, P::warps), row_tiles = BR / 16 / row_warps;
    constexpr int column_warps = fg::largest_divisor(DP / 16, P::warps / row_warps), q_tiles = DP / 8 / column_warps;
    const int warp = fg::warp_index(), row = warp % row_warps * 16 * row_tiles, column = warp / row_warps * 8 * q_tiles;
    if (warp / row_warps >= column_warps) return;
    const int groups = (q_len + 15) / 16;  // of 16 rows
    constexpr int some = P::divided ? 2 * fg::largest_divisor(q_tiles / 2, 8 / row_tiles) : q_tiles;  // tiles at a time: registers hold dK and dV
#pragma unroll 1
    for (int begin = column; begin < column + 8 * q_tiles; begin += 8 * some) add_columns_to_dq<row_tiles, some>(n, row0, row, begin, groups);
  }
  template <int row_tiles, int q_tiles> FG_DEVICE void add_columns_to_dq(int n, int row0, int row, int column, int groups) {
    fg::Accumulators<row_tiles, q_tiles> dq;
    fg::clear(dq);
    fg::product_across(dq, ds_tile(n), row, k_tile(), column);
    if constexpr (Spec::tangent)
      if (a.t_k) fg::product_across(dq, t_ds_tile(), row, t_k_tile(), column);
#pragma unroll
    for (int m = 0; m < row_tiles; ++m) {
      const int group = (row0 + row) / 16 + m;
      if (group >= groups) continue;
      float* const sums = dq_sums(a) + (int64_t(visits.noted(&Notes::head)) * groups + group) * (16 * DP) + column / 8 * 128;
#pragma unroll
      for (int t = 0; t < q_tiles; ++t) fg::global_add_fragment(sums + 128 * t, dq.at[m][t]);
    }
  }

  // ---- epilogue ----
  FG_DEVICE void store_keys(const Place& place) {
    Base::finish_sums();
    const auto to_dk = rows_of_dk<T>(a, place.b, place.hkv, place.column0);
    const auto to_dv = rows_of_dv<T>(a, place.b, place.hkv, place.column0);
    fg::copy_async_wait<0>();
    if constexpr (Spec::writes_f32_of_keys) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
        fg::store_sums<D>(to_dk, dk.at[m], warp_key + 16 * m, fg::ColumnsFrom{8 * k_tiles * part}, place.count);
        fg::store_sums<DV>(to_dv, dv.at[m], warp_key + 16 * m, fg::ColumnsFrom{8 * v_tiles * part}, place.count);
      }
    } else {
      Team::barrier();
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) {
#pragma unroll
        for (int t = 0; t < k_tiles; ++t) fg::store_fragment(k_tile(), warp_key + 16 * m, (part * k_tiles + t) * 8, dk.at[m][t], fg::lane_index());
#pragma unroll
        for (int t = 0; t < v_tiles; ++t) fg::store_fragment(v_tile(), warp_key + 16 * m, (part * v_tiles + t) * 8, dv.at[m][t], fg::lane_index());
      }
      Team::barrier();
      fg::store_rows<threads, D>(to_dk, k_tile(), int(threadIdx.x), 0, BC, place.count);
      fg::store_rows<threads, DV>(to_dv, v_tile(), int(threadIdx.x), 0, BC, place.count);
    }
  }
};

template <class Spec, class T, bool in_bounds, bool dropped, bool atomic, Adding how>
using Block = KeyVisits<ByWarps<Keys<Spec, T, in_bounds, dropped, atomic, how>>>;

}  // namespace backward
