// The kernel of dQ alone where warpgroups multiply, of 64 rows each.
#pragma once
#include "flashgen/backward/queries.cuh"
#include "flashgen/warpgroup.cuh"

namespace backward {

template <class Spec, class T, bool in_bounds, bool dropped, Adding how>
struct WarpgroupQueries : Queries<Spec, T, in_bounds, dropped, how> {
  using Base = Queries<Spec, T, in_bounds, dropped, how>;
  using Base::BC, Base::stages, Base::d_o_tile, Base::dq, Base::k_tile, Base::q_tile, Base::v_tile, Base::visits, Base::warp_row;
  using Base::Base;

  template <bool masked> FG_DEVICE void step(int n) {
    const int row0 = warp_row / 64 * 64, column0 = visits.tile(n) * BC;
    fg::copy_async_wait<stages - 1>();
    fg::publish_shared();
    Base::begin_tile(n);
    typename Base::Scores s, dp;
    fg::begin_products(s, dp);
    fg::start_product(s, q_tile(), row0, k_tile(n));
    fg::start_product(dp, d_o_tile(), row0, v_tile(n));
    fg::warpgroup_commit();
    fg::wait_products<0>(s, dp);
    Base::template pairs<masked>(s, dp, column0);
    fg::LeftRows<T, 1, BC> ds;
    fg::round_into(ds, dp);
    fg::begin_products(dq, ds);
    fg::start_product_across(dq, ds, k_tile(n));
    fg::warpgroup_commit();
    fg::wait_products<0>(dq, ds);
    fg::block_barrier();
    Base::load(n + stages);
  }
};

}  // namespace backward
