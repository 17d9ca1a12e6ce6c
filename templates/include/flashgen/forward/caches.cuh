// Over caches: a block has a tile of the queries of heads that share keys, and a part of the keys, whose length it learns first.
#pragma once
#include "flashgen/forward/mainloop.cuh"
#include "flashgen/forward/merging.cuh"
#include "flashgen/forward/products_of_warps.cuh"
#include "flashgen/forward/query_tiles_of_caches.cuh"
#include "flashgen/forward/results.cuh"
#include "flashgen/forward/rows.cuh"

namespace fg::forward {

template <class Base> struct KeyTilesOfCaches : Base {
  using typename Base::Spec, typename Base::Stored, typename Base::Notes, typename Base::Memory;
  using Base::a, Base::visits, Base::kv_len, Base::threads, Base::stages, Base::BC, Base::D, Base::DV, Base::DP, Base::DVP, Base::k_tile, Base::v_tile;
  using Base::Base;
  using TilePages = fg::TilePages<BC>;
  int last_tile;         // behind this block's part of the keys
  const Stored* k_rows;  // of the sequence; null: in pages
  const Stored* v_rows;
  int32_t pages_ahead;  // a page of the tile to come, as this lane has looked it up

  template <class Tile> FG_DEVICE static auto stored_in(Tile tile) {
    if constexpr (Spec::f8_cached) return tile.stored;
    else return tile;
  }
  FG_DEVICE void load_k(int n) {
    if (n < visits.count()) {
      const int first = visits.tile(n) * BC;
      if (a.block_table) {
        TilePages::put(pages(), page_table(a), place_of(n), pages_ahead);
        look_ahead(n + 1);
      }
      if (D == DP && k_rows && first + BC <= kv_len) load_k_of_entry(n, first);
      else copy_rows_async<threads, D>(stored_in(k_tile(n)), rows_of_k<Stored>(a, visits.noted(&Notes::k)).template of_tile<BC>(first, pages()), first, kv_len - first);
    }
    copy_async_commit();
  }
  FG_DEVICE void load_v(int n) {
    if (n < visits.count()) {
      const int first = visits.tile(n) * BC;
      if (DV == DVP && v_rows && first + BC <= kv_len) load_v_of_entry(n, first);
      else copy_rows_async<threads, DV>(stored_in(v_tile(n)), rows_of_v<Stored>(a, visits.noted(&Notes::v)).template of_tile<BC>(first, pages()), first, kv_len - first);
    }
    copy_async_commit();
  }
  FG_DEVICE void load_k_of_entry(int n, int first) const { copy_rows_of_entry_async<threads>(stored_in(k_tile(n)), k_rows, rows_of_k<Stored>(a, 0).by_row, first); }
  FG_DEVICE void load_v_of_entry(int n, int first) const { copy_rows_of_entry_async<threads>(stored_in(v_tile(n)), v_rows, rows_of_v<Stored>(a, 0).by_row, first); }
  // The first copies of tiles in one entry, `first` and those behind it, all of whose rows are there.
  FG_DEVICE void ask_first(int first) {
#pragma unroll 1
    for (int n = 0; n < stages; ++n) {
      const bool is_tile = first + n < min(first + WINDOW, last_tile);
      if (is_tile) load_k_of_entry(n, (first + n) * BC);
      copy_async_commit();
      if (n == stages - 1) break;
      if (is_tile) load_v_of_entry(n, (first + n) * BC);
      copy_async_commit();
    }
  }

  // A tile's values lie in the pages of its keys, whose copies start right before theirs.
  FG_DEVICE int32_t* pages() const { return reinterpret_cast<int32_t*>(this->memory + Memory::PAGES + warp_index() * TilePages::bytes); }
  FG_DEVICE unsigned place_of(int n) const { return unsigned(int(a.kv_start) + visits.tile(n) * BC); }
  FG_DEVICE void look_ahead(int n) {
    if (a.block_table && n < visits.count()) pages_ahead = TilePages::ahead(page_table(a), place_of(n));
  }
};

template <class Base> struct PartOfKeys : Base {
  using typename Base::Spec, typename Base::P, typename Base::Stored, typename Base::Place, typename Base::Team;
  using Base::a, Base::u, Base::x, Base::kv_len, Base::visits, Base::stages, Base::threads, Base::tiles, Base::begin, Base::last_tile, Base::k_rows, Base::v_rows;
  using Base::Base;

  FG_DEVICE void run() {
    const Place place = this->locate(block_number(a));
    this->load_q(place);  // while the length is on its way
    know(place);
    k_rows = v_rows = nullptr;
    if (!a.block_table) {
      k_rows = rows_of_k<Stored>(a, first_of_k(a, 0, place.head)).in_entry();
      v_rows = rows_of_v<Stored>(a, first_of_v(a, 0, place.head)).in_entry();
    }
    if constexpr (Spec::f8_cached) this->k_factor = factor_of(a, a.k_factors, place.head);
    const int own_tiles = this->tiles_of_part(), first_tile = int(a.part) * own_tiles;
    last_tile = min(first_tile + own_tiles, tiles());
    Place here = place;
    // Where nothing of a part is masked, its first tiles are known. Nothing that can wait goes before they are asked for.
    const bool begins = first_tile < last_tile;
    bool asked = false;
    ranges::Bool whole = {true, false};
    if constexpr (!Spec::selected) {
      if (begins) whole = this->classify(place)(first_tile, min(first_tile + WINDOW, last_tile));
      asked = Base::D == Base::DP && Base::DV == Base::DVP && k_rows && !whole.may_be_false;
      if (asked) this->ask_first(first_tile);
    }
    if (!begins) begin(place);
    if (threadIdx.x == 0) this->note(place, x);
    if constexpr (Spec::selected) Team::barrier();  // the place of the block is known
#pragma unroll 1
    for (int window = first_tile; window < last_tile; window += WINDOW) {
      if constexpr (Spec::selected) {
        this->find_window(this->place(), window, last_tile);
      } else {
        const auto of = this->classify(here);
        if (window > first_tile) whole = of(window, min(window + WINDOW, last_tile));
        list_visits<Team>(visits.list, window, min(window + WINDOW, last_tile), of, whole);
      }
      visit(here, window == first_tile, asked && window == first_tile);
      here = this->place();
      Team::barrier();  // everyone is done with V and the list before the next window's
    }
    copy_async_wait<0>();
    if constexpr (Base::divided) this->join_sums();
    if constexpr (Spec::f8_cached) this->to_sums(factor_of(a, a.v_factors, here.head));
    if (a.merges) {
      if (begins) this->leave(here);
      if (!a.arrivals || !this->is_last()) return;
      this->template merge<threads>(here, this->parts_left(own_tiles));
    } else {
      Team::barrier();
    }
    this->finish(here);
  }
  // By a kernel of its own.
  FG_DEVICE void merge_apart() {
    const Place place = this->locate(block_number(a));
    know(place);
    begin(place);
    this->template merge<P::merging_threads>(place, this->parts_left(this->tiles_of_part()));
    if (warp_index() < P::merging_warps) this->finish(place);
  }
  // What follows from the sequence's length.
  FG_DEVICE void know(const Place& place) {
    know_length(a);
    kv_len = int(a.kv_len), u = make_launch(a);
    this->enter(place);
  }

  // The tiles of one window. In the first one rows `begin`, whose queries came before all keys. First tiles may be `asked` for already.
  FG_DEVICE void visit(const Place& place, bool begins, bool asked) {
    if (!asked) {
      this->look_ahead(0);
#pragma unroll 1
      for (int n = 0; n < stages; ++n) {
        this->load_k(n);
        if (n < stages - 1) this->load_v(n);
      }
    }
    if (begins) {
      begin(place);
      if constexpr (Spec::f8_cached || Spec::sqdist) {
        copy_async_wait<2 * stages - 1>();
        block_barrier();
      }
      if constexpr (Spec::sqdist) {
        this->take_norms_of_rows();
        if constexpr (Spec::f8_cached) block_barrier();
      }
      if constexpr (Spec::f8_cached) this->order_q();
    }
    this->multiply_tiles();
  }
};

template <class Weighing> using Block = PartOfKeys<Mainloop<KeyTilesOfCaches<Merging<Results<Rows<QueryTilesOfCaches<ProductsOfWarps<Weighing>>>>>>>>;

}  // namespace fg::forward
