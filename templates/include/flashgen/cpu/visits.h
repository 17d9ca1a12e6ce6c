// Which key tiles a query tile visits, and what is computed once for a tile's diagonals.
#pragma once
#include "flashgen/cpu/rows.h"

namespace {

using Row = Spec::Row;
using Column = Spec::Column;
using Diagonals = Spec::Diagonals;
using RowBounds = Spec::RowBounds;
using ColumnBounds = Spec::ColumnBounds;

// The global rows of vector `vector` of a tile; lanes past the last row repeat it.
FG_INLINE fg::VecI rows_of(int64_t first, int vector, int rows) {
  return fg::min(int32_t(first) + vector * W + fg::iota(), int32_t(first) + rows - 1);
}

// ---- The diagonals of a tile ---------------------------------------------------------------------------------------
// Numbers of the spec that positions decide by i - j alone, of all diagonals of a tile of up to `rows` by `columns`;
// they are stored so that those of one key and W neighbouring rows are neighbours, too.

template <int rows, int columns> struct DiagonalsOfTile {
  static constexpr int size = int(round_up(rows + columns, W)) + W;

  // Where the diagonals begin that key j of the tile shares with vector `vector` of its rows.
  static int64_t at(int vector, int64_t j) { return vector * W + columns - 1 - j; }

  // Of rows i0 … i0 + count_i - 1, of which vectors first … last - 1 are computed, and keys j0 … j0 + count_j - 1.
  void make(const Arguments& a, const Launch& u, const Head& x, int64_t i0, int count_i, int first, int last,
            int64_t j0, int count_j) {
    origin = int32_t(i0 - j0), nearest = origin - (count_j - 1), farthest = origin + count_i - 1;
    begin = int(at(first, count_j - 1)), end = int(at(last, 0));
    for (int n = begin; n < end; n += W) {
      Diagonals d = Spec::make_diagonals(a, u, x, distances(n));
      Spec::for_each_value(d, [&](int value, fg::VecF of) { fg::store(values[value] + n, of); });
    }
  }
  // i - j of W diagonals from n on; past those of the tile the last.
  FG_INLINE fg::VecI distances(int n) const {
    return fg::clamp(origin + n - (columns - 1) + fg::iota(), nearest, farthest);
  }
  FG_INLINE Diagonals of(int vector, int64_t j) const {
    Diagonals d;
    Spec::for_each_value(d, [&](int value, fg::VecF& of) { of = fg::load(values[value] + at(vector, j)); });
    return d;
  }

  float values[Spec::diagonal_values][size];
  int32_t origin, nearest, farthest;
  int begin, end;  // what is stored
};
struct NoDiagonals {
  void make(const Arguments&, const Launch&, const Head&, int64_t, int, int, int, int64_t, int) {}
  FG_INLINE Diagonals of(int, int64_t) const { return Diagonals{}; }
};
template <int rows, int columns>
using TileDiagonals = std::conditional_t<Spec::diagonals, DiagonalsOfTile<rows, columns>, NoDiagonals>;

// ---- Visits --------------------------------------------------------------------------------------------------------

struct Visit {
  int32_t tile;
  bool masked;          // PARTIAL: some pairs of its rows are not kept. Otherwise FULL
  int16_t first, last;  // its rows: vectors first … last - 1; others keep nothing
};

// The rows of K and V of one visit.
inline KeyRows key_rows(const Arguments& a, const Visit& visit, int tile_columns) {
  const int64_t first = int64_t(visit.tile) * tile_columns;
  return {first, int(std::min<int64_t>(tile_columns, a.kv_len - first))};
}

// What the mask reads of keys, over every power-of-two run of key tiles: node n covers the tiles of nodes 2n and 2n +
// 1, and leaves are single tiles. There is one tree for each batch entry, or head; O(Nk) to build.
inline int64_t leaves_of_tree(int64_t tiles) {
  int64_t leaves = 1;
  while (leaves < tiles) leaves *= 2;
  return leaves;
}

inline int64_t trees_of(const Arguments& a) {
  return Spec::observed_columns ? a.batch * (Spec::observed_by_head ? a.heads : 1) : 0;
}
inline int64_t nodes_of_tree(const Arguments& a, int tile_columns) {
  return 2 * leaves_of_tree(ceil_div(a.kv_len, tile_columns));
}
inline int64_t bytes_of_trees(const Arguments& a, int tile_columns) {
  if (!Spec::observed_columns) return 0;
  return round_up(trees_of(a) * nodes_of_tree(a, tile_columns) * int64_t(sizeof(ColumnBounds)), 64);
}
inline const ColumnBounds* tree_of(const Arguments& a, const ColumnBounds* trees, int64_t b, int64_t h,
                                   int tile_columns) {
  if (!Spec::observed_columns) return nullptr;
  return trees + (Spec::observed_by_head ? b * a.heads + h : b) * nodes_of_tree(a, tile_columns);
}
// What the mask reads of tile `tile` of these.
inline const ColumnBounds& leaf_of(const Arguments& a, const ColumnBounds* tree, int32_t tile, int tile_columns) {
  static constexpr ColumnBounds none{};
  return Spec::observed_columns ? tree[leaves_of_tree(ceil_div(a.kv_len, tile_columns)) + tile] : none;
}

inline void build_tree(const Arguments& a, const Launch& u, int64_t number, int tile_columns, ColumnBounds* tree) {
  const bool by_head = Spec::observed_by_head;
  const Head x = make_head(a, u, by_head ? number / a.heads : number, by_head ? number % a.heads : 0);
  const int64_t tiles = ceil_div(a.kv_len, tile_columns), leaves = leaves_of_tree(tiles);
  const auto bounds_of = [&](int64_t j) {
    return Spec::bounds_of_column(Spec::make_column(a, u, x, int(a.kv_start + j)));
  };
  for (int64_t tile = 0; tile < leaves; ++tile) {
    const int64_t first = std::min(tile, tiles - 1) * tile_columns;  // leaves past the end repeat the last tile
    ColumnBounds found = bounds_of(first);
    for (int64_t j = first + 1; j < std::min(first + tile_columns, a.kv_len); ++j) found = found.hull(bounds_of(j));
    tree[leaves + tile] = found;
  }
  for (int64_t node = leaves - 1; node > 0; --node) tree[node] = tree[2 * node].hull(tree[2 * node + 1]);
}
// All trees, by the threads of a team.
inline void build_trees(const Arguments& a, const Launch& u, int tile_columns, ColumnBounds* trees) {
#pragma omp for schedule(static)
  for (int64_t n = 0; n < trees_of(a); ++n)
    build_tree(a, u, n, tile_columns, trees + n * nodes_of_tree(a, tile_columns));
}

// What the mask reads of vectors of rows first … end - 1, of `rows` that begin with i0.
inline RowBounds bounds_of_rows(const Arguments& a, const Launch& u, const Head& x, int64_t i0, int rows, int first,
                                int end) {
  RowBounds bounds{};
  if constexpr (Spec::observed_rows) {
    const auto of = [&](int n) { return Spec::bounds_of_row(Spec::make_row(a, u, x, rows_of(i0, n, rows))); };
    bounds = of(first);
    for (int n = first + 1; n < end; ++n) bounds = bounds.hull(of(n));
  }
  return bounds;
}

// Finds the key tiles that one query tile visits. A run of tiles that is FULL or EMPTY as a whole is settled by one
// evaluation, any other is quartered: the work follows the border of the mask, not its area. In a tile on the border,
// rows that keep nothing are left out at either end; what ranges leave open then is settled by the first pairs that
// differ.
struct Search {
  const Arguments& a;
  const Launch& u;
  const Head& x;
  int tile_columns;
  int64_t i0;
  int row_count;
  const ColumnBounds* tree;
  Visit* visits;
  int count;
  RowBounds rows;

