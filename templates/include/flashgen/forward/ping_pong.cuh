// Two warpgroups share 64 rows, each with half of O's columns, and weigh key tiles in turns; other warps copy.
//
// Of all tiles that a block visits number n is weighed by warpgroup n % 2, while the other multiplies. Both need its P, which goes
// through shared memory with the maxima that it is counted from: who reads them is who writes the next ones. K comes by halves of its
// columns, so that one comes while the other is multiplied, and V by the columns of either warpgroup.
//
// A cluster has the rows of one tile, and visits what these do. Block h of it copies half h of every K and V, for all: it waits until all
// are done with what was there.
#pragma once
#include "flashgen/clusters.cuh"
#include "flashgen/forward/pairs.cuh"
#include "flashgen/forward/with_producers.cuh"
#include "flashgen/warpgroup_spans.cuh"
#include "flashgen/warpgroup_turns.cuh"

namespace fg::forward {

template <class Base> struct HalvesOfO : Base {
  using typename Base::T, typename Base::Place;
  using Base::Base;

  FG_DEVICE static int rank() { return cluster_rank(); }
  FG_DEVICE static void barrier_of_cluster() { cluster_barrier(); }
  FG_DEVICE void store_o(const Place& place, int warp_row, int count) const {
    store_half<T, typename Base::Kernel::ColumnsOfO, Base::DV, Kept::normally>(rows_of_o<T>(this->a, place.head, place.row0), this->o.at[0], this->part, warp_row, count);
  }
};

// Signals of K have a phase for two tiles, so that a warpgroup waits for every one of those that it waits for.
template <class Base> struct HalvesOfTiles : Base {
  using typename Base::P, typename Base::Memory;
  using Base::memory, Base::threads, Base::signals, Base::v_signals;
  using Base::Base;
  using PSignals = fg::Signals<2>;
  using NumberSignals = fg::Signals<2>;

  FG_DEVICE PSignals p_signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::P_SIGNALS)}; }
  FG_DEVICE NumberSignals number_signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::NUMBER_SIGNALS)}; }
  FG_DEVICE void make_signals_of_halves() const {
    constexpr int users = P::cluster > 1 ? 4 * P::cluster : threads / 2;  // warps of one warpgroup of every block, or one warpgroup
    signals().make(false, users, 1);
    v_signals().make(false, users, 1);
    for (int n = 0; n < 2; ++n) mbarrier_init(p_signals().full(n), threads / 2);  // what was there nobody needs
    publish_shared();
    if constexpr (P::cluster > 1) number_signals().make(false, P::cluster * (P::producers - 2), 1);
  }
  // By warps that find visits: one block takes the next tile for all.
  FG_DEVICE int next_of_cluster(int n, bool first) const {
    int* const place = reinterpret_cast<int*>(memory + Memory::NUMBERS) + n % 2;
    if (Base::rank() == 0 && first) {
      number_signals().await_room(n);
      if (lane_index() == 0) {
        const int number = fetch_work_tile<P::cluster>(tile_counter_of(this->a), this->work_tiles());
        for (int rank = 0; rank < P::cluster; ++rank) shared_store_at(place, number, rank);
      }
      for (int rank = 0; rank < P::cluster; ++rank) mbarrier_tell(number_signals().full(n), rank);
    }
    mbarrier_wait_for_cluster(number_signals().full(n), NumberSignals::parity(n));
    const int number = shared_load(place);
    mbarrier_arrive_at(number_signals().empty(n), 0);
    return number;
  }
};

