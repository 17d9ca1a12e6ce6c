// dK and dV, and with `atomic` dQ, by two warpgroups that have half of the columns of dQ each.
//
// They share 64 keys: each has scores of half a tile's queries and half of the columns of dK and dV, and P and dS go through shared
// memory. Or, where registers hold whole rows of dK and dV, each has 64 keys of its own. dQ of a tile is multiplied in the next step: it
// leaves while S of that step is multiplied, or with own keys dK. Warps of their own copy Q, dO and what rows carry: one thread starts
// tensor copies, Q two tiles ahead, dO one.
#pragma once
#include "flashgen/backward/stored_pairs.cuh"
#include "flashgen/backward/warpgroup_keys.cuh"
#include "flashgen/backward/warpgroup_visits.cuh"
#include "flashgen/clusters.cuh"
#include "flashgen/warpgroup_spans.cuh"

namespace backward {

template <class Base> struct Wide : Base {
  using typename Base::Spec, typename Base::T, typename Base::P, typename Base::Ahead, typename Base::KeptPairs, typename Base::Known, typename Base::Notes, typename Base::Place, typename Base::RowWords, typename Base::Team;
  using typename Base::KTile, typename Base::Memory, typename Base::OTile, typename Base::PTile, typename Base::QTile, typename Base::TheirK, typename Base::VTile;
  using Base::BC, Base::BINS, Base::BR, Base::D, Base::DP, Base::DV, Base::OWN_K, Base::OWN_V, Base::atomic, Base::clustered, Base::ds_stages, Base::k_tiles, Base::more_stages, Base::row_bytes, Base::paired, Base::persistent, Base::s_tiles, Base::shares_dq, Base::split, Base::stages, Base::takes_turns, Base::threads, Base::v_tiles;
  using Base::CARRIERS, Base::ROWS_SHOWN;
  using Base::a, Base::dk, Base::dv, Base::maps, Base::memory, Base::part, Base::q_len, Base::visits, Base::warp_key;
  using Base::d_o_tile, Base::drawn_pairs, Base::ds_tile, Base::first_of_own, Base::k_tile, Base::load_rows, Base::p_tile, Base::q_tile, Base::rows, Base::their_k_tile, Base::transpose, Base::v_tile;
  using Base::Base;
  using QSignals = fg::Signals<stages>;
  using Signals = fg::Signals<1, 2>;
  KEY_MEMORY_IS_PLANNED

  int exchanged = 0;  // tiles of the windows before

  // Named barriers, the last two for each warpgroup: where keys are shared, P and dS of the tile before are used up; where each has its
  // own, the other has shared its dS of tile n, and is done with that of the tile before.
  static constexpr int LIST_FREE = 1, LISTED = 2, USED_UP = 3;
  FG_DEVICE static constexpr int shared_ds(int n, int group) { return 3 + 2 * int(fg::stage_of<2>(n)) + group; }
  using ColumnsOfK = fg::Half<KTile>;
  using ColumnsOfV = fg::Half<VTile>;
  static constexpr bool by_columns = split == 1 || (k_tiles + v_tiles > 32 && P::dq_sent == 0);  // dK and dV leave no registers for all of dQ
  static_assert(!clustered || (split > 1 && P::dq_sent == 0), "dQ leaves by pieces");
  FG_DEVICE int group() const { return split > 1 ? part : fg::warpgroup_index<2>(); }

  // Q is there, or dO, and what its rows carry; the warps that multiply are done with it. A window begins with fresh ones.
  FG_DEVICE QSignals q_signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::Q_SIGNALS)}; }
  FG_DEVICE Signals signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::SIGNALS)}; }
  FG_DEVICE void make_signals(bool again) const {
    if (threadIdx.x != 0) return;
    if constexpr (shares_dq) ds_signals().make(again);
    constexpr int users = paired ? P::warps * P::cluster : threads;
    q_signals().make(again, users, 1);
    signals().make(again, users, 1, CARRIERS);
  }

  template <class Tile> FG_DEVICE static void copy_tile(Tile to, const fg::TensorMap& map, [[maybe_unused]] int column, int first, int slab, uint64_t* signal) {
    if constexpr (clustered) fg::copy_columns_async(to, map, column, first, slab, signal);
    else if constexpr (paired) fg::copy_part_to_all<P::cluster>(to, map, first, slab, signal);
    else fg::copy_tile_async(to, map, first, slab, signal);
  }
  FG_DEVICE void start_once_free(int n, int thread) const {
    q_signals().await_room(n);
    if (thread == 0) {
      fg::mbarrier_expect(q_signals().full(n), QTile::bytes);
      copy_tile(q_tile(n), maps->q, first_of_own(OWN_K), visits.tile(n) * BR, visits.noted(&Notes::q), q_signals().full(n));
    }
    signals().await_room(n);
    if (thread == 0) {
      fg::mbarrier_expect(signals().full(n), OTile::bytes);
      copy_tile(d_o_tile(n), maps->d_o, first_of_own(OWN_V), visits.tile(n) * BR, visits.noted(&Notes::d_o), signals().full(n));
    }
  }

  // -- what the blocks of a cluster exchange --
  // Each has sums of S and of dP over its own columns. A warp sends them to the same one of the other block, and adds what that sends: both
  // have the same bits. What is sent takes the place of what was there a step before, which has been read: the other sends S of a step
  // once it has dP of the one before, and dP once it has read S.

  enum Exchange { OF_S, OF_DP };
  FG_DEVICE uint64_t* exchange_signal(int which, int warp) const { return reinterpret_cast<uint64_t*>(memory + Memory::EXCHANGE_SIGNALS) + which * P::warps + warp; }
  FG_DEVICE float4* exchange_place(int which) const {
    return reinterpret_cast<float4*>(memory + Memory::EXCHANGE) + (which * P::warps + fg::warp_index()) * 32 * s_tiles + fg::lane_index();
  }
  FG_DEVICE void make_exchange() const {
    if (threadIdx.x != 0) return;
    for (int which = 0; which < 2; ++which)
      for (int warp = 0; warp < P::warps; ++warp) fg::mbarrier_init(exchange_signal(which, warp), 1);
    fg::publish_shared();
  }
  FG_DEVICE void send(const fg::Accumulators<1, s_tiles>& own, int which) const {
    uint64_t* const signal = exchange_signal(which, fg::warp_index());
    if (fg::lane_index() == 0) fg::mbarrier_expect(signal, 32 * s_tiles * int(sizeof(float4)));
    fg::send_async<32>(exchange_place(which), own.at[0], signal, fg::cluster_rank() ^ 1);
  }
  FG_DEVICE void receive(fg::Accumulators<1, s_tiles>& sum, int which, int n) const {
    fg::mbarrier_wait(exchange_signal(which, fg::warp_index()), (exchanged + n) % 2);
    const float4* const theirs = exchange_place(which);
#pragma unroll
    for (int t = 0; t < s_tiles; ++t) {
      const float4 four = fg::shared_load(theirs + 32 * t);
      sum.at[0][t][0] += four.x, sum.at[0][t][1] += four.y, sum.at[0][t][2] += four.z, sum.at[0][t][3] += four.w;
    }
    fg::touch(sum);  // it is read before anything else is sent
  }

  FG_DEVICE void multiply_window(bool /*begins*/, bool /*started*/) {
    Base::template meet<LISTED>();  // Q and dO may come
    fg::copy_async_wait<0>();       // K and V
    fg::publish_shared();
    Team::barrier();
    int n = 0;
    if constexpr (atomic) {
      if (visits.count() == 0) return;
      if (visits.partials() > 0) take_step<true, true>(n++);
      else take_step<false, true>(n++);
    }
#pragma unroll 1
    for (; n < visits.partials(); ++n) take_step<true>(n);
#pragma unroll 1
    for (; n < visits.count(); ++n) take_step<false>(n);
    if constexpr (atomic) finish_dq(n - 1);
    if constexpr (clustered) exchanged += visits.count();
  }

  template <bool masked, bool first = false> FG_DEVICE void take_step(int n) {
    if constexpr (paired) step_with_exchanged_ds<masked, first>(n);
    else if constexpr (split > 1) step_with_shared_keys<masked, first>(n);
    else step_with_own_keys<masked, first>(n);
    if constexpr (takes_turns && !paired) this->leave_turn(n);
  }
  // As with shared keys, and dQ of the tile before is multiplied between S and dP, once the other block's dS is there. Who has a named
  // barrier behind is done with what is read of P and dS.
  template <bool masked, bool first> FG_DEVICE void step_with_exchanged_ds(int n) {
    constexpr bool adds = shares_dq && !first;
    fg::Accumulators<1, s_tiles> s, dp;
    [[maybe_unused]] fg::Accumulators<1, dq_tiles> dq;
    fg::barrier_arrive(USED_UP + 1 - group(), threads);  // done with P of the tile before
    q_signals().await(n);
    start_s(s, n);
    if constexpr (adds) start_own_dq(dq, n - 1);
    signals().await(n);
    start_dp(dp, n);
    signals().await(n, ROWS_SHOWN);
    Ahead ahead;
    const bool transposed = Base::template read_ahead<masked>(ahead, n);
    float carried[2 * s_tiles];
    load_rows(carried, rows(RowWords::lse, n) + 8 * s_tiles * part);
    Known known;
    Base::template ask<masked>(known, n);
    fg::wait_products<adds ? 2 : 1>(s);
    if (transposed) transpose(ahead);
    weigh_and_share<masked>(s, carried, n, known, ahead);
    if constexpr (adds) {
      fg::wait_products<1>(dq);
      fg::mbarrier_arrive_at(ds_signals().taken(), fg::cluster_rank() ^ 1);
    }
    Team::barrier();  // P is there, and dS of the tile before used up
    start_dv(n);
    if constexpr (adds) put_own_dq(dq, n - 1);
    load_rows(carried, rows(RowWords::delta, n) + 8 * s_tiles * part);
    fg::wait_products<1>(dp);
    Base::template differentiate_pairs<masked>(s, dp, carried, n);
    if constexpr (adds) fg::mbarrier_wait(ds_signals().taken(), (n - 1) % 2);
    share(ds_tile(n), dp);
    Team::barrier();  // dS is there
    if constexpr (shares_dq) send_ds(n);
    // dK += dSᵀ Q
    fg::begin_products(dk);
    fg::start_half_across<false>(dk, ds_tile(n), q_tile(n), part);
    fg::warpgroup_commit();
    fg::wait_products<1>(dv);
    if (n + 1 < visits.count()) release(signals(), n);
    fg::wait_products<0>(dk);
    if (n + stages < visits.count()) release(q_signals(), n);
  }

  // -- what the blocks of a cluster share --
  // Each brings half of Q and dO for both, once both are done with what was there. Each has dS of its own keys, sends it to the other,
  // and multiplies half of dQ's columns over the keys of both: half of these for each warpgroup.
  static constexpr int dq_tiles = DP / 4 / 8;
  static_assert(!shares_dq || (P::cluster == 2 && DP % 256 == 0 && split == 2), "a warpgroup has whole panels of dQ");

  // dS of the other block is there; it has used up this one's.
  struct DsSignals {
    uint64_t* base;
    FG_DEVICE uint64_t* came() const { return base; }
    FG_DEVICE uint64_t* taken() const { return base + 1; }
    FG_DEVICE void make(bool again) const {
      if (again) fg::mbarrier_invalidate(came()), fg::mbarrier_invalidate(taken());
      fg::mbarrier_init(came(), 1);
      fg::mbarrier_init(taken(), P::warps);
    }
  };
  FG_DEVICE DsSignals ds_signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::DS_SIGNALS)}; }
  FG_DEVICE PTile their_ds_tile() const { return {reinterpret_cast<T*>(memory + Memory::THEIR_DS)}; }
  FG_DEVICE void send_ds(int n) const {
    if (threadIdx.x != 0) return;
    fg::mbarrier_expect(ds_signals().came(), PTile::bytes);
    fg::send_bytes_async(their_ds_tile().base, ds_tile(n).base, PTile::bytes, ds_signals().came(), fg::cluster_rank() ^ 1);
  }
  template <int ring, int fillings> FG_DEVICE static void release(const fg::Signals<ring, fillings>& of, int n) {
    for (int rank = 0; rank < P::cluster; ++rank) fg::mbarrier_arrive_at(of.empty(n), rank);
  }
  FG_DEVICE int first_of_own_dq() const { return 8 * dq_tiles * group(); }  // of the block's columns
  FG_DEVICE void start_own_dq(fg::Accumulators<1, dq_tiles>& dq, int n) {
    const int place = fg::again(0), column = first_of_own_dq();  // as for dP
    fg::mbarrier_wait(ds_signals().came(), n % 2);
    fg::begin_products(dq);
    fg::start_product_across(dq, PTile{ds_tile(n).base + place}, 0, KTile{k_tile().base + place}, first_of_own(DP / 2) + column);
    fg::start_product_across(dq, PTile{their_ds_tile().base + place}, 0, TheirK{their_k_tile().base + place}, column, true);
    fg::warpgroup_commit();
  }
  FG_DEVICE void finish_own_dq(int n) {
    fg::Accumulators<1, dq_tiles> dq;
    start_own_dq(dq, n);
    fg::wait_products<0>(dq);
    put_own_dq(dq, n);
  }
  FG_DEVICE void put_own_dq(const fg::Accumulators<1, dq_tiles>& dq, int n) const {
    float* const sums = dq_place(n);
    if (!sums) return;
    float* const own = sums + 16 * (first_of_own(DP / 2) + first_of_own_dq()) + 4 * fg::lane_index();
#pragma unroll
    for (int t = 0; t < dq_tiles; ++t) fg::global_add(own + 128 * t, dq.at[0][t]);
  }
  // P to shared memory, once that is used up.
  template <bool masked> FG_DEVICE void weigh_and_share(fg::Accumulators<1, s_tiles>& s, const float (&lses)[2 * s_tiles], int n, const Known& known, const Ahead& ahead) {
    Base::template weigh<masked>(s, lses, n, known, ahead, [&](const fg::Accumulators<1, s_tiles>& weights) {
      fg::barrier_wait(USED_UP + part, threads);
      share(p_tile(), weights);
    });
  }
  template <bool masked, bool first> FG_DEVICE void step_with_shared_keys(int n) {
    fg::Accumulators<1, s_tiles> s, dp;
    begin_step<first>(s, dp, n);
    if constexpr (Spec::weighs_first) {
      Ahead ahead;
      const bool transposed = Base::template read_ahead<masked>(ahead, n);
      float carried[2 * s_tiles];  // of this lane's rows: read before the wait that it is needed after
      load_rows(carried, rows(RowWords::lse, n) + 8 * s_tiles * part);
      Known known;
      Base::template ask<masked>(known, n);  // so is this
      if constexpr (clustered) {
        receive(s, OF_S, n);
        fg::wait_products<0>(dp);
        send(dp, OF_DP);  // it is on its way while S is weighed
      } else {
        fg::wait_products<1>(s);
      }
      if (transposed) transpose(ahead);
      weigh_and_share<masked>(s, carried, n, known, ahead);
      Team::barrier();  // P is there
      start_dv(n);
      load_rows(carried, rows(RowWords::delta, n) + 8 * s_tiles * part);
      if constexpr (clustered) receive(dp, OF_DP, n);
      else fg::wait_products<1>(dp);
      Base::template differentiate_pairs<masked>(s, dp, carried, n);
      share(ds_tile(n), dp);
      Team::barrier();  // dS is there
      if constexpr (Spec::stores_pairs) {
        fg::LeftRows<T, 1, 8 * s_tiles> ds;
        fg::round_into(ds, dp);
        this->template store_pairs<masked>(dp, ds, n);
      }
    } else {
      const KeptPairs kept_pairs = drawn_pairs(n);  // while products run
      if constexpr (clustered) {
        receive(s, OF_S, n);
        fg::wait_products<0>(dp);
        send(dp, OF_DP);
        receive(dp, OF_DP, n);
      } else {
        fg::wait_products<0>(s, dp);
      }
      Base::template pairs<masked>(s, dp, kept_pairs, n);
      fg::barrier_wait(USED_UP + part, threads);
      share(p_tile(), s);
      share(ds_tile(n), dp);
      Team::barrier();  // both are there
      start_dv(n);
    }
    // dK += dSᵀ Q
    fg::begin_products(dk);
    fg::start_half_across<false>(dk, ds_tile(n), q_tile(n), part);
    fg::warpgroup_commit();
    fg::wait_products<1>(dv);
    if (n + 1 < visits.count()) signals().release(n);
    fg::wait_products<0>(dk);
    if (n + stages < visits.count()) q_signals().release(n);
  }
  // dQ of the tile before, and products of this one; what its rows carry is there.
  template <bool first> FG_DEVICE void begin_step(fg::Accumulators<1, s_tiles>& s, fg::Accumulators<1, s_tiles>& dp, int n) {
    const auto start_next = [&] {
      signals().await(n);
      start_dp(dp, n);
    };
    q_signals().await(n);
    if constexpr (clustered) {
      const auto send_s = [&] {
        fg::wait_products<1>(s);
        send(s, OF_S);  // what comes is there when dQ has left
      };
      start_s(s, n);
      if constexpr (atomic && !first) {
        put_pieces_of_dq<1>(n - 1, start_next, send_s);
      } else {
        start_next();
        send_s();
      }
    } else {
      if constexpr (atomic && !first && by_columns) {
        put_pieces_of_dq<1>(n - 1, [&] { start_s(s, n); }, [] {});
      } else if constexpr (atomic && !first) {
        fg::Accumulators<1, ColumnsOfK::tiles> dq;
        start_dq(dq, n - 1);
        start_s(s, n);
        fg::wait_products<1>(dq);
        put_dq(dq, n - 1);
      } else {
        start_s(s, n);
      }
      start_next();
    }
    fg::barrier_arrive(USED_UP + 1 - group(), threads);  // done with P and dS of the tile before
    signals().await(n, ROWS_SHOWN);
  }

  // P and dS leave the registers as operands; queries go through it in parts.
  template <bool masked, bool first> FG_DEVICE void step_with_own_keys(int n) {
    constexpr int parts = BR / (8 * s_tiles), first_piece = ColumnsOfK::tiles_together(0, 8);
    constexpr bool adds = atomic && !first;
    fg::Accumulators<1, s_tiles> s[parts], dp[parts];
    fg::LeftRows<T, 1, 8 * s_tiles> p[parts], ds[parts];
    q_signals().await(n);
    start_s(s[0], n);
    signals().await(n);
    start_dp(dp[0], n);
    if constexpr (adds) hand_over(n - 1);
    [[maybe_unused]] fg::Accumulators<1, first_piece> dq;
    signals().await(n, ROWS_SHOWN);
#pragma unroll
    for (int k = 0; k < parts; ++k) {
      part = k;
      Ahead ahead;
      const bool transposed = Base::template read_ahead<masked>(ahead, n);
      float carried[2 * s_tiles];
      load_rows(carried, rows(RowWords::lse, n) + 8 * s_tiles * k);
      Known known;
      Base::template ask<masked>(known, n);
      if (k == 0) fg::wait_products<1>(s[k]);
      else fg::wait_products<2>(s[k], p[k - 1]);  // all of the part before but dK is there
      if (transposed) transpose(ahead);
      Base::template weigh<masked>(s[k], carried, n, known, ahead, [&](const fg::Accumulators<1, s_tiles>& weights) { fg::round_into(p[k], weights); });
      // dV += Pᵀ dO, dK += dSᵀ Q
      fg::begin_products(dv, p[k]);
      fg::start_product_across(dv, p[k], d_o_tile(n), 8 * s_tiles * k);
      fg::warpgroup_commit();
      load_rows(carried, rows(RowWords::delta, n) + 8 * s_tiles * k);
      if (k == 0) fg::wait_products<1>(dp[k]);
      else fg::wait_products<1>(dp[k], ds[k - 1]);
      Base::template differentiate_pairs<masked>(s[k], dp[k], carried, n);
      fg::round_into(ds[k], dp[k]);
      if constexpr (Spec::stores_pairs) this->template store_pairs<masked>(dp[k], ds[k], n);
      if constexpr (atomic) {
        if (!first && k == 0) await_ds(n - 1);
        const int lane = fg::again(fg::lane_index());
#pragma unroll
        for (int t = 0; t < s_tiles / 2; ++t) fg::store_left(ds_tile(n), warp_key, 8 * s_tiles * k + 16 * t, ds[k].at[0][t], lane);
      }
      if (k + 1 < parts) {
        part = k + 1;
        start_s(s[k + 1], n);
      }
      if constexpr (adds)
        if (k + 1 == parts) {
          fg::wait_products<0>(dv, p[k]);
          if (n + 1 < visits.count()) signals().release(n);
          start_piece_of_dq(dq, 0, n - 1);  // in front of dK: it leaves while that is multiplied
        }
      fg::begin_products(dk, ds[k]);
      fg::start_product_across(dk, ds[k], q_tile(n), 8 * s_tiles * k);
      fg::warpgroup_commit();
      if (k + 1 < parts) start_dp(dp[k + 1], n);
    }
    part = 0;
    if constexpr (adds) {
      fg::wait_products<1>(dq);
      put_columns_of_dq<0>(dq, n - 1);
      if constexpr (first_piece < ColumnsOfK::tiles) put_pieces_of_dq<0, first_piece>(n - 1, [] {}, [] {});
    }
    fg::wait_products<0>(dv, p[parts - 1], dk, ds[parts - 1]);
    if (!adds && n + 1 < visits.count()) signals().release(n);
    if (n + stages < visits.count()) q_signals().release(n);
  }
  // dS of tile n goes to the other warpgroup.
  FG_DEVICE void hand_over(int n) {
    fg::publish_shared();
    fg::barrier_arrive(shared_ds(n, 1 - group()), threads);
  }
  FG_DEVICE void await_ds(int n) { fg::barrier_wait(shared_ds(n, group()), threads); }
  // Sᵀ = K Qᵀ, dPᵀ = V dOᵀ, of this warpgroup's keys and queries
  FG_DEVICE int first_key() const { return split > 1 ? 0 : 64 * group(); }
  FG_DEVICE void start_s(fg::Accumulators<1, s_tiles>& s, int n) {
    fg::begin_products(s);
    fg::start_product(s, k_tile(), first_key(), q_tile(n), 8 * s_tiles * part);
    fg::warpgroup_commit();
  }
  FG_DEVICE void start_dp(fg::Accumulators<1, s_tiles>& dp, int n) {
    const int begin = fg::again(0);  // both have one place: without, what describes it would be kept in registers
    fg::begin_products(dp);
    fg::start_product(dp, VTile{v_tile().base + begin}, first_key(), OTile{d_o_tile(n).base + begin}, 8 * s_tiles * part);
    fg::warpgroup_commit();
  }
  // dV += Pᵀ dO
  FG_DEVICE void start_dv(int n) {
    const int place = fg::again(0);  // as for dP
    fg::begin_products(dv);
    fg::start_half_across<false>(dv, PTile{p_tile().base + place}, OTile{d_o_tile(n).base + place}, part);
    fg::warpgroup_commit();
  }
  // What this warp has of Pᵀ or dSᵀ, for products.
  FG_DEVICE void share(PTile to, const fg::Accumulators<1, s_tiles>& own) const {
    const int lane = fg::again(fg::lane_index());
#pragma unroll
    for (int t = 0; t < s_tiles; ++t) fg::store_fragment(to, warp_key, 8 * (s_tiles * part + t), own.at[0][t], lane);
    fg::publish_shared();
  }

  // dQ = dS K, of this warpgroup's columns
  FG_DEVICE void start_dq(fg::Accumulators<1, ColumnsOfK::tiles>& dq, int n) {
    fg::begin_products(dq);
    fg::start_half_across<true>(dq, ds_tile(n), k_tile(), group());
    fg::warpgroup_commit();
  }
  // That of the last tile.
  FG_DEVICE void finish_dq(int n) {
    if constexpr (shares_dq) {
      finish_own_dq(n);
    } else {
      if constexpr (split == 1) {
        hand_over(n);
        await_ds(n);
      }
      if constexpr (by_columns || clustered) {
        put_pieces_of_dq<0>(n, [] {}, [] {});
      } else {
        fg::Accumulators<1, ColumnsOfK::tiles> dq;
        start_dq(dq, n);
        fg::wait_products<0>(dq);
        put_dq(dq, n);
      }
    }
  }

  // Where a warp's 16 rows of a tile of dQ are summed up; null past the last row.
  FG_DEVICE float* dq_place(int n) const {
    const int row_tiles = (q_len + 15) / 16, tile = visits.tile(n) * BR / 16 + fg::warp_index() % 4;
    if (tile >= row_tiles) return nullptr;
    return dq_sums(a) + (int64_t(visits.noted(&Notes::head)) * row_tiles + tile) * (16 * DP) + (clustered ? 16 * first_of_own(OWN_K) : 0);
  }
  static constexpr int sent_tiles = P::dq_sent / 8;
  // The columns that shared memory has room for leave by way of it, the others straight from registers.
  FG_DEVICE void put_dq(const fg::Accumulators<1, ColumnsOfK::tiles>& dq, int n) { put_columns_of_dq<0>(dq, n); }
  // Puts dQ in pieces of at most 64 columns; `beside` the first ones, and the last ones beside the `pending` products that `start_next` starts.
  template <int pending, int begin = 0, class Start, class Beside> FG_DEVICE void put_pieces_of_dq(int n, Start start_next, Beside beside) {
    constexpr int tiles = ColumnsOfK::tiles_together(begin, 8);
    constexpr bool last = begin + tiles == ColumnsOfK::tiles;
    fg::Accumulators<1, tiles> dq;
    start_piece_of_dq(dq, begin, n);
    if constexpr (begin == 0) beside();
    if constexpr (last) start_next();
    fg::wait_products<last ? pending : 0>(dq);
    put_columns_of_dq<begin>(dq, n);
    if constexpr (!last) put_pieces_of_dq<pending, begin + tiles>(n, start_next, beside);
  }
  template <int tiles> FG_DEVICE void start_piece_of_dq(fg::Accumulators<1, tiles>& dq, int begin, int n) {
    const int column = ColumnsOfK::column(group(), begin);
    const int place = fg::again(0);  // as for dP
    fg::begin_products(dq);
    fg::start_product_across(dq, PTile{ds_tile(n).base + place}, 0, KTile{k_tile().base + place}, column);
    fg::warpgroup_commit();
  }
  // Of this warpgroup's tiles of columns those from `begin` on.
  template <int begin, int tiles> FG_DEVICE void put_columns_of_dq(const fg::Accumulators<1, tiles>& dq, int n) {
    float* const sums = dq_place(n);
    const int own_half = group();
    if constexpr (begin < sent_tiles) {
      float* const own = reinterpret_cast<float*>(memory + Memory::DQ) + fg::warp_index() * 128 * sent_tiles;
      if constexpr (begin == 0) {
        if (fg::lane_index() == 0) fg::bulk_wait_read();  // what was sent before has left
        fg::warp_barrier();
      }
      float4* const places = reinterpret_cast<float4*>(own) + fg::lane_index();
#pragma unroll
      for (int t = 0; t < tiles; ++t)
        if (begin + t < sent_tiles) fg::shared_store(places + 32 * (begin + t), make_float4(dq.at[0][t][0], dq.at[0][t][1], dq.at[0][t][2], dq.at[0][t][3]));
      if constexpr (begin + tiles >= sent_tiles) {
        fg::publish_shared();
        fg::warp_barrier();
        if (fg::lane_index() == 0 && sums) {
          send_span<0>(sums, own, own_half);
          send_span<1>(sums, own, own_half);
          send_span<2>(sums, own, own_half);
          fg::bulk_commit();
        }
      }
    }
    if (!sums) return;
#pragma unroll
    for (int t = 0; t < tiles; ++t)
      if (begin + t >= sent_tiles) fg::global_add(sums + 16 * ColumnsOfK::column(own_half, begin + t) + 4 * fg::lane_index(), dq.at[0][t]);
  }
  template <int span> FG_DEVICE void send_span(float* sums, const float* own, int own_half) const {
    constexpr int first = ColumnsOfK::begin(span) / 8, last = first + ColumnsOfK::size(span) / 8, end = last < sent_tiles ? last : sent_tiles;
    if constexpr (end > first) fg::bulk_add_async(sums + 16 * ColumnsOfK::first(span, own_half), own + 128 * first, 512 * (end - first));
  }

  // ---- epilogue ----
  FG_DEVICE void store_keys(const Place& place) {
    Base::finish_sums();
    auto to_dk = rows_of_dk<T>(a, place.b, place.hkv, place.column0);
    auto to_dv = rows_of_dv<T>(a, place.b, place.hkv, place.column0);
    if constexpr (clustered) to_dk = to_dk.from(first_of_own(OWN_K)), to_dv = to_dv.from(first_of_own(OWN_V));
    const int count = place.count;
    if constexpr (Spec::writes_f32_of_keys && split > 1) {
      fg::copy_async_wait<0>();
      fg::store_sums<D>(to_dk, dk.at[0], warp_key, fg::ColumnsOfHalf<ColumnsOfK>{part}, count);
      fg::store_sums<DV>(to_dv, dv.at[0], warp_key, fg::ColumnsOfHalf<ColumnsOfV>{part}, count);
    } else if constexpr (Spec::writes_f32_of_keys) {
      fg::copy_async_wait<0>();
      fg::store_sums<D>(to_dk, dk.at[0], warp_key, fg::ColumnsFrom{0}, count);
      fg::store_sums<DV>(to_dv, dv.at[0], warp_key, fg::ColumnsFrom{0}, count);
    } else if constexpr (split > 1) {
      fg::store_half<T, ColumnsOfK, D, fg::Kept::briefly>(to_dk, dk.at[0], part, warp_key, count);
      fg::store_half<T, ColumnsOfV, DV, fg::Kept::briefly>(to_dv, dv.at[0], part, warp_key, count);
    } else {
      fg::store_fragments<T, D, fg::Kept::briefly>(to_dk, dk.at[0], warp_key, count);
      fg::store_fragments<T, DV, fg::Kept::briefly>(to_dv, dv.at[0], warp_key, count);
    }
    if (atomic && fg::lane_index() == 0) fg::bulk_wait_read();
  }
};

template <class Spec, class T, bool in_bounds, bool dropped, bool atomic, Adding how>
using Block = WarpgroupVisits<Wide<StoredPairs<WarpgroupKeys<Keys<Spec, T, in_bounds, dropped, atomic, how>>>>>;

}  // namespace backward