  // The tiles first … first + span - 1 below `node`; span is a power of two.
  void run(int32_t node, int32_t first, int32_t span) {
    const int64_t start = int64_t(first) * tile_columns;
    if (start >= a.kv_len) return;
    const int64_t end = std::min(start + int64_t(span) * tile_columns, a.kv_len);
    const fg::ranges::Int j = {a.kv_start + start, a.kv_start + end - 1};
    const fg::ranges::Bool keep = kept({i0, i0 + row_count - 1}, j, rows, node);
    if (!keep.may_be_true) return;
    if (keep.may_be_false && span > 1) {
      const int32_t parts = std::min(span, 4);
      for (int32_t part = 0; part < parts; ++part)
        run(parts * node + part, first + part * (span / parts), span / parts);
      return;
    }
    Visit visit = {first, keep.may_be_false, 0, int16_t(ceil_div(row_count, W))};
    if (visit.masked) {
      while (visit.first < visit.last && !may_keep(visit.first, node, j)) ++visit.first;
      while (visit.first < visit.last && !may_keep(visit.last - 1, node, j)) --visit.last;
      const fg::ranges::Bool found = kept_pairs(visit, j);
      if (!found.may_be_true) return;
      visit.masked = found.may_be_false;
    }
    for (; int64_t(visit.tile) * tile_columns < end; ++visit.tile) visits[count++] = visit;
  }

