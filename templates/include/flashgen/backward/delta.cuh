// delta = rowsum(dO ∘ O) - d(lse), and the gradient of the sink: the kernel that runs first. In forward mode's backward pass, too.
// A block takes `rows` rows, `lanes` neighbouring threads each; the blocks together clear the sums of dQ, if need be.
#pragma once
#include "flashgen/backward/captured.cuh"
#include "flashgen/backward/rows.cuh"

namespace backward {

// The sums of dQ of so many groups of 16 rows, and what blocks of the next kernel count.
template <class Spec, class T> FG_DEVICE void clear(const typename Spec::Arguments& a, int64_t groups) {
  using P = BackwardPlan<T>;
  const int64_t fours = groups * (16 * Spec::DP / 4);  // of floats
  const int64_t each = fg::ceil_div(fours, fg::grid_size()), first = backwards() * each, last = first + each < fours ? first + each : fours;
  float4* const sums = reinterpret_cast<float4*>(dq_sums(a));
#pragma unroll 4
  for (int64_t n = first + threadIdx.x; n < last; n += 128) fg::global_store(sums + n, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  if constexpr (P::persistent)
    if (fg::block_index() == 0 && threadIdx.x == 0) fg::global_store(key_tile_counter_of(a), 0u);
  if constexpr (Spec::shares_last && P::persistent && P::producers > 0)
    if (fg::block_index() == 0)
      for (int n = int(threadIdx.x); n < Spec::most_units; n += 128) fg::global_store(arrivals_of_parts(a) + n, 0u);
}

template <class Spec, class T> struct Rows {
  using Written = typename WrittenAs<Spec::writes_f32, T>::Type;
  static constexpr int DV = Spec::DV, threads = 128, whole = fg::Chunk<Written>::size, chunk = DV % whole == 0 ? whole : 1, chunks = DV / chunk;
  static constexpr int lanes = chunks >= 32 ? 32 : chunks >= 16 ? 16 : chunks >= 8 ? 8 : chunks >= 4 ? 4 : chunks >= 2 ? 2 : 1;
  static constexpr int rows = threads / lanes;  // of a block

  template <class E> struct alignas(chunk * sizeof(E)) Part {
    E element[chunk];
  };
  template <class E> FG_DEVICE static Part<E> part(const E* row, int n) { return fg::global_load(reinterpret_cast<const Part<E>*>(row) + n); }
  template <class Sum> FG_DEVICE static Sum over_lanes(Sum sum) {
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) sum += fg::shuffle_xor(sum, mask);
    return sum;
  }
};

// A row of head h, counted through the batch `head`; of `place` are numbers of rows.
template <class Place> struct OneRow {
  bool real;  // else it is any
  int b, h, head, i;
  Place place;
};

// What arrives at the sink of a row, and goes to the captured values that it is of.
template <class Spec, Adding how, class Place> struct SinkOfRow {
  const typename Spec::Arguments& a;
  const OneRow<Place>& row;
  bool first;  // the row's first lane
  typename Spec::Launch u;
  typename Spec::Head x;
  typename Spec::Row r;
  float d_sink, d_t_sink;
  bool arrives;
  Adder<Spec, how> adder;

  // The sink's weight is exp(sink - lse), its value 0: d(sink) = -weight · delta.
  FG_DEVICE SinkOfRow(const typename Spec::Arguments& arguments, const OneRow<Place>& own, bool is_first, float delta, [[maybe_unused]] float epsilon)
      : a(arguments), row(own), first(is_first), u(make_launch(a)), x(make_head(a, u, row.b, row.h)), r(make_row(a, u, x, int(a.q_start) + row.i)) {
    const RowOffset offset = row_offset<Spec>(a, u, fg::global_load(a.lse + row.place), [&] { return row.place; });
    float above;
    if constexpr (Spec::sign_of_factor) above = __fmaf_rn(-offset.top, Spec::slope(u), sink_score(a, u, x, r));
    else above = sink_score(a, u, x, r) - __fmul_rn(offset.top, Spec::natural_of_top(u));
    const float weight = fg::exp2_approximate(fg::min(__fmul_rn(above, fg::LOG2_E), fg::MOST_FLOAT) - offset.lse);
    arrives = first && weight != 0.0f;
    d_sink = arrives ? -weight * delta : 0.0f;
    if constexpr (Spec::tangent) {
      float moved = 0.0f;
      if constexpr (Spec::moves_sink) moved = sink_tangent(a, u, x, r);
      moved -= fg::global_load(a.t_lse + row.place);
      d_t_sink = d_sink, d_sink = arrives ? -weight * (epsilon + delta * moved) : 0.0f;
    } else {
      d_t_sink = 0.0f, arrives = d_sink != 0.0f;
    }
  }
  template <class... Of> FG_DEVICE void add(GradientList<Of...>) {
    (add<Of>(), ...);
    adder.finish(a);
  }
  template <class Of> FG_DEVICE void add() {
    if (!Of::target(a)) return;
    const float value = arrives ? Of::through_sink(a, u, x, r, d_sink, d_t_sink) : 0.0f;
    if constexpr (Of::level == Level::row) {
      if (first) put<Of>(value);
    } else {
      // Rows of one head are neighbours: their sum is one contribution, where a warp holds one head, of one sequence.
      int own_head = row.head;
      if constexpr (Spec::ragged) own_head = row.head * int(a.sequences) + a.sequence;
      const int warp_head = fg::shuffle(own_head, 0);
      if (fg::ballot(row.real && own_head != warp_head) == 0) {
        const float total = fg::warp_sum(value);
        if (fg::lane_index() == 0) put<Of>(total);
      } else if (first) {
        put<Of>(value);
      }
    }
  }
  template <class Of> FG_DEVICE void put(float value) {
    adder.template add<Of::number>(a, Of::target(a), Of::offset(a, u, x, r, typename Spec::Column{}), value);
  }
};

template <class Spec, class T, Adding how, class Place> FG_DEVICE void run_row(const typename Spec::Arguments& a, const OneRow<Place>& row) {
  using R = Rows<Spec, T>;
  const auto [real, b, h, head, i, place] = row;
  const auto* const o = row_of_o<T>(a, b, h, i);
  const T* const d_o = row_of_d_o<T>(a, b, h, i);
  const T* t_o = nullptr;
  if constexpr (Spec::tangent) t_o = Spec::template row_of_tangents<T>(a, b, h, i);
  // Rounded once: in a row with few keys dP - delta cancels.
  using Sum = typename fg::Element<T>::Sum;
  Sum sum = 0;
  [[maybe_unused]] Sum moved = 0;
  for (int n = int(threadIdx.x) % R::lanes; n < R::chunks; n += R::lanes) {
    const auto x = R::part(o, n);
    const auto y = R::part(d_o, n);
#pragma unroll
    for (int e = 0; e < R::chunk; ++e) sum += Sum(fg::to_float(x.element[e])) * fg::to_float(y.element[e]);
    if constexpr (Spec::tangent) {
      const auto t_x = R::part(t_o, n);
#pragma unroll
      for (int e = 0; e < R::chunk; ++e) moved += Sum(fg::to_float(t_x.element[e])) * fg::to_float(y.element[e]);
    }
  }
  sum = R::over_lanes(sum);
  if constexpr (Spec::tangent) moved = R::over_lanes(moved);
  const bool first = real && int(threadIdx.x) % R::lanes == 0;
  if constexpr (Spec::divided)  // through o nothing reaches the weight of a row's one key; what rounding leaves of it, Z would divide
    if (row_inverse(a, place) < 0.0f) moved = sum, sum = 0;
  const float delta = float(sum - (a.d_lse ? fg::global_load(a.d_lse + place) : 0.0f)), epsilon = float(moved);
  if (first) fg::global_store(delta_of(a) + place, delta);
  if constexpr (Spec::tangent)
    if (first) fg::global_store(epsilon_of(a) + place, epsilon);
  if constexpr (Spec::has_sink_gradients) SinkOfRow<Spec, how, Place>(a, row, first, delta, epsilon).add(typename Spec::SinkGradients{});
}

// Of all rows of the call.
template <class Spec, class T, bool clears, Adding how> FG_DEVICE void run_rows(const typename Spec::Arguments& a) {
  using R = Rows<Spec, T>;
  if constexpr (clears) clear<Spec, T>(a, a.batch * a.heads * ((a.q_len + 15) / 16));
  const unsigned row = unsigned(backwards()) * R::rows + threadIdx.x / R::lanes, q_len = unsigned(a.q_len);
  const bool real = row < unsigned(a.batch * a.heads) * q_len;
  const unsigned own = real ? row : 0;
  const int head = int(own / q_len), b = unsigned(head) / unsigned(a.heads), h = head - b * int(a.heads), i = int(own - head * q_len);
  if constexpr (Spec::slices) run_row<Spec, T, how>(a, OneRow<int64_t>{real, b, h, head, i, head * rows_apart(a) + i});
  else run_row<Spec, T, how>(a, OneRow<unsigned>{real, b, h, head, i, own});
}

}  // namespace backward
