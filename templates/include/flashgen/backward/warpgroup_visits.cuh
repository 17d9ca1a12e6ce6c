// The way of a block through its key tiles where warpgroups multiply: who copies goes it beside who multiplies, and blocks may be
// persistent.
#pragma once
#include "flashgen/backward/keys.cuh"

namespace backward {

// A printed template of ragged batches.
template <class, int> FG_DEVICE void sequence_of_key_tile();
template <int> FG_DEVICE void numbers_of_keys();
template <class> FG_DEVICE void sequence_of();

constexpr int NO_MORE = -1;
template <bool moves, class Sequence> struct NextTile {
  int number;              // or NO_MORE
  int first, end;          // tiles of queries
  int parts, unit, group;  // how many blocks have a part of the key tile each; which part of all that is, and of which such tile
};
template <class Sequence> struct NextTile<true, Sequence> {
  Sequence sequence;
  int number;  // in it, or NO_MORE
};

// What persistent blocks know of their next key tile.
template <class Base> struct NextKeyTiles : Base {
  using typename Base::Spec, typename Base::T, typename Base::P, typename Base::Memory, typename Base::Notes;
  using Base::BC, Base::moves, Base::persistent, Base::prefetches_next;
  using Base::a, Base::call, Base::memory, Base::visits;
  using Base::key_tiles, Base::tiles;
  using Base::Base;
  using Sequence = typename Spec::Sequence;
  using Tile = NextTile<moves, Sequence>;

  int ordinal = 0;     // how many key tiles the block had before
  int next_work_tile;  // without warps that copy: of the thread that knows it, until all may

  FG_DEVICE int work_tiles() const { return int(a.batch * a.kv_heads) * int(key_tiles()); }
  // That of this number among the block's. There is room for several, so that one may be found while some still look at those before.
  FG_DEVICE Tile* tile(int n) const { return reinterpret_cast<Tile*>(memory + Memory::NEXT_TILES) + n % (moves ? 2 : 4); }
  FG_DEVICE void take_tile(int n) const {
    if constexpr (moves) {
      Sequence sequence;
      const auto find = [this](int number, int& own) { return sequence_of_key_tile<T, BC>(call, number, own); };
      const int number = fg::fetch_tile(key_tile_counter_of(a), numbers_of_keys<BC>(call), n == 0, sequence, find);
      if (fg::lane_index() == 0) {
        fg::shared_store(&tile(n)->number, number);
        if (number != NO_MORE) note(&tile(n)->sequence, sequence);
      }
    } else {
      if (fg::lane_index() == 0) note_tile(tile(n), n == 0 ? fg::block_index() : fg::fetch_work_tile(key_tile_counter_of(a), work_tiles()));
    }
    fg::warp_barrier();  // lanes go on together
  }
  // Key tiles that are left once all blocks have had as many are worked on by several blocks, each of which has a part of the queries.
  static constexpr bool shares_last = persistent && P::producers > 0 && !moves;
  FG_DEVICE void note_tile(Tile* noted, int number) const {
    const int blocks = fg::grid_size(), rest = work_tiles() % blocks, whole = work_tiles() - rest, own = number - whole;
    int parts = 1, group = 0, part = 0;
    if (own >= 0) {
      parts = parts_of(rest, blocks), group = own / parts, part = own - group * parts;
      number = group < rest ? whole + group : NO_MORE;
    }
    fg::shared_store(&noted->number, number);
    fg::shared_store(&noted->first, tiles() * part / parts), fg::shared_store(&noted->end, tiles() * (part + 1) / parts);
    fg::shared_store(&noted->parts, parts), fg::shared_store(&noted->unit, own), fg::shared_store(&noted->group, group);
  }
  // How many parts of each of the `rest` end first. What a part begins and ends with takes as long as part_overhead tiles of queries.
  FG_DEVICE int parts_of(int rest, int blocks) const {
    const int heads = int(a.heads) / int(a.kv_heads);
    int found = 1, least = tiles() * heads + P::part_overhead;
#pragma unroll 1
    for (int parts = 2; parts <= P::most_parts && parts * P::least_part <= tiles() && rest * parts <= fg::min(work_tiles() / 2, Spec::most_units); ++parts) {
      const int cost = (rest * parts + blocks - 1) / blocks * ((tiles() + parts - 1) / parts * heads + P::part_overhead);
      if (cost < least) found = parts, least = cost;
    }
    return found;
  }
  FG_DEVICE int first_tile() const {
    if constexpr (shares_last) return fg::shared_load(&tile(ordinal)->first);
    else return 0;
  }
  FG_DEVICE int end_tile() const {
    if constexpr (shares_last) return fg::shared_load(&tile(ordinal)->end);
    else return tiles();
  }

  // Without warps that copy, once the products of a key tile have begun.
  FG_DEVICE void note_next() {
    if (fg::knows_next()) fg::shared_store(&visits.notes()->next, next_work_tile);
    if constexpr (prefetches_next) {
      if (fg::NextTeam::warp() != 0 || !a.visits_of_keys) return;
      const int number = fg::shuffle(next_work_tile, 0);
      if (number < work_tiles()) fg::copy_visits_async<fg::NextTeam>(copied_list(), fg::list_of(a.visits_of_keys, Base::work_tile(number), tiles()), tiles());
    }
  }
  // The list of the next key tile, which comes while this one is worked on.
  FG_DEVICE uint4* copied_list() const { return reinterpret_cast<uint4*>(memory + Memory::COPIED); }
};

template <class Base> struct WarpgroupVisits : KeyVisits<Base> {
  using Visits = KeyVisits<Base>;
  using typename Base::Spec, typename Base::T, typename Base::P, typename Base::Memory, typename Base::Notes, typename Base::Place, typename Base::Team;
  using Base::CARRIERS, Base::CONSUMERS, Base::SEEN, Base::clustered, Base::has_producers, Base::k_tiles, Base::moves, Base::persistent, Base::prefetches_next, Base::rows_each, Base::takes_turns, Base::v_tiles;
  using Base::a, Base::dk, Base::dv, Base::maps, Base::memory, Base::u, Base::visits, Base::x;
  using Base::end_tile, Base::first_tile, Base::locate, Base::place, Base::store_keys, Base::tiles;
  using Visits::Visits, Visits::begin_keys, Visits::visit_heads;

  FG_DEVICE void run() {
    if constexpr (clustered) {
      Base::make_exchange();
      fg::Cluster<P::cluster>::barrier();
    }
    if constexpr (has_producers) {
      static_assert(P::producers * P::producer_registers + P::warps * P::registers <= (P::producers + P::warps) * (65536 / P::threads / 8 * 8), "nobody waits for registers that there are not");
      if (Base::is_producer()) {
        fg::give_registers<P::producer_registers>();
        if constexpr (persistent) copy_key_tiles();
        else copy_windows();
      } else {
        fg::take_registers<P::registers>();
        compute();
      }
    } else {
      compute();
    }
  }
  FG_DEVICE void compute() {
    if constexpr (!persistent) Visits::run();
    else if constexpr (has_producers) take_key_tiles();
    else go_on();
  }
  // What warps that copy do meanwhile.
  FG_DEVICE void copy_windows() {
#pragma unroll 1
    for (int n = 0; n < int(a.heads) / int(a.kv_heads); ++n)
#pragma unroll 1
      for (int window = first_tile(); window < end_tile(); window += fg::WINDOW) {
        Base::template meet<Base::LIST_FREE>();
        Base::template meet<Base::LISTED>();
        if constexpr (SEEN > 0 || (Spec::prefetch && Spec::weighs_first) || P::stores_whole) {
          const int head = visits.noted(&Notes::head), b = unsigned(head) / unsigned(a.heads);
          x = make_head(a, u, b, head - b * int(a.heads));
        }
        if (visits.count() > 0) copy_tiles();
        if constexpr (Base::clears) Base::clear_rest(window);
      }
  }

  FG_DEVICE void copy_tiles() {
    if constexpr (P::tensor_copies) start_copies();
    else Base::copy_by_threads();
  }
  // One thread starts tensor copies; others bring what rows carry.
  FG_DEVICE void start_copies() {
    const int count = visits.count(), thread = int(threadIdx.x) - CONSUMERS;
    bool staged = false;
    if constexpr (Base::pairs_staged) {
      staged = Base::has_chunks();
      if (staged && thread >= CARRIERS && thread < CARRIERS + Base::COPIERS_OF_PAIRS) Base::copy_pairs();
    }
    if (thread >= CARRIERS) return;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      [[maybe_unused]] uint32_t number_of_turn = 0;
      if constexpr (takes_turns)
        if (thread == 0) number_of_turn = Base::claim_turn(n);  // while there is no room for what is copied
      if constexpr (Spec::prefetch && Spec::weighs_first)
        if (!staged) Base::prefetch_pairs(n, thread);
      float lses[rows_each], deltas[rows_each];  // on their way while there is no room for them
      uint32_t seen[rows_each][SEEN > 0 ? SEEN : 1];
      const bool partial = n < visits.partials();
      if constexpr (Spec::row_state) Base::carry(lses, deltas, n, thread);
      if constexpr (SEEN > 0)
        if (partial) Base::carry(seen, n, thread);
      Base::start_once_free(n, thread);
      if constexpr (Spec::row_state) Base::put_carried(lses, deltas, seen, partial, n, thread);
      if constexpr (takes_turns)
        if (thread == 0) Base::await_turn(n, number_of_turn);
      fg::mbarrier_arrive(Base::signals().full(n, Base::ROWS_SHOWN));  // after what was read of the block's place, too: a next head overwrites it
    }
  }

