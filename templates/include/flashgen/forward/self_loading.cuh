// Persistent blocks in which those who multiply do all. Lists take one place, whose address stays the same in the loops.
#pragma once
#include "flashgen/forward/persistent.cuh"
#include "flashgen/forward/query_tiles.cuh"
#include "flashgen/forward/results.cuh"
#include "flashgen/forward/rows.cuh"
#include "flashgen/forward/warpgroup_copies.cuh"
#include "flashgen/forward/warpgroups.cuh"

namespace fg::forward {

// What comes after the present window, or query tile.
template <class Base> struct NextWindow : Base {
  using typename Base::Spec, typename Base::P, typename Base::Memory, typename Base::Head, typename Base::Place, typename Base::Notes;
  using typename Base::QTile, typename Base::KTile, typename Base::VTile, typename Base::Team;
  using Base::a, Base::u, Base::x, Base::maps, Base::memory, Base::visits, Base::kv_len, Base::q_place, Base::BR, Base::BC, Base::SEEN, Base::stages, Base::threads, Base::tiles;
  using Base::moves, Base::opens, Base::NO_MORE, Base::BEGINS, Base::ENDS, Base::begins, Base::ends, Base::work_tiles, Base::signals, Base::q_signals, Base::q_tile, Base::k_tile, Base::v_tile;
  using Base::locate, Base::head_at, Base::classify, Base::start_part, Base::note;
  using Base::Base;
  using QueryPlace = typename Base::Kernel::QueryPlace;
  using OpenedTile = typename Base::Kernel::OpenedTile;
  int next_work_tile;  // of a query tile, in the thread that has taken it

  FG_DEVICE void begin_first() {
    if (threadIdx.x == 0) {
      if constexpr (P::prefetches_next) shared_store(&next_place()->head, NO_MORE);
      q_signals().make(false, threads, 1);
      if constexpr (opens) signals().make(false, threads, 1);
      // As if query tile -1 had ended.
      set_visits(visits.list, 0, 0, 0);
      shared_store(&visits.notes()->head, 0), shared_store(&visits.notes()->row0, 0);
      shared_store(&visits.notes()->edges, ENDS), shared_store(&visits.notes()->ordinal, -1);
      if constexpr (moves) note_sequence<decltype(this->sequence())>(visits.notes(), {0, 0, 0, 0, 0});
    }
    if constexpr (moves) {
      if (NextTeam::warp() == 0) take_next_tile(true);
    } else {
      next_work_tile = block_index();
    }
    Team::barrier();
    if constexpr (opens) look_ahead();
  }
  FG_DEVICE void fetch_next_work_tile() {
    if constexpr (moves) {
      if (NextTeam::warp() == 0 && ends()) take_next_tile(false);
    } else {
      if (knows_next() && ends()) next_work_tile = fetch_work_tile(tile_counter_of(a), work_tiles());
    }
  }

  // Goes on to the next window, of this query tile or another, once nobody needs Q and the list: finds what it visits, and
  // starts what it begins with.
  FG_DEVICE void advance_window() {
    const bool another = ends();
    const int ordinal = visits.noted(&Notes::ordinal) + another, window = another ? 0 : visits.first() + WINDOW;
    [[maybe_unused]] const int used = opens && visits.count() > 0 ? visits.count() + 1 : 0;  // parts of the present list
    [[maybe_unused]] const bool copied = P::prefetches_next && visits.count() > 0;
    if constexpr (P::prefetches_next) copy_async_wait<0>();
    if (knows_next()) shared_store(&visits.notes()->next, next_work_tile);
    Team::barrier();
    const int number = next_number(another);
    if (moves ? number == NO_MORE : number >= work_tiles()) {
      if (threadIdx.x == 0) set_visits(visits.list, 0, 0, NO_MORE);
      Team::barrier();
      return;
    }
    if constexpr (moves)
      if (another) this->move_to(noted(next_sequence()));
    if constexpr (opens) {
      if (is_short()) return open(ordinal, used);
      if (threadIdx.x == 0) pass_parts(used, 0), pass_parts(used, 1);
    } else {
      // Fresh ones, so that stages follow from a part's place in its list, and take no instructions of the loop.
      if (threadIdx.x == 0) signals().make(ordinal > 0 || !another, threads, 1);
    }
    if constexpr (P::prefetches_next) {
      if (another && a.visits_of_queries) {
        const WorkTile next_tile = this->work_tile(number);
        if (!copied) {
          copy_visits_async<Team>(copied_list(), list_of(a.visits_of_queries, next_tile, tiles()), tiles());
          copy_async_wait<0>();
          Team::barrier();
        }
        prepare({next_tile.head, tile_of_copied(copied_list()) * BR}, number, window, ordinal);
        take_copied_visits<Team>(visits.list, copied_list(), 0);
      } else {
        find_next_window(number, window, ordinal);
      }
    } else {
      find_next_window(number, window, ordinal);
    }
    if (threadIdx.x == 0 && visits.count() > 0) start_part(0), start_part(1);
    if constexpr (P::prefetches_next) {
      fetch_next_work_tile();  // early: its list comes while this tile is worked on
    } else if constexpr (!opens) {
      if (visits.count() == 0) fetch_next_work_tile();  // else once the products of this window have been started
    }
  }
  FG_DEVICE int next_number(bool another) const {
    if constexpr (opens)
      if (is_short()) return shared_load(&opened()->number);
    return visits.noted(another ? &Notes::next : &Notes::number);
  }
  FG_DEVICE void find_next_window(int number, int window, int ordinal) {
    const Place place = locate(number);
    const Head head = prepare(place, number, window, ordinal);
    this->template find_window<Team>(number, place, head, window);
  }
  // What is done once it is known where a window's query tile lies.
  FG_DEVICE Head prepare(const Place& place, int number, int window, int ordinal) const {
    const Head head = head_at(place);
    if (threadIdx.x == 0) {
      note(place, head, window, ordinal);
      if (window == 0) {
        shared_store(&visits.notes()->number, number);
        this->start_q(place, head, ordinal);
      }
    }
    return head;
  }

  // Of ragged batches: where the sequence of the next tile is kept until that begins.
  FG_DEVICE auto* next_sequence() const { return reinterpret_cast<decltype(this->sequence())*>(memory + Memory::NEXT_SEQUENCE); }
  FG_DEVICE void take_next_tile(bool first) {
    decltype(this->sequence()) sequence;
    next_work_tile = this->take_tile(first, sequence);
    if (lane_index() == 0 && next_work_tile != NO_MORE) note_sequence(next_sequence(), sequence);
    warp_barrier();  // lanes go on together
  }

  // - where lists do not say what is visited -
  // Where one window has all, and a word a bit for each key tile, a warp looks at the next query tile while the last product of
  // the present one runs.
  FG_DEVICE bool is_short() const { return tiles() <= 32; }
  FG_DEVICE OpenedTile* opened() const { return reinterpret_cast<OpenedTile*>(memory + Memory::OPENED); }
  FG_DEVICE void look_ahead() const {
    if (NextTeam::warp() != 0 || !is_short()) return;
    const int number = shuffle(next_work_tile, 0), lane = lane_index();
    if (lane == 0) shared_store(&opened()->number, number);
    if (number >= work_tiles()) return;
    const Place place = locate(number);
    const Head head = head_at(place);
    ranges::Bool kept = {true, false};
    if (lane < tiles()) kept = classify(place, head)(lane, lane + 1);
    const uint32_t partial = ballot(kept.may_be_true && kept.may_be_false), full = ballot(!kept.may_be_false);
    if (lane != 0) return;
    note(opened(), place, head);
    shared_store(&opened()->q, slab_of(maps->q, head.b - int(a.b_start), head.h - int(a.h_start)));
    shared_store(&opened()->partial, int(partial)), shared_store(&opened()->full, int(full));
  }
  // Its list becomes the present one, by the first warp; what it begins with is started, by a thread each of three warps.
  FG_DEVICE void open(int ordinal, int used) const {
    const OpenedTile* const tile = opened();
    const uint32_t partial = shared_load(&tile->partial), full = shared_load(&tile->full);
    const int warp = warp_index(), lane = lane_index();
    if (warp == 0) {
      const int partials = popcount(int(partial));
      const uint32_t mine = 1u << lane, below = mine - 1;
      if (partial & mine) shared_store(&visits.list->tile[popcount(int(partial & below))], uint16_t(lane));
      if (full & mine) shared_store(&visits.list->tile[partials + popcount(int(full & below))], uint16_t(lane));
      if (lane == 0) {
        Notes* const to = visits.notes();
        uint64_t* const there = q_signals().full(ordinal);
        const int row0 = shared_load(&tile->row0);
        mbarrier_expect(there, QTile::bytes);
        copy_tile_async(q_tile(), maps->q, row0, shared_load(&tile->q), there);
        set_visits(visits.list, 0, partials, partials + popcount(int(full)));
        shared_store(&to->k, shared_load(&tile->k)), shared_store(&to->v, shared_load(&tile->v));
        shared_store(&to->head, shared_load(&tile->head)), shared_store(&to->row0, row0);
        shared_store(&to->edges, BEGINS | ENDS), shared_store(&to->ordinal, ordinal);
      }
    } else if (warp < 3 && lane == 0) {
      const uint32_t visited = partial ? partial : full, without = visited & (visited - 1);  // the first one
      const uint32_t after = without || !partial ? without : full;
      if (visited) {
        const int n = warp - 1;
        uint64_t* const there = signals().full(n);
        pass_parts(used, n);
        mbarrier_expect(there, ((n == 0 || after) ? int(KTile::bytes) : 0) + (n > 0 ? int(VTile::bytes) : 0));
        if (n == 0 || after) copy_tile_async(k_tile(n), maps->k, lowest(n == 0 ? visited : after) * BC, shared_load(&tile->k), there);
        if (n > 0) copy_tile_async(v_tile(0), maps->v, lowest(visited) * BC, shared_load(&tile->v), there);
      } else {
        pass_parts(used, warp - 1);
      }
    }
  }
  FG_DEVICE static int lowest(uint32_t bits) { return popcount(int((bits & (0u - bits)) - 1)); }
  // As many parts that bring nothing, of a stage's, that phases come again: stages and phases so follow from a part's place in its list,
  // and take no instructions of the loop.
  FG_DEVICE void pass_parts(int used, int stage) const {
#pragma unroll 1
    for (int n = used; n % (2 * stages) != 0; ++n)
      if (n % stages == stage) mbarrier_expect(signals().full(n), 0);
  }

  // - from tile to tile -
  // Where the next tile's list has come in time, and both tiles visit some, Q and the first K of the next one come while the
  // last visit but one is worked on, by the signal of Q: parts, stages and phases go on. Its first product and exponentials then
  // run beside the last product of this tile, and O leaves afterwards. Visits of such a tile count from the number of this
  // tile's last part on, modulo the numbers after which stages and phases come again. All else begins what comes next with
  // nothing on its way: after a tile of one visit (its list would come too late), before and after tiles that visit none or have
  // several windows, after the last one, and where there are no lists.

  static constexpr int NUMBERS = 2 * stages;
  FG_DEVICE uint4* copied_list() const { return reinterpret_cast<uint4*>(memory + Memory::COPIED); }
  // Where its place lies, beside the slabs of its keys; no head until it has begun.
  FG_DEVICE QueryPlace* next_place() const { return reinterpret_cast<QueryPlace*>(memory + Memory::NEXT_PLACE); }

  // Brings the list of the next query tile while this one is worked on, by the warp that knows its number.
  FG_DEVICE void copy_next_list() const {
    if (NextTeam::warp() != 0 || !a.visits_of_queries || !ends()) return;
    const int number = shuffle(next_work_tile, 0);
    if (number < work_tiles()) copy_visits_async<NextTeam>(copied_list(), list_of(a.visits_of_queries, this->work_tile(number), tiles()), tiles());
  }
  // By the thread that knows its number. Its first K takes the place that part n of this tile would have.
  FG_DEVICE void begin_next(int n) {
    if (!next_has_list()) return;
    const Place place = {this->work_tile(next_work_tile).head, tile_of_copied(copied_list()) * BR};
    const Head head = head_at(place);
    note(next_place(), place, head);
    uint64_t* const there = q_signals().full(visits.noted(&Notes::ordinal) + 1);
    mbarrier_expect(there, QTile::bytes + KTile::bytes);
    this->copy_q(q_tile(1 - q_place), place, head, there);
    copy_tile_async(k_tile(n), maps->k, visit_of_copied(copied_list(), 0) * BC, shared_load(&next_place()->k), there);
    // Of the one after it: its list can be copied as soon as this one is taken, while products run.
    next_work_tile = fetch_work_tile(tile_counter_of(a), work_tiles());
  }
  FG_DEVICE bool next_has_list() const {
    if (!a.visits_of_queries || next_work_tile >= work_tiles() || tiles() + NUMBERS > WINDOW) return false;
    copy_async_wait<0>();  // what this thread reads of it
    return visits_of(counts_of_copied(copied_list())) > 0;
  }
  // The list of a tile that has begun, whose first visit is number n, takes the place of the one before, which nobody needs any
  // more; then the next part is started.
  FG_DEVICE void take_next_list(int n, int ordinal) {
    if (threadIdx.x == 0) {
      const QueryPlace* const from = next_place();
      QueryPlace* const to = visits.notes();
      shared_store(&to->k, shared_load(&from->k)), shared_store(&to->v, shared_load(&from->v));
      shared_store(&to->head, shared_load(&from->head)), shared_store(&to->row0, shared_load(&from->row0));
      shared_store(&visits.notes()->ordinal, ordinal);
    }
    take_copied_visits<Team>(visits.list, copied_list(), n);
    if (threadIdx.x == 0) shared_store(&next_place()->head, NO_MORE);
    this->copy_next_part(n + 1);
    copy_next_list();
  }

  // What the mask reads by column, where it is looked at: into registers well before it is needed, and then into shared memory.
  FG_DEVICE void fetch_columns(int n) {
    if (n >= visits.partials() || int(threadIdx.x) >= BC) return;
    see(this->next_seen, make_column(a, u, x, int(a.kv_start) + min(visits.tile(n) * BC + int(threadIdx.x), kv_len - 1)));
  }
  FG_DEVICE void put_columns(int n) const {
    if (n >= visits.partials() || int(threadIdx.x) >= BC) return;
#pragma unroll
    for (int k = 0; k < SEEN; ++k) shared_store(this->columns(n) + k * BC + threadIdx.x, this->next_seen[k]);
  }
};

template <class Base> struct SelfLoading : Base {
  using typename Base::Place, typename Base::Team;
  using Base::visits, Base::moves, Base::opens;
  using Base::Base;

  FG_DEVICE void run() {
    this->begin_first();
#pragma unroll 1
    for (bool first = true;; first = false) {
      const Place before = this->place();
      const auto sequence_before = present_sequence();
      const bool ended = !first && this->ends();
      this->advance_window();
      if constexpr (moves)
        if (ended) this->move_to(sequence_before);
      if (ended) this->finish(before);
      if constexpr (opens) {
        Team::barrier();  // the list is there
        if (visits.count() == 0) this->fetch_next_work_tile(), this->look_ahead();  // else while the last visit is worked on
      }
      if (visits.count() == Base::NO_MORE) return;
      if (this->begins()) {
        const Place place = this->enter_tile();
        this->begin(place);
      }
      this->multiply_window();
    }
  }
  FG_DEVICE auto present_sequence() const {
    if constexpr (moves) return this->sequence();
    else return 0;
  }
};

template <class Weighing> using Block = SelfLoading<Warpgroups<NextWindow<WarpgroupCopies<Persistent<Results<Rows<QueryTiles<Weighing>>>>>>>>;

}  // namespace fg::forward
