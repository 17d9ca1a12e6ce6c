// Layer 3 of the CPU primitives: products with few query rows, as in generation, where rows would not fill the lanes of
// a vector.
//
// Contract: sums in float32, of keys and values of float32 or 16 bits, which become float32 in registers. Of Q Kᵀ
// features are lanes, then keys; of P V features. Rows of Q and O are whole vectors, zeros behind the last feature; of K
// and V nothing is read that is not there. Sums do not depend on how a tile's keys are cut into runs. `ahead`: rows that
// another call will read, as far apart as those of this one, which are asked for on the way; or null.
#pragma once
#include <type_traits>
#include "flashgen/cpu/convert.h"
#include "flashgen/cpu/tile_product.h"

namespace fg {

constexpr int most_few_rows = 2 * W < 16 ? 2 * W : 16;
// Rows that are multiplied together, by four keys or by vectors of features: their sums fit the registers.
constexpr int few_together = block_vectors == 4 ? 4 : 2;

// The vector of features that begins with feature d of `width`.
template <int width, class T> FG_INLINE VecF features_of(const T* row, int d) {
  if (width % W == 0 || d + W <= width) return load_elements(row + d);
  return load_elements(row + d, width % W);
}

// Asks for `count` features from `row` on.
template <int count, class T> FG_INLINE void ask_for(const T* row) {
  FG_UNROLL for (int byte = 0; byte < count * int(sizeof(T)); byte += line_bytes)
      __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, 0, 2);
}

