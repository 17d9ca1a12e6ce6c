// The kernels of rows where these are of the sequences of a ragged batch: delta, and dQ from its sums.
#pragma once
#include "flashgen/backward/delta.cuh"
#include "flashgen/backward/dq_sums.cuh"

namespace backward {

template <class Spec, class T, bool clears, Adding how> FG_DEVICE void run_rows(const Call& call) {
  using R = Rows<Spec, T>;
  if constexpr (clears) {
    const auto a = whole_of(call);
    clear<Spec, T>(a, a.heads * tiles_of_all<16>(a.q_rows, a.sequences));
  }
  const unsigned row = unsigned(backwards()) * R::rows + threadIdx.x / R::lanes, all = unsigned(call.q_len);
  const bool is_there = row < unsigned(call.heads) * all;
  const int h = is_there ? int(row / all) : 0;
  const int64_t at = is_there ? row - h * all : 0;
  const auto run = [&](const typename Spec::Arguments& a, bool real) {
    const int i = real ? int(at - a.q_begin) : 0;
    run_row<Spec, T, how>(a, OneRow<int64_t>{real, 0, h, h, i, h * rows_apart(a) + i});
  };
  if constexpr (Spec::has_sink_gradients) {
    const auto a = sequence_of<T>(call, sequence_of_query<1>(call, at));
    run(a, is_there && at - a.q_begin < a.q_len);  // else no sequence has it, and it reads its first
  } else {
    run(whole_of(call), is_there);  // nothing depends on the sequence
  }
}

template <class Spec, class T> FG_DEVICE void run_convert(const Call& call) {
  const unsigned all = unsigned(tiles_of_all<16>(call.q_len, call.batch)), number = backwards() * 4 + fg::warp_index(), head = number / all;
  if (head >= unsigned(call.heads)) return;
  const unsigned place = number - head * all;
  const auto a = sequence_of<T>(call, sequence_of_query<16>(call, place));
  const unsigned groups = (unsigned(a.q_len) + 15) / 16, own = place - unsigned(first_tile<16>(a.q_begin, a.sequence));
  if (own < groups) convert_rows<Spec, T>(a, head * groups + own, head, groups);
}

}  // namespace backward
