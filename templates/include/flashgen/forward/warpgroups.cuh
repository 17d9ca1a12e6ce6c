// As FlashAttention-3: a warpgroup weighs S of one key tile while O takes in the tile before.
#pragma once
#include "flashgen/forward/pairs.cuh"
#include "flashgen/pairs.cuh"
#include "flashgen/team.cuh"
#include "flashgen/warpgroup.cuh"

namespace fg::forward {

template <class Base> struct Warpgroups : Base {
  using typename Base::Spec, typename Base::P, typename Base::T, typename Base::Memory, typename Base::Place, typename Base::Notes, typename Base::Team, typename Base::VTile, typename Base::Scores;
  using Base::a, Base::u, Base::x, Base::memory, Base::visits, Base::kv_len, Base::warp_row, Base::parts_before, Base::q_place, Base::rows, Base::o, Base::BC, Base::m_tiles, Base::s_tiles, Base::o_tiles;
  using Base::has_producers, Base::self_loading, Base::overlaps_next, Base::q_places, Base::shows_columns, Base::opens, Base::dropped, Base::scaled, Base::rescale, Base::q_tile, Base::k_tile, Base::v_tile;
  using Base::group, Base::groups, Base::first_row_of_group, Base::await_part, Base::release_part, Base::await_v, Base::release_k, Base::release_q;
  using Base::Base;
  using Weights = LeftRows<T, 1, BC>;           // P of one tile, as an operand
  using Ahead = typename Base::Kernel::Ahead;  // what pairs read, a step before they need it: memory takes longer than products
  using StagedPairs = fg::StagedPairs<typename Ahead::element, BC>;  // what pairs of a warp read
  bool in_chunks = false;  // whether it comes to shared memory

  FG_DEVICE void multiply_window() {
    int list = 0;  // without producer warps there is one
    multiply_window(list);
  }
  FG_DEVICE void multiply_window([[maybe_unused]] int& list) {
    Ahead ahead;
    if constexpr (Spec::prefetch) {
      if constexpr (P::pairs_staged) {
        in_chunks = has_chunks();
        if (in_chunks) stage_pairs(0);
      }
      if (!in_chunks) read_ahead(ahead, 0);
    }
    this->await_q();
    if (visits.count() == 0) {
      if constexpr (overlaps_next) let_next_start(list);
      return release_q();
    }
    if constexpr (Spec::sqdist && P::tensor_copies) this->take_norms_of_rows();
    if constexpr (!P::tensor_copies) this->copy_next_part(0);
    if constexpr (shows_columns && !has_producers) this->fetch_columns(0), this->put_columns(0);
    Weights p;
    if (visits.partials() > 0) first<true>(p, list, ahead);
    else first<false>(p, list, ahead);
    if constexpr (P::prefetches_next) this->copy_next_list();
    int n = 1;
#pragma unroll 1
    do {
      // Up to the last one, whose V remains.
#pragma unroll 1
      for (; n < visits.partials(); ++n) step<true>(p, n, ahead);
#pragma unroll 1
      for (; n < visits.count(); ++n) step<false>(p, n, ahead);
    } while (goes_on(p, n, list, ahead));
    if constexpr (!overlaps_next) release_q();  // else it has been
    // Late, so that none waits for this block while others have nothing to do; it is on its way during the last product.
    if constexpr (self_loading && !P::prefetches_next && !opens)
      if (Base::moves || visits.count() == 1) this->fetch_next_work_tile();
    if constexpr (overlaps_next) await_v(n - 1);
    else if constexpr (!P::prefetches_next) await_part(n);  // else it has been waited for
    begin_products(o, p);
    start_product_across(o, p, v_tile(n - 1));
    warpgroup_commit();
    if constexpr (opens) this->look_ahead();
    wait_products<0>(o, p);
    release_part(n);
  }
  FG_DEVICE bool goes_on([[maybe_unused]] Weights& p, [[maybe_unused]] int& n, [[maybe_unused]] int& list, [[maybe_unused]] Ahead& ahead) {
    if constexpr (P::prefetches_next) return passes_to_next(p, n, ahead);
    else if constexpr (overlaps_next) return begins_next_tile(p, n, list, ahead);
    else return false;
  }

  template <bool masked> FG_DEVICE void first(Weights& p, [[maybe_unused]] int list, Ahead& ahead) {
    await_part(0);
    if constexpr (overlaps_next) await_start(list);
    Scores s;
    begin_products(s);
    start_product(s, q_tile(), first_row_of_group(), k_tile(0));
    warpgroup_commit();
    if constexpr (opens)
      if (visits.count() == 1) this->fetch_next_work_tile();
    if constexpr (overlaps_next) pass_turn();
    if constexpr (P::pairs_staged) take_pairs(ahead, 0);
    if constexpr (shows_columns && !has_producers) this->fetch_columns(1);
    if constexpr (Spec::sqdist) this->take_norms(0);
    if constexpr (masked && shows_columns && has_producers) this->await_columns(0);
    wait_products<0>(s);
    if constexpr (overlaps_next) {
      let_next_start(list);
      release_q_of_last(0);
      if constexpr (!shows_columns) release_k(0);
    }
    if constexpr (Spec::f8)
      if (this->dot_unit != 1.0f) this->multiply_sums(s, this->dot_unit);
    if constexpr (Spec::exponential) {
      float shrink[2];  // of what the windows before have left in O
      if (this->template scores<masked>(s, 0, shrink, ahead)) rescale(shrink);
    }
    weigh_tile<masked>(s, 0, ahead);
    if constexpr (overlaps_next && shows_columns) release_k(0);
    if constexpr (!overlaps_next) release_part(0);
    if constexpr (shows_columns && !has_producers) this->put_columns(1);
    if constexpr (scaled) this->scale(s);
    round_into(p, s);
    if constexpr (dropped && !Spec::f8) drop_operand(p, 0);
    if constexpr (P::pairs_staged)
      if (!in_chunks) read_ahead(ahead, 1);
  }

  template <bool masked> FG_DEVICE void step(Weights& p, int n, Ahead& ahead) {
    await_part(n);
    if constexpr (overlaps_next) await_turn();
    Scores s;
    begin_products(s, o, p);
    start_product(s, q_tile(), first_row_of_group(), k_tile(n));
    warpgroup_commit();
    if constexpr (overlaps_next) {
      await_v(n - 1);
      warpgroup_arrive();
    }
    start_product_across(o, p, v_tile(n - 1));
    warpgroup_commit();
    if constexpr (overlaps_next) pass_turn();
    if constexpr (self_loading) follow_part(n);
    if constexpr (Spec::sqdist) this->take_norms(n);
    if constexpr (P::pairs_staged) take_pairs(ahead, n);
    if constexpr (masked && shows_columns && has_producers) this->await_columns(n);
    [[maybe_unused]] float shift[2], shrink[2];
    [[maybe_unused]] bool by_maxima = false, grown = false;
    if constexpr (P::maxima_by_sums) by_maxima = !masked && this->counts_on(shift) && keeps_q(n);
    wait_products<1>(s);
    if constexpr (overlaps_next) {
      release_q_of_last(n);
      if constexpr (!shows_columns && !P::maxima_by_sums) release_k(n);
    }
    if constexpr (Spec::f8)
      if (this->dot_unit != 1.0f) this->multiply_sums(s, this->dot_unit);
    if constexpr (P::maxima_by_sums) {
      if (!by_maxima || !this->weigh_by_maxima(s, shift)) {
        if (by_maxima) this->multiply_again(s, n);
        grown = this->template scores<masked>(s, n, shrink, ahead);
        weigh_tile<masked>(s, n, ahead);
      }
    } else {
      if constexpr (Spec::exponential) grown = this->template scores<masked>(s, n, shrink, ahead);
      weigh_tile<masked>(s, n, ahead);
    }
    if constexpr (overlaps_next && (shows_columns || P::maxima_by_sums)) release_k(n);
    if constexpr (Spec::exponential) {
      if (grown) {  // two waits: with one, the assembler would move it before the exponentials
        wait_products<0>(o, p);
        rescale(shrink);
      } else {
        wait_products<0>(o, p);
      }
    } else {
      wait_products<0>(o, p);
      if constexpr (scaled) this->scale(s);
    }
    release_part(n);
    if constexpr (shows_columns && !has_producers) this->put_columns(n + 1);
    round_into(p, s);
    if constexpr (dropped && !Spec::f8) drop_operand(p, n);
    if constexpr (P::pairs_staged)
      if (!in_chunks) read_ahead(ahead, n + 1);
    if constexpr (Spec::f8)
      if (n % P::tiles_of_sums == 0) this->keep_sums();  // when registers have no scores
  }
  // Without warps that copy, once products run that hide what it takes a thread.
  FG_DEVICE void follow_part(int n) {
    this->copy_next_part(n + 1);
    if constexpr (P::prefetches_next) {
      if (n + 1 == visits.count() && knows_next()) this->begin_next(n + 1);
    } else if constexpr (!Base::moves) {
      if (n + 1 == visits.count()) this->fetch_next_work_tile();  // late, so that none waits for this block while others have nothing to do
    }
    if constexpr (shows_columns) this->fetch_columns(n + 1);
  }

  // Scores, or products, to P.
  template <bool masked> FG_DEVICE void weigh_tile(Scores& s, int n, Ahead& ahead) {
    if constexpr (!Spec::exponential) this->template weigh<masked>(s, n, ahead);
    if constexpr (Spec::prefetch && !P::pairs_staged) read_ahead(ahead, n + 1);  // scores have what this tile reads
    if constexpr (Spec::exponential) this->exponentials(s);
    if constexpr (dropped && Spec::f8) this->drop(visits.tile(n) * BC, s);
  }
  // Dropped where P is an operand, whose registers have two numbers each.
  FG_DEVICE void drop_operand(Weights& p, int n) const {
    drop(p, this->dropout(), this->first_row_of_warp(), int(a.kv_start) + visits.tile(n) * BC);
  }

  // - what pairs read -
  // It comes to shared memory a step before its tile is multiplied, where rows are whole chunks; shared memory takes so little time that
  // lanes ask it while products run. Else they read for themselves, once scores of a step have left their registers.
  FG_DEVICE StagedPairs staged_pairs() const { return {memory + Memory::PAIRS + warp_index() * StagedPairs::bytes}; }
  // Where this lane begins to copy what pairs of tile n read.
  FG_DEVICE auto own_pairs(int n) const {
    struct {
      int j;
    } const c = {int(a.kv_start) + visits.tile(n) * BC + StagedPairs::own_column()};
    const int row = int(a.q_start) + visits.noted(&Notes::row0) + warp_row + StagedPairs::own_row();
    return pairs_of(a) + offset_of_pair(a, u, x, rows[0], c) + (row - rows[0].i) * pairs_by_row(a);
  }
  FG_DEVICE bool has_chunks() const {
    const bool chunks = visits.count() > 0 && pairs_by_column(a) == 1 && StagedPairs::are_chunks(own_pairs(0), pairs_by_row(a));
    return ballot(chunks) != 0;
  }
  FG_DEVICE void stage_pairs(int n) const {
    if (n >= visits.count()) return;
    warp_barrier();  // all have read what lies there
    const int row_count = int(a.q_len) - visits.noted(&Notes::row0) - warp_row;
    staged_pairs().copy_async(own_pairs(n), pairs_by_row(a), row_count, kv_len - visits.tile(n) * BC);
  }
  // What pairs of tile n read, while its products run, and on to the next one.
  FG_DEVICE void take_pairs(Ahead& ahead, int n) const {
    if (!in_chunks) return;
    copy_async_wait<0>();
    warp_barrier();
    staged_pairs().load(ahead.at);
    stage_pairs(n + 1);
  }
  FG_DEVICE void read_ahead(Ahead& ahead, int n) const {
    if (n >= visits.count()) return;
    const int column = visits.tile(n) * BC + fragment_column(0);
    struct {
      int j;
    } const c = {int(a.kv_start) + min(column, kv_len - 1)};
    const auto *const upper = pairs_of(a) + offset_of_pair(a, u, x, rows[0], c), *const lower = pairs_of(a) + offset_of_pair(a, u, x, rows[1], c);
    const bool inside = visits.tile(n) * BC + BC <= kv_len;
    const bool together = inside && lie_together(upper, pairs_by_column(a)) && lie_together(lower, pairs_by_column(a));
    const int last = max(kv_len - 1 - column, 0);
    load_pairs(ahead.at[0], upper, pairs_by_column(a), together, last);
    load_pairs(ahead.at[1], lower, pairs_by_column(a), together, last);
  }

  // - from tile to tile -
  // O = 0, by a zero that the assembler does not know of: those that it knows it brings in two steps each.
  FG_DEVICE void clear_by_moves() {
    const float zero = __int_as_float(visits.first());  // of the only window
#pragma unroll
    for (int t = 0; t < o_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) o.at[0][t][e] = zero;
  }
  // The first visit of a tile that begins while another ends, when its product is there; so many later ones may run on.
  template <bool masked, int pending> FG_DEVICE void weigh_first(Scores& s, int n, Ahead& ahead) {
    wait_products<pending>(s);
    if constexpr (overlaps_next) {
      release_q_of_last(n);
      if constexpr (!shows_columns) release_k(n);
    }
    if constexpr (Spec::exponential) {
      float shrink[2];  // of nothing
      this->template scores<masked>(s, n, shrink, ahead);
    }
    weigh_tile<masked>(s, n, ahead);
  }

  // Without warps that copy. Awaits the last part. Where the next tile has begun with it: O of this tile leaves, P is of the first visit of
  // the next one, and n the number of its second visit.
  FG_DEVICE bool passes_to_next(Weights& p, int& n, Ahead& ahead) {
    const Place before = this->place();
    const int ordinal = visits.noted(&Notes::ordinal) + 1;
    copy_async_wait<0>();
    await_part(n);
    const int next_head = shared_load(&this->next_place()->head);
    if (next_head == Base::NO_MORE) return false;
    const Place place = {next_head, shared_load(&this->next_place()->row0)};
    this->q_signals().await(ordinal);
    q_place = 1 - q_place;
    Scores s;
    begin_products(s, o, p);
    start_product(s, q_tile(), 64 * group(), k_tile(n));
    warpgroup_commit();
    start_product_across(o, p, v_tile(n - 1));
    warpgroup_commit();
    n = int(stage_of<Base::NUMBERS>(n));
    this->take_next_list(n, ordinal);
    float factors[2 * m_tiles];  // of O, while rows are the next tile's
    this->close_rows(before, factors);
    this->enter(place);
    if constexpr (shows_columns) this->fetch_columns(n);
    this->begin_rows(place);
    if constexpr (Spec::sqdist) {
      this->take_norms_of_rows();
      this->take_norms(n);
    }
    if constexpr (Spec::prefetch) read_ahead(ahead, n);
    if constexpr (shows_columns) {
      this->put_columns(n);
      this->fetch_columns(n + 1);
      Team::barrier();
    }
    if (visits.partials() > n) weigh_first<true, 1>(s, n, ahead);
    else weigh_first<false, 1>(s, n, ahead);
    wait_products<0>(o, p);
    this->write(before, factors);
    clear_by_moves();
    if constexpr (shows_columns) this->put_columns(n + 1);
    if constexpr (scaled) this->scale(s);
    round_into(p, s);
    if constexpr (dropped) drop_operand(p, n);
    ++n;
    return true;
  }

  // With producer warps the first product of the next tile follows the last one of this tile, and O leaves meanwhile. Not so before and
  // after tiles that visit none, and from window to window of a tile.

  // Of two warpgroups the second begins a list after the first: in step both would multiply, and then both weigh. The first says
  // that the second may, by a signal of two places, as there are two lists. Three start the products of every visit in turn, each
  // at a barrier of its own that the one before it comes to as well.
  static constexpr bool in_turn = overlaps_next && groups > 2;
  FG_DEVICE static int barrier_of(int group) { return 2 + group; }
  FG_DEVICE static void await_turn() {
    if (in_turn) barrier_wait(barrier_of(group()), 2 * 128);
  }
  FG_DEVICE static void pass_turn() {
    if (in_turn) barrier_arrive(barrier_of(group() + 1 < groups ? group() + 1 : 0), 2 * 128);
  }
  FG_DEVICE void await_start(int list) const {
    if (in_turn) await_turn();
    else if (group() > 0) this->start_signals(group() - 1).await(list);
  }
  FG_DEVICE void let_next_start(int list) const {
    if (!in_turn && group() < groups - 1) mbarrier_arrive(this->start_signals(group()).full(list));
  }
  // Where there is one place for Q the next one waits for it: it is free once the tile's last scores are there.
  FG_DEVICE void release_q_of_last(int n) const {
    if constexpr (q_places == 1)
      if (n + 1 == visits.count()) release_q();
  }
  // Whether this tile's Q stays until the weights of visit n are there.
  FG_DEVICE bool keeps_q(int n) const { return !overlaps_next || q_places > 1 || n + 1 < visits.count(); }

  // At a tile's last part, n. Where the next tile has begun with it: O of this tile leaves, P is of the first visit of the next
  // one, of the next list, and n the number of its second visit.
  FG_DEVICE bool begins_next_tile(Weights& p, int& n, int& list, Ahead& ahead) {
    if constexpr (q_places > 1) release_q();
    if (!this->ends()) return false;
    const Place before = this->place();
    const VTile last_v = v_tile(n - 1);
    this->list_signals().await(list + 1);
    this->switch_to(list + 1);
    if (visits.count() <= 0) {  // it has no first visit, for which the one before need not be left, or there is none
      this->switch_to(list);
      return false;
    }
    this->list_signals().release(list++);
    const int ordinal = visits.noted(&Notes::ordinal);
    parts_before += n;
    await_part(0);
    await_v(-1);
    await_start(list);
    begin_products(o, p);
    start_product_across(o, p, last_v);
    warpgroup_commit();
    this->q_signals().await(ordinal);
    if constexpr (q_places > 1) q_place = stage_of<q_places>(ordinal);
    Scores s;
    begin_products(s);
    start_product(s, q_tile(), 64 * group(), k_tile(0));
    warpgroup_commit();
    pass_turn();
    let_next_start(list);
    float factors[2 * m_tiles];  // of O, while rows are the next tile's
    this->close_rows(before, factors);
    const Place place = this->place();
    this->enter(place);
    this->begin_rows(place);
    wait_products<1>(o, p);
    release_part(0);
    this->write(before, factors);
    clear_by_moves();
    if constexpr (shows_columns)
      if (visits.partials() > 0) this->await_columns(0);
    if (visits.partials() > 0) weigh_first<true, 0>(s, 0, ahead);
    else weigh_first<false, 0>(s, 0, ahead);
    if constexpr (shows_columns) release_k(0);
    if constexpr (scaled) this->scale(s);
    round_into(p, s);
    if constexpr (dropped) drop_operand(p, 0);
    n = 1;
    return true;
  }
};

}  // namespace fg::forward
