// What a block of the forward pass keeps, in registers and in shared memory, whatever its schedule.
//
// A block is a chain of classes: State, parts that schedules share, a schedule. A source prints `struct Kernel`: the spec, the plan, the
// types of elements and tiles, and which calls it is for.
#pragma once
#include "flashgen/fragments.cuh"
#include "flashgen/visits.cuh"

namespace fg::forward {

struct Larger {
  FG_DEVICE float operator()(float x, float y) const { return running_max(x, y); }
};
struct Sum {
  FG_DEVICE float operator()(float x, float y) const { return x + y; }
};

// A query tile: its head, counted through the batch (over caches, the key/value head), and its first query.
struct Place {
  int head, row0;
};

template <class Kernel_> struct State {
  using Kernel = Kernel_;
  using Spec = typename Kernel::Spec;
  using P = typename Kernel::Plan;
  using Memory = typename Kernel::Memory;
  using Arguments = typename Spec::Arguments;
  using Launch = typename Spec::Launch;
  using Head = typename Spec::Head;
  using Row = typename Spec::Row;
  using Column = typename Spec::Column;
  using T = typename Kernel::T;            // elements of Q and O
  using Stored = typename Kernel::Stored;  // of K and V, as they are stored
  using E = typename Kernel::E;            // as they are multiplied

  static constexpr int D = Spec::D, DV = Spec::DV, DP = Spec::DP, DVP = Spec::DVP;
  static constexpr bool dropped = Kernel::dropped;
  using Place = forward::Place;
  static constexpr int blocks = Kernel::blocks;  // that share a tile's columns, where parts of its keys are merged
  static constexpr int BR = P::BR / P::cluster, BC = P::BC, stages = P::stages;

  // Rows may be shared by `split` warps, or warpgroups, `unit` warps that multiply together: each has its part of O's columns. Where they
  // are divided each has scores of its part of the keys, too, else they weigh key tiles in turns.
  static constexpr int split = P::split, unit = P::warpgroups ? 4 : 1, row_warps = P::warps / split;
  static constexpr bool divided = split > 1 && !P::ping_pong;
  static constexpr int m_tiles = BR / (16 * row_warps), s_tiles = (divided ? P::s_columns : BC) / 8, o_tiles = DVP / (8 * (blocks > 1 ? blocks : split));
  static_assert(BR % (16 * row_warps) == 0 && BC % (8 * s_tiles) == 0 && DVP % (16 * split) == 0, "a warp has whole fragments");
  static_assert(!P::warpgroups || (m_tiles == 1 && P::warps % (4 * split) == 0), "a warpgroup has 64 rows");

  using Team = fg::Team<32 * P::warps, 0>;  // who multiplies
  static constexpr int threads = Team::threads;
  static constexpr bool has_producers = P::producers > 0;                       // others copy, and find the visits
  static constexpr bool self_loading = P::tensor_copies && !has_producers;      // one thread starts the copies, and all find the visits
  static constexpr bool overlaps_next = P::overlaps_next;                       // from query tile to query tile, where others copy
  static constexpr bool overlaps = P::warpgroups && !divided && (P::tensor_copies || !Spec::tangent);  // weighs one key tile while O takes in another
  static constexpr bool moves = Spec::ragged && P::tensor_copies;               // from sequence to sequence
  static constexpr bool opens = self_loading && !(P::prefetches_next || moves || Spec::lists);  // looks at the next query tile ahead
  static constexpr bool shows_columns = Spec::observes_columns && P::tensor_copies;  // what the mask reads by column comes with the tile
  static constexpr int chains = P::warpgroups ? 4 : 1;  // of dependent additions and maxima a row, side by side
  // Scores are bounded, so that weights may be there before maxima of rows are looked at.
  static constexpr bool bounded = Spec::bounded && !divided && sizeof(T) == 2 && Kernel::in_bounds;
  // 8 bits hold weights between 2^-6 and 448 well, float16 between 2^-14 and 2^16, and no others: there a row's weights, and with them O,
  // are multiplied by a power of two that brings the largest so far near 32, or 1; 0 before the first one.
  static constexpr bool scaled = Spec::scaled_weights && Element<E>::narrow;
  // Exponents are counted from so far below a row's maximum: 8 bits hold weights up to 448, and few below 1.
  static constexpr float HEADROOM = Spec::headroom, LESS_HEADROOM = 1.0f / (1 << Spec::headroom);

  // Shared memory, in bytes from its start. O takes the place of everything at the end, but for where blocks are persistent.
  using QTile = SharedTile<T, BR, DP>;
  using OrderedTile = SharedTile<E, BR, DP>;  // Q in its place, as operand
  using KTile = typename Kernel::KTile;
  using VTile = typename Kernel::VTile;
  using OTile = SharedTile<T, BR, DVP>;
  using PTile = SharedTile<E, BR, BC>;
  // Q of the next tile may come while this one is worked on; there may be a list more for those who find the visits.
  static constexpr int q_places = P::q_places, lists = has_producers ? 2 : 1;
  static constexpr bool copies = P::tensor_copies;
  static constexpr int norm_places = has_producers ? stages : 1;      // of norms of keys
  static constexpr int SEEN = shows_columns ? Spec::columns_seen : 1;  // what the mask reads by column, by stages

  using Notes = typename Kernel::Notes;
  const typename Kernel::Call& call;
  typename Kernel::OwnArguments a;  // of the present sequence
  const typename Kernel::Maps* maps;
  Launch u;
  Head x;
  char* memory;
  int kv_len, warp_row;    // this warp's first query, in the tile
  int part;                // of the columns of O that this warp has, and of the keys
  int parts_before = 0;    // the present list, where producer warps bring them
  int q_place = 0;         // in which Q lies
  float dot_unit;          // of 8 bits: what a product of numbers is multiplied by; what makes it an exponent in base 2; this warpgroup's
  float exponent_unit;     // first query, in the tile; what sums of rows that are kept in shared memory are to be multiplied by
  int group_row;
  float kept[2 * m_tiles];
  float row_shift[2 * m_tiles];  // what exponents are less
  bool are_far;                  // whether scores of a row of this warp's are less its maximum before
  float k_factor;                // over caches of 8 bits: what goes to sums over numbers
  fg::Visits<VisitList<Spec::words_of_notes>, Notes> visits;

  Row rows[2 * m_tiles];    // this lane's
  Head heads[2 * m_tiles];  // of these, where rows are of several
  LeftRows<E, m_tiles, P::q_in_registers ? DP : Element<E>::depth> q_rows;  // where they fit
  Accumulators<m_tiles, o_tiles> o;
  float row_max[2 * m_tiles];     // of the scores, as of the last rescaling
  float row_sum[2 * m_tiles];     // of this lane's columns
  float row_moving[2 * m_tiles];  // how many of this lane's columns are kept; in forward mode, have a weight that is not 0, or that scores move
  float row_scale[2 * m_tiles];
  uint32_t next_seen[SEEN];  // of one column of the key tile to come

  FG_DEVICE State(const typename Kernel::Call& whole, const Arguments& arguments, const typename Kernel::Maps* tensor_maps = nullptr)
      : call(whole), a(arguments), maps(tensor_maps), u(make_launch(arguments)), memory(shared_memory()) {
    take_place(warp_index());
    if constexpr (P::tensor_copies)
      if (threadIdx.x == 0) prefetch_map(maps->q), prefetch_map(maps->k), prefetch_map(maps->v);
  }
  // Over caches.
  FG_DEVICE State(Arguments& arguments, int own_warp = warp_index()) : call(arguments), a(arguments), memory(shared_memory()) { take_place(own_warp); }
  FG_DEVICE void take_place(int own_warp) {
    visits.list = reinterpret_cast<VisitList<Spec::words_of_notes>*>(memory + Memory::LIST);
    kv_len = int(a.kv_len);
    if constexpr (split > 1) {
      const int warp = blocks == 1 ? own_warp : own_warp * split + share() * split / blocks;
      warp_row = (warp / unit / split * unit + warp % unit) * 16 * m_tiles, part = warp / unit % split;
    } else {
      warp_row = own_warp * 16 * m_tiles;
    }
  }
  // Few tiles leave most multiprocessors idle while a kernel of its own merges their parts: blocks share the columns of one.
  FG_DEVICE static int share() { return blocks == 1 ? 0 : int(unsigned(block_index()) % blocks); }

  // -- the query tile --

  // The present one, once the team has met: from shared memory, where it costs no registers and no division.
  FG_DEVICE Place place() const { return {visits.noted(&Notes::head), visits.noted(&Notes::row0)}; }
  // By one thread: what the others read of it.
  template <class Noted> FG_DEVICE void note(Noted* noted, const Place& place, [[maybe_unused]] const Head& head) const {
    int b = 0, hkv = place.head;
    if constexpr (!Spec::cached) b = head.b - int(a.b_start), hkv = unsigned(head.h - int(a.h_start)) / (unsigned(a.heads) / unsigned(a.kv_heads));
    if constexpr (P::tensor_copies) {  // slabs in the place of elements
      shared_store(&noted->k, slab_of(maps->k, b, hkv));
      shared_store(&noted->v, slab_of(maps->v, b, hkv));
    } else {
      shared_store(&noted->k, first_of_k(a, b, hkv));
      shared_store(&noted->v, first_of_v(a, b, hkv));
    }
    shared_store(&noted->head, place.head);
    shared_store(&noted->row0, place.row0);
  }
  FG_DEVICE void note(const Place& place, const Head& head) const { note(visits.notes(), place, head); }
  FG_DEVICE int row_count(const Place& place) const {
    if constexpr (Spec::cached) return min(BR, int(a.group_rows) - place.row0);
    else return min(BR, int(a.q_len) - place.row0);
  }
  FG_DEVICE const Head& head_of_row([[maybe_unused]] int r) const {
    if constexpr (Spec::rows_of_heads) return heads[r];
    else return x;
  }

  // This warp's first row, looked up again where that takes no registers; whether it writes what rows have; and where that is.
  FG_DEVICE int first_own_row() const { return split > 1 ? warp_row : warp_index() * 16 * m_tiles; }
  FG_DEVICE bool writes_rows() const { return (split == 1 || part == 0) && (!Spec::cached || share() == 0); }
  FG_DEVICE int64_t first_row([[maybe_unused]] const Place& place) const {
    if constexpr (Spec::rows_of_heads) return 0;
    else return int64_t(place.head) * rows_apart(a) + place.row0;
  }
  FG_DEVICE int64_t place_of_row([[maybe_unused]] const Place& place, int /*r*/, [[maybe_unused]] int row, int64_t first_row) const {
    if constexpr (Spec::rows_of_heads) return query_row(a, place.head, place.row0 + row);
    else return first_row;
  }
  template <class V> FG_DEVICE static V* of_row(V* values, int64_t at, int row) { return Spec::rows_of_heads ? values + at : values + at + row; }

  // -- tiles in shared memory --

  FG_DEVICE int tiles() const { return (again(int(a.kv_len)) + BC - 1) / BC; }
  FG_DEVICE QTile q_tile(int place) const { return {reinterpret_cast<T*>(memory + place * QTile::bytes)}; }
  FG_DEVICE QTile q_tile() const { return q_tile(q_places > 1 ? q_place : 0); }
  FG_DEVICE OrderedTile ordered_q() const { return {reinterpret_cast<E*>(memory)}; }  // q_tile() but for caches of 8 bits
  FG_DEVICE int part_of(int n) const { return has_producers ? parts_before + n : n; }  // visit n, counted from the first list on
  FG_DEVICE KTile k_tile(int n) const { return {reinterpret_cast<Stored*>(memory + Memory::K + stage_of<stages>(part_of(n)) * KTile::bytes)}; }
  FG_DEVICE VTile v_tile(int n) const { return {reinterpret_cast<Stored*>(memory + Memory::V + stage_of<stages>(part_of(n)) * VTile::bytes)}; }
  // |k|² of the keys of tile n, or what scores have of it.
  FG_DEVICE float* norms(int n) const { return reinterpret_cast<float*>(memory + Memory::KK) + stage_of<norm_places>(part_of(n)) * BC; }
  // Takes them, `by` threads for everyone, of whom this is number `thread`.
  template <int by> FG_DEVICE void measure(int n, int thread) const {
    for (int row = thread; row < BC; row += by) {
      const float kk = squared_norm(k_tile(n), row);
      if constexpr (Spec::norms && !Spec::tangent) shared_store(norms(n) + row, from_norm(a, u, x, kk));
      else shared_store(norms(n) + row, kk);
    }
  }
  FG_DEVICE uint32_t* columns(int n) const { return reinterpret_cast<uint32_t*>(memory + Memory::COLUMNS) + stage_of<stages>(part_of(n)) * SEEN * BC; }

  // Where rows are divided, this warp's first key of a tile; a tile may have fewer than there are warps to share them: some weigh none.
  FG_DEVICE int own_key() const { return divided ? part * P::s_columns : 0; }
  FG_DEVICE static int column_of(int t) { return 8 * t; }  // where tile t of this warp's columns of O begins
  FG_DEVICE bool weighs() const { return !divided || split * P::s_columns == BC || own_key() < BC; }

  // O and its sums by what rows are multiplied by.
  FG_DEVICE void rescale(const float (&shrink)[2 * m_tiles]) {
    if constexpr (Spec::f8)
#pragma unroll
      for (int r = 0; r < 2 * m_tiles; ++r) kept[r] *= shrink[r];
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) o.scale_row(r, shrink[r]);
  }
};

}  // namespace fg::forward
