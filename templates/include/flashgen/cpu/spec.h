// What a kernel is written over: the primitives, and what a spec may say.
//
// A generated source includes this first, then prints `struct Arguments`, `struct Plan` (tiles) and `struct Spec`,
// which derives from AnySpec and hides what the spec says otherwise; then it includes the passes.
#pragma once
#include "flashgen/cpu/preamble.h"
#include "flashgen/cpu/images.h"
#include "flashgen/cpu/matrix_product.h"

namespace fg {

// In which loop a value changes.
enum class Level { launch, head, row, column, diagonal, pair };

// What the backward pass knows of W pairs; in forward mode also what tangents change by.
struct PairTerms {
  VecF dot{}, sqdist{};        // of q and k
  VecF d_score{}, d_weight{};  // what reaches the score and the weight
  VecF safe{};                 // the score, 0 where nothing is kept
  VecF t_dot{}, t_norms{}, t_e{}, d_t_score{}, d_t_weight{};
};

// A captured value with a gradient.
struct Captured {
  float* gradient;  // null: nobody asked for it
  int64_t elements;
  bool owned_by_head;  // each element is read under one b and hkv: tasks of other heads never meet there
};

// The gradient of one read of a captured value, from pairs and through the sink.
struct AnyGradient {
  static constexpr bool of_pairs = false, of_sink = false;
};
template <class... Of> struct GradientList {};

struct AnySpec {
  // Weights: exp of the score, or the spec's own function `weight`; over the row's denominator, or as they are.
  static constexpr bool exponential = false, normalised = false;
  static constexpr bool divided = false;  // normalised, and not exponential
  static constexpr bool sink = false;     // one more exponential in the denominator
  // Scores. Linear ones are the dot product but for a constant factor, with which kernels go on; bounded ones are so
  // small that exp2 needs no maximum; to compute a slow one takes longer than to weigh it.
  static constexpr bool linear = false, bounded_scores = false, slow_scores = false;
  static constexpr bool sqdist = false;     // they depend on |q - k|²
  static constexpr bool diagonals = false;  // some of their terms are computed once a diagonal
  static constexpr bool chains = false;     // what arrives at a score may be no number where its derivative is 0
  static constexpr bool dropout = false;
  // The mask.
  static constexpr bool keep_everything = false;
  static constexpr bool keeps_lists = false;  // which tiles are visited is found once, for calls of the same shape
  static constexpr bool trimmed = false;  // keys that ranges rule out for some rows of a tile are left out of products
  static constexpr bool observed_rows = false, observed_columns = false;  // the mask reads tensors of rows, of keys
  static constexpr bool observed_by_head = false;
  // Nothing depends on the head, nor on how many there are.
  static constexpr bool heads_are_alike = false;
  // Forward mode, or its backward pass: also captured values change weights, and the sink.
  static constexpr bool tangent = false, moves_weight = false, moves_sink = false;
  // O and dQ, or dK and dV, are float32 whatever the tensors are.
  static constexpr bool writes_f32 = false, writes_f32_of_keys = false;

  // What the mask reads, over the rows of a tile and over some key tiles.
  struct RowBounds {
    RowBounds hull(RowBounds) const { return {}; }
  };
  struct ColumnBounds {
    ColumnBounds hull(ColumnBounds) const { return {}; }
  };
  template <class Row> static RowBounds bounds_of_row(const Row&) { return {}; }
  template <class Column> static ColumnBounds bounds_of_column(const Column&) { return {}; }

  // The masks that batch entries and heads tell apart, numbered; and one that has a number.
  template <class Arguments> static int64_t masks_of(const Arguments&) { return 1; }
  template <class Arguments> static int64_t mask_of(const Arguments&, int64_t /*b*/, int64_t /*h*/) { return 0; }
  template <class Arguments> static int64_t batch_of_mask(const Arguments&, int64_t /*mask*/) { return 0; }
  template <class Arguments> static int64_t head_of_mask(const Arguments&, int64_t /*mask*/) { return 0; }
  // What lists of visits depend on.
  template <class Arguments> static std::array<double, 0> question_of(const Arguments&, int, int) { return {}; }

  // What is computed once a diagonal: none.
  struct Diagonals {};
  static constexpr int diagonal_values = 0;
  template <class... Any> static FG_INLINE Diagonals make_diagonals(const Any&...) { return {}; }
  template <class Visit> static FG_INLINE void for_each_value(Diagonals&, const Visit&) {}

  // Captured values with gradients: none.
  template <class Arguments> static std::array<Captured, 0> captured(const Arguments&) { return {}; }
  using Gradients = GradientList<>;
};

}  // namespace fg
