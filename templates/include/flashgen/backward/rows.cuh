// What a row carries, as its pairs need it.
#pragma once
#include "flashgen/backward/spec.cuh"

namespace backward {

// What a row's exponents are: its scores, or where these are products but for a factor its products, less `top`, in base 2, less `lse`.
// Where its scores are not extreme top is 0.
struct RowOffset {
  float top, lse;
};
// Of a score.
template <class Spec> FG_DEVICE float product_of(const typename Spec::Launch& u, float score) {
  return __fmul_rn(score, 1.0f / (Spec::slope(u)));
}
// A row that keeps nothing has lse -inf; with +inf every weight comes out 0.
template <class Spec, class Find>
FG_DEVICE RowOffset row_offset(const typename Spec::Arguments& a, const typename Spec::Launch& u, float lse, Find find_row) {
  if (!fg::is_extreme(lse)) return {0.0f, lse == -INFINITY ? INFINITY : lse * fg::LOG2_E};
  const float2 parts = fg::global_load(reinterpret_cast<const float2*>(a.lse_parts) + find_row());
  if constexpr (Spec::sign_of_factor) {  // it is kept as a score; what the product is rounded by is given to lse
    const float slope = Spec::slope(u), top = product_of<Spec>(u, parts.x);
    return {top, parts.y - __fmaf_rn(top, slope, -parts.x) * fg::LOG2_E};
  } else {
    return {parts.x, parts.y};
  }
}

// Of weights over their sum, what the passes read of a row: 1 / Z, of one that keeps nothing 0. It is less than 0 where one key alone
// has a weight: its P is 1 or -1, however the weight moves. Then delta is of d_lse alone, and, in forward mode, epsilon the rest of it.
template <class Arguments> FG_DEVICE float row_inverse(const Arguments& a, int64_t row) { return fg::global_load(a.lse_parts + 2 * row); }

// A row's lse as its exponents need it, or 1 / Z, and delta.
struct RowState {
  float lse = 0.0f, delta = 0.0f, top = 0.0f;
};
struct MovingRow : RowState {
  float moved = 0.0f, epsilon = 0.0f;
};

// From shared memory, where a row of tile n lies in words of this layout.
template <class Spec, class Words, class Block> FG_DEVICE MovingRow state_of_row(const Block& block, int n, [[maybe_unused]] const typename Spec::Row& r, int row) {
  MovingRow state;
  if constexpr (Spec::row_state) {
    const auto load = [&](int which) { return fg::shared_load(block.rows(which, n) + row); };
    state.lse = load(Words::lse), state.delta = load(Words::delta);
    if constexpr (Spec::tangent) state.moved = load(Words::moved), state.epsilon = load(Words::epsilon);
    if constexpr (Spec::tops) state.top = load(Words::top);
    if constexpr (Spec::tops && Spec::split_score && !Spec::norms) state.top -= row_score(block.a, block.u, block.x, r);
  }
  return state;
}

}  // namespace backward
