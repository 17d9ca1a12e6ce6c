// Of the warps that do not multiply one or two stream Q and the parts, the others find what the next tile visits: what begins and ends a
// tile is hidden by products of another.
#pragma once
#include "flashgen/forward/state.cuh"
#include "flashgen/norms.cuh"
#include "flashgen/tensor_copies.cuh"

namespace fg::forward {

template <class Base> struct Producers : Base {
  using typename Base::Spec, typename Base::P, typename Base::Memory, typename Base::Head, typename Base::Place, typename Base::Notes, typename Base::VTile;
  using Base::a, Base::u, Base::x, Base::maps, Base::memory, Base::visits, Base::kv_len, Base::parts_before, Base::q_place, Base::BC, Base::SEEN, Base::threads, Base::tiles;
  using Base::moves, Base::overlaps_next, Base::q_places, Base::shows_columns, Base::NO_MORE, Base::groups, Base::begins, Base::signals, Base::q_signals, Base::v_signals, Base::k_tile, Base::v_tile;
  using Base::Base;

  // Where warpgroups take turns one copies Q and K, another V. The last ones take the norms of keys, as soon as these are there.
  static constexpr int COPIERS = 1 + P::ping_pong, FINDERS = P::producers - COPIERS - P::measurers, BESIDE = 32 * P::measurers;
  using Finders = fg::Team<32 * FINDERS, 1, 32 * (P::warps + COPIERS)>;
  using Measurers = fg::Team<BESIDE, 2, 32 * (P::warps + 1 + FINDERS)>;
  using ListSignals = fg::Signals<2>;
  using StartSignals = fg::Signals<2>;
  static_assert(P::producers * P::producer_registers + P::warps * P::registers <= (P::producers + P::warps) * (65536 / P::threads / 8 * 8), "nobody waits for registers that there are not");
  static_assert(P::tensor_copies && FINDERS > 0, "some warps start tensor copies, others find visits");

  FG_DEVICE ListSignals list_signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::LIST_SIGNALS)}; }
  FG_DEVICE StartSignals start_signals(int group) const { return {reinterpret_cast<uint64_t*>(memory + Memory::START_SIGNALS + group * StartSignals::bytes)}; }
  FG_DEVICE void make_signals() const {
    if constexpr (P::ping_pong) this->make_signals_of_halves();
    else signals().make(false, threads + BESIDE, 1, 32);
    q_signals().make(false, threads, 1);
    if constexpr (overlaps_next) {
      v_signals().make(false, threads, 1);
#pragma unroll
      for (int g = 0; g < groups - 1; ++g) start_signals(g).make(false, 1, 128);
    }
    list_signals().make(false, threads + 32 * COPIERS + BESIDE, 32 * FINDERS);
    if constexpr (Spec::sqdist) this->norm_signals().make(false, threads, BESIDE);
  }

  // There is room for two lists, so that the next one is found while the present one is worked on.
  FG_DEVICE void switch_to(int list) { visits.list = reinterpret_cast<decltype(visits.list)>(memory + Memory::LIST) + list % 2; }
  // Switches to a list once it is there; whether there is one.
  FG_DEVICE bool take(int list) {
    list_signals().await(list);
    switch_to(list);
    if (visits.count() == NO_MORE) return false;
    if constexpr (!overlaps_next) parts_before = visits.noted(&Notes::parts_before);
    return true;
  }

  // -- who finds visits --

  FG_DEVICE void find() {
    int n = 0, number = block_index() / P::cluster;
    [[maybe_unused]] int parts = 0;
#pragma unroll 1
    for (int ordinal = 0;; ++ordinal) {
      list_signals().await_room(n);
      switch_to(n);
      if constexpr (moves) number = take_tile_together(ordinal == 0);
      else if (ordinal > 0) number = fetch_work_tile_together(ordinal - 1);
      if (moves ? number == NO_MORE : number >= this->work_tiles()) break;
      const Place place = this->locate(number);
      const Head head = this->head_at(place);
#pragma unroll 1
      for (int window = 0; (moves && window == 0) || window < tiles(); window += WINDOW) {  // a sequence may have no keys
        if (window > 0) {
          list_signals().await_room(n);
          switch_to(n);
        }
        this->template find_window<Finders>(number, place, head, window);
        if (Finders::thread() == 0) {
          this->note(this->rows_of_block(place), head, window, ordinal);
          if constexpr (!overlaps_next) shared_store(&visits.notes()->parts_before, parts);
        }
        if constexpr (P::ping_pong) parts += visits.count();
        else if constexpr (!overlaps_next) parts += visits.count() > 0 ? visits.count() + 1 : 0;
        mbarrier_arrive(list_signals().full(n++));
      }
    }
    if (Finders::thread() == 0) set_visits(visits.list, 0, 0, NO_MORE);
    mbarrier_arrive(list_signals().full(n));
  }
  FG_DEVICE int take_tile_together(bool first) {
    if (Finders::warp() == 0) {
      decltype(this->sequence()) sequence;
      const int number = this->take_tile(first, sequence);
      if (lane_index() == 0) {
        if (number != NO_MORE) note_sequence<decltype(this->sequence())>(visits.notes(), sequence);
        shared_store(&visits.notes()->head, number);
      }
    }
    Finders::barrier();
    const int number = visits.noted(&Notes::head);
    if (number != NO_MORE) this->move_to(this->sequence());
    return number;
  }
  FG_DEVICE int fetch_work_tile_together([[maybe_unused]] int n) const {
    if constexpr (P::cluster > 1) {
      return this->next_of_cluster(n, Finders::warp() == 0);
    } else {
      if (Finders::thread() == 0) shared_store(&visits.notes()->head, fetch_work_tile(tile_counter_of(a), this->work_tiles()));
      Finders::barrier();
      return visits.noted(&Notes::head);
    }
  }

  // -- who copies --

  FG_DEVICE void copy(int) {
#pragma unroll 1
    for (int list = 0; take(list); ++list) {
      if (begins()) {
        [[maybe_unused]] const Place place = this->enter_tile();
        if constexpr (!overlaps_next) bring_q(place);
      }
      const int count = visits.count();
#pragma unroll 1
      for (int n = 0; n <= count && (overlaps_next || count > 0); ++n) {
        if (!overlaps_next || n < count) bring_part(n);
        if constexpr (overlaps_next) {  // rings of K and of V
          if (n == 0 && begins()) bring_q(this->place());
          if (n > 0) bring_v(n - 1);
        }
      }
      if constexpr (overlaps_next) parts_before += count;
      list_signals().release(list);
    }
  }
  FG_DEVICE void bring_q(const Place& place) {
    const int ordinal = visits.noted(&Notes::ordinal);
    if constexpr (overlaps_next) q_place = stage_of<q_places>(ordinal);
    q_signals().await_room(ordinal);
    if (lane_index() == 0) this->start_q(place, x, ordinal);
  }
  FG_DEVICE void bring_part(int n) const {
    ColumnsAhead seen;
    const bool partial = n < visits.partials();
    if constexpr (shows_columns)
      if (partial) fetch_columns(seen, n);
    signals().await_room(parts_before + n);
    if (lane_index() == 0) this->start_part(n);
    if constexpr (shows_columns) {
      if (partial) put_columns(seen, n);
      mbarrier_arrive(signals().full(parts_before + n, COLUMNS_SHOWN));
    }
  }
  FG_DEVICE void bring_v(int n) const {
    uint64_t* const there = v_signals().full(parts_before + n);
    v_signals().await_room(parts_before + n);
    if (lane_index() == 0) {
      mbarrier_expect(there, VTile::bytes);
      this->copy_keys(v_tile(n), maps->v, visits.tile(n), visits.noted(&Notes::v), there);
    }
  }

  // What the mask reads by column, on its way while there is no room for it.
  static constexpr int COLUMNS_EACH = (BC + 31) / 32;  // of a lane
  static constexpr int COLUMNS_SHOWN = 1;              // what a signal says, beside that copies are there
  using ColumnsAhead = uint32_t[COLUMNS_EACH][SEEN];
  FG_DEVICE void fetch_columns(ColumnsAhead& seen, int n) const {
    const int first = visits.tile(n) * BC + lane_index();
#pragma unroll
    for (int k = 0; k < COLUMNS_EACH; ++k) see(seen[k], make_column(a, u, x, int(a.kv_start) + min(first + 32 * k, kv_len - 1)));
  }
  FG_DEVICE void put_columns(const ColumnsAhead& seen, int n) const {
#pragma unroll
    for (int k = 0; k < COLUMNS_EACH; ++k) {
      const int column = lane_index() + 32 * k;
      if (BC % 32 != 0 && column >= BC) continue;
#pragma unroll
      for (int word = 0; word < SEEN; ++word) shared_store(this->columns(n) + word * BC + column, seen[k][word]);
    }
  }
  FG_DEVICE void await_columns(int n) const { signals().await(parts_before + n, COLUMNS_SHOWN); }

  // -- who takes norms --

  FG_DEVICE void take_norms_of(int n) const {
    Base::template measure<BESIDE>(n, Measurers::thread());
    if constexpr (Spec::tangent) twice_products<BESIDE>(this->t_norms(n), k_tile(n), this->t_k_tile(n), this->moves_k(), Measurers::thread());
  }
  FG_DEVICE void measure() {
#pragma unroll 1
    for (int list = 0; take(list); ++list) {
      if constexpr (Spec::norms_by_head || (moves && Spec::norms_vary))
        if (begins()) this->enter_tile();
      const int count = visits.count();
#pragma unroll 1
      for (int n = 0; n <= count && count > 0; ++n) {
        signals().await(parts_before + n);
        if (n < count) take_norms_of(n);
        mbarrier_arrive(this->norm_signals().full(parts_before + n));
        signals().release(parts_before + n);
      }
      list_signals().release(list);
    }
  }
};

}  // namespace fg::forward
