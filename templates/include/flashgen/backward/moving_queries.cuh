// The kernel of dQ alone of forward mode's backward pass.
#pragma once
#include "flashgen/backward/queries.cuh"
#include "flashgen/backward/moving_pair.cuh"
#include "flashgen/products_of_both.cuh"

namespace backward {

template <class Spec, class T, bool in_bounds, bool dropped, Adding how> struct MovingQueries : Queries<Spec, T, in_bounds, dropped, how> {
  using Base = Queries<Spec, T, in_bounds, dropped, how>;
  using typename Base::Column, typename Base::KTile, typename Base::Memory, typename Base::Notes, typename Base::Place, typename Base::QTile, typename Base::Scores, typename Base::VTile;
  using Base::BC, Base::D, Base::DV, Base::lane_rows, Base::s_tiles, Base::stages, Base::threads;
  using Base::a, Base::dq, Base::kv_len, Base::memory, Base::rows, Base::states, Base::u, Base::visits, Base::warp_row, Base::x;
  using Base::d_o_tile, Base::k_tile, Base::q_tile, Base::v_tile;
  using Base::Base;
  static_assert(Base::split == 1, "a warp has whole rows");

  float moves[lane_rows], epsilons[lane_rows];

  FG_DEVICE QTile t_q_tile() const { return {reinterpret_cast<T*>(memory + Memory::T_Q)}; }
  FG_DEVICE KTile t_k_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::T_K + fg::stage_of<stages>(n) * KTile::bytes)}; }
  FG_DEVICE VTile t_v_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::T_V + fg::stage_of<stages>(n) * VTile::bytes)}; }

  FG_DEVICE void begin(const Place& place) {
    Base::begin(place);
    if (a.t_q) fg::copy_rows_async<threads, D>(t_q_tile(), rows_of_t_q<T>(a, first_of_t_q(a, place.b, place.h)), place.row0, place.count);
  }
  FG_DEVICE void begin_rows(const Place& place) {
    Base::begin_rows(place);
    if constexpr (Spec::row_state)
#pragma unroll
      for (int n = 0; n < lane_rows; ++n) {
        const int last = fg::min(Base::row(n), place.count - 1);
        const bool real = Base::row(n) < place.count;
        moves[n] = real ? fg::global_load(a.t_lse + place.first_row + last) : 0.0f;
        epsilons[n] = real ? fg::global_load(epsilon_of(a) + place.first_row + last) : 0.0f;
      }
  }

  FG_DEVICE void load(int n) {
    if (n < visits.count()) {
      const int first = visits.tile(n) * BC;
      const auto k = rows_of_k<T>(a, visits.noted(&Notes::k));
      const auto v = rows_of_v<T>(a, visits.noted(&Notes::v));
      fg::copy_rows_async<threads, D>(k_tile(n), k, first, kv_len - first);
      fg::copy_rows_async<threads, DV>(v_tile(n), v, first, kv_len - first);
      const Place place = this->place();
      const int hkv = place.h / (int(a.heads) / int(a.kv_heads));
      if (a.t_k) fg::copy_rows_async<threads, D>(t_k_tile(n), rows_of_t_k<T>(a, first_of_t_k(a, place.b, hkv)), first, kv_len - first);
      if (a.t_v) fg::copy_rows_async<threads, DV>(t_v_tile(n), rows_of_t_v<T>(a, first_of_t_v(a, place.b, hkv)), first, kv_len - first);
    }
    fg::copy_async_commit();
  }

  // One key tile.
  template <bool masked> FG_DEVICE void step(int n) {
    const int column0 = visits.tile(n) * BC;
    fg::copy_async_wait<stages - 1>();
    fg::block_barrier();
    Scores s, dp, t_s, t_p;
    fg::clear(s);
    fg::clear(t_s);
    if (a.t_k && a.t_q) {
      fg::product_and_tangent(s, t_s, q_tile(), t_q_tile(), warp_row, k_tile(n), t_k_tile(n));
    } else {
      fg::product(s, q_tile(), warp_row, k_tile(n), 0);
      if (a.t_k) fg::product(t_s, q_tile(), warp_row, t_k_tile(n), 0);
      if (a.t_q) fg::product(t_s, t_q_tile(), warp_row, k_tile(n), 0);
    }
    fg::clear(dp);
    fg::product(dp, d_o_tile(), warp_row, v_tile(n), 0);
    fg::clear(t_p);
    if (a.t_v) fg::product(t_p, d_o_tile(), warp_row, t_v_tile(n), 0);
    pairs<masked>(s, dp, t_s, t_p, column0);
    fg::product_across(dq, dp, k_tile(n), 0);
    if (a.t_k) fg::product_across(dq, t_s, t_k_tile(n), 0);
    fg::block_barrier();
    load(n + stages);
  }

  // Products to P (in s), tP (in t_p), and what reaches products (in dp) and what they change by (in t_s), but for a constant slope.
  template <bool masked> FG_DEVICE void pairs(Scores& s, Scores& dp, Scores& t_s, Scores& t_p, int column0) {
    [[maybe_unused]] const auto kept_pairs = Base::drawn_pairs(column0);
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = column0 + 8 * t + fg::fragment_column(e);
        const Column c = Base::template column_of<masked>(column0, t, e, column);
#pragma unroll
        for (int k = 0; k < lane_rows; ++k) {
          const int m = k / 2, at = k % 2 * 2 + e;
          MovingPair<Spec, masked, dropped> pair = {{a, u, x, rows[k], c, 1.0f, true}};
          if (masked) pair.kept = column < kv_len && keep(a, u, x, rows[k], c);
          if constexpr (dropped) pair.survivor = kept_pairs.of(m, t, at, a.dropout_scale);
          pair.differentiate(s.at[m][t][at], dp.at[m][t][at], t_s.at[m][t][at], t_p.at[m][t][at], {states[k], moves[k], epsilons[k]});
          Base::sums.add(pair, k);
        }
      }
  }
};

}  // namespace backward
