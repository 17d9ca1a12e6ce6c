// By blocks of keys: parts of rows, and how they are merged.
#pragma once
#include "flashgen/by_blocks/lists.cuh"
#include "flashgen/forward/exponentials.cuh"
#include "flashgen/units.cuh"
#include "flashgen/warpgroup.cuh"

namespace by_blocks {

// What a block of threads knows of a unit.
struct UnitNote {
  uint32_t row;   // of Q, the first head's: elements from the first query of the span and the first head
  int part;       // which part it leaves
  int query;      // of the span
  int head;       // its first one, of those that share keys
};
static_assert(sizeof(UnitNote) == 16, "one load");

// Rows of Q of an item: units one behind the other, past the last one those that are noted there.
template <class T> struct ListedRows {
  const T* base;  // of the first head and query
  const uint4* notes;  // of the tile's units
  int by_head;

  FG_DEVICE const T* at(int row, int column) const {
    const uint32_t first = fg::shared_load(reinterpret_cast<const uint32_t*>(notes + row / UNIT));
    return base + (first + uint32_t(row % UNIT * by_head + column));
  }
};

// Two units, each in a row of O of its own for every lane.
template <class T> struct OwnRows {
  T* of_half[2];
};
template <int width, class T> FG_DEVICE T* row_of(const OwnRows<T>& to, int row) { return row / UNIT % 2 ? to.of_half[1] : to.of_half[0]; }

template <class T_> struct State {
  using T = T_;
  using P = ForwardPlan<T>;
  using Spec = ::Spec;
  using Head = ::Head;
  using Row = ::Row;
  using Column = ::Column;
  static constexpr int BC = P::BC, groups = P::warps / 4, m_tiles = 1, s_tiles = BC / 8, o_tiles = DVP / 8;
  static constexpr int threads = 128;  // that share a tile of Q
  static_assert(BC == BLOCK && P::warps % 4 == 0, "a tile is a block of keys, of four warps rows each");
  static constexpr int chains = 4;  // of dependent additions and maxima a row, side by side
  static constexpr int split = 1;
  static constexpr bool divided = false, overlaps = false, bounded = false, shows_columns = false, dropped = false;
  static constexpr float HEADROOM = 0.0f, LESS_HEADROOM = 1.0f;

  using QTile = fg::SharedTile<T, 64, DP>;
  using KTile = fg::SharedTile<T, BC, DP>;
  using VTile = fg::SharedTile<T, BC, DVP>;
  using Memory = ForwardMemory<T>;
  FORWARD_MEMORY_IS_PLANNED

  const Arguments& a;
  Launch u;
  Head x;
  char* memory;
  int kv_len, warp_row;
  struct {
    int number;
    FG_DEVICE int tile(int) const { return number; }
  } visits;  // the block of keys
  Row rows[2];                        // this lane's
  Head heads[2];                      // of these
  [[maybe_unused]] int64_t numbers[2];  // in lse
  fg::Accumulators<1, o_tiles> o;
  float row_max[2], row_sum[2];

  // What parts that forward kernels share ask of a block.
  struct Place {
    int rows;  // of the block's that are there
  };
  FG_DEVICE static int row_count(const Place& place) { return place.rows; }
  FG_DEVICE static int first_own_row() { return fg::warp_index() * 16; }
  FG_DEVICE static bool writes_rows() { return true; }
  FG_DEVICE static int64_t first_row(const Place&) { return 0; }
  FG_DEVICE int64_t place_of_row(const Place&, int r, int, int64_t) const { return numbers[r]; }
  template <class V> FG_DEVICE static V* of_row(V* values, int64_t at, int) { return values + at; }
  FG_DEVICE const Head& head_of_row(int r) const { return heads[r]; }
  FG_DEVICE static int own_key() { return 0; }
  FG_DEVICE static bool weighs() { return true; }

  FG_DEVICE State(const Arguments& arguments) : a(arguments), u(make_launch(arguments)), memory(fg::shared_memory()) {
    kv_len = int(a.kv_len), warp_row = 16 * (fg::warp_index() % 4);
  }
};

template <class T> struct Block : fg::forward::Exponentials<State<T>> {
  using Base = fg::forward::Exponentials<State<T>>;
  using typename Base::P, typename Base::Memory, typename Base::QTile, typename Base::KTile, typename Base::VTile, typename Base::Place;
  using Base::a, Base::u, Base::x, Base::memory, Base::kv_len, Base::warp_row, Base::visits, Base::rows, Base::heads, Base::numbers, Base::o, Base::row_max, Base::row_sum;
  using Base::BC, Base::groups, Base::s_tiles, Base::o_tiles, Base::threads, Base::exponentials, Base::shrink_of, Base::close_rows;
  using Base::Base;

  FG_DEVICE static int group() { return P::warpgroups ? fg::warpgroup_index<groups>() : fg::warp_index() / 4; }
  FG_DEVICE static int thread() { return int(threadIdx.x) % threads; }
  FG_DEVICE static void barrier() { fg::barrier_wait(1 + group(), threads); }
  FG_DEVICE KTile k_tile(int) const { return {reinterpret_cast<T*>(memory + Memory::K)}; }
  FG_DEVICE VTile v_tile(int) const { return {reinterpret_cast<T*>(memory + Memory::V)}; }
  FG_DEVICE QTile q_tile(int place) const { return {reinterpret_cast<T*>(memory + Memory::Q + (2 * group() + place) * QTile::bytes)}; }
  FG_DEVICE uint4* notes() const { return reinterpret_cast<uint4*>(memory + Memory::NOTES); }
  FG_DEVICE UnitNote note_of(int unit) const {
    const uint4 words = fg::shared_load(notes() + unit);
    return {words.x, int(words.y), int(words.z), int(words.w)};
  }
  // A part of a unit, by the unit's number through the batch.
  FG_DEVICE int64_t part_of(int64_t unit, int place) const { return unit * numbers_of(a) + place; }

  // ---- one item ----

  FG_DEVICE void run() {
    const unsigned block = fg::block_index(), items = unsigned(items_of_span(a)), number = block / items, own = block - number * items;
    if (own >= fg::global_load(Parts::item_counts(a) + number)) return;
    const uint4 item = fg::global_load(Parts::items(a) + int64_t(number) * items + own);
    const Span span = span_of(a, number);
    const int first_key = int(item.x) * BC, units = int(item.w), tiles = (units + 7) / 8;
    visits.number = int(item.x);
    const int first_head = span.kv_head * group_of(a);
    x = head_of(a, u, span.b, first_head);

    const T* const q = row_of_q<T>(a, span.b, first_head, span.first);
    const uint32_t* const listed = Parts::listed(a) + int64_t(number) * QUERIES * numbers_of(a) + item.y;
#pragma unroll 1
    for (int n = int(threadIdx.x); n < 8 * tiles; n += P::threads) {  // of whole tiles: the last one is repeated
      const unsigned unit = item.z + unsigned(fg::min(n, units - 1)), per_query = unsigned(units_of_query(a)), of_query = unit / per_query;
      const uint32_t entry = fg::global_load(listed + of_query);
      const int head = int(unit - of_query * per_query), query = query_of(entry);
      const int64_t part = part_of((span.head * a.q_len + span.first + query) * per_query + head, place_of(entry));
      const int64_t row = query * rows_of_q_apart(a) + head * UNIT * heads_of_q_apart(a);
      fg::shared_store(notes() + n, make_uint4(uint32_t(row), uint32_t(part), uint32_t(query), uint32_t(head * UNIT)));
    }
    fg::copy_rows_async<P::threads, D>(k_tile(0), rows_of_k<T>(a, first_of_k(a, span.b, span.kv_head)), first_key, kv_len - first_key);
    fg::copy_rows_async<P::threads, DV>(v_tile(0), rows_of_v<T>(a, first_of_v(a, span.b, span.kv_head)), first_key, kv_len - first_key);
    fg::copy_async_commit();
    const bool masked = is_masked(span);
    fg::block_barrier();  // everyone knows the queries

    const auto start_q = [&](int tile, int place) {
      const ListedRows<T> from = {q, notes() + 8 * tile, int(heads_of_q_apart(a))};
      fg::copy_rows_async<threads, D>(q_tile(place), from, 0, 64, thread());
      fg::copy_async_commit();
    };
    int tile = group(), place = 0;
    if (tile < tiles) start_q(tile, 0);
    fg::copy_async_wait<0>();
    if constexpr (P::warpgroups) fg::publish_shared();
    fg::block_barrier();  // K and V are there
#pragma unroll 1
    for (; tile < tiles; tile += groups, place ^= 1) {
      fg::copy_async_wait<0>();
      if constexpr (P::warpgroups) fg::publish_shared();
      barrier();  // Q is there, and everyone is done with that of the tile before
      if (tile + groups < tiles) start_q(tile + groups, place ^ 1);
      begin(span, 8 * tile + warp_row / UNIT);
      if (masked) multiply<true>(place);
      else multiply<false>(place);
      leave(8 * tile + warp_row / UNIT, units);
    }
  }

  // Whether the mask keeps less than all pairs of an item, for any of its heads.
  FG_DEVICE bool is_masked(const Span& span) const {
    bool masked = false;
#pragma unroll 1
    for (int n = 0; n < (MASKS_BY_HEAD ? group_of(a) : 1); ++n) {
      const int h = span.kv_head * group_of(a) + n;
      const Head head = head_of(a, u, span.b, h);
      const fg::KeyTiles<Spec, QUERIES, BC> keys = {a, u, head, span.b * int(a.heads) + h, {span.first, span.count}};
      masked = masked || keys(visits.number, visits.number + 1).may_be_false;
    }
    return masked;
  }

  // The lane's rows: of the warp's first unit and the one behind it.
  FG_DEVICE void begin(const Span& span, int first) {
    fg::clear(o);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const UnitNote note = note_of(first + r);
      heads[r] = head_of(a, u, span.b, span.kv_head * group_of(a) + note.head + fg::fragment_row(0));
      rows[r] = make_row(a, u, heads[r], int(a.q_start) + span.first + note.query);
      row_max[r] = -INFINITY, row_sum[r] = 0.0f;
    }
  }

