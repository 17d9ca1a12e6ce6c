// dK and dV, and with `atomic` dQ, where warpgroups multiply, of 64 keys each.
//
// A product runs while the next one's operand is computed. Warps of their own copy Q, dO and what rows carry; without such warps everyone
// copies a tile while the one before is worked on, and what hides the rest is another block. Where tensor copies bring Q and dO, one
// thread starts those of a tile, and the others wait for its signal.
#pragma once
#include "flashgen/backward/stored_pairs.cuh"
#include "flashgen/backward/warpgroup_keys.cuh"
#include "flashgen/backward/warpgroup_visits.cuh"

namespace backward {

// What rows of a lane carry, where a tile is weighed at once: half is read at once, before a wait, and what registers have no room for
// when it is asked for.
template <int s_tiles> struct CarriedByRows {
  const float* of_rows;
  float2 early[s_tiles / 2];
  FG_DEVICE explicit CarriedByRows(const float* rows) : of_rows(rows) {
#pragma unroll
    for (int t = 0; t < s_tiles / 2; ++t) early[t] = pair(t);
  }
  FG_DEVICE float2 pair(int t) const { return fg::shared_load(reinterpret_cast<const float2*>(of_rows + 8 * t + fg::fragment_column(0))); }
  FG_DEVICE float operator[](int n) const {
    const float2 both = n / 2 < s_tiles / 2 ? early[n / 2 % (s_tiles / 2)] : pair(n / 2);
    return n % 2 ? both.y : both.x;
  }
};

template <class Base> struct ByWarpgroups : Base {
  using typename Base::Spec, typename Base::T, typename Base::P, typename Base::Ahead, typename Base::KeptPairs, typename Base::Known, typename Base::Notes, typename Base::PairElement, typename Base::Place, typename Base::Row, typename Base::RowWords, typename Base::Team;
  using typename Base::KTile, typename Base::Memory, typename Base::OTile, typename Base::PTile, typename Base::QTile, typename Base::VTile;
  using Base::BC, Base::BINS, Base::BR, Base::D, Base::DP, Base::DV, Base::DVP, Base::SEEN, Base::atomic, Base::ds_stages, Base::has_producers, Base::k_tiles, Base::more_stages, Base::row_bytes, Base::pairs_staged, Base::persistent, Base::s_tiles, Base::split, Base::stages, Base::takes_turns, Base::threads, Base::v_tiles;
  using Base::CARRIERS, Base::CONSUMERS, Base::COPIERS_OF_PAIRS, Base::PRODUCERS, Base::ROWS_SHOWN;
  using Base::a, Base::dk, Base::dv, Base::kv_len, Base::maps, Base::memory, Base::part, Base::q_len, Base::u, Base::visits, Base::warp, Base::warp_key, Base::x;
  using Base::column0, Base::d_o_tile, Base::drawn_pairs, Base::ds_tile, Base::fetch_rows, Base::k_tile, Base::load_lse, Base::load_rows, Base::lse_rows, Base::put_row, Base::put_rows, Base::q_tile, Base::rows, Base::seen_rows, Base::transpose, Base::v_tile;
  using Base::Base;
  using Signals = fg::Signals<stages, (P::producers > 0 ? 2 : 1)>;
  using StagedPairs = fg::StagedPairs<PairElement, BC>;  // what pairs of 16 queries read
  using PairSignals = fg::Signals<1>;
  KEY_MEMORY_IS_PLANNED

  // Warpgroups that need each other's dS take it a step later, so that they need not keep step: one multiplies while another
  // is busy with its pairs.
  static constexpr bool dq_late = has_producers && atomic;
  static constexpr bool tight = DP + DVP > 128;     // dK and dV leave no registers for what could be read ahead
  static constexpr int parts = BR / (8 * s_tiles);  // of a tile of queries
  // Then dQ is multiplied in front of dK, and leaves while that is. Of two parts dK of the first one is under way by then.
  static constexpr bool dq_in_front = dq_late && parts == 1;
  // S of the next tile is started behind dK, which hides that dQ and dS leave; not where pairs need registers for more than products. The
  // last tile is awaited twice, as only signals of tensor copies can be.
  static constexpr bool weighs_whole = P::s_columns == 128;
  static constexpr bool s_ahead = dq_in_front && P::tensor_copies && Spec::marked && Spec::weighs_first && !weighs_whole;
  static constexpr int groups = P::warps / 4;
  // Its number costs a shuffle, which is no part of the way from one product to the next where `warp` is asked for beside them.
  FG_DEVICE int own_warp() const { return s_ahead ? warp : fg::warp_index(); }
  FG_DEVICE int group() const { return groups == 1 ? 0 : own_warp() / 4; }
  // Named barriers: tile n is in its stage; its stage may be filled again; the other warpgroups have shared their dS of it, and
  // are done with that of the tile before.
  FG_DEVICE static constexpr int copied(int n, int group) { return 1 + int(fg::stage_of<stages>(n)) * groups + group; }
  FG_DEVICE static constexpr int used(int n) { return 1 + stages * groups + int(fg::stage_of<stages>(n)); }
  FG_DEVICE static constexpr int shared_ds(int n, int group) { return 1 + stages * (groups + 1) + int(fg::stage_of<2>(n)) * groups + group; }
  static constexpr int LIST_FREE = 1 + stages * (groups + 1) + 2 * groups, LISTED = LIST_FREE + 1, TILE_KNOWN = LISTED + 1;
  static_assert((persistent && has_producers ? TILE_KNOWN : LISTED) < 15, "there are 16 barriers, one of them the team's");

  static constexpr int row_groups = P::warpgroups ? fg::largest_divisor(BR / 64, groups) : 1, column_groups = P::dq_column_groups, q_tiles = DP / 8 / column_groups;
  static_assert(!P::warpgroups || 64 * row_groups == BR, "a warpgroup has 64 rows of dQ");

  // Of tensor copies: a tile is there, and, where others copy, what its rows carry; the warps that multiply are done with it. A window
  // begins with fresh ones.
  FG_DEVICE Signals signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::SIGNALS)}; }
  FG_DEVICE void make_signals(bool again) const {
    if (threadIdx.x == 0) signals().make(again, threads, 1, CARRIERS);
    if constexpr (pairs_staged)
      if (threadIdx.x == 0) pair_signals().make(again, threads, COPIERS_OF_PAIRS);
  }
  FG_DEVICE void start_tile(int n) const { start_tile(n, visits.tile(n), visits.noted(&Notes::q), visits.noted(&Notes::d_o)); }
  FG_DEVICE void start_tile(int n, int tile, int q_slab, int d_o_slab) const {
    uint64_t* const there = signals().full(n);
    fg::mbarrier_expect(there, QTile::bytes + OTile::bytes);
    if constexpr (Spec::ragged) {
      fg::copy_tile_async(q_tile(n), maps->q, rows_of_queries(a), tile * BR, q_slab, there);
      fg::copy_tile_async(d_o_tile(n), maps->d_o, rows_of_queries(a), tile * BR, d_o_slab, there);
    } else {
      fg::copy_tile_async(q_tile(n), maps->q, tile * BR, q_slab, there);
      fg::copy_tile_async(d_o_tile(n), maps->d_o, tile * BR, d_o_slab, there);
    }
  }

  bool in_chunks = false;  // whether what pairs read comes to shared memory

  // `begins`: it is the key tile's first one; `started`: its first tile is on its way.
  FG_DEVICE void multiply_window([[maybe_unused]] bool begins, [[maybe_unused]] bool started) {
    if constexpr (has_producers) {
      fg::barrier_meet(LISTED, P::threads);  // Q and dO may come
      fg::copy_async_wait<0>();              // K and V
      fg::publish_shared();
      Team::barrier();
    } else {
      if (!started) copy_next_tile(0);
      fetch_rows(0);
      put_rows(0);
      if constexpr (P::tensor_copies) {
        fg::copy_async_wait<0>();  // K and V
        fg::publish_shared();
      }
      if constexpr (persistent)
        if (begins) this->note_next();
    }
    if constexpr (pairs_staged) in_chunks = has_chunks();
    int n = 0;
    fg::Accumulators<1, s_tiles> s[parts];
    if constexpr (dq_late) {
      if (visits.count() == 0) return;
      if constexpr (s_ahead) {
        warp = fg::warp_index();
        await_tile(0);
        start_s(s[0], 0, 0);
        fg::wait_products<0>(s[0]);
      }
      if (visits.partials() > 0) take_step<true, true>(s, n++);
      else take_step<false, true>(s, n++);
    }
#pragma unroll 1
    for (; n < visits.partials(); ++n) take_step<true>(s, n);
#pragma unroll 1
    for (; n < visits.count(); ++n) take_step<false>(s, n);
    if constexpr (dq_late) finish_dq(n - 1);
  }


  // ---- copies ----
  FG_DEVICE void start_once_free(int n, int thread) const {
    signals().await_room(n);
    if (thread == 0) start_tile(n);
  }
  // Without tensor copies.
  FG_DEVICE void copy_by_threads() {
    const int count = visits.count(), thread = int(threadIdx.x) - CONSUMERS;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      if (n >= stages) fg::barrier_wait(used(n), PRODUCERS + CONSUMERS);
      copy_tile<PRODUCERS>(n, thread);
      if constexpr (Spec::row_state)
        for (int row = visits.tile(n) * BR + thread, last = visits.tile(n) * BR + BR; row < last; row += PRODUCERS) {
          const int place = visits.noted(&Notes::head) * lse_rows() + row, at = row + BR - last;
          put_row(n, at, row < q_len ? load_lse(place) : Spec::divided ? 0.0f : -INFINITY, row < q_len ? fg::global_load(delta_of(a) + place) : 0.0f);
          if constexpr (SEEN > 0)
            if (n < visits.partials()) {
              uint32_t seen[SEEN];
              see(seen, make_row(a, u, x, int(a.q_start) + fg::min(row, q_len - 1)));
#pragma unroll
              for (int k = 0; k < SEEN; ++k) fg::shared_store(seen_rows(k, n) + at, seen[k]);
            }
        }
      fg::copy_async_wait<0>();
      fg::publish_shared();
      for (int group = 0; group < groups; ++group) fg::barrier_arrive(copied(n, group), PRODUCERS + 128);
    }
  }
  // What pairs read comes to shared memory while the tile before is worked on, where rows are whole chunks; a warp copies it that brings
  // nothing else. Those who multiply have it from there transposed, and room is left as soon as they do.
  FG_DEVICE PairSignals pair_signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::PAIR_SIGNALS)}; }
  FG_DEVICE StagedPairs staged_pairs(int row) const { return {memory + Memory::PAIRS + row * StagedPairs::row_bytes}; }
  // Where a lane begins to copy what pairs of tile n read.
  FG_DEVICE const PairElement* own_pairs(int n) const {
    return Base::first_pair(visits.tile(n) * BR, column0() + StagedPairs::own_column()) + StagedPairs::own_row() * pairs_by_row(a);
  }
  FG_DEVICE bool has_chunks() const {
    const bool chunks = visits.count() > 0 && pairs_by_column(a) == 1 && StagedPairs::are_chunks(own_pairs(0), pairs_by_row(a));
    return fg::ballot(chunks) != 0;
  }
  FG_DEVICE void copy_pairs() const {
    const int64_t stride = pairs_by_row(a);
#pragma unroll 1
    for (int n = 0; n < visits.count(); ++n) {
      const PairElement* own = own_pairs(n);
      pair_signals().await_room(n);
#pragma unroll 1
      for (int row = 0; row < BR; row += 16, own += 16 * stride)
        staged_pairs(row).copy_async(own, stride, q_len - visits.tile(n) * BR - row, kv_len - column0());
      fg::copy_async_wait<0>();
      fg::mbarrier_arrive(pair_signals().full(n));
    }
  }
  FG_DEVICE void take_pairs(Ahead& ahead, int n) const {
    pair_signals().await(n);
    staged_pairs(8 * s_tiles * part).load_transposed(ahead.at, warp_key);
    if (part == parts - 1 && n + 1 < visits.count()) pair_signals().release(n);
  }
  // Without producer warps, where the places of tile n are free.
  FG_DEVICE void copy_next_tile(int n) {
    if constexpr (P::tensor_copies) {
      if (n < visits.count() && threadIdx.x == 0) start_tile(n);
      return;
    }
    copy_tile<threads>(n, fg::again(int(threadIdx.x)));
  }
  template <int copiers> FG_DEVICE void copy_tile(int n, int thread) {
    if (n >= visits.count()) return;
    const int first = visits.tile(n) * BR;
    fg::copy_rows_async<copiers, D>(q_tile(n), rows_of_q<T>(a, visits.noted(&Notes::q)), first, q_len - first, thread);
    fg::copy_rows_async<copiers, DV>(d_o_tile(n), rows_of_d_o<T>(a, visits.noted(&Notes::d_o)), first, q_len - first, thread);
    fg::copy_async_commit();
  }
  FG_DEVICE void await_tile(int n) {
    if constexpr (P::tensor_copies) {
      if constexpr (!has_producers) Team::barrier();  // everyone is done with the place of tile n + 1
      signals().await(n);
      return;
    }
    if constexpr (has_producers) {
      fg::barrier_wait(copied(n, group()), PRODUCERS + 128);
    } else {
      fg::copy_async_wait<0>();
      fg::publish_shared();
      Team::barrier();  // tile n is there, and everyone is done with the place of tile n + 1
      copy_next_tile(n + 1);
      fetch_rows(n + 1);
    }
  }
  // Once products run, which hide it: the wait for what rows carry, or, without producer warps, what it takes a thread to copy on.
  FG_DEVICE void follow_tile(int n) {
    if constexpr (P::tensor_copies && has_producers) signals().await(n, ROWS_SHOWN);
    if constexpr (P::tensor_copies && !has_producers) {
      copy_next_tile(n + 1);
      fetch_rows(n + 1);
    }
  }

  // ---- steps ----
  template <bool masked, bool first = false> FG_DEVICE void take_step(fg::Accumulators<1, s_tiles> (&s)[parts], int n) {
    if constexpr (weighs_whole) weigh_whole_tile<masked, first>(n);
    else weigh_in_parts<masked, first>(s, n);
  }
  // A tile of 128 queries is weighed at once: products are half as many and twice as wide as by two parts. S and dP fill the registers
  // beside dK and dV, so that P is rounded when dS is, and half of what rows carry is read where pairs need it. dQ of the tile before is
  // multiplied first, and leaves beside the others. What a warpgroup does itself runs beside products of the other one.
  template <bool masked, bool first = false> FG_DEVICE void weigh_whole_tile(int n) {
    fg::Accumulators<1, s_tiles> s, dp;
    fg::LeftRows<T, 1, 8 * s_tiles> p, ds;
    await_tile(n);
    start_s(s, n, 0);
    start_dp(dp, n, 0);
    follow_tile(n);
    if constexpr (atomic && !first) hand_over(n - 1);  // while products run
    Known known;
    Base::template ask<masked>(known, n);  // read before the wait that it is needed after
    const CarriedByRows<s_tiles> lses(rows(RowWords::lse, n));
    fg::wait_products<1>(s);
    Base::template weigh_pairs<masked>(s, lses, n, known, Ahead{});
    const CarriedByRows<s_tiles> deltas(rows(RowWords::delta, n));
    fg::wait_products<0>(dp);
    Base::template differentiate_pairs<masked>(s, dp, deltas, n);
    fg::round_into(p, s);
    fg::round_into(ds, dp);
    fg::Accumulators<1, q_tiles> dq;
    if constexpr (atomic && !first) {
      await_ds(n - 1);
      start_dq(dq, n - 1);
    }
    // dV += Pᵀ dO, dK += dSᵀ Q
    fg::begin_products(dv, p);
    fg::start_product_across(dv, p, d_o_tile(n), 0);
    fg::warpgroup_commit();
    if constexpr (atomic) store_ds(ds, n);
    fg::begin_products(dk, ds);
    fg::start_product_across(dk, ds, q_tile(n), 0);
    fg::warpgroup_commit();
    if constexpr (atomic && !first) {
      fg::wait_products<2>(dq);
      put_dq(dq);
    }
    fg::wait_products<0>(dv, dk, p, ds);
    release_tile(n);
  }
  // A tile of 128 rows goes through it as two parts: what begins and ends a step is paid once for both, and products of one
  // part run while the other is weighed. So does one of 64 rows where three blocks share the registers: whole, its accumulators
  // would leave none for products under way, and the assembler would wait for each.
  // Where S is started ahead it is there.
  template <bool masked, bool first = false> FG_DEVICE void weigh_in_parts(fg::Accumulators<1, s_tiles> (&begun)[parts], int n) {
    fg::Accumulators<1, s_tiles> own[parts], dp[parts];
    auto& s = s_ahead ? begun : own;
    fg::LeftRows<T, 1, 8 * s_tiles> p[parts], ds[parts];
    if constexpr (!s_ahead) {
      await_tile(n);
      start_s(s[0], n, 0);
    }
    start_dp(dp[0], n, 0);
    follow_tile(n);
    if constexpr (dq_late && !s_ahead && !first) hand_over(n - 1);  // while products run
    fg::Accumulators<1, q_tiles> dq;
#pragma unroll
    for (int k = 0; k < parts; ++k) {
      const bool more = k + 1 < parts;
      part = k;
      // dV += Pᵀ dO, dK += dSᵀ Q
      if constexpr (Spec::weighs_first) {
        Ahead ahead;
        bool transposed = false;
        if constexpr (pairs_staged) {
          if (in_chunks) take_pairs(ahead, n);
          else transposed = Base::template read_ahead<masked>(ahead, n);
        } else {
          transposed = Base::template read_ahead<masked>(ahead, n);
        }
        float carried[2 * s_tiles];  // of this lane's rows: read before the wait that it is needed after
        load_rows(carried, rows(RowWords::lse, n) + 8 * s_tiles * k);
        Known known;
        Base::template ask<masked>(known, n);  // so is this
        if (k > 0) fg::wait_products<2>(s[k]);
        else if (!s_ahead) fg::wait_products<1>(s[k]);
        if (transposed) transpose(ahead);
        Base::template weigh<masked>(s[k], carried, n, known, ahead, [&](const fg::Accumulators<1, s_tiles>& weights) { fg::round_into(p[k], weights); });
        fg::begin_products(dv, p[k]);
        fg::start_product_across(dv, p[k], d_o_tile(n), 8 * s_tiles * k);
        fg::warpgroup_commit();
        if (more) start_s(s[k + 1], n, k + 1);
        if constexpr (!tight) load_rows(carried, rows(RowWords::delta, n) + 8 * s_tiles * k);
        if (more) fg::wait_products<2>(dp[k]);
        else fg::wait_products<1>(dp[k]);
        if constexpr (tight) load_rows(carried, rows(RowWords::delta, n) + 8 * s_tiles * k);
        Base::template differentiate_pairs<masked>(s[k], dp[k], carried, n);
      } else {
        const KeptPairs kept_pairs = drawn_pairs(n);  // while products run
        fg::wait_products<0>(s[k], dp[k]);
        Base::template pairs<masked>(s[k], dp[k], kept_pairs, n);
        fg::round_into(p[k], s[k]);
        fg::begin_products(dv, p[k]);
        fg::start_product_across(dv, p[k], d_o_tile(n), 8 * s_tiles * k);
        fg::warpgroup_commit();
        if (more) start_s(s[k + 1], n, k + 1);
      }
      fg::round_into(ds[k], dp[k]);
      if constexpr (Spec::stores_pairs) this->template store_pairs<masked>(dp[k], ds[k], n);
      if constexpr (atomic) {
        if (dq_late && !first && k == 0) await_ds(n - 1);
        store_ds(ds[k], n);
        if constexpr (dq_in_front && !first) start_dq(dq, n - 1);
      }
      fg::begin_products(dk, ds[k]);
      fg::start_product_across(dk, ds[k], q_tile(n), 8 * s_tiles * k);
      fg::warpgroup_commit();
      if (more) start_dp(dp[k + 1], n, k + 1);
    }
    part = 0;
    if constexpr (dq_in_front) {
      if constexpr (!first) {
        fg::wait_products<1>(dv, p, dq);
        put_dq(dq);
      }
      if constexpr (s_ahead) {
        const int next = fg::min(n + 1, visits.count() - 1);  // the last one's once more: a branch would part the products
        await_tile(next);
        start_s(s[0], next, 0);  // in the registers of dQ
        hand_over(n);
        warp = fg::warp_index();
        fg::wait_products<0>(dv, dk, p, ds, s[0]);
        return release_tile(n);
      }
    } else if constexpr (atomic) {
      // dQ += dS K
      if constexpr (!has_producers) {
        fg::publish_shared();
        Team::barrier();
      }
      if constexpr (!first) start_dq(dq, dq_late ? n - 1 : n);
      fg::wait_products<0>(dv, dk, p, ds, dq);
      release_tile(n);
      if constexpr (dq_late) {
        if constexpr (!first) put_dq(dq);
      } else {
        add_dq(dq, n);
      }
      return;
    }
    fg::wait_products<0>(dv, dk, p, ds);
    release_tile(n);
  }
  // Sᵀ = K Qᵀ, dPᵀ = V dOᵀ
  FG_DEVICE void start_s(fg::Accumulators<1, s_tiles>& s, int n, int part) {
    fg::begin_products(s);
    fg::start_product(s, k_tile(), 64 * group(), q_tile(n), 8 * s_tiles * part);
    fg::warpgroup_commit();
  }
  FG_DEVICE void start_dp(fg::Accumulators<1, s_tiles>& dp, int n, int part) {
    fg::begin_products(dp);
    fg::start_product(dp, v_tile(), 64 * group(), d_o_tile(n), 8 * s_tiles * part);
    fg::warpgroup_commit();
  }
  FG_DEVICE void store_ds(const fg::LeftRows<T, 1, 8 * s_tiles>& ds, int n) {
    const int lane = fg::again(fg::lane_index());
#pragma unroll
    for (int t = 0; t < s_tiles / 2; ++t) fg::store_left(ds_tile(n), warp_key, 8 * s_tiles * part + 16 * t, ds.at[0][t], lane);
  }
  // dS of tile n goes to the other warpgroups, dQ of the tile before to global memory.
  FG_DEVICE void hand_over(int n) {
    const int own = group();
    fg::publish_shared();
#pragma unroll
    for (int group = 0; group < groups; ++group)
      if (group != own) fg::barrier_arrive(shared_ds(n, group), CONSUMERS);
    if (n > 0) send_dq(n - 1);
  }
  FG_DEVICE void await_ds(int n) { fg::barrier_wait(shared_ds(n, group()), CONSUMERS); }
  // The warpgroups divide a tile of dQ into 64 rows each and, where there are more of them, into columns; some may have none.
  FG_DEVICE int dq_row() const { return group() % row_groups * 64; }
  FG_DEVICE int dq_column() const { return group() / row_groups * 8 * q_tiles; }
  FG_DEVICE bool has_dq() const { return row_groups * column_groups == groups || dq_column() < DP; }
  FG_DEVICE void start_dq(fg::Accumulators<1, q_tiles>& dq, int n) {
    fg::begin_products(dq);
    if (has_dq()) fg::start_product_across(dq, ds_tile(n), dq_row(), k_tile(), dq_column());
    fg::warpgroup_commit();
  }
  // That of the last tile.
  FG_DEVICE void finish_dq(int n) {
    fg::Accumulators<1, q_tiles> dq;
    if constexpr (!s_ahead) hand_over(n);
    await_ds(n);
    start_dq(dq, n);
    fg::wait_products<0>(dq);
    put_dq(dq);
    fg::publish_shared();
    send_dq(n);
  }
  FG_DEVICE void release_tile(int n) {
    if constexpr (takes_turns) this->leave_turn(n);
    if (!has_producers) put_rows(n + 1);
    if (!has_producers || n + stages >= visits.count()) return;
    if constexpr (P::tensor_copies) return signals().release(n);
    fg::barrier_arrive(used(n), PRODUCERS + CONSUMERS);
  }

  // Where a warp's 16 rows of a tile of dQ are summed up; null past the last row, and where the warpgroup has no columns.
  FG_DEVICE float* dq_place(int n) const {
    const int row_tiles = (q_len + 15) / 16, tile = (visits.tile(n) * BR + dq_row()) / 16 + own_warp() % 4;
    if (tile >= row_tiles || !has_dq()) return nullptr;
    return dq_sums(a) + (int64_t(visits.noted(&Notes::head)) * row_tiles + tile) * (16 * DP) + dq_column() / 8 * 128;
  }
  FG_DEVICE void add_dq(const fg::Accumulators<1, q_tiles>& dq, int n) {
    float* const sums = dq_place(n);
    if (!sums) return;
#pragma unroll
    for (int t = 0; t < q_tiles; ++t) fg::global_add(sums + 128 * t + 4 * fg::lane_index(), dq.at[0][t]);
  }

  // With warps that copy they leave by way of shared memory: put there by one step, sent by the next.
  FG_DEVICE float* dq_part() const { return reinterpret_cast<float*>(memory + Memory::DQ) + own_warp() * 128 * q_tiles; }
  FG_DEVICE void put_dq(const fg::Accumulators<1, q_tiles>& dq) {
    if (!has_dq()) return;
    if (fg::lane_index() == 0) fg::bulk_wait_read();  // what was sent before has left
    fg::warp_barrier();
    float4* const places = reinterpret_cast<float4*>(dq_part()) + fg::lane_index();
#pragma unroll
    for (int t = 0; t < q_tiles; ++t)
      fg::shared_store(places + 32 * t, make_float4(dq.at[0][t][0], dq.at[0][t][1], dq.at[0][t][2], dq.at[0][t][3]));
  }
  FG_DEVICE void send_dq(int n) {
    fg::warp_barrier();
    float* const sums = dq_place(n);
    const float* const part = dq_part();
    if (fg::lane_index() != 0 || !sums) return;
    fg::bulk_add_async(sums, part, 512 * q_tiles);
    fg::bulk_commit();
  }

  // ---- epilogue ----
  FG_DEVICE void store_keys(const Place& place) {
    Base::finish_sums();
    const auto to_dk = rows_of_dk<T>(a, place.b, place.hkv, place.column0);
    const auto to_dv = rows_of_dv<T>(a, place.b, place.hkv, place.column0);
    if constexpr (Spec::writes_f32_of_keys) {
      fg::copy_async_wait<0>();
      fg::store_sums<D>(to_dk, dk.at[0], warp_key, fg::ColumnsFrom{8 * k_tiles * part}, place.count);
      fg::store_sums<DV>(to_dv, dv.at[0], warp_key, fg::ColumnsFrom{8 * v_tiles * part}, place.count);
    } else {
      fg::store_fragments<T, D, fg::Kept::briefly>(to_dk, dk.at[0], warp_key, place.count);
      fg::store_fragments<T, DV, fg::Kept::briefly>(to_dv, dv.at[0], warp_key, place.count);
    }
    if (has_producers && atomic && fg::lane_index() == 0) fg::bulk_wait_read();
  }
};

template <class Spec, class T, bool in_bounds, bool dropped, bool atomic, Adding how>
using Block = WarpgroupVisits<ByWarpgroups<StoredPairs<WarpgroupKeys<NextKeyTiles<Keys<Spec, T, in_bounds, dropped, atomic, how>>>>>>;

}  // namespace backward
