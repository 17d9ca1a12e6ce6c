// Rows that warps or warpgroups share, each with its part of the keys of a tile: P and numbers of rows go through shared memory.
#pragma once
#include "flashgen/forward/state.cuh"

namespace fg::forward {

template <class Base> struct SharedRows : Base {
  using typename Base::Spec, typename Base::P, typename Base::E, typename Base::PTile, typename Base::Memory;
  using Base::memory, Base::part, Base::split, Base::warp_row, Base::m_tiles, Base::BR;
  using Base::Base;

  FG_DEVICE PTile p_tile() const { return {reinterpret_cast<E*>(memory + Memory::PP)}; }
  FG_DEVICE float* of_parts() const { return reinterpret_cast<float*>(memory + Memory::PARTS); }  // a number a row, of each part
  // Where tile t of its columns of O begins.
  FG_DEVICE int column_of(int t) const {
    if constexpr (P::warpgroups) return Base::Kernel::ColumnsOfO::column(part, t);
    else return 8 * (part * Base::o_tiles + t);
  }
  // Of a number that each row has in every part: the largest, or the sum, the same in all of them. Nobody needs the former ones any more.
  template <class Join> FG_DEVICE void over_parts(float (&values)[2 * m_tiles], Join join) const {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r)
      if (fragment_column(0) == 0) shared_store(of_parts() + part * BR + warp_row + 16 * (r / 2) + fragment_row(r % 2 * 2), values[r]);
    block_barrier();
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const float* const own = of_parts() + warp_row + 16 * (r / 2) + fragment_row(r % 2 * 2);
      values[r] = shared_load(own);
#pragma unroll
      for (int n = 1; n < split; ++n) values[r] = join(values[r], shared_load(own + n * BR));
    }
  }
  // At the end.
  FG_DEVICE void join_sums() {
    if constexpr (Spec::normalised) join_sums(Base::row_sum);
    if constexpr (Spec::divided && !Spec::cached) {
      block_barrier();  // everyone has read the sums
      join_sums(Base::row_moving);
    }
  }
  FG_DEVICE void join_sums(float (&values)[2 * m_tiles]) const {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) values[r] = fg::row_sum(values[r]);
    over_parts(values, Sum());
  }
};

}  // namespace fg::forward
