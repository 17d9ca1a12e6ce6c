// Blocks that have one query tile each.
#pragma once
#include "flashgen/forward/state.cuh"

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

}  // namespace fg::forward
