// dQ from its float32 sums: the kernel that runs last. A warp takes 16 rows, in the order in which fragments were added.
#pragma once
#include "flashgen/backward/spec.cuh"

namespace backward {

// Columns of 16 rows, `most` at a time, as many as registers hold; all where rows are no whole number of 16 bytes, which is how they are
// stored. `padded` are left in the sums, `width` in a row.
template <class Spec, class T, int padded, int width, int most, class Rows>
FG_DEVICE void convert_columns([[maybe_unused]] const typename Spec::Arguments& a, const float* sums, Rows to, int count, int lane) {
  using Written = typename WrittenAs<Spec::writes_f32, T>::Type;
  constexpr int columns = padded < most ? padded : most, stored = width < most ? width : most;
  float dq[columns / 8][4];  // all on their way at once
#pragma unroll
  for (int t = 0; t < columns / 8; ++t) {
    if constexpr (BackwardPlan<T>::warpgroups) {
      const float4 four = fg::global_load(reinterpret_cast<const float4*>(sums + 128 * t) + lane);
      dq[t][0] = four.x, dq[t][1] = four.y, dq[t][2] = four.z, dq[t][3] = four.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[t][e] = fg::global_load(sums + 128 * t + 32 * e + lane);
    }
  }
  if constexpr (Spec::constant_slope) {
    typename Spec::Launch u;
    if constexpr (Spec::slope_of_launch) u = make_launch(a);
#pragma unroll
    for (int t = 0; t < columns / 8; ++t)
#pragma unroll
      for (int e = 0; e < 4; ++e) Spec::finish_sum(u, dq[t][e]);
  }
  fg::store_fragments<Written, stored>(to, dq, 0, count);
  if constexpr (width > most) {
    to.base += most;
    convert_columns<Spec, T, padded - most, width - most, most>(a, sums + 16 * most, to, count, lane);
  }
}

// The group of 16 rows of this number, of head `head`.
template <class Spec, class T> FG_DEVICE void convert_rows(const typename Spec::Arguments& a, unsigned group, unsigned head, unsigned groups) {
  constexpr int D = Spec::D, DP = Spec::DP, most = QueryPlan<T>::split > 1 && D % 8 == 0 ? 256 : DP;
  const int row0 = int(group - head * groups) * 16, lane = fg::lane_index();
  const float* const sums = dq_sums(a) + int64_t(group) * (16 * DP);
  convert_columns<Spec, T, DP, D, most>(a, sums, rows_of_dq<T>(a, int(head), row0), int(a.q_len) - row0, lane);
}

// Of all rows of the call.
template <class Spec, class T> FG_DEVICE void run_convert(const typename Spec::Arguments& a) {
  const unsigned groups = (unsigned(a.q_len) + 15) / 16, group = backwards() * 4 + fg::warp_index(), head = group / groups;
  if (head < unsigned(a.batch * a.heads)) convert_rows<Spec, T>(a, group, head, groups);
}

}  // namespace backward
