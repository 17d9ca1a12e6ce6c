// Layer 3 of the CPU primitives: elements of captured tensors, read and added to.
//
// Contract: addresses are in bounds; where the compiler could not prove it, the index went through clamp_index. "Rows"
// is a vector of W neighbouring query rows, each with its own element; what does not depend on the row is already part
// of the base address.
#pragma once
#include "flashgen/cpu/convert.h"
#include "flashgen/cpu/standard.h"
#include "flashgen/ranges.h"
#include "flashgen/cpu/vector.h"
#include "flashgen/cpu/vector_math.h"

namespace fg {

// The nearest valid index of a dimension. Where it has no entries -1: the tensor's strides are 0 then, and a zero is
// read.
template <class T> FG_INLINE T clamp_index(T index, int64_t dimension) {
  return clamp(index, int32_t(0), static_cast<int32_t>(dimension - 1));
}

// Sums of index * stride, lane by lane, for any number of (index, stride) pairs.
FG_INLINE void add_offsets(int64_t (&)[W]) {}
template <class... Rest>
FG_INLINE void add_offsets(int64_t (&offset)[W], VecI index, int64_t stride, Rest... rest) {
  for (int l = 0; l < W; ++l) offset[l] += index[l] * stride;
  add_offsets(offset, rest...);
}

// Whether lane l of the index is index[0] + l, so that the rows lie side by side where the stride is 1.
FG_INLINE bool consecutive(VecI index) { return all(eq(index, index[0] + iota())); }

// The elements base[Σ index * stride], one a row.
template <class T, class... Rest> FG_INLINE auto rows(const T* base, VecI index, int64_t stride, Rest... rest) {
  if (sizeof...(rest) == 0 && stride == 1 && consecutive(index)) return load_elements(base + index[0]);
  int64_t offset[W] = {};
  add_offsets(offset, index, stride, rest...);
  T gathered[W];
  for (int l = 0; l < W; ++l) gathered[l] = base[offset[l]];
  return load_elements(gathered);
}

// The range of the values in the lanes of a vector, or of one value.
FG_INLINE ranges::Int range_of(VecI x) { return {horizontal_min(x), horizontal_max(x)}; }
FG_INLINE ranges::Bool range_of(VecB x) { return {!all(x), any(x)}; }
FG_INLINE ranges::Float range_of(VecF x) {
  return any(ne(x, x)) ? ranges::any_float() : ranges::Float{horizontal_min(x), horizontal_max(x), false};
}
FG_INLINE ranges::Int range_of(int32_t x) { return ranges::point(x); }
FG_INLINE ranges::Bool range_of(bool x) { return ranges::point(x); }
FG_INLINE ranges::Float range_of(float x) { return ranges::point(x); }

// Where one task adds the gradient of a captured value: to a double precision copy of its own, or to the float32
// result, plainly or, where tasks share elements, atomically. Neither: nobody asked for it.
struct Gradient {
  double* own = nullptr;
  float* result = nullptr;
  bool shared = false;

  bool wanted() const { return own || result; }
};

template <class Value> FG_INLINE void add(const Gradient& gradient, int64_t offset, Value value) {
  if (gradient.own) {
    gradient.own[offset] += value;
  } else if (!gradient.shared) {
    gradient.result[offset] += float(value);
  } else {
#pragma omp atomic
    gradient.result[offset] += float(value);
  }
}

// Adds one value a row; only the first n rows count.
template <class... Rest>
FG_INLINE void add_rows(const Gradient& gradient, int n, VecF value, int64_t offset0, Rest... indices) {
  int64_t offset[W] = {};
  add_offsets(offset, indices...);
  for (int l = 0; l < n; ++l) add(gradient, offset0 + offset[l], value[l]);
}

// Sums along the diagonals that W rows have with one column after another: each column is one diagonal further. Those
// that no later column meets move on from `open` to `left`; below, `at` is where the first of the last column's begins.
class DiagonalSums {
 public:
  FG_INLINE void add(VecF column) {
    left_ = shifted_in(left_, open_);
    open_ = shifted_in(open_, VecF{}) + column;
  }
  // To be called every W columns.
  FG_INLINE void leave(float* at) {
    store(at + W, load(at + W) + left_);
    left_ = VecF{};
  }
  FG_INLINE void finish(float* at) {
    leave(at);
    store(at, load(at) + open_);
  }

 private:
  VecF open_{}, left_{};
};

}  // namespace fg
