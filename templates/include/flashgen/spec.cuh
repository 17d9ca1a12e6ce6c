// What kernels of GPUs are written over, beside the primitives.
//
// A generated source includes this first, then prints `struct Arguments`, the functions of its spec, `struct Spec`, which derives from
// AnySpec and hides what is otherwise, and the plan of each pass; headers with kernels are templates over these.
#pragma once
#include "flashgen/math.cuh"

namespace fg {

struct AnySpec {
  // The kind of call.
  static constexpr bool ragged = false, cached = false, f8_cached = false, f8 = false, slices = false;
  static constexpr bool rows_of_heads = false;  // the rows of a tile are of several heads: what hooks know of a head goes by row
  static constexpr bool writes_sums = false;    // as they are, whatever the elements are
  // Weights: exp of the score, or the spec's own function; over the row's denominator, or as they are.
  static constexpr bool exponential = false, normalised = false;
  static constexpr bool divided = false;  // normalised, and not exponential
  static constexpr bool scaled_weights = false;  // brought into the range of the elements
  static constexpr bool sink = false;            // one more exponential in the denominator
  static constexpr bool dropout = false;
  // Forward mode, or its backward pass: also captured values change weights, and the sink.
  static constexpr bool tangent = false, moves_weight = false, moves_sink = false;
  // Scores: the product but for a factor, with a sign that launches decide; bounded, in launches that say so.
  static constexpr bool product = false, sign_of_factor = false, bounded = false, in_bounds = false, bounds_rows = false;
  static constexpr bool small_tanh = false;   // of a small argument their tanh is a polynomial
  static constexpr bool sqdist = false;       // they depend on |q - k|²
  static constexpr bool norms = false;        // and are without |q|²; what multiplies |k|² is of heads, is no constant:
  static constexpr bool norms_by_head = false, norms_vary = false;
  static constexpr bool distance = false;     // they read i - j as a float
  static constexpr bool diagonals = false;    // and numbers of tables by it
  static constexpr bool split_score = false;  // what is the same for all keys of a query is left out
  static constexpr bool prefetch = false;     // pairs read an element of a captured tensor, perhaps ahead
  // The mask. Which tiles are visited stands in lists that heads share; what a row keeps, or a column, is known without its pairs.
  static constexpr bool masks_by_head = false;  // heads that share keys have masks of their own
  static constexpr bool lists = false, longest_first = false, masks_by_batch = false, selected = false, keys_of_row = false, queries_of_column = false;
  static constexpr bool observes_rows = false, observes_columns = false;  // it reads tensors of rows, of keys
  // Which tile comes next: that of all batch entries, of several heads.
  static constexpr bool batch_inside = false, in_groups = false;
  // Gradients: dQ comes with dK and dV, rows carry lse and delta, captured values have some, dK waits for no dP.
  static constexpr bool one_pass = false, row_state = false, captured = false, weighs_first = false;
};

// ‖q - k‖² = |q|² + |k|² - 2 q·k; rounding may leave a negative number where q = k. By one instruction less than a product and a
// difference, and as exact: twice a number is not rounded.
template <class Row, class Column> FG_DEVICE float squared_distance(const Row& r, const Column& c, float dot) {
  return max(__fmaf_rn(-2.0f, dot, r.qq + c.kk), 0.0f);
}

// Printed templates that headers name with arguments of their own.
template <class> FG_DEVICE void rows_of_q();
template <class> FG_DEVICE void rows_of_k();
template <class> FG_DEVICE void rows_of_v();
template <class> FG_DEVICE void rows_of_o();
template <class> FG_DEVICE void rows_of_t_q();
template <class> FG_DEVICE void rows_of_t_k();
template <class> FG_DEVICE void rows_of_t_v();
template <class> FG_DEVICE void rows_of_t_o();
template <class> FG_DEVICE void sequence_of();
template <int> FG_DEVICE void numbers_of_queries();
template <class, int> FG_DEVICE void sequence_of_query_tile();
template <int> FG_DEVICE void keys_of_row();
template <int, int> FG_DEVICE void keep_range();

// Queries or keys of a call, by their local positions.
struct Span {
  int first, count;
};

}  // namespace fg
