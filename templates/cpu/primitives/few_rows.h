// Layer 3 of the CPU primitives: products with few query rows, as in generation, where rows would not fill the lanes of a vector.
//
// Contract: float32; features are lanes. Widths are whole vectors: what lies behind the last feature is zero on one side. R rows, of
// which scores have whole vectors: lanes behind the last row are copies of it. Sums do not depend on how keys are cut.
#pragma once
#include "tile_product.h"

namespace fg {

constexpr int most_few_rows = 4;

// The sums of W vectors, lane by lane, in their order: halves are added pair by pair.
FG_INLINE VecF sums_of(VecF x[W]) {
  FG_UNROLL for (int count = W / 2; count > 0; count /= 2)
    for (int i = 0; i < count; ++i) x[i] = interleave_low(x[i], x[i + count]) + interleave_high(x[i], x[i + count]);
  return x[0];
}

// S[j][i] = Σ_d K[j][d] Q[i][d] of `keys` keys. Leading dimensions in floats.
template <int R>
inline __attribute__((noinline)) void scores_of_rows(int keys, int width, const float* k, int64_t ldk, const float* q, int64_t ldq, float* s,
                                                     int64_t lds, Ahead& ahead) {
  const int lines = width * int(sizeof(float)) / line_bytes;
  for (int first = 0; first < keys; first += W) {
    const int count = keys - first < W ? keys - first : W;
    VecF parts[R][W] = {};
    for (int j = 0; j < count; ++j) {
      const float* const key = k + (first + j) * ldk;
      VecF sum[R] = {};
      for (int d = 0; d < width; d += W) {
        const VecF features = load(key + d);
        FG_UNROLL for (int i = 0; i < R; ++i) sum[i] += features * load(q + i * ldq + d);
      }
      FG_UNROLL for (int i = 0; i < R; ++i) parts[i][j] = sum[i];
      ahead.ask(lines);
    }
    float of_row[R][W];
    FG_UNROLL for (int i = 0; i < R; ++i) store(of_row[i], sums_of(parts[i]));
    for (int j = 0; j < count; ++j) {
      VecF row = broadcast(of_row[0][j]);
      FG_UNROLL for (int i = 1; i < R; ++i) row = select(ge(iota(), i), broadcast(of_row[i][j]), row);
      store(s + (first + j) * lds, row);
    }
  }
}

// Oᵀ[d][i] += Σ_j V[j][d] P[j][i], of V vectors of features.
template <int R, int V>
FG_INLINE void values_of_block(int keys, const float* v, int64_t ldv, const float* p, int64_t ldp, float* o, int64_t ldo, int lines, Ahead& ahead) {
  VecF sum[R][V] = {};
  for (int j = 0; j < keys; ++j) {
    VecF features[V];
    FG_UNROLL for (int n = 0; n < V; ++n) features[n] = load(v + j * ldv + n * W);
    FG_UNROLL for (int i = 0; i < R; ++i) {
      const VecF weight = broadcast(p[j * ldp + i]);
      FG_UNROLL for (int n = 0; n < V; ++n) sum[i][n] += weight * features[n];
    }
    ahead.ask(lines);
  }
  for (int i = 0; i < R; ++i)
    for (int n = 0; n < V; ++n) {
      float of_row[W];
      store(of_row, sum[i][n]);
      for (int l = 0; l < W; ++l) o[(n * W + l) * ldo + i] += of_row[l];
    }
}
template <int R>
inline __attribute__((noinline)) void values_of_rows(int keys, int width, const float* v, int64_t ldv, const float* p, int64_t ldp, float* o,
                                                     int64_t ldo, Ahead& ahead) {
  constexpr int V = R == 4 && block_vectors == 2 ? 2 : 4;  // R * V sums and V vectors of features in registers
  const auto lines_of = [](int vectors) { return vectors * W * int(sizeof(float)) / line_bytes; };
  int d = 0;
  for (; d + V * W <= width; d += V * W) values_of_block<R, V>(keys, v + d, ldv, p, ldp, o + d * ldo, ldo, lines_of(V), ahead);
  for (; d < width; d += W) values_of_block<R, 1>(keys, v + d, ldv, p, ldp, o + d * ldo, ldo, lines_of(1), ahead);
}

// with_rows(rows, f): f of the number of rows that are computed, at least `rows` of `most_few_rows`.
template <class F> FG_INLINE void with_rows(int rows, const F& f) {
  if (rows == 1) return f(std::integral_constant<int, 1>());
  if (rows == 2) return f(std::integral_constant<int, 2>());
  return f(std::integral_constant<int, most_few_rows>());
}

}  // namespace fg