  template <bool masked> FG_DEVICE void multiply(int place) {
    fg::Accumulators<1, s_tiles> s;
    float shrink[2];
    if constexpr (P::warpgroups) {
      fg::begin_products(s);
      fg::start_product(s, q_tile(place), 0, k_tile(0));
      fg::warpgroup_commit();
      fg::wait_products<0>(s);
      Base::template scores<masked>(s, 0, shrink);
      exponentials(s);
      fg::LeftRows<T, 1, BC> p;
      fg::round_into(p, s);
      fg::begin_products(o, p);
      fg::start_product_across(o, p, v_tile(0));
      fg::warpgroup_commit();
      fg::wait_products<0>(o, p);
      return;
    }
    fg::clear(s);
    fg::product(s, q_tile(place), warp_row, k_tile(0), 0);
    Base::template scores<masked>(s, 0, shrink);
    exponentials(s);
    fg::product_across(o, s, v_tile(0), 0);
  }

  // The parts of these; those past the last one are nobody's.
  FG_DEVICE void leave(int first, int units) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = fg::row_sum(row_sum[r]);
      if (first + r >= units) continue;
      const int64_t part = note_of(first + r).part;
      if (fg::fragment_column(0) == 0) fg::global_store(Parts::rows(a) + part * UNIT + fg::fragment_row(0), make_float2(row_max[r], sum));
      float inverse = 0.0f;
      if constexpr (sizeof(T) == 2) inverse = sum == 0.0f ? 0.0f : fg::reciprocal_approximate(sum);
      else inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      fg::store_unit<T>(Parts::o(a) + part * fg::Unit<T, o_tiles>::bytes, o.at[0], r, inverse);
    }
  }

  // ---- merging ----

  // A warp has two units, and all of their parts.
  FG_DEVICE void merge() {
    const int units = int(a.batch * a.heads * a.q_len / UNIT), first = fg::block_index() * 2 * MERGING_WARPS;
    const int per_query = units_of_query(a), count = numbers_of(a);
    const Place place = {fg::min(units - first, 2 * MERGING_WARPS) * UNIT};
    int64_t parts[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const unsigned unit = unsigned(fg::min(first + 2 * fg::warp_index() + r, units - 1));
      const unsigned row = unit / unsigned(per_query), head = row / unsigned(a.q_len), b = head / unsigned(a.kv_heads);
      const int n = int(row - head * unsigned(a.q_len)), kv_head = int(head - b * unsigned(a.kv_heads));
      const int h = kv_head * group_of(a) + int(unit - row * unsigned(per_query)) * UNIT + fg::fragment_row(0);
      heads[r] = head_of(a, u, int(b), h);
      rows[r] = make_row(a, u, heads[r], int(a.q_start) + n);
      numbers[r] = (b * a.heads + h) * rows_apart(a) + n;
      parts[r] = part_of(unit, 0);
      row_max[r] = -INFINITY, row_sum[r] = 0.0f;
    }
    fg::clear(o);
    const auto state = [&](int r, int k) { return fg::global_load(Parts::rows(a) + (parts[r] + k) * UNIT + fg::fragment_row(0)); };
#pragma unroll 4
    for (int k = 0; k < count; ++k)
#pragma unroll
      for (int r = 0; r < 2; ++r) row_max[r] = fg::running_max(row_max[r], state(r, k).x);
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      fg::Unit<T, o_tiles> left[2];
      float weights[2];
      bool is_there[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 own = state(r, k);
        is_there[r] = own.y != NO_PART;  // for all rows of a unit
        weights[r] = own.y == 0.0f || !is_there[r] ? 0.0f : own.y * shrink_of(own.x, row_max[r]);
        row_sum[r] += weights[r];
      }
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (is_there[r]) fg::load_unit(left[r], Parts::o(a) + (parts[r] + k) * fg::Unit<T, o_tiles>::bytes);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (is_there[r]) fg::add_unit<T>(o.at[0], r, left[r], weights[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) row_sum[r] = fg::fragment_column(0) == 0 ? row_sum[r] : 0.0f;  // lanes that share a row have a sum of their own each
    float factors[2];
    close_rows(place, factors);
#pragma unroll
    for (int r = 0; r < 2; ++r) o.scale_row(r, factors[r]);
    OwnRows<T> to;  // not before: they would take registers all the way
#pragma unroll
    for (int r = 0; r < 2; ++r)
      to.of_half[r] = row_of_o<T>(a, heads[r].b - a.b_start, heads[r].h - a.h_start, rows[r].i - a.q_start);
    fg::store_fragments<T, DV>(to, o.at[0], fg::warp_index() * 16, place.rows);
  }
};

}  // namespace by_blocks
