// What kernels of the backward pass are written over, beside what fg::AnySpec says.
//
// A source prints `struct Spec` of this namespace, which derives from AnySpec, and the captured gradients as structs that derive from
// AnyGradient; then it includes the kernels.
#pragma once
#include "flashgen/math.cuh"
#include "flashgen/reduce.cuh"
#include "flashgen/spec.cuh"

namespace backward {

// A printed template that headers name with arguments of their own.
template <int> FG_DEVICE void queries_of_column();

// In which loop a value changes.
enum class Level { launch, head, row, column, pair };

// How contributions to captured gradients are added up: by atomic additions of floats; or, where results have to repeat, as
// integers, whose order does not matter: their unit follows from the largest contribution, which a first run measures. NaN
// and infinity are added as floats: in any order the sum is the same.
enum class Adding { atomic, measure, exact };

// What is known of a pair; in forward mode also what tangents change.
struct PairTerms {
  float dot = 0.0f, sqdist = 0.0f;         // of q and k
  float d_score = 0.0f, d_weight = 0.0f;   // what reaches the score and the weight
  float safe = 0.0f;                       // the score, 0 where the pair is not kept
  float t_dot = 0.0f, t_e = 0.0f, d_t_score = 0.0f, d_t_weight = 0.0f;
};

// The gradient of one read of a captured value, from pairs and through the sink.
struct AnyGradient {
  static constexpr bool of_pairs = false, of_sink = false;
  static constexpr bool by_distance = false;   // its elements follow from i - j
  static constexpr int RUN = 0;                // and are known for runs of so many distances, if they are
  static constexpr bool has_factor = false;    // what a pair adds is a number of the launch times dS
  static constexpr bool own_elements = false;  // each pair of a head has one of its own
  // Each pair of a call has one of its own, which is stored; batch entries may add to it in turn.
  static constexpr bool is_stored = false, is_summed = false;
};
template <class... Of> struct GradientList {};

// Elements of o and dQ, or of dK and dV, are float32 whatever the call's are, or as these.
template <bool f32, class T> struct WrittenAs {
  using Type = T;
};
template <class T> struct WrittenAs<true, T> {
  using Type = float;
};

// What pairs read ahead, where that is nothing.
struct ReadsNothing {
  template <class Column> FG_DEVICE const Column& of(const Column& c, int, int, int) const { return c; }
};

// Arguments that a block reads, or those of the present sequence, which are its own.
template <bool own, class Arguments> struct Own {
  using Type = const Arguments&;
};
template <class Arguments> struct Own<true, Arguments> {
  using Type = Arguments;
};

template <class General> struct AnySpec : General {
  // Rows carry what their scores are counted from, or two bytes say whether they are extreme.
  static constexpr bool tops = false, marked = false;
  static constexpr bool by_lse = false;          // what arrives at |q|² is P times what arrives at lse
  // ∂score/∂(q·k) is a constant, or a number of the launch, by which sums are multiplied at the end.
  static constexpr bool constant_slope = false, slope_of_launch = false;
  static constexpr bool chains = false;          // what arrives at a score may be no number where its derivative is 0
  static constexpr bool writes_f32 = false, writes_f32_of_keys = false;  // o and dQ, or dK and dV, are float32 whatever the tensors are
  static constexpr bool divides_columns = false;  // blocks of a cluster have a part of the columns each, and the same pairs
  static constexpr bool shares_last = false;  // several blocks work on key tiles that are left at the end, in at most so many parts
  static constexpr int most_units = 0;
  static constexpr int captured_count = 0;
  static constexpr bool has_sink_gradients = false;
  static constexpr bool weighs_with_slope = false;  // P times the score's derivative takes the place of S
  static constexpr bool stores_pairs = false;       // gradients of pairs are stored a fragment of dS at a time
  template <bool rows_are_keys, int m_tiles, int n_tiles> struct KeptPairs {};  // which pairs dropout keeps
  template <class... Any> static FG_DEVICE bool dropout(const Any&...) { return false; }
  using KeyGradients = GradientList<>;
  using QueryGradients = GradientList<>;
  using SinkGradients = GradientList<>;
  // Of the keys' those that are stored from fragments of dS, and the one that batch entries add to in turn.
  using StoredGradients = GradientList<>;
  using SummedGradients = GradientList<>;
  static constexpr bool knows_diagonals = false;  // what scores read by distance may be known before products are there
  using PairElement = uint16_t;                   // of the captured tensor that pairs read ahead
  template <int rows, int tiles> using Ahead = ReadsNothing;
};

// What arrives at a score, by one of its derivatives.
template <class Spec> FG_DEVICE float chained(float arriving, float derivative) {
  if constexpr (Spec::chains) return fg::chained(arriving, derivative);
  else return arriving * derivative;
}

// The position of a row or column of a tile as a sum, whose second part is a literal where loops are unrolled: `offset` from this lane's
// first, which is at `begin`. Where positions are clamped, near and step need not be: such pairs are not kept.
template <class Spec, bool masked, class Line, class Head>
FG_DEVICE void place_as_sum([[maybe_unused]] Line& line, [[maybe_unused]] const Head& x, [[maybe_unused]] int begin, [[maybe_unused]] int offset) {
  if constexpr (Spec::distance) line.near = fg::to_float(begin - x.origin), line.step = float(offset);  // one conversion for the whole tile
  if constexpr (Spec::diagonals && !masked) line.begin = begin, line.offset = offset;
}

// Printed templates of forward mode.
template <class> FG_DEVICE void rows_of_t_q();
template <class> FG_DEVICE void rows_of_t_k();
template <class> FG_DEVICE void rows_of_t_v();

// Kernels that follow one another go through the heads there and back, so that each begins with what the last cache still holds.
FG_DEVICE int backwards() { return fg::grid_size() - 1 - fg::block_index(); }

// Runs a kernel of dK and dV; of one that is for launches that bound scores, or for others, the one that a launch needs.
template <template <class, class, bool, bool, bool, Adding> class Block, class Spec, class T, bool dropped, bool atomic, Adding how, class... Maps>
FG_DEVICE void run_keys(const typename Spec::Call& call, const typename Spec::Arguments& a, const Maps&... maps) {
  if constexpr (Spec::bounds_rows) {
    if (make_launch(a).is_bounded) Block<Spec, T, true, dropped, atomic, how>(call, a, &maps...).run();
    else Block<Spec, T, false, dropped, atomic, how>(call, a, &maps...).run();
  } else {
    Block<Spec, T, false, dropped, atomic, how>(call, a, &maps...).run();
  }
}

}  // namespace backward