  // Looks at the pairs of a visit until one is kept and one is not.
  fg::ranges::Bool kept_pairs(const Visit& visit, fg::ranges::Int j) const {
    fg::ranges::Bool found = {false, false};
    for (int n = visit.first; n < visit.last; ++n) {
      const Row r = Spec::make_row(a, u, x, rows_of(i0, n, row_count));
      for (int64_t column = j.lo; column <= j.hi; ++column) {
        const Column c = Spec::make_column(a, u, x, int(column));
        found = fg::ranges::hull(found, fg::range_of(Spec::keep(a, u, x, r, c, Diagonals{})));
        if (found.may_be_true && found.may_be_false) return found;
      }
    }
    return found;
  }

  // Whether one vector of rows may keep a key of the range j, of which `node` knows what the mask reads.
  bool may_keep(int vector, int32_t node, fg::ranges::Int j) const {
    const int64_t first = i0 + vector * W, last = std::min(first + W, i0 + row_count) - 1;
    return kept({first, last}, j, bounds_of_rows(a, u, x, i0, row_count, vector, vector + 1), node).may_be_true;
  }

  FG_INLINE fg::ranges::Bool kept(fg::ranges::Int i, fg::ranges::Int j, const RowBounds& of_rows,
                                  [[maybe_unused]] int32_t node) const {
    if constexpr (Spec::observed_columns) return Spec::keep_range(a, u, x, i, j, of_rows, tree[node]);
    else return Spec::keep_range(a, u, x, i, j, of_rows, {});
  }
};

// The visits of `rows` query rows from `row0` on, in the order of the keys; returns their number.
inline int find_visits(const Arguments& a, const Launch& u, const Head& x, int64_t row0, int rows, int tile_columns,
                       const ColumnBounds* tree, Visit* visits) {
  const int64_t i0 = a.q_start + row0;
  int32_t span = 1;
  while (int64_t(span) * tile_columns < a.kv_len) span *= 2;
  const RowBounds bounds = bounds_of_rows(a, u, x, i0, rows, 0, int(ceil_div(rows, W)));
  Search search = {a, u, x, tile_columns, i0, rows, tree, visits, 0, bounds};
  search.run(1, 0, span);
  return search.count;
}

// What is computed of a visit: vectors of rows first … last - 1, in whole groups. Rows that join a visit to fill one up
// are past the last row or keep nothing, which the mask has to say.
struct Computed {
  int first, last;
  bool masked;

