// Blocks that have one query tile each.
#pragma once
#include "flashgen/forward/mainloop.cuh"
#include "flashgen/forward/query_tiles.cuh"
#include "flashgen/forward/results.cuh"
#include "flashgen/forward/rows.cuh"

namespace fg::forward {

template <class Base> struct OneTile : Base {
  using typename Base::Spec, typename Base::Team, typename Base::Place;
  using Base::a, Base::x, Base::visits, Base::tiles;
  using Base::Base;

  FG_DEVICE void run() {
    const Place place = this->locate(block_number(a));
    this->enter(place);
    if (threadIdx.x == 0) this->note(place, x);
    this->load_q(place);
    this->begin(place);
    if constexpr (Spec::sqdist) {
      copy_async_wait<0>();
      Team::barrier();
      this->take_norms_of_rows();
    }
    Team::barrier();  // the place of the block is known
#pragma unroll 1
    for (int window = 0; window < tiles(); window = visits.first() + WINDOW) {
      this->template find_window<Team>(block_index(), this->place(), x, window);
      this->multiply_window();
      Team::barrier();  // everyone is done with V before the next window's copies
    }
    copy_async_wait<0>();
    const Place here = this->place();  // before O may take its room
    if constexpr (Base::divided) this->join_sums();
    Team::barrier();
    this->finish(here);
  }
};

template <class Base> struct CopiesOfKeyTiles : Base {
  using typename Base::Spec, typename Base::T, typename Base::Notes;
  using Base::a, Base::visits, Base::kv_len, Base::threads, Base::BC;
  using Base::Base;

  FG_DEVICE void load_k(int n) {
    if (n < visits.count()) {
      const int first = visits.tile(n) * BC;
      copy_rows_async<threads, Base::D>(this->k_tile(n), rows_of_k<T>(a, visits.noted(&Notes::k)), first, kv_len - first);
      if constexpr (Spec::tangent)
        if (a.t_k) copy_rows_async<threads, Base::D>(this->t_k_tile(n), rows_of_t_k<T>(a, first_of_t_k(a, this->batch_entry(), this->key_head())), first, kv_len - first);
    }
    copy_async_commit();
  }
  FG_DEVICE void load_v(int n) {
    if (n < visits.count()) {
      const int first = visits.tile(n) * BC;
      copy_rows_async<threads, Base::DV>(this->v_tile(n), rows_of_v<T>(a, visits.noted(&Notes::v)), first, kv_len - first);
      if constexpr (Spec::tangent)
        if (a.t_v) copy_rows_async<threads, Base::DV>(this->t_v_tile(n), rows_of_t_v<T>(a, first_of_t_v(a, this->batch_entry(), this->key_head())), first, kv_len - first);
    }
    copy_async_commit();
  }
  FG_DEVICE void load_first() {
#pragma unroll
    for (int n = 0; n < Base::stages; ++n) {
      load_k(n);
      if (n < Base::stages - 1) load_v(n);
    }
  }
};

template <class Products> using KeyTilesInTurn = OneTile<Mainloop<CopiesOfKeyTiles<Results<Rows<QueryTiles<Products>>>>>>;

}  // namespace fg::forward