  // ---- persistent blocks ----
  // They take one key tile after another, of one sequence after another. One of the warps that copy finds the next while this one is
  // worked on: once it has asked for the last queries of this one. If it did earlier, the block might hold two while others have none left.
  FG_DEVICE void copy_key_tiles() {
    const bool finds = fg::warp_index() == (moves ? P::warps + P::producers - 1 : P::warps);
    if (finds) Base::take_tile(0);
#pragma unroll 1
    for (; is_more(); ++this->ordinal) {
      copy_windows();
      if (finds) Base::take_tile(this->ordinal + 1);
    }
  }
  // Once the next tile is known, and everyone is done with K, V and the list of the one before: whether there is one, whose sequence then
  // is the present one.
  FG_DEVICE bool is_more() {
    fg::barrier_meet(Base::TILE_KNOWN, P::threads);
    const auto* const next = Base::tile(this->ordinal);
    if (fg::shared_load(&next->number) == NO_MORE) return false;
    if constexpr (moves) move_to(noted(&next->sequence));
    return true;
  }
  template <class Sequence> FG_DEVICE void move_to(const Sequence& sequence) {
    a = sequence_of<T>(this->call, sequence);
    u = make_launch(a), this->q_len = int(a.q_len), this->kv_len = int(a.kv_len);
  }
  // Brings K and V of the present tile.
  FG_DEVICE Place start_tile_of_keys() const {
    const int number = fg::shared_load(&Base::tile(this->ordinal)->number);
    const Place place = locate(number);
    begin_keys(place);
    if (threadIdx.x == 0) fg::shared_store(&visits.notes()->number, number);
    return place;
  }
  FG_DEVICE void take_key_tiles() {
    [[maybe_unused]] bool first = true;  // no window so far
    bool more = is_more();
    Place place = {};
    if (more) place = start_tile_of_keys();
#pragma unroll 1
    while (more) {
      visit_heads(place, moves ? first : this->ordinal == 0);
      if constexpr (moves) first = first && tiles() == 0;
      if (tiles() == 0) fg::copy_async_wait<0>();  // there may be no queries: nobody has awaited K and V
      place = this->place();
      const auto* const done = Base::tile(this->ordinal++);
      if constexpr (moves) {
        const auto sequence = noted(&done->sequence);
        more = is_more();
        const Place before = place;
        if (more) place = start_tile_of_keys();
        move_to(sequence);
        store_keys(before);
        if (more) move_to(noted(&Base::tile(this->ordinal)->sequence));
      } else {
        more = is_more();
        const Place before = place;
        if (more) place = start_tile_of_keys();
        if (fg::shared_load(&done->parts) == 1 || add_up_parts(done)) store_keys(before);
      }
    }
  }
  // Leaves dK and dV of a part. The block that is the last of a key tile to do so adds up all of them, in one order: whether it is.
  template <class Tile> FG_DEVICE bool add_up_parts(const Tile* of) {
    constexpr int FOURS = k_tiles + v_tiles;
    static_assert(Base::m_tiles == 1 && CONSUMERS * FOURS * 16 == P::BC * 4 * (Base::DP + Base::DVP), "what the plan counts");
    const int parts = fg::shared_load(&of->parts), unit = fg::shared_load(&of->unit), group = fg::shared_load(&of->group);
    float4* place = sums_of_parts(a) + int64_t(unit) * (CONSUMERS * FOURS) + threadIdx.x;
#pragma unroll
    for (int t = 0; t < FOURS; ++t) {
      const float(&four)[4] = t < k_tiles ? dk.at[0][t < k_tiles ? t : 0] : dv.at[0][t < k_tiles ? 0 : t - k_tiles];
      fg::global_store(place + CONSUMERS * t, make_float4(four[0], four[1], four[2], four[3]));
    }
    uint32_t* const last = reinterpret_cast<uint32_t*>(memory + Memory::SUMS);
    if (fg::lane_index() == 0) fg::bulk_wait_read();  // as a block may end here
    Team::barrier();
    if (threadIdx.x == 0) fg::shared_store(last, uint32_t(fg::global_arrive(arrivals_of_parts(a) + group, uint32_t(parts))));
    Team::barrier();
    if (fg::shared_load(last) == 0) return false;
    fg::clear(dk);
    fg::clear(dv);
    place = sums_of_parts(a) + int64_t(group) * parts * (CONSUMERS * FOURS) + threadIdx.x;
#pragma unroll 1
    for (int part = 0; part < parts; ++part, place += CONSUMERS * FOURS)
#pragma unroll
      for (int t = 0; t < FOURS; ++t) {
        const float4 four = fg::global_load_left(place + CONSUMERS * t);
        float(&sums)[4] = t < k_tiles ? dk.at[0][t < k_tiles ? t : 0] : dv.at[0][t < k_tiles ? 0 : t - k_tiles];
        sums[0] += four.x, sums[1] += four.y, sums[2] += four.z, sums[3] += four.w;
      }
    return true;
  }

