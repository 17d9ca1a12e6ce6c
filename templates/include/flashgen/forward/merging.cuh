// Over caches, where parts of the keys have blocks of their own: what they leave, and how it is merged.
#pragma once
#include "flashgen/forward/state.cuh"
#include "flashgen/parts.cuh"

namespace fg::forward {

template <class Base> struct Merging : Base {
  using typename Base::Spec, typename Base::P, typename Base::Place;
  using Base::a, Base::o, Base::memory, Base::warp_row, Base::part, Base::row_max, Base::row_sum, Base::row_scale, Base::BR, Base::DVP, Base::m_tiles, Base::o_tiles, Base::threads;
  using Base::blocks, Base::split, Base::tiles, Base::row_count, Base::share, Base::column_of;
  using Base::Base;
  // Where those who merge have what, in bytes: rows, what counts for how much, and sums, four to a thread or all of a tile.
  struct Merged {
    static constexpr int ROWS = 0, KEPT = ROWS + 8 * BR, WEIGHTS = KEPT + 4 * BR, SUMS = WEIGHTS + 4 * P::merged_weights, LAST = ROWS;
    static constexpr int bytes = SUMS + (4 * P::merging_threads > BR * DVP ? 16 * P::merging_threads : 4 * BR * DVP);
    static constexpr int at_once = P::merged_weights / BR;  // parts whose weights there is room for
  };
  static_assert(threads <= P::merging_threads && Merged::at_once > 0, "there is room for what the block merges");
  static constexpr float NONE = Spec::exponential ? -INFINITY : 0.0f;  // in the place of a row's maximum

  static constexpr int merged_columns = DVP / blocks;  // a block's
  // Parts that have a tile, the first ones, where each has so many.
  FG_DEVICE int parts_left(int own_tiles) const { return own_tiles == 0 ? 0 : int((unsigned(tiles()) + unsigned(own_tiles) - 1) / unsigned(own_tiles)); }
  // What they leave: O, by rows; of each row, those of its parts one behind the other, the maximum, or what its sum is multiplied by, and the sum.
  FG_DEVICE float* o_of_part(int n) const { return Base::Kernel::Parts::o(a) + (a.work_tile * a.splits + n) * (BR * DVP); }
  FG_DEVICE float2* parts_of_row(int row) const { return Base::Kernel::Parts::rows(a) + (a.work_tile * BR + row) * a.splits; }
  FG_DEVICE void leave(const Place& place) const {
    const int count = row_count(place);
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
      store_sums<DVP>(o_of_part(a.part), o.at[m], warp_row + 16 * m, ColumnsFrom{column_of(0)}, count);
    if constexpr (Spec::normalised)
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) {
        const float2 row = {Spec::exponential ? row_max[r] : Spec::scaled_weights ? row_scale[r] : 0.0f, split > 1 ? row_sum[r] : fg::row_sum(row_sum[r])};
        if (own_row(r) < count && fragment_column(0) == 0 && (split == 1 || part == 0)) global_store(parts_of_row(own_row(r)) + a.part, row);
      }
  }
  // By the block that is the last to leave its part. Everyone is done with shared memory, of which the start is free.
  FG_DEVICE bool is_last() const {
    uint32_t* const found = reinterpret_cast<uint32_t*>(memory + Merged::LAST);
    block_barrier();
    if (threadIdx.x == 0) shared_store(found, uint32_t(global_arrive(a.arrivals + a.work_tile, uint32_t(a.splits))));
    block_barrier();
    return shared_load(found) != 0;
  }