// The sums of four vectors, by and by: groups of four neighbouring lanes hold one part of each.
FG_INLINE VecF partial_sums(const VecF (&x)[4]) {
#if FG_LANES == 16
#define FG_LOW 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define FG_HIGH 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#elif FG_LANES == 8
#define FG_LOW 0, 8, 1, 9, 4, 12, 5, 13
#define FG_HIGH 2, 10, 3, 11, 6, 14, 7, 15
#else
#define FG_LOW 0, 4, 1, 5
#define FG_HIGH 2, 6, 3, 7
#endif
  const VecF even = FG_SHUFFLE(x[0], x[2], FG_LOW) + FG_SHUFFLE(x[0], x[2], FG_HIGH);
  const VecF odd = FG_SHUFFLE(x[1], x[3], FG_LOW) + FG_SHUFFLE(x[1], x[3], FG_HIGH);
  return FG_SHUFFLE(even, odd, FG_LOW) + FG_SHUFFLE(even, odd, FG_HIGH);
#undef FG_LOW
#undef FG_HIGH
}
// The sums of W vectors, of whose quarters these are the partial ones, lane by lane in their order.
FG_INLINE VecF joined_sums(const VecF (&x)[W / 4]) {
#if FG_LANES == 16
#define FG_EVEN 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define FG_ODD 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
  const VecF low = FG_SHUFFLE(x[0], x[1], FG_EVEN) + FG_SHUFFLE(x[0], x[1], FG_ODD);
  const VecF high = FG_SHUFFLE(x[2], x[3], FG_EVEN) + FG_SHUFFLE(x[2], x[3], FG_ODD);
  return FG_SHUFFLE(low, high, FG_EVEN) + FG_SHUFFLE(low, high, FG_ODD);
#undef FG_EVEN
#undef FG_ODD
#elif FG_LANES == 8
  return FG_SHUFFLE(x[0], x[1], 0, 1, 2, 3, 8, 9, 10, 11) + FG_SHUFFLE(x[0], x[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  return x[0];
#endif
}
#undef FG_SHUFFLE

// S[i][j] = Σ_d Q[i][d] K[j][d] of `keys` keys and R rows; up to a multiple of W more are written behind them. Leading
// dimensions in elements.
template <int R, int width, class T>
inline __attribute__((noinline)) void scores_of_rows(int keys, const T* k, int64_t ldk, const float* q, int64_t ldq,
                                                     float* s, int64_t lds, const T* ahead) {
  for (int first = 0; first < keys; first += W) {
    VecF parts[R][W / 4];
    FG_UNROLL for (int group = 0; group < W / 4; ++group) {
      const T* key[4];
      FG_UNROLL for (int n = 0; n < 4; ++n) {
        const int j = first + 4 * group + n;
        key[n] = k + (j < keys ? j : keys - 1) * ldk;
      }
      VecF sum[R][4] = {};
      for (int d = 0; d < width; d += W) {
        VecF features[4];
        FG_UNROLL for (int n = 0; n < 4; ++n) features[n] = features_of<width>(key[n], d);
        FG_UNROLL for (int i = 0; i < R; ++i) {
          const VecF of_row = load(q + i * ldq + d);
          FG_UNROLL for (int n = 0; n < 4; ++n) sum[i][n] += features[n] * of_row;
        }
      }
      FG_UNROLL for (int i = 0; i < R; ++i) parts[i][group] = partial_sums(sum[i]);
      if (ahead) {
        FG_UNROLL for (int n = 0; n < 4; ++n) ask_for<width>(ahead + (key[n] - k));
      }
    }
    FG_UNROLL for (int i = 0; i < R; ++i) store(s + i * lds + first, joined_sums(parts[i]));
  }
}

// Sums of O over keys that lie in several runs: those so far are kept in `so_far`, and added to O after the last run.
struct RunOfKeys {
  float* so_far;  // rows as far apart as those of O
  bool is_first, is_last;
};

// O[i][d] += Σ_j P[i][j] V[j][d], of V vectors of features from d0 on.
template <int R, int V, int width, class T>
FG_INLINE void values_of_block(int keys, int d0, const T* v, int64_t ldv, const float* p, int64_t ldp, float* o,
                               int64_t ldo, const RunOfKeys& run, const T* ahead) {
  VecF sum[R][V] = {};
  float* const so_far = run.so_far + d0;
  if (!run.is_first) {
    FG_UNROLL for (int i = 0; i < R; ++i) {
      FG_UNROLL for (int n = 0; n < V; ++n) sum[i][n] = load(so_far + i * ldo + n * W);
    }
  }
  for (int j = 0; j < keys; ++j) {
    VecF features[V];
    FG_UNROLL for (int n = 0; n < V; ++n) features[n] = features_of<width>(v + j * ldv, d0 + n * W);
    FG_UNROLL for (int i = 0; i < R; ++i) {
      const VecF weight = broadcast(p[i * ldp + j]);
      FG_UNROLL for (int n = 0; n < V; ++n) sum[i][n] += weight * features[n];
    }
    if (ahead) ask_for<V * W>(ahead + j * ldv + d0);
  }
  float* const to = run.is_last ? o + d0 : so_far;
  FG_UNROLL for (int i = 0; i < R; ++i) {
    FG_UNROLL for (int n = 0; n < V; ++n) {
      float* const at = to + i * ldo + n * W;
      store(at, run.is_last ? load(at) + sum[i][n] : sum[i][n]);
    }
  }
}
template <int R, int width, class T>
inline __attribute__((noinline)) void values_of_rows(int keys, const T* v, int64_t ldv, const float* p, int64_t ldp,
                                                     float* o, int64_t ldo, const RunOfKeys& run, const T* ahead) {
  constexpr int V = R == 1 ? 8 : 4, vectors = (width + W - 1) / W, whole = vectors / V * V;
  for (int n = 0; n < whole; n += V) values_of_block<R, V, width>(keys, n * W, v, ldv, p, ldp, o, ldo, run, ahead);
  if constexpr (vectors > whole)
    values_of_block<R, vectors - whole, width>(keys, whole * W, v, ldv, p, ldp, o, ldo, run, ahead);
}

// perform(first, count) for all of `rows`, some together: `count` is a constant.
template <class Perform> FG_INLINE void rows_together(int rows, const Perform& perform) {
  int first = 0;
  for (; first + few_together <= rows; first += few_together)
    perform(first, std::integral_constant<int, few_together>());
  if (few_together > 2 && first + 2 <= rows) perform(first, std::integral_constant<int, 2>()), first += 2;
  if (first < rows) perform(first, std::integral_constant<int, 1>());
}

}  // namespace fg