  // Of the strip that begins with vector n.
  int end_of_strip(int n, int strip) const { return std::min(last, (n / strip + 1) * strip); }
};
template <class Products> inline Computed computed(const Visit& visit) {
  const int first = visit.first / Products::row_vectors * Products::row_vectors;
  const int last = int(round_up(visit.last, Products::row_vectors));
  return {first, last, visit.masked || first < visit.first || last > visit.last};
}

// Lays out the keys of a visit, and what the spec computes of them, for `rows` rows from i0 on.
template <class Tile>
FG_INLINE void lay_out_keys(const Call& a, const Launch& u, const Head& x, int64_t i0, int rows, const HeadRows& k,
                            const HeadRows& v, KeyRows keys, const Computed& part, Tile& t) {
  t.k.load(k, keys);
  t.v.load(v, keys);
  for (int j = 0; j < keys.count; ++j) {
    t.columns[j] = Spec::make_column(a, u, x, int(a.kv_start + keys.first) + j);
    if constexpr (Spec::sqdist) t.columns[j].kk = squared_norm(k, keys.first + j);
  }
  t.diagonals.make(a, u, x, i0, rows, part.first, part.last, a.kv_start + keys.first, keys.count);
}

// The keys of a visit that some neighbouring vectors of rows meet, and whether the mask has a say there.
struct KeptKeys {
  int first, end;
  bool masked;
};
// Vectors of rows first … end - 1 of a visit, and the keys that they meet.
struct Strip {
  int first, end;
  KeptKeys kept;
};

// Those that rows of vectors first … end - 1 may keep: of a visit on the border, whose rows begin with i0, halves,
// quarters … of its keys are left out at either end, down to KEY_GROUP of them, where no pair of these is kept.
constexpr int KEY_GROUP = MR;
inline KeptKeys kept_keys(const Arguments& a, const Launch& u, const Head& x, int64_t i0, int rows, int first, int end,
                          KeyRows keys, const ColumnBounds& columns) {
  const fg::ranges::Int i = {i0 + std::min(first * W, rows - 1), i0 + std::min(end * W, rows) - 1};
  const RowBounds bounds = bounds_of_rows(a, u, x, i0, rows, first, end);
  const auto keep = [&](int from, int to) {
    const int64_t before = a.kv_start + keys.first;
    return Spec::keep_range(a, u, x, i, {before + from, before + std::min(to, keys.count) - 1}, bounds, columns);
  };
  const fg::ranges::Bool all = keep(0, keys.count);
  if (!all.may_be_true || !all.may_be_false) return {0, all.may_be_true ? keys.count : 0, false};
  KeptKeys kept = {0, int(round_up(keys.count, KEY_GROUP)), true};
  int step = KEY_GROUP;
  while (2 * step < kept.end) step *= 2;
  for (; step >= KEY_GROUP; step /= 2) {
    if (kept.first + step < kept.end && !keep(kept.first, kept.first + step).may_be_true) kept.first += step;
    if (kept.first + step < kept.end && !keep(kept.end - step, kept.end).may_be_true) kept.end -= step;
  }
  kept.end = std::min(kept.end, keys.count);
  kept.masked = keep(kept.first, kept.end).may_be_false;
  return kept;
}

// perform(strip) for what two neighbouring strips meet: once for the keys that both do, then for the others.
template <class Perform> inline void for_each_block(const Strip& upper, const Strip& lower, const Perform& perform) {
  const KeptKeys &x = upper.kept, &y = lower.kept;
  const int first = std::max(x.first, y.first), end = std::min(x.end, y.end);
  if (first >= end) {
    perform(upper);
    perform(lower);
    return;
  }
  perform({upper.first, lower.end, {first, end, false}});
  const Strip &low = x.first < first ? upper : lower, &high = x.end > end ? upper : lower;
  perform({low.first, low.end, {low.kept.first, first, false}});
  perform({high.first, high.end, {end, high.kept.end, false}});
}

// ---- How much work a query tile is ---------------------------------------------------------------------------------
// Rows may keep very different numbers of keys. What a query tile visits is counted once for all batch entries and
// heads that the mask does not tell apart; the counts decide an order, or where the work is cut.

// The number of visits of query tile `query_tile` under mask `mask`, and one for what a tile takes beside them.
inline int32_t work_of(const Arguments& a, const Launch& u, int64_t mask, int64_t query_tile, int tile_rows,
                       int tile_columns, const ColumnBounds* trees, Visit* visits) {
  const int64_t b = Spec::batch_of_mask(a, mask), h = Spec::head_of_mask(a, mask), row0 = query_tile * tile_rows;
  const Head x = make_head(a, u, b, h);
  const int rows = int(std::min<int64_t>(tile_rows, a.q_len - row0));
  return 1 + find_visits(a, u, x, row0, rows, tile_columns, tree_of(a, trees, b, h, tile_columns), visits);
}

// Query tiles 0 … tiles - 1 by their work, the longest first; of equals the last.
inline void longest_first(int32_t* order, const int32_t* work, int64_t tiles) {
  for (int64_t n = 0; n < tiles; ++n) order[n] = int32_t(tiles - 1 - n);
  std::stable_sort(order, order + tiles, [work](int32_t x, int32_t y) { return work[x] > work[y]; });
}

// Cuts query tiles into runs of about the same work: run n begins at query tile first[n].
inline void cut_evenly(int32_t* first, int64_t runs, const int32_t* work, int64_t tiles) {
  int64_t total = 0, before = 0, run = 0;
  for (int64_t n = 0; n < tiles; ++n) total += work[n];
  for (int64_t n = 0; n < tiles; ++n) {
    while (run < runs && 2 * before + work[n] >= 2 * (total * run / runs)) first[run++] = int32_t(n);
    before += work[n];
  }
  while (run <= runs) first[run++] = int32_t(tiles);
}

}  // namespace
