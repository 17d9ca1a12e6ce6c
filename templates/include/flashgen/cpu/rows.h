// The rows of one head as a caller passes them, in float32 and back.
#pragma once
#include "flashgen/cpu/call.h"

namespace {

// The rows of one head as a caller passes them: Q, K, V, O or dO.
struct HeadRows {
  const void* at;
  int64_t stride;  // of rows, in elements
  int element;
  Pages pages{};
  float scale = 1.0f;  // what 8-bit numbers are multiplied by

  // Of a row, in elements.
  int64_t offset(int64_t row) const {
    if (!pages.table) return row * stride;
    const int64_t n = pages.first + row;
    return pages.table[n / pages.rows] * pages.stride + n % pages.rows * stride;
  }
  // How many of the rows first … first + count - 1 are `stride` apart, and whether all are.
  int run_of(int64_t first, int count) const {
    return pages.table ? int(std::min<int64_t>(count, pages.rows - (pages.first + first) % pages.rows)) : count;
  }
  bool is_run(int64_t first, int count) const { return run_of(first, count) == count; }
};
inline HeadRows rows_of_head(const void* base, int element, int64_t b, int64_t stride_b, int64_t h, int64_t stride_h,
                             int64_t stride_n, const Pages& pages = {}, float scale = 1.0f) {
  const int64_t offset = (b * stride_b + h * stride_h) * element_bytes(element);
  return {static_cast<const char*>(base) + offset, stride_n, element, pages, scale};
}

inline HeadRows queries(const Call& a, int64_t b, int64_t h) {
  return rows_of_head(a.q, a.element, b, a.q_stride_b, h, a.q_stride_h, a.q_stride_n);
}
inline HeadRows outputs(const Call& a, int64_t b, int64_t h) {
  return rows_of_head(a.o, a.element_of_rows(), b, a.rows_of_o.b, h, a.rows_of_o.h, a.rows_of_o.n);
}
inline HeadRows keys_of(const Call& a, int64_t b, int64_t hkv) {
  const float scale = a.k_scales ? a.k_scales[hkv] : 1.0f;
  return rows_of_head(a.k, a.key_element, b, a.k_stride_b, hkv, a.k_stride_h, a.k_stride_n, a.k_pages, scale);
}
inline HeadRows values_of(const Call& a, int64_t b, int64_t hkv) {
  const float scale = a.v_scales ? a.v_scales[hkv] : 1.0f;
  return rows_of_head(a.v, a.key_element, b, a.v_stride_b, hkv, a.v_stride_h, a.v_stride_n, a.v_pages, scale);
}

// Copies rows first … first + count to float32, `ld` apart. Columns up to `ld` and rows up to `padded` are filled:
// columns with zeros, rows with copies of the last one, so that no lane computes on junk.
inline void load_rows(float* to, int ld, int width, const HeadRows& from, int64_t first, int count, int padded) {
  for (int row = 0; row < count; ++row) {
    const int64_t offset = from.offset(first + row);
    if (from.element == F32) fg::to_float(to + row * ld, static_cast<const float*>(from.at) + offset, width);
    else if (from.element == BF16) fg::to_float(to + row * ld, static_cast<const fg::bf16*>(from.at) + offset, width);
    else if (from.element == F8E4M3)
      fg::to_float_times(to + row * ld, static_cast<const fg::f8e4m3*>(from.at) + offset, width, from.scale);
    else fg::to_float(to + row * ld, static_cast<const fg::f16*>(from.at) + offset, width);
    for (int d = width; d < ld; ++d) to[row * ld + d] = 0.0f;
  }
  for (int row = count; row < padded; ++row)
    std::memcpy(to + row * ld, to + (count - 1) * ld, sizeof(float) * size_t(ld));
}

// One row in float32, of whole vectors; zeros past its end.
template <int width> struct alignas(64) Features {
  Features(const HeadRows& from, int64_t row) { load_rows(values, padded, width, from, row, 1, 1); }
  float dot(const Features& other) const {
    fg::VecF sum{};
    for (int d = 0; d < padded; d += W) sum += fg::load(values + d) * fg::load(other.values + d);
    return fg::horizontal_sum(sum);
  }

  static constexpr int padded = int(round_up(width, W));
  float values[padded];
};

// Rows of float32, `ld` apart.
struct Rows {
  const float* at;
  int64_t ld;
};

// The rows as they lie, where they are float32 and need no padding; else a copy in `scratch`.
inline Rows rows_in_place(float* scratch, int ld, int width, const HeadRows& from, int64_t first, int count,
                          int padded) {
  if (from.element == F32 && width == ld && count == padded && from.is_run(first, count))
    return {static_cast<const float*>(from.at) + from.offset(first), from.stride};
  load_rows(scratch, ld, width, from, first, count, padded);
  return {scratch, ld};
}

// Rounds `count` rows of float32, `ld` apart, to the element type, from element `first` on, `stride` apart.
inline void store_rows(void* to, int element, int64_t first, int64_t stride, const float* from, int ld, int width,
                       int count) {
  for (int row = 0; row < count; ++row) {
    const int64_t offset = first + int64_t(row) * stride;
    if (element == F32) fg::from_float(static_cast<float*>(to) + offset, from + row * ld, width);
    else if (element == BF16) fg::from_float(static_cast<fg::bf16*>(to) + offset, from + row * ld, width);
    else fg::from_float(static_cast<fg::f16*>(to) + offset, from + row * ld, width);
  }
}

// Stores rows that lie transposed, `ld` apart; by way of `scratch`, `padded` a row, unless they fit as they are.
inline void store_transposed(void* to, int element, int64_t first, int64_t stride, const float* from, int64_t ld,
                             float* scratch, int padded, int width, int count) {
  if (element == F32 && width == padded && count % W == 0) {
    fg::transpose_to(static_cast<float*>(to) + first, stride, from, ld, width, count);
    return;
  }
  fg::transpose_to(scratch, padded, from, ld, padded, int(round_up(count, W)));
  store_rows(to, element, first, stride, scratch, padded, width, count);
}

// Rows of K and V that follow one another.
struct KeyRows {
  int64_t first;
  int count;
};

// Such rows, to be asked for while others are computed: line by line where they lie without gaps.
inline fg::Ahead rows_ahead(const HeadRows& from, KeyRows rows, int width) {
  const int64_t each = element_bytes(from.element), bytes = from.stride * each;  // of an element, from row to row
  const int64_t lines = ceil_div(width * each, fg::line_bytes);
  if (rows.count == 0 || !from.is_run(rows.first, rows.count)) return {};
  const char* const at = static_cast<const char*>(from.at) + from.offset(rows.first) * each;
  if (bytes == lines * fg::line_bytes) return {at, fg::line_bytes, rows.count * lines, 1, 0};
  return {at, bytes, rows.count, int(lines), 0};
}

// ‖q - k‖² = |q|² + |k|² - 2 q·k, where scores depend on it; rounding may leave a negative number where q = k.
template <class Row, class Column>
FG_INLINE fg::VecF squared_distance([[maybe_unused]] const Row& r, [[maybe_unused]] const Column& c, fg::VecF dot) {
  if constexpr (Spec::sqdist) return fg::max(r.qq + c.kk - 2.0f * dot, 0.0f);
  else return fg::VecF{};
}

// What arrives at a score from one of its derivatives: nothing where that is 0, even of what is no number.
FG_INLINE fg::VecF through(fg::VecF arriving, fg::VecF derivative) {
  return Spec::chains ? fg::chained(arriving, derivative) : arriving * derivative;
}

inline float squared_norm(const HeadRows& from, int64_t row) {
  const Features<D> x(from, row);
  return x.dot(x);
}

// Those of rows first … first + count; up to `padded` copies of the last.
inline void squared_norms(float* norms, const HeadRows& from, int64_t first, int count, int padded) {
  for (int row = 0; row < padded; ++row) norms[row] = row < count ? squared_norm(from, first + row) : norms[count - 1];
}

}  // namespace