  // Without warps that copy: K and V of the next one are on their way while dK and dV leave. So are Q and dO of its first visit, where it
  // has a list.
  FG_DEVICE void go_on() {
    if (threadIdx.x == 0) fg::shared_store(&visits.notes()->next, fg::block_index());
#pragma unroll 1
    for (bool first = true;; first = false) {
      Place before = {};
      if (!first) before = this->place();
      if constexpr (prefetches_next) fg::copy_async_wait<0>();  // the list
      Team::barrier();  // everyone is done with K, V and the list before
      const int number = visits.noted(&Notes::next);
      if (number >= Base::work_tiles()) return store_keys(before);  // a block has one key tile at least
      const Place place = next_place(number, first);
      begin_keys(place);
      if (threadIdx.x == 0) fg::shared_store(&visits.notes()->number, number);
      bool started = false;
      if constexpr (prefetches_next) {
        started = a.visits_of_keys != nullptr;
        if (started && threadIdx.x == 0) start_first_tile(place, first);
      }
      if (fg::knows_next()) this->next_work_tile = fg::fetch_work_tile(key_tile_counter_of(a), Base::work_tiles());
      if (!first) store_keys(before);
      visit_heads(place, first, started);
    }
  }
  // Where the key tile of this number lies: its list has come, but for that of a block's first one.
  FG_DEVICE Place next_place(int number, bool first) const {
    if constexpr (prefetches_next)
      if (a.visits_of_keys) {
        const fg::WorkTile work_tile = Base::work_tile(number);
        if (first) {
          fg::copy_visits_async<Team>(Base::copied_list(), fg::list_of(a.visits_of_keys, work_tile, tiles()), tiles());
          fg::copy_async_wait<0>();
          Team::barrier();
        }
        return Base::place_of(work_tile.head, fg::tile_of_copied(Base::copied_list()));
      }
    return locate(number);
  }
  // Q and dO of the first visit for the first query head.
  FG_DEVICE void start_first_tile(const Place& place, bool first) const {
    Base::make_signals(!first);
    if (fg::visits_of(fg::counts_of_copied(Base::copied_list())) == 0) return;
    const int h = place.hkv * (int(a.heads) / int(a.kv_heads));
    Base::start_tile(0, fg::visit_of_copied(Base::copied_list(), 0), fg::slab_of(maps->q, place.b, h), fg::slab_of(maps->d_o, place.b, h));
  }
};

}  // namespace backward
