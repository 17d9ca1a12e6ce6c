// Tangents of Q, K and V, as forward mode and its backward pass read them. Those that are null are 0 everywhere.
#pragma once
#include "flashgen/cpu/rows.h"

namespace {

inline HeadRows tangents_of_queries(const Call& a, int64_t b, int64_t h) {
  return rows_of_head(a.t_q, a.element, b, a.t_q_stride_b, h, a.t_q_stride_h, a.t_q_stride_n);
}
inline HeadRows tangents_of_keys(const Call& a, int64_t b, int64_t hkv) {
  return rows_of_head(a.t_k, a.element, b, a.t_k_stride_b, hkv, a.t_k_stride_h, a.t_k_stride_n);
}
inline HeadRows tangents_of_values(const Call& a, int64_t b, int64_t hkv) {
  return rows_of_head(a.t_v, a.element, b, a.t_v_stride_b, hkv, a.t_v_stride_h, a.t_v_stride_n);
}

// What the squared norm of a row changes by, where the row changes by another.
inline float twice_product(const HeadRows& x, const HeadRows& t_x, int64_t row) {
  return 2.0f * Features<D>(x, row).dot(Features<D>(t_x, row));
}

// Before the first key tile of `rows` rows from row0 on, and before each key tile: what a tile `t` has of tangents.
template <class Tile>
void begin_tangents_of_rows(const Call& a, int64_t b, int64_t h, int64_t row0, int rows, int padded, Tile& t) {
  const HeadRows q = queries(a, b, h), t_q = tangents_of_queries(a, b, h);
  if (a.t_q) t.t_q.load(t_q, row0, rows, padded, PastEnd::last_row);
  if constexpr (Spec::sqdist)
    for (int row = 0; row < padded; ++row)
      t.t_qq[row] = a.t_q ? twice_product(q, t_q, row0 + std::min(row, rows - 1)) : 0.0f;
}
template <class Tile>
void begin_tangents_of_keys(const Call& a, int64_t b, int64_t hkv, const HeadRows& k, KeyRows keys, Tile& t) {
  const HeadRows t_k = tangents_of_keys(a, b, hkv);
  if (a.t_k) t.t_k.load(t_k, keys);
  if (a.t_v) t.t_v.load(tangents_of_values(a, b, hkv), keys);
  if constexpr (Spec::sqdist)
    for (int j = 0; j < keys.count; ++j) t.t_kk[j] = a.t_k ? twice_product(k, t_k, keys.first + j) : 0.0f;
}
// Scores that no product writes, of vectors first … end - 1 and keys from … to - 1.
template <class Scores> void clear_scores(Scores& s, int first, int end, int from, int to) {
  for (int64_t j = from; j < to; ++j) std::fill_n(s.of(first) + j * s.ld, (end - first) * W, 0.0f);
}
// What |q|² + |k|² changes by.
template <class Tile> FG_INLINE fg::VecF tangent_of_norms(const Tile& t, int n, int64_t j) {
  if constexpr (Spec::sqdist) return fg::load(t.t_qq + n * W) + t.t_kk[j];
  else return fg::VecF{};
}

}  // namespace
