// Where two warpgroups have half of O's columns each, and perhaps blocks of a cluster a part of its rows.
#pragma once
#include "flashgen/clusters.cuh"
#include "flashgen/forward/state.cuh"
#include "flashgen/warpgroup_spans.cuh"

namespace fg::forward {

template <class Base> struct HalvesOfO : Base {
  using typename Base::T, typename Base::Place;
  using Base::Base;

  FG_DEVICE static int rank() { return cluster_rank(); }
  FG_DEVICE static void barrier_of_cluster() { cluster_barrier(); }
  FG_DEVICE void store_o(const Place& place, int warp_row, int count) const {
    store_half<T, typename Base::Kernel::ColumnsOfO, Base::DV, Kept::normally>(rows_of_o<T>(this->a, place.head, place.row0), this->o.at[0], this->part, warp_row, count);
  }
};

}  // namespace fg::forward
