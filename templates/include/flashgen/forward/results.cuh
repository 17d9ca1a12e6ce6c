// Sums to results, which leave by way of shared memory but for where tensor copies use it.
#pragma once
#include "flashgen/forward/state.cuh"
#include "flashgen/parts.cuh"

namespace fg::forward {

template <class Base> struct Results : Base {
  using typename Base::Spec, typename Base::P, typename Base::T, typename Base::OTile, typename Base::Place;
  using Base::a, Base::o, Base::m_tiles, Base::o_tiles, Base::threads, Base::blocks, Base::divided, Base::DV, Base::row_count, Base::rescale, Base::close_rows;
  using Base::Base;
  using Sums = Accumulators<m_tiles, o_tiles>;

  // Scales O by its rows' denominators and writes it, and the log-sum-exps.
  FG_DEVICE void finish(const Place& place) {
    float factors[2 * m_tiles];
    if constexpr (Spec::tangent) {
      float moves[2 * m_tiles];  // of lse, less t_base
      close_rows(place, factors, moves);
      if constexpr (Spec::normalised || Spec::dropout) rescale(factors);
      if constexpr (Spec::normalised) this->move_back(moves);
      const int count = row_count(place), warp_row = this->first_own_row();
      store(this->t_o, rows_of_t_o<T>(a, place.head, place.row0), warp_row, count);
      if (!a.o) return;
      if constexpr (!P::tensor_copies) warp_barrier();
      store(o, rows_of_o<T>(a, place.head, place.row0), warp_row, count);
    } else {
      if constexpr (Spec::f8) this->add_kept_sums();
      close_rows(place, factors);
      write(place, factors);
    }
  }
  FG_DEVICE void write(const Place& place, [[maybe_unused]] const float (&factors)[2 * m_tiles]) {
    const int count = row_count(place), warp_row = this->first_own_row();
    if constexpr (Spec::normalised || Spec::dropout || Spec::f8) rescale(factors);
    if constexpr (Spec::writes_sums)
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
        store_sums<DV>(rows_of_o<T>(a, place.head, place.row0), o.at[m], warp_row + 16 * m, [this](int t) { return Base::column_of(t); }, count);
    else if constexpr (Spec::f8 || P::ping_pong) this->store_o(place, warp_row, count);
    else store(o, rows_of_o<T>(a, place.head, place.row0), warp_row, count);
  }
  template <class To> FG_DEVICE void store(const Sums& sums, const To& to, int warp_row, int count) const {
    if constexpr (P::tensor_copies) {  // others copy into its place
#pragma unroll
      for (int m = 0; m < m_tiles; ++m) store_fragments<T, DV>(to, sums.at[m], warp_row + 16 * m, count);
    } else {
      stage(sums, warp_row);
      store_staged(to, warp_row, count);
    }
  }
  // Rounded sums, by rows in shared memory, and from there 16 bytes a lane.
  FG_DEVICE OTile o_tile() const { return {reinterpret_cast<T*>(this->memory)}; }
  FG_DEVICE void stage(const Sums& sums, int warp_row) const {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int t = 0; t < o_tiles; ++t) store_fragment(o_tile(), warp_row + 16 * m, blocks > 1 ? 8 * t : Base::column_of(t), sums.at[m][t], lane_index());
    if constexpr (!divided || blocks > 1) warp_barrier();
    else if constexpr (Spec::cached) barrier_wait(1, threads);  // more warps may have merged
    else block_barrier();
  }
  template <class To> FG_DEVICE void store_staged(const To& to, int warp_row, int count) const {
    if constexpr (divided && blocks == 1) {
      store_rows<threads, DV>(to, o_tile(), int(threadIdx.x), 0, Base::BR, count);
    } else {
      To own = to;
      if constexpr (Spec::cached) own.base += Base::share() * (DV / blocks);
      store_rows<32, DV / blocks>(own, o_tile(), lane_index(), warp_row, 16 * m_tiles, count);
    }
  }
};

}  // namespace fg::forward