  FG_DEVICE int own_row(int r) const { return warp_row + 16 * (r / 2) + fragment_row(r % 2 * 2); }
  FG_DEVICE float2* merged_rows() const { return reinterpret_cast<float2*>(memory + Merged::ROWS); }
  FG_DEVICE float* kept_of_rows() const { return reinterpret_cast<float*>(memory + Merged::KEPT); }
  FG_DEVICE float* weights_of_row(int row) const { return reinterpret_cast<float*>(memory + Merged::WEIGHTS) + row * Merged::at_once; }
  // What O of each of the parts first … counts for in its row, and what those before them do: a warp has some of the rows, a lane some of the parts.
  template <int merging> FG_DEVICE void weigh_parts(int count, int first, int parts) const {
    constexpr int own = (Merged::at_once + 31) / 32;
    const int lane = lane_index(), span = min(parts - first, Merged::at_once);
#pragma unroll 1
    for (int row = warp_index(); row < count; row += merging / 32) {
      const float2* const from = parts_of_row(row) + first;
      const float2 none = {NONE, 0.0f}, before = first > 0 && lane == 0 ? shared_load(merged_rows() + row) : none;
      float2 left[own];
#pragma unroll
      for (int k = 0; k < own; ++k) left[k] = 32 * k + lane < span ? global_load_left(from + 32 * k + lane) : none;
      float top = 0.0f;
      if constexpr (Spec::exponential) {
        top = before.x;
#pragma unroll
        for (int k = 0; k < own; ++k) top = running_max(top, left[k].x);
        top = warp_max(top);
      } else if constexpr (Spec::scaled_weights) {  // the smallest, as all were to fit
        top = before.x == 0.0f ? -INFINITY : -before.x;
#pragma unroll
        for (int k = 0; k < own; ++k) top = left[k].x == 0.0f ? top : fg::max(top, -left[k].x);
        top = warp_max(top);
        top = top == -INFINITY ? 0.0f : -top;
      }
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < own; ++k) {
        if (32 * k >= span) continue;
        const float weight = Base::shrink_of(left[k].x, top);
        sum += Spec::exponential ? left[k].y * weight : left[k].y;
        if (32 * k + lane < span) shared_store(weights_of_row(row) + 32 * k + lane, weight);
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        const float kept = Base::shrink_of(before.x, top);
        shared_store(kept_of_rows() + row, kept);
        shared_store(merged_rows() + row, make_float2(top, (Spec::exponential ? before.y * kept : before.y) + sum));
      }
    }
  }
  // The parts of a tile, as if one block had had them all; only the order of sums is another, which does not depend on who came when. A
  // thread has four columns of a row; where there are rows for fewer threads, teams have some of the parts each.
  template <int merging> FG_DEVICE void merge(const Place& place, int parts) {
    constexpr int ahead = merging <= 256 && m_tiles * o_tiles <= 8 ? 32 : 16;  // as registers allow
    const int count = row_count(place);
    int teams = 1;
    if (parts > 4) teams = add_parts<merging, 1, ahead>(count, parts);
    else add_parts<merging, 4, 4>(count, parts);
    block_barrier();
    if (warp_index() < (blocks == 1 ? P::warps : P::merging_warps)) take_merged(count, parts, teams);
    block_barrier();  // O may take that place
  }
  // Sums by teams, how many. A thread has `deep` rows at a time; of each `ahead` parts are asked for before the first of them is looked
  // at, and before their weights are known.
  template <int merging, int deep, int ahead> FG_DEVICE int add_parts(int count, int parts) const {
    constexpr int across = merged_columns / 4, wide = across < merging ? across : merging, high = merging / wide;
    const int thread = int(threadIdx.x), level = thread / wide, teams = deep == 1 && count < high ? int(unsigned(high) / unsigned(count)) : 1;
    const int team = teams > 1 ? int(unsigned(level) / unsigned(count)) : 0;
    float4* const sums = reinterpret_cast<float4*>(memory + Merged::SUMS) + team * count * across;
#pragma unroll 1
    for (int begin = 0; begin < across; begin += wide)
#pragma unroll 1
      for (int rows = 0; rows < count; rows += high * deep) {
        const int column = begin + thread % wide, row = rows + level - team * count;
        const bool has_own = level < high && team < teams && column < across && row < count;
        float4 sum[deep];
#pragma unroll
        for (int j = 0; j < deep; ++j) sum[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
        for (int first = 0; first < parts; first += Merged::at_once) {
          const int span = min(parts - first, Merged::at_once), own = teams > 1 ? int((unsigned(span) + teams - 1) / unsigned(teams)) : span;
          int n = team * own, end = has_own ? min(n + own, span) : n;  // counted from the first
          const float4* from = reinterpret_cast<const float4*>(o_of_part(first + n) + row * DVP + share() * merged_columns) + column;
          bool begins = true;
          do {
            float4 left[deep][ahead];
            const bool whole = deep == 1 && n + ahead <= end;
#pragma unroll
            for (int j = 0; j < deep; ++j)
#pragma unroll
              for (int k = 0; k < ahead; ++k) {
                const float4* const own_from = from + j * high * (DVP / 4) + k * (BR * DVP / 4);
                if (whole) left[j][k] = global_load_left(own_from);
                else left[j][k] = n + k < end && row + j * high < count ? global_load_left(own_from) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
              }
            if constexpr (Spec::normalised)
              if (begins && (rows + begin == 0 || parts > Merged::at_once)) {
                block_barrier();  // everyone is done with those before
                weigh_parts<merging>(count, first, parts);
                block_barrier();
              }
#pragma unroll
            for (int j = 0; j < deep; ++j) {
              const int own_row = row + j * high;
              if constexpr (Spec::normalised) {
                const float kept = begins && first > 0 && has_own && own_row < count ? shared_load(kept_of_rows() + own_row) : 1.0f;
                sum[j].x *= kept, sum[j].y *= kept, sum[j].z *= kept, sum[j].w *= kept;
              }
#pragma unroll
              for (int k = 0; k < ahead; ++k) {
                float weight = Spec::normalised ? 0.0f : 1.0f;
                if constexpr (Spec::normalised)
                  if (whole || (n + k < end && own_row < count)) weight = shared_load(weights_of_row(own_row) + n + k);
                sum[j].x += left[j][k].x * weight, sum[j].y += left[j][k].y * weight, sum[j].z += left[j][k].z * weight, sum[j].w += left[j][k].w * weight;
              }
            }
            begins = false, n += ahead, from += ahead * (BR * DVP / 4);
          } while (n < end);
        }
#pragma unroll
        for (int j = 0; j < deep; ++j)
          if (has_own && row + j * high < count) shared_store(sums + (row + j * high) * across + column, sum[j]);
      }
    return teams;
  }
  // As lanes hold O and what rows have.
  FG_DEVICE void take_merged(int count, int parts, int teams) {
    clear(o);
#pragma unroll 1
    for (int team = 0; team < teams; ++team)
#pragma unroll
      for (int m = 0; m < m_tiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = warp_row + 16 * m + fragment_row(2 * half);
          const float* const from = reinterpret_cast<const float*>(memory + Merged::SUMS) + (team * count + row) * merged_columns + (blocks > 1 ? 0 : column_of(0)) + fragment_column(0);
#pragma unroll
          for (int t = 0; t < o_tiles; ++t) {
            if (row >= count) continue;
            const float2 own = shared_load(reinterpret_cast<const float2*>(from + 8 * t));
            o.at[m][t][2 * half] += own.x, o.at[m][t][2 * half + 1] += own.y;
          }
        }
    if constexpr (Spec::normalised)
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) {
        const bool is_row = parts > 0 && own_row(r) < count;
        const float2 row = is_row ? shared_load(merged_rows() + own_row(r)) : make_float2(NONE, 0.0f);
        if constexpr (Spec::exponential) row_max[r] = row.x;
        else if constexpr (Spec::scaled_weights) row_scale[r] = row.x;
        row_sum[r] = split > 1 || fragment_column(0) == 0 ? row.y : 0.0f;  // lanes that share a row alone have a sum of their own each
      }
  }
};

}  // namespace fg::forward
