// The rows of a query tile: Q, what hooks know of queries, and sums of no key so far.
#pragma once
#include "flashgen/forward/state.cuh"

namespace fg::forward {

template <class Base> struct Rows : Base {
  using typename Base::Spec, typename Base::T, typename Base::Place;
  using Base::a, Base::u, Base::x, Base::rows, Base::warp_row, Base::m_tiles, Base::row_count, Base::q_tile;
  using Base::Base;

  FG_DEVICE void load_q(const Place& place) {
    const int b = Spec::cached ? 0 : x.b - int(a.b_start), h = Spec::cached ? place.head * group_of_heads() : x.h - int(a.h_start);
    copy_rows_async<Base::threads, Spec::D>(q_tile(), rows_of_q<T>(a, first_of_q(a, b, h)), place.row0, row_count(place));
    if constexpr (Spec::tangent)
      if (a.t_q) copy_rows_async<Base::threads, Spec::D>(this->t_q_tile(), rows_of_t_q<T>(a, first_of_t_q(a, b, h)), place.row0, row_count(place));
    copy_async_commit();
  }
  FG_DEVICE int group_of_heads() const {
    if constexpr (Spec::cached) return group_of(a);
    else return 1;
  }
  // Once Q is there.
  FG_DEVICE void take_norms_of_rows() {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const int row = warp_row + 16 * (r / 2) + fragment_row(r % 2 * 2);
      rows[r].qq = squared_norm(q_tile(), row);
      if constexpr (Spec::tangent) this->t_qq[r] = twice_product(q_tile(), this->t_q_tile(), row, a.t_q != nullptr);
    }
  }

  // No key is seen yet.
  FG_DEVICE void begin(const Place& place) {
    clear(this->o);
    if constexpr (Spec::f8) this->clear_kept_sums(), this->take_factors(place);
    if constexpr (Spec::tangent) clear(this->t_o);
    begin_rows(place);
  }
  FG_DEVICE void begin_rows(const Place& place) {
    const int first = again(warp_row) + fragment_row(0);  // not kept from tile to tile
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const int row = first + 16 * (r / 2) + 8 * (r % 2);
      if constexpr (Spec::cached) {
        const int number = place.row0 + min(row, row_count(place) - 1), n = int(position_of(number, group_of(a)));
        this->heads[r] = this->head_of(place.head * group_of(a) + (number - n * group_of(a)));
        rows[r] = make_row(a, u, this->heads[r], int(a.q_start) + n);
      } else {
        rows[r] = make_row(a, u, x, int(a.q_start) + place.row0 + min(row, row_count(place) - 1));
        if constexpr (Spec::diagonals) {  // of one begin, so that rows 8 apart read the same addresses
          static_assert(16 * m_tiles <= Spec::BEYOND, "rows past the last one read, too");
          rows[r].begin = int(a.q_start) + place.row0 + min(first, row_count(place) - 1), rows[r].offset = 8 * r;
        }
      }
      if constexpr (Spec::norms) rows[r].qq = 0.0f;  // of rows that visit nothing
      if constexpr (Spec::exponential) {
        this->row_max[r] = -INFINITY;
        if constexpr (Spec::f8) this->begin_row(r);
        if constexpr (Spec::tangent) this->t_base[r] = 0.0f;
      }
      if constexpr (Spec::normalised) {
        this->row_sum[r] = 0.0f;
        if constexpr (Spec::divided && !Spec::cached) this->row_moving[r] = 0.0f;
        if constexpr (Spec::tangent) this->t_sum[r] = 0.0f;
      }
      if constexpr (Spec::scaled_weights) this->row_scale[r] = 0.0f;
    }
  }
};

}  // namespace fg::forward
