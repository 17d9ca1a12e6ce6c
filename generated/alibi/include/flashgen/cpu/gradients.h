// Captured gradients: what pairs, and the sink, add to each is summed over the loops outside of its level first.
#pragma once
#include "flashgen/cpu/visits.h"

namespace {

// The partial sums of one gradient, Of, over a tile. An array of no elements takes no memory.
template <class Of, int rows, int columns> struct GradientSums {
  static constexpr fg::Level level = Of::level;
  static constexpr bool of_rows = level == fg::Level::row, of_columns = level == fg::Level::column;
  static constexpr bool of_diagonals = level == fg::Level::diagonal, of_pairs = level == fg::Level::pair;
  static constexpr bool of_heads = level == fg::Level::head || level == fg::Level::launch;
  using Lines = DiagonalsOfTile<rows, columns>;

  float by_row[of_rows ? rows : 0], by_column[of_columns ? columns * W : 0];
  float by_diagonal[of_diagonals ? Lines::size : 0];
  double of_head[of_heads ? 1 : 0];

  void begin_rows() {
    if constexpr (of_rows) std::fill_n(by_row, rows, 0.0f);
    if constexpr (of_heads) of_head[0] = 0.0;
  }
  void begin_keys() {
    if constexpr (of_columns) std::fill_n(by_column, columns * W, 0.0f);
    if constexpr (of_diagonals) std::fill_n(by_diagonal, Lines::size, 0.0f);
  }

  // Those of one vector of rows: sums of short sums, as terms of both signs nearly cancel.
  struct OfVector {
    fg::VecF sum{}, total{};
    fg::DiagonalSums along;
  };
  template <class Task>
  FG_INLINE void add(OfVector& own, const Task& task, const Arguments& a, const Launch& u, const Head& x, const Row& r,
                     const Column& c, const Diagonals& d, const fg::PairTerms& p, fg::VecB kept, int n, int64_t j,
                     int valid) {
    if constexpr (Of::of_pairs) {
      const fg::VecF value = fg::select(kept, Of::of_pair(a, u, x, r, c, d, p), 0.0f);
      if constexpr (of_pairs) {
        const fg::Gradient& to = task.captured[Of::captured];
        if (to.wanted()) Of::add(to, valid, value, a, u, x, r, c, d);
      } else if constexpr (of_columns) {
        fg::store(by_column + j * W, fg::load(by_column + j * W) + value);
      } else if constexpr (of_diagonals) {
        own.along.add(fg::select(fg::lt(fg::iota(), valid), value, 0.0f));
        if (j % W == W - 1) own.along.leave(by_diagonal + Lines::at(n, j));
      } else {
        own.sum += value;
        if (j % 16 == 15) own.total += own.sum, own.sum = fg::VecF{};
      }
    }
  }
  // Behind the last column, j.
  FG_INLINE void end_vector(OfVector& own, [[maybe_unused]] int n, [[maybe_unused]] int64_t j) {
    if constexpr (Of::of_pairs) {
      if constexpr (of_heads) of_head[0] += fg::horizontal_sum(own.total + own.sum);
      if constexpr (of_diagonals) own.along.finish(by_diagonal + Lines::at(n, j));
      if constexpr (of_rows) fg::store(by_row + n * W, fg::load(by_row + n * W) + (own.total + own.sum));
    }
  }

  template <class Task, class Tiles>
  void end_keys(const Task& task, const Arguments& a, const Launch& u, const Head& x, const Tiles& t, int count) {
    const fg::Gradient& to = task.captured[Of::captured];
    if constexpr (of_columns)
      for (int j = 0; to.wanted() && j < count; ++j)
        Of::add(to, 1, fg::horizontal_sum(fg::load(by_column + j * W)), a, u, x, Row{}, t.columns[j], Diagonals{});
    if constexpr (of_diagonals)
      for (int n = t.diagonals.begin; to.wanted() && n < t.diagonals.end; n += W) {
        const Diagonals d = Spec::make_diagonals(a, u, x, t.diagonals.distances(n));
        Of::add(to, std::min(W, t.diagonals.end - n), fg::load(by_diagonal + n), a, u, x, Row{}, Column{}, d);
      }
  }

  // Of vector n of rows, `valid` of which are: what comes through the sink.
  template <class Reaching>
  void add_sink(const Arguments& a, const Launch& u, const Head& x, const Row& r, int n, int valid,
                const Reaching& of) {
    if constexpr (Of::of_sink) {
      const fg::VecF value = Of::through_sink(a, u, x, r, Column{}, Diagonals{}, of.d_sink, of.d_t_sink);
      if constexpr (of_rows) fg::store(by_row + n * W, fg::load(by_row + n * W) + value);
      else
        for (int l = 0; l < valid; ++l) of_head[0] += value[l];
    }
  }
  template <class Task>
  void end_rows(const Task& task, const Arguments& a, const Launch& u, const Head& x, const Row& r, int n, int valid) {
    const fg::Gradient& to = task.captured[Of::captured];
    if constexpr (of_rows)
      if (to.wanted()) Of::add(to, valid, fg::load(by_row + n * W), a, u, x, r, Column{}, Diagonals{});
  }
  template <class Task> void end_head(const Task& task, const Arguments& a, const Launch& u, const Head& x) {
    const fg::Gradient& to = task.captured[Of::captured];
    if constexpr (of_heads)
      if (to.wanted()) Of::add(to, 1, of_head[0], a, u, x, Row{}, Column{}, Diagonals{});
  }
};

// Those of all gradients.
template <class List, int rows, int columns> struct AllSums;
template <class... Of, int rows, int columns>
struct AllSums<fg::GradientList<Of...>, rows, columns> : GradientSums<Of, rows, columns>... {
  static constexpr bool of_sink = (Of::of_sink || ...);
  // Whether rows are looked at once more, behind the last key tile.
  static constexpr bool close_rows = of_sink || ((Of::level == fg::Level::row) || ...);

  struct OfVector : GradientSums<Of, rows, columns>::OfVector... {};

  template <class Perform> FG_INLINE void for_each([[maybe_unused]] const Perform& perform) {
    (perform(static_cast<GradientSums<Of, rows, columns>&>(*this)), ...);
  }
  template <class... Given> FG_INLINE void add(OfVector& own, const Given&... given) {
    (GradientSums<Of, rows, columns>::add(own, given...), ...);
  }
  FG_INLINE void end_vector(OfVector& own, [[maybe_unused]] int n, [[maybe_unused]] int64_t j) {
    (GradientSums<Of, rows, columns>::end_vector(own, n, j), ...);
  }
};

}  // namespace
