// Persistent blocks with warps that do not multiply.
#pragma once
#include "flashgen/forward/persistent.cuh"
#include "flashgen/forward/producers.cuh"
#include "flashgen/forward/query_tiles.cuh"
#include "flashgen/forward/results.cuh"
#include "flashgen/forward/rows.cuh"
#include "flashgen/forward/warpgroup_copies.cuh"

namespace fg::forward {

template <class Base> struct WithProducers : Base {
  using typename Base::Spec, typename Base::P, typename Base::Place, typename Base::Notes;
  using Base::visits, Base::overlaps_next, Base::group, Base::groups;
  using Base::Base;

  FG_DEVICE void run() {
    if (threadIdx.x == 0) this->make_signals();
    barrier_of_all();
    const int warp = warp_index();
    if (warp < P::warps) {
      take_registers<P::registers>();
      if constexpr (overlaps_next)
        if (this->in_turn && group() == groups - 1) this->pass_turn();
      multiply();
      if constexpr (overlaps_next)
        if (this->in_turn && group() == 0) this->await_turn();  // nobody else does
    } else {
      give_registers<P::producer_registers>();
      if (warp < P::warps + Base::COPIERS) this->copy(warp - P::warps);
      else serve(warp);
    }
    if constexpr (P::cluster > 1) barrier_of_all();  // none copies to a block, or arrives there, that has ended
  }
  FG_DEVICE static void barrier_of_all() {
    if constexpr (P::cluster > 1) Base::barrier_of_cluster();
    else block_barrier();
  }
  FG_DEVICE void serve([[maybe_unused]] int warp) {
    if constexpr (Spec::sqdist)
      if (warp > P::warps + Base::FINDERS) return this->measure();
    this->find();
  }
  FG_DEVICE void multiply() {
    if constexpr (Spec::f8) this->group_row = 64 * group();
#pragma unroll 1
    for (int list = 0; this->take(list); ++list) {
      if (this->begins()) {
        const Place place = this->enter_tile();
        this->begin(place);
        if constexpr (overlaps_next) this->q_place = stage_of<Base::q_places>(visits.noted(&Notes::ordinal));
      }
      this->multiply_window(list);
      const Place place = this->place();
      const bool done = this->ends();
      if constexpr (overlaps_next) this->parts_before += visits.count();
      this->list_signals().release(list);
      if constexpr (P::ping_pong)
        if (done) this->join_sums();
      if (done) this->finish(place);
    }
  }
};
template <class Weighing> using CopiesOfTiles = WarpgroupCopies<Persistent<Results<Rows<QueryTiles<Weighing>>>>>;

}  // namespace fg::forward