template <class Base> struct PingPong : Base {
  using typename Base::Spec, typename Base::P, typename Base::T, typename Base::Notes, typename Base::KTile, typename Base::VTile, typename Base::Scores;
  using Base::a, Base::maps, Base::visits, Base::part, Base::parts_before, Base::warp_row, Base::row_max, Base::row_sum, Base::o, Base::BR, Base::BC, Base::stages, Base::split, Base::s_tiles, Base::threads, Base::dropped;
  using Base::q_tile, Base::k_tile, Base::v_tile, Base::signals, Base::v_signals, Base::p_signals, Base::release_q;
  using Base::Base;
  using Weights = LeftRows<T, 1, BC>;  // P of one tile, as an operand
  using HalfOfK = PanelHalf<KTile>;
  using HalfOfV = PanelHalf<VTile>;
  static_assert(P::warps == 8 && stages == 1 && VTile::panels % 2 == 0, "two warpgroups, with whole panels of V");
  FG_DEVICE int group() const { return part; }
  FG_DEVICE int half_of(int n, int h) const { return 2 * (parts_before + n) + h; }  // half h of tile n
  template <int ring> FG_DEVICE void release_half(const fg::Signals<ring>& of, int n, int h) const {
    if constexpr (P::cluster > 1) mbarrier_arrive_at(of.empty(half_of(n, h)), h);
    else of.release(half_of(n, h));
  }
  FG_DEVICE float* maxima() const { return this->of_parts() + split * BR; }
  FG_DEVICE int own_row(int r) const { return warp_row + fragment_row(2 * r); }

  // -- who multiplies --

  FG_DEVICE void multiply_window(int) {
    this->await_q();
    const int count = visits.count();
    if (count == 0) return release_q();
    Weights p;
    int n = (parts_before + group()) & 1;  // the first one that it weighs
    if (n == 0) {
      if (visits.partials() > 0) step<true, true>(p, 0);
      else step<false, true>(p, 0);
      n = 2;
    }
#pragma unroll 1
    for (; n < visits.partials(); n += 2) step<true, false>(p, n);
#pragma unroll 1
    for (; n < count; n += 2) step<false, false>(p, n);
    if (n == count) {  // the other one's is the last
      take_in(p, n - 1);
      wait_products<0>(o, p);
      release_half(v_signals(), n - 1, group());
    }
    release_q();
  }

  // Tile n. O takes in tile n - 1, of the other warpgroup, while n is weighed. No product is under way from one step to the next: the
  // other one's are, and the assembler would have each wait for the one before (C7514).
  template <bool masked, bool begins> FG_DEVICE void step(Weights& p, int n) {
    Scores s;
    constexpr int middle = HalfOfK::middle * KTile::width;
    signals().await(half_of(n, 0));
    begin_products(s);
    start_product_along<0, middle>(s, q_tile(), 0, k_tile(0));
    warpgroup_commit();
    signals().await(half_of(n, 1));
    warpgroup_arrive();
    start_product_along<middle, KTile::columns>(s, q_tile(), 0, k_tile(0));
    warpgroup_commit();
    warpgroup_wait<1>();
    release_half(signals(), n, 0);
    if constexpr (begins) {
      wait_products<0>(s);
    } else {
      take_in(p, n - 1);
      wait_products<1>(s);
    }
    release_half(signals(), n, 1);
    float shrink[2];
    const bool grown = this->template scores<masked>(s, n, shrink);
    this->exponentials(s);
    if constexpr (dropped) this->drop(visits.tile(n) * BC, s);
    if (grown) {  // two waits: with one, the assembler would move it before the exponentials
      wait_products<0>(o, p);
      this->rescale(shrink);
    } else {
      wait_products<0>(o, p);
    }
    if constexpr (!begins) release_half(v_signals(), n - 1, group());
    round_into(p, s);
    give(s, n);
    multiply_values(p, n);
    wait_products<0>(o, p);
    release_half(v_signals(), n, group());
  }

  // P of tile n, and the maxima, to the other warpgroup.
  FG_DEVICE void give(const Scores& s, int n) const {
    const int lane = again(lane_index());
#pragma unroll
    for (int t = 0; t < s_tiles; ++t) store_fragment(this->p_tile(), warp_row, 8 * t, s.at[0][t], lane);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (fragment_column(0) == 0) shared_store(maxima() + own_row(r), row_max[r]);
    mbarrier_arrive(p_signals().full(parts_before + n));
  }
  // From it.
  FG_DEVICE void take_in(Weights& p, int n) {
    p_signals().await(parts_before + n);
    load(p, this->p_tile(), warp_row);
    follow_maxima();
    multiply_values(p, n);
  }
  FG_DEVICE void follow_maxima() {
    float top[2], shrink[2];
    bool grown = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = shared_load(maxima() + own_row(r));
      grown = grown || top[r] != row_max[r];
    }
    if (ballot(grown) == 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      shrink[r] = top[r] == row_max[r] ? 1.0f : exp2_approximate((row_max[r] - top[r]) * this->factor_of_top());
      row_max[r] = top[r];
      row_sum[r] *= shrink[r];
    }
    this->rescale(shrink);
  }
  // O += P V
  FG_DEVICE void multiply_values(Weights& p, int n) {
    v_signals().await(half_of(n, group()));
    begin_products(o, p);
    start_half_across(o, p, v_tile(0), group());
    warpgroup_commit();
  }

  // The sums of both. Both have the same maxima once they have taken in all tiles.
  FG_DEVICE void join_sums() {
    barrier_of_both();  // those of the tile before have been read
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_sum[r] = fg::row_sum(row_sum[r]);
      if (fragment_column(0) == 0) shared_store(this->of_parts() + group() * BR + own_row(r), row_sum[r]);
    }
    barrier_of_both();
