// The kernel of dQ alone, for calls whose results have to repeat and for sums over rows: one block a query tile, as forward. In forward mode
// what tangents change goes beside it.
#pragma once
#include "flashgen/backward/captured.cuh"
#include "flashgen/backward/moving_pair.cuh"
#include "flashgen/lists.cuh"
#include "flashgen/parts.cuh"
#include "flashgen/products_of_both.cuh"

namespace backward {

template <class Spec, class T, bool in_bounds, bool dropped, Adding how> struct Queries {
  using Arguments = typename Spec::Arguments;
  using Launch = typename Spec::Launch;
  using Head = typename Spec::Head;
  using Row = typename Spec::Row;
  using Column = typename Spec::Column;
  using P = QueryPlan<T>;
  static constexpr int D = Spec::D, DV = Spec::DV, DP = Spec::DP, DVP = Spec::DVP;
  static constexpr int BR = P::BR, BC = P::BC, threads = P::threads, stages = P::stages, split = P::split;
  using Team = fg::Team<threads, 0>;
  // Warps that share rows have a part of a tile's keys each, and of dQ's columns.
  static constexpr int row_warps = P::warps / split, own_keys = split > 1 ? P::s_columns : BC;
  static constexpr int m_tiles = BR / (16 * row_warps), s_tiles = own_keys / 8, q_tiles = DP / (8 * split), lane_rows = 2 * m_tiles;
  static_assert(BR % (16 * row_warps) == 0 && BC % own_keys == 0 && own_keys % 8 == 0 && BR <= threads, "a warp has whole fragments, a row a thread");
  static_assert(DP % (16 * split) == 0, "warps that share rows have parts of one length");
  static_assert(!P::warpgroups || (m_tiles == 1 && P::warps % 4 == 0), "a warpgroup has 64 rows");
  static_assert(!Spec::tangent || split == 1, "a warp has whole rows of Q's tangents");

  using QTile = fg::SharedTile<T, BR, DP>;
  using OTile = fg::SharedTile<T, BR, DVP>;
  using KTile = fg::SharedTile<T, BC, DP>;
  using VTile = fg::SharedTile<T, BC, DVP>;
  using PTile = fg::SharedTile<T, BR, BC>;
  using Scores = fg::Accumulators<m_tiles, s_tiles>;
  using Memory = QueryMemory<T>;
  QUERY_MEMORY_IS_PLANNED

  using Notes = QueryNotes<false>;
  const Arguments& a;
  Launch u;
  Head x;
  char* memory;
  int kv_len, warp_row, part;
  Visits<Notes> visits;

  Row rows[lane_rows];  // this lane's
  MovingRow states[lane_rows];
  fg::Accumulators<m_tiles, q_tiles> dq;
  float by_row[lane_rows];  // Σ_j P where what arrives at lse arrives at |q|², else Σ_j dS ∂S/∂|q|²
  Sums<typename Spec::QueryGradients, lane_rows> sums;
  Adder<Spec, how> adder;

  // The query tile of a block, the last ones of a head first, as forward.
  struct Place {
    int b, h, row0, count;
    int64_t first_row;  // of what is one number a row
  };
  Place start;  // until the team has met
  FG_DEVICE Place place_of(int head, int row0) const {
    const int b = unsigned(head) / unsigned(a.heads), q_len = int(a.q_len);
    return {b, head - b * int(a.heads), row0, fg::min(BR, q_len - row0), int64_t(head) * rows_apart(a) + row0};
  }
  FG_DEVICE Place locate() const {
    const unsigned tiles = (unsigned(a.q_len) + BR - 1) / BR, block = block_number(a), head = block / tiles;
    if constexpr (Spec::longest_first)
      if (a.visits_of_queries) {
        const fg::WorkTile work_tile = this->work_tile();
        return place_of(work_tile.head, fg::tile_of(fg::list_of(a.visits_of_queries, work_tile, this->tiles()), this->tiles()) * BR);
      }
    return place_of(int(head), int(tiles - 1 - (block - head * tiles)) * BR);
  }
  FG_DEVICE Place place_before_team_met() const {
    if constexpr (Spec::longest_first) return start;
    else return locate();
  }
  // The block's place, once the team has met: from shared memory, where it costs no registers, if a list has it.
  FG_DEVICE Place place() const {
    if constexpr (Spec::longest_first) return place_of(visits.noted(&Notes::head), visits.noted(&Notes::row0));
    else return locate();
  }

  FG_DEVICE Queries(const Arguments& arguments) : a(arguments), u(make_launch(arguments)), memory(fg::shared_memory()) {
    const Place place = start = locate();
    const int b = place.b, h = place.h, hkv = h / (int(a.heads) / int(a.kv_heads)), warp = fg::warp_index();
    visits.list = reinterpret_cast<VisitList*>(memory + Memory::LIST);
    warp_row = warp / split * 16 * m_tiles, part = warp % split, kv_len = int(a.kv_len);
    x = make_head(a, u, b, h);
    if constexpr (Spec::distance) x.origin = int(a.q_start) + place.row0;
    if (threadIdx.x == 0) {
      fg::shared_store(&visits.notes()->k, first_of_k(a, b, hkv));
      fg::shared_store(&visits.notes()->v, first_of_v(a, b, hkv));
      fg::shared_store(&visits.notes()->head, b * int(a.heads) + h);
      fg::shared_store(&visits.notes()->row0, place.row0);
    }
  }

  FG_DEVICE int tiles() const { return (fg::again(int(a.kv_len)) + BC - 1) / BC; }
  FG_DEVICE QTile q_tile() const { return {reinterpret_cast<T*>(memory)}; }
  FG_DEVICE OTile d_o_tile() const { return {reinterpret_cast<T*>(memory + Memory::O)}; }
  FG_DEVICE KTile k_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::K + fg::stage_of<stages>(n) * KTile::bytes)}; }
  FG_DEVICE VTile v_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::V + fg::stage_of<stages>(n) * VTile::bytes)}; }
  FG_DEVICE QTile t_q_tile() const { return {reinterpret_cast<T*>(memory + Memory::T_Q)}; }
  FG_DEVICE KTile t_k_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::T_K + fg::stage_of<stages>(n) * KTile::bytes)}; }
  FG_DEVICE VTile t_v_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::T_V + fg::stage_of<stages>(n) * VTile::bytes)}; }
  FG_DEVICE int row(int r) const { return warp_row + 16 * (r / 2) + fg::fragment_row(r % 2 * 2); }
  FG_DEVICE int own_column(int t) const { return (part * q_tiles + t) * 8; }

  FG_DEVICE fg::KeyTiles<Spec, BR, BC> classify() const {
    const Place place = this->place();
    return {a, u, x, visits.noted(&Notes::head), {place.row0, place.count}};
  }
  FG_DEVICE fg::WorkTile work_tile() const {
    return fg::work_tile_of<Spec>(fg::block_index(), Spec::sharers_of_queries(a), unsigned(a.group_of_queries), (unsigned(a.q_len) + BR - 1) / BR);
  }
  FG_DEVICE const uint4* list() const {
    if constexpr (Spec::longest_first) {
      return fg::list_of(a.visits_of_queries, work_tile(), tiles());
    } else {
      const Place place = this->place();
      return fg::list_of(a, a.visits_of_queries, place.b, place.h, unsigned(place.row0) / BR, (unsigned(a.q_len) + BR - 1) / BR, tiles());
    }
  }
  FG_DEVICE void find_visits(int window) {
    const int end = fg::min(window + fg::WINDOW, tiles());
    if constexpr (Spec::lists) fg::take_visits<Team>(visits.list, list(), window, end, classify());
    else fg::find_visits<Team>(visits.list, window, end, classify());
  }

  // ---- prologue ----
  FG_DEVICE void begin(const Place& place) {
    const auto q = rows_of_q<T>(a, first_of_q(a, place.b, place.h));
    const auto d_o = rows_of_d_o<T>(a, first_of_d_o(a, place.b, place.h));
    fg::copy_rows_async<threads, D>(q_tile(), q, place.row0, place.count);
    fg::copy_rows_async<threads, DV>(d_o_tile(), d_o, place.row0, place.count);
    if constexpr (Spec::tangent)
      if (a.t_q) fg::copy_rows_async<threads, D>(t_q_tile(), rows_of_t_q<T>(a, first_of_t_q(a, place.b, place.h)), place.row0, place.count);
  }
  FG_DEVICE void begin_rows(const Place& place) {
    fg::clear(dq);
#pragma unroll
    for (int n = 0; n < lane_rows; ++n) {
      const int last = fg::min(row(n), place.count - 1);
      rows[n] = make_row(a, u, x, int(a.q_start) + place.row0 + last);
      if constexpr (Spec::row_state) {
        const bool real = row(n) < place.count;
        if constexpr (Spec::divided) {
          states[n].lse = real ? row_inverse(a, place.first_row + last) : 0.0f;
        } else {
          const float stored = real ? fg::global_load(a.lse + place.first_row + last) : -INFINITY;
          const RowOffset offset = row_offset<Spec>(a, u, stored, [&] { return place.first_row + last; });
          states[n].lse = offset.lse, states[n].top = offset.top;
          if constexpr (Spec::split_score && !Spec::norms) states[n].top -= row_score(a, u, x, rows[n]);
        }
        states[n].delta = real ? fg::global_load(delta_of(a) + place.first_row + last) : 0.0f;
        if constexpr (Spec::tangent) {
          states[n].moved = real ? fg::global_load(a.t_lse + place.first_row + last) : 0.0f;
          states[n].epsilon = real ? fg::global_load(epsilon_of(a) + place.first_row + last) : 0.0f;
        }
      }
      by_row[n] = 0.0f;
      sums.clear(n);
    }
    if constexpr (Spec::sqdist) {
      fg::copy_async_wait<0>();
      fg::block_barrier();
#pragma unroll
      for (int n = 0; n < lane_rows; ++n) {
        rows[n].qq = fg::squared_norm(q_tile(), row(n));
        if constexpr (Spec::norms) states[n].top -= row_score(a, u, x, rows[n]);
      }
    }
  }

  // ---- epilogue ----
  // by_row of all keys: over the lanes of a row, and over the warps that share it, each of which has a part of them.
  FG_DEVICE void add_up_rows() {
    static_assert(split * BR * sizeof(float) <= KTile::bytes, "K makes room for them");
    float* const sums = reinterpret_cast<float*>(memory + Memory::K);
    fg::copy_async_wait<0>();
    fg::block_barrier();  // everyone is done with K
#pragma unroll
    for (int n = 0; n < lane_rows; ++n) {
      const float sum = fg::row_sum(by_row[n]);
      if (fg::fragment_column(0) == 0) fg::shared_store(sums + part * BR + row(n), sum);
    }
    fg::block_barrier();
#pragma unroll
    for (int n = 0; n < lane_rows; ++n) {
      by_row[n] = 0.0f;
#pragma unroll
      for (int k = 0; k < split; ++k) by_row[n] += fg::shared_load(sums + k * BR + row(n));
    }
  }
  // Of row n: what arrives at q through |q|² is this times q.
  FG_DEVICE float factor_of_norm(const Place& place, int n) const {
    const float sum = split > 1 ? by_row[n] : fg::row_sum(by_row[n]);
    if constexpr (Spec::by_lse) {
      // Through the scores of all keys arrives what arrives at lse, here that of this call's; a sum of dS would cancel.
      const float arriving = a.d_lse && row(n) < place.count ? fg::global_load(a.d_lse + place.first_row + row(n)) : 0.0f;
      return 2.0f * fg::chained(arriving, sum) * row_slope(a, u, x, rows[n]);
    } else {
      return 2.0f * sum;  // ∂|q|²/∂q = 2 q
    }
  }
  template <class Of> FG_DEVICE void leave(const float (&sum)[lane_rows]) {
    if (!Of::target(a)) return;
    const Place place = this->place();
#pragma unroll
    for (int n = 0; n < lane_rows; ++n) {
      const Row r = make_row(a, u, x, int(a.q_start) + place.row0 + fg::min(row(n), place.count - 1));
      const float total = fg::row_sum(sum[n]);
      if (fg::fragment_column(0) == 0 && row(n) < place.count) adder.template add<Of::number>(a, Of::target(a), Of::offset(a, u, x, r, Column{}), total);
    }
  }
  FG_DEVICE void finish() {
    const Place place = this->place();
    sums.leave(*this);
    adder.finish(a);
    if constexpr (Spec::sqdist && split > 1) add_up_rows();
#pragma unroll
    for (int n = 0; n < lane_rows; ++n) {
      float factor = 0.0f;
      if constexpr (Spec::sqdist) factor = factor_of_norm(place, n);
#pragma unroll
      for (int t = 0; t < q_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& value = dq.at[n / 2][t][n % 2 * 2 + e];
          Spec::finish_sum(u, value);
          if constexpr (Spec::sqdist) value += factor * fg::to_float(fg::shared_load(q_tile().at(row(n), own_column(t) + fg::fragment_column(e))));
        }
    }
    const auto to = [&] { return rows_of_dq<T>(a, place.b, place.h, place.row0); };
    fg::copy_async_wait<0>();
    if constexpr (Spec::writes_f32) {
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) fg::store_sums<D>(to(), dq.at[m], warp_row + 16 * m, fg::ColumnsFrom{own_column(0)}, place.count);
    } else {
      fg::block_barrier();
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int t = 0; t < q_tiles; ++t) fg::store_fragment(q_tile(), warp_row + 16 * m, own_column(t), dq.at[m][t], fg::lane_index());
      if constexpr (split > 1) {
        fg::block_barrier();
        fg::store_rows<threads, D>(to(), q_tile(), int(threadIdx.x), 0, BR, place.count);
      } else {
        fg::warp_barrier();
        fg::store_rows<32, D>(to(), q_tile(), fg::lane_index(), warp_row, 16 * m_tiles, place.count);
      }
    }
  }

  // ---- mainloop ----
  // This lane's key e of tile t of its keys, the first of which is column0, and where that lies.
  template <bool masked> FG_DEVICE Column column_of(int column0, int t, int e, int column) const {
    Column c = make_column(a, u, x, int(a.kv_start) + (masked ? fg::min(column, kv_len - 1) : column));
    place_as_sum<Spec, masked>(c, x, int(a.kv_start) + column0 + fg::fragment_column(0), 8 * t + e);
    return c;
  }
  // Which pairs of this warp's rows and its keys from column0 on dropout keeps.
  FG_DEVICE auto drawn_pairs([[maybe_unused]] int column0) const {
    typename Spec::template KeptPairs<false, m_tiles, s_tiles> kept_pairs;
    if constexpr (dropped) draw(kept_pairs, Spec::dropout(a, u, x), int(a.q_start) + visits.noted(&Notes::row0) + warp_row, int(a.kv_start) + column0);
    return kept_pairs;
  }
  // `kernel` is the whole of this one: it loads key tile n, and visits it.
  template <class Kernel> FG_DEVICE void run(Kernel& kernel) {
    const Place place = place_before_team_met();
    kernel.begin(place);
    fg::copy_async_commit();
    kernel.begin_rows(place);
    fg::block_barrier();  // the place of the block is known
#pragma unroll 1
    for (int window = 0; window < tiles(); window = visits.first() + fg::WINDOW) {
      find_visits(window);
      fg::block_barrier();
#pragma unroll
      for (int n = 0; n < stages; ++n) kernel.load(n);
      int n = 0;
#pragma unroll 1
      for (; n < visits.partials(); ++n) kernel.template step<true>(n);
#pragma unroll 1
      for (; n < visits.count(); ++n) kernel.template step<false>(n);
    }
    finish();
  }

  FG_DEVICE void load(int n) {
    if (n < visits.count()) {
      const int first = visits.tile(n) * BC;
      const auto k = rows_of_k<T>(a, visits.noted(&Notes::k));
      const auto v = rows_of_v<T>(a, visits.noted(&Notes::v));
      fg::copy_rows_async<threads, D>(k_tile(n), k, first, kv_len - first);
      fg::copy_rows_async<threads, DV>(v_tile(n), v, first, kv_len - first);
      if constexpr (Spec::tangent) {
        const Place place = this->place();
        const int hkv = place.h / (int(a.heads) / int(a.kv_heads));
        if (a.t_k) fg::copy_rows_async<threads, D>(t_k_tile(n), rows_of_t_k<T>(a, first_of_t_k(a, place.b, hkv)), first, kv_len - first);
        if (a.t_v) fg::copy_rows_async<threads, DV>(t_v_tile(n), rows_of_t_v<T>(a, first_of_t_v(a, place.b, hkv)), first, kv_len - first);
      }
    }
    fg::copy_async_commit();
  }

  // One key tile.
  template <bool masked> FG_DEVICE void step(int n) {
    const int column0 = visits.tile(n) * BC;
    fg::copy_async_wait<stages - 1>();
    begin_tile(n);
    Scores s, dp;
    if constexpr (Spec::tangent) multiply_tangents<masked>(s, dp, n, column0);
    else if constexpr (split > 1) multiply_in_parts<masked>(s, dp, n, column0);
    else multiply<masked>(s, dp, n, column0);
    fg::block_barrier();
    load(n + stages);
  }
  FG_DEVICE void begin_tile(int n) {
    fg::block_barrier();
    if constexpr (Spec::sqdist) {
      fg::squared_norms<threads>(norms(), k_tile(n));
      fg::block_barrier();
    }
  }
  template <bool masked> FG_DEVICE void multiply(Scores& s, Scores& dp, int n, int column0) {
    fg::clear(s);
    fg::product(s, q_tile(), warp_row, k_tile(n), 0);
    fg::clear(dp);
    fg::product(dp, d_o_tile(), warp_row, v_tile(n), 0);
    pairs<masked>(s, dp, column0);
    fg::product_across(dq, dp, k_tile(n), 0);
  }
  template <bool masked> FG_DEVICE void multiply_tangents(Scores& s, Scores& dp, int n, int column0) {
    Scores t_s, t_p;
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
    pairs<masked, MovingPair<Spec, masked, dropped>>(s, dp, column0, t_s, t_p);
    fg::product_across(dq, dp, k_tile(n), 0);
    if (a.t_k) fg::product_across(dq, t_s, t_k_tile(n), 0);
  }
  // This warp's first key of a tile; where that has fewer than there are warps to share them, some weigh none.
  FG_DEVICE int own_key() const { return part * own_keys; }
  FG_DEVICE bool weighs() const { return split * own_keys == BC || own_key() < BC; }
  template <bool masked> FG_DEVICE void multiply_in_parts(Scores& s, Scores& dp, int n, int column0) {
    const PTile ds = {reinterpret_cast<T*>(memory + Memory::DS)};
    fg::clear(s);
    if (weighs()) {
      fg::product(s, q_tile(), warp_row, k_tile(n), own_key());
      fg::clear(dp);
      fg::product(dp, d_o_tile(), warp_row, v_tile(n), own_key());
      pairs<masked>(s, dp, column0 + own_key());
      const int lane = fg::again(fg::lane_index());
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int t = 0; t < s_tiles; ++t) fg::store_fragment(ds, warp_row + 16 * m, own_key() + 8 * t, dp.at[m][t], lane);
    }
    fg::block_barrier();
    fg::product_across<false>(dq, ds, warp_row, k_tile(n), part * 8 * q_tiles);
  }

  FG_DEVICE float* norms() const { return reinterpret_cast<float*>(memory + Memory::KK); }
  // Products to P (in s) and dS ∘ ∂S/∂dot (in dp), but for a constant slope; in `moved` what they change by to what reaches that, and dP of tV
  // to tP.
  template <bool masked, class OnePair = Pair<Spec, masked, dropped, in_bounds>, class... Moved> FG_DEVICE void pairs(Scores& s, Scores& dp, int column0, Moved&... moved) {
    [[maybe_unused]] const auto kept_pairs = drawn_pairs(column0);
    if constexpr (Spec::marked) count_from_tops(s);
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = column0 + 8 * t + fg::fragment_column(e);
        Column c = column_of<masked>(column0, t, e, column);
        if constexpr (Spec::sqdist) c.kk = fg::shared_load(norms() + (split > 1 ? own_key() : 0) + column - column0);
        if constexpr (Spec::norms) c.from_norm = from_norm(a, u, x, c.kk);
#pragma unroll
        for (int k = 0; k < lane_rows; ++k) {
          float &value = s.at[k / 2][t][k % 2 * 2 + e], &d_value = dp.at[k / 2][t][k % 2 * 2 + e];
          OnePair pair = {a, u, x, rows[k], c, 1.0f, true};
          if (masked) pair.kept = column < kv_len && keep(a, u, x, rows[k], c);
          if constexpr (dropped) pair.survivor = kept_pairs.of(k / 2, t, k % 2 * 2 + e, a.dropout_scale);
          pair.differentiate(value, d_value, moved.at[k / 2][t][k % 2 * 2 + e]..., states[k]);
          sums.add(pair, k);
          if constexpr (Spec::by_lse) by_row[k] += value;
          else if constexpr (Spec::sqdist)
            if (pair.kept) by_row[k] += pair.d_norm();
        }
      }
  }
  // The scores of a row that are extreme, from what the forward pass has counted them from.
  FG_DEVICE void count_from_tops(Scores& s) const {
    bool extreme = false;
#pragma unroll
    for (int n = 0; n < lane_rows; ++n) extreme = extreme || states[n].top != 0.0f;
    if (fg::ballot(extreme) != 0)
#pragma unroll
      for (int n = 0; n < lane_rows; ++n)
#pragma unroll
        for (int t = 0; t < s_tiles; ++t)
#pragma unroll
          for (int e = n % 2 * 2; e < n % 2 * 2 + 2; ++e) s.at[n / 2][t][e] = __fadd_rn(s.at[n / 2][t][e], -states[n].top);
  }
};

// Runs a kernel; of one that is for launches that bound scores, or for others, the one that a launch needs.
template <class Kernel, class Arguments> FG_DEVICE void run_kernel(const Arguments& a) {
  Kernel kernel(a);
  kernel.run(kernel);
}
template <template <class, class, bool, bool, Adding> class Kernel, class Spec, class T, bool dropped, Adding how>
FG_DEVICE void run_queries(const typename Spec::Arguments& a) {
  if constexpr (Spec::bounds_rows) {
    if (make_launch(a).is_bounded) run_kernel<Kernel<Spec, T, true, dropped, how>>(a);
    else run_kernel<Kernel<Spec, T, false, dropped, how>>(a);
  } else {
    run_kernel<Kernel<Spec, T, false, dropped, how>>(a);
  }
}

}  // namespace backward