#pragma unroll
    for (int r = 0; r < 2; ++r)
      row_sum[r] = shared_load(this->of_parts() + own_row(r)) + shared_load(this->of_parts() + BR + own_row(r));
  }
  FG_DEVICE static void barrier_of_both() { barrier_wait(2, threads); }

  // -- who copies --

  FG_DEVICE void copy(int which) {
    if (which == 0) copy_keys_and_q();
    else copy_values();
  }
  FG_DEVICE void copy_keys_and_q() {
#pragma unroll 1
    for (int list = 0; this->take(list); ++list) {
      if (this->begins()) this->bring_q(this->enter_tile());
      const int count = visits.count();
#pragma unroll 1
      for (int n = 0; n < count; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) copy_half<HalfOfK>(signals(), n, h, k_tile(0), maps->k, visits.noted(&Notes::k));
      this->list_signals().release(list);
    }
  }
  FG_DEVICE void copy_values() {
#pragma unroll 1
    for (int list = 0; this->take(list); ++list) {
      if constexpr (Base::moves)
        if (this->begins()) this->move_to(this->sequence());
      const int count = visits.count();
#pragma unroll 1
      for (int n = 0; n < count; ++n)
#pragma unroll
        for (int k = 1; k >= 0; --k) {  // who weighed the tile before is done with its half first
          const int h = (parts_before + n + k) & 1;
          copy_half<HalfOfV>(v_signals(), n, h, v_tile(0), maps->v, visits.noted(&Notes::v));
        }
      this->list_signals().release(list);
    }
  }
  // Until nobody needs what is in the place of this half.
  template <int ring> FG_DEVICE static void await_half(const fg::Signals<ring>& of, int number) {
    if (number >= 2) mbarrier_wait(of.empty(number - 2), of.parity(number - 2));
  }
  template <class Half, int ring, class Tile>
  FG_DEVICE void copy_half(const fg::Signals<ring>& of, int n, int h, Tile tile, const TensorMap& map, int slab) const {
    const int number = half_of(n, h);
    const bool own = P::cluster == 1 || h == Base::rank();
    if (own) await_half(of, number);
    else if (number >= ring) of.await(number - ring);  // its signal counts this phase
    if (lane_index() != 0) return;
    mbarrier_expect(of.full(number), Half::bytes(h));
    if (!own) return;
    for (int panel = Half::begin(h); panel < Half::end(h); ++panel) {
      const auto to = tile.base + panel * Tile::rows * Tile::width;
      const int column = panel * Tile::width, row = visits.tile(n) * BC;
      if constexpr (P::cluster > 1) copy_panel_to_all(to, map, column, row, slab, of.full(number), (1 << P::cluster) - 1);
      else if constexpr (Spec::ragged) copy_panel_async(to, map, rows_of_keys(a), column, row, slab, of.full(number));
      else copy_panel_async(to, map, column, row, slab, of.full(number));
    }
  }
};

template <class Weighing> using Block = WithProducers<PingPong<Producers<HalvesOfTiles<CopiesOfTiles<HalvesOfO<Weighing>>>>>>;

}  // namespace fg::forward
