// A block of dK and dV, as every schedule has it: where its key tile lies, which tiles of queries it visits, and what becomes of pairs.
//
// A schedule derives from Keys and adds how tiles come, are multiplied, and how dK and dV leave; KeyVisits is the way through its heads.
#pragma once
#include "flashgen/backward/captured_pairs.cuh"
#include "flashgen/backward/moving_pair.cuh"
#include "flashgen/lists.cuh"
#include "flashgen/parts.cuh"
#include "flashgen/persistent.cuh"

namespace backward {

template <class Spec_, class T_, bool in_bounds_, bool dropped_, bool atomic_, Adding how> struct Keys {
  using Spec = Spec_;
  using T = T_;
  using Call = typename Spec::Call;
  using Arguments = typename Spec::Arguments;
  using Launch = typename Spec::Launch;
  using Head = typename Spec::Head;
  using Row = typename Spec::Row;
  using Column = typename Spec::Column;
  using RowWords = typename Spec::RowWords;
  using P = BackwardPlan<T>;
  static constexpr bool in_bounds = in_bounds_, dropped = dropped_, atomic = atomic_;
  static constexpr Adding adding = how;
  static constexpr int D = Spec::D, DV = Spec::DV, DP = Spec::DP, DVP = Spec::DVP;
  // Blocks of a cluster have a part of the columns each, or of a tile's keys, and exchange dS.
  static constexpr int BR = P::BR, BC = P::BC / (P::divides_keys ? P::cluster : 1), stages = P::stages, split = P::split;
  using Team = fg::Team<32 * P::warps, (P::producers == 0 ? 0 : 15)>;  // who multiplies
  static constexpr int threads = Team::threads, key_warps = P::warps / split, m_tiles = BC / (16 * key_warps);
  static constexpr bool clustered = P::column_parts > 1, paired = P::divides_keys;
  static constexpr int OWN_K = DP / P::column_parts, OWN_V = DVP / P::column_parts;  // columns that a block has
  static constexpr int COPIED_K = clustered ? OWN_K : D, COPIED_V = clustered ? OWN_V : DV;
  static_assert(!clustered || (P::cluster == 2 && DP == D && DVP == DV && OWN_K % 32 == 0 && OWN_V % 32 == 0), "parts are alike");
  static constexpr int s_tiles = P::s_columns / 8, k_tiles = OWN_K / (8 * split), v_tiles = OWN_V / (8 * split);
  static_assert(BC % (16 * key_warps) == 0 && BR % (P::divided ? P::s_columns : 8 * split) == 0, "a warp has whole fragments");
  static_assert(DP % (16 * split) == 0 && DVP % (16 * split) == 0, "warps that share keys have parts of one length");
  static_assert(BR <= threads && stages <= 2, "one thread a row");
  static_assert(!P::halves_dq || (m_tiles == 1 && P::warps == 8 && P::tensor_copies && P::producers > 0 && BR == 64), "two warpgroups have 64 keys each, or share them");
  static_assert(!P::warpgroups || P::halves_dq || (m_tiles == 1 && split == 1 && P::warps % 4 == 0 && stages == 2), "a warpgroup has 64 keys");
  static constexpr int more_stages = P::warpgroups && !P::halves_dq ? stages : 1;  // of dO and what rows carry
  static constexpr int ds_stages = (P::halves_dq ? split == 1 : P::producers > 0) ? stages : 1;
  static constexpr bool takes_turns = atomic && how == Adding::atomic && P::takes_turns;  // batch entries, at a gradient
  static constexpr bool shares_dq = atomic && paired;                                     // with the other block of the cluster
  static constexpr bool persistent = atomic && P::persistent;                             // blocks take one key tile after another
  static constexpr bool moves = Spec::ragged && persistent;                               // and one sequence after another
  static constexpr bool prefetches_next = persistent && P::prefetches_next;
  static constexpr bool pairs_staged = atomic && P::pairs_staged;

  // Shared memory, in bytes from its start. dK and dV may take the places of K and V at the end.
  using KTile = fg::SharedTile<T, BC, OWN_K>;
  using VTile = fg::SharedTile<T, BC, OWN_V>;
  using QTile = fg::SharedTile<T, BR, OWN_K>;
  using OTile = fg::SharedTile<T, BR, OWN_V>;
  using PTile = fg::SharedTile<T, BC, BR>;
  using TheirK = fg::SharedTile<T, BC, DP / 2>;
  static constexpr int row_bytes = 4 * RowWords::count;  // of what a row carries
  static constexpr int BINS = Spec::BINS;
  using Memory = BackwardMemory<T, atomic>;

  using Notes = KeyNotes;
  const Call& call;
  typename Own<moves, Arguments>::Type a;  // of the present sequence
  Launch u;
  Head x;
  char* memory;
  int q_len, kv_len;
  int warp;            // this one's number
  int warp_key, part;  // this warp's first key, in the tile; which part of the head dimension it has
  Visits<Notes> visits;

  Column columns[2 * m_tiles];  // this lane's
  fg::Accumulators<m_tiles, k_tiles> dk;
  fg::Accumulators<m_tiles, v_tiles> dv;
  static constexpr int SEEN = Spec::row_state ? Spec::observed_rows : 0;  // of what the mask reads by row, where it is looked at
  float by_column[2 * m_tiles];  // Σ_i dS ∂S/∂|k|²
  using Sums = KeySums<typename Spec::KeyGradients, 2 * m_tiles>;
  Sums sums;
  Adder<Spec, how> adder;

  // ---- the key tile of a block ----
  struct Place {
    int b, hkv, column0, count;
  };
  FG_DEVICE unsigned key_tiles() const { return (unsigned(a.kv_len) + P::BC - 1) / P::BC; }
  FG_DEVICE Place place_of(unsigned head, unsigned tile) const {
    const int first = int(tile) * P::BC + (paired ? first_of_own(BC) : 0), b = int(head / unsigned(a.kv_heads));
    return {b, int(head) - b * int(a.kv_heads), first, fg::min(BC, int(a.kv_len) - first)};
  }
  // Which number of all key tiles this is.
  FG_DEVICE unsigned number() const {
    if constexpr (persistent) return unsigned(visits.noted(&Notes::number));
    else return block_number(a) / P::cluster;
  }
  // The first of this block's keys, or columns of dQ, where each has so many.
  FG_DEVICE static int first_of_own(int own) { return fg::Cluster<P::cluster>::rank() * own; }
  FG_DEVICE Place locate(unsigned number) const {
    if constexpr (Spec::longest_first)
      if (a.visits_of_keys) {
        const fg::WorkTile work_tile = this->work_tile(number);
        return place_of(work_tile.head, fg::tile_of(fg::list_of(a.visits_of_keys, work_tile, tiles()), tiles()));
      }
    constexpr bool inside = Spec::batch_inside;
    if constexpr (Spec::in_groups && P::producers > 0)
      if (key_tiles() >= 8) {  // few blocks of one length after another would all begin and end together
        constexpr int bytes_of_query = (DP + DVP) * int(sizeof(T)) + DP * int(sizeof(float));  // Q, dO and the sums of dQ
        const fg::TileOfGroup own = fg::tile_of_group<Spec>(number, key_tiles(), unsigned(inside ? a.kv_heads : a.batch * a.kv_heads), 1, unsigned(a.batch), bytes_of_query, int(inside ? a.batch * a.q_len : a.q_len));
        return place_of(own.head, own.tile);
      }
    if constexpr (inside) {
      const fg::TileOfGroup own = fg::tile_of_group<Spec>(number, key_tiles(), unsigned(a.kv_heads), 1, unsigned(a.batch), fg::ALONE, 1);  // of one head
      return place_of(own.head, own.tile);
    } else {
      const unsigned head = number / key_tiles();
      return place_of(head, number - head * key_tiles());
    }
  }
  // The block's place, once a query head is there: from shared memory, where it costs no registers, if a list has it.
  FG_DEVICE Place place() const {
    if constexpr (!Spec::longest_first) return locate(number());
    const unsigned head = visits.noted(&Notes::head), b = head / unsigned(a.heads), group = unsigned(a.heads) / unsigned(a.kv_heads);
    const int first = column0();
    return {int(b), int((head - b * unsigned(a.heads)) / group), first, fg::min(BC, kv_len - first)};
  }

  FG_DEVICE Keys(const Call& whole, const Arguments& arguments) : call(whole), a(arguments), u(make_launch(arguments)), memory(fg::shared_memory()) {
    warp = fg::warp_index();
    visits.list = reinterpret_cast<VisitList*>(memory + Memory::LIST);
    q_len = int(a.q_len), kv_len = int(a.kv_len);
    if constexpr (clustered) adder.adds = first_of_own(1) == 0;
    warp_key = warp / split * 16 * m_tiles, part = warp % split;
    if constexpr (P::warpgroups && split > 1) warp_key = warp % 4 * 16, part = warp / 4;
  }

  // Where a tile has fewer queries than there are warps to share them, some weigh none.
  FG_DEVICE bool weighs() const { return !P::divided || split * P::s_columns == BR || part * P::s_columns < BR; }

  FG_DEVICE int lse_rows() const { return Spec::ragged || Spec::slices ? int(rows_apart(a)) : q_len; }  // from one head to the next
  FG_DEVICE int column0() const { return visits.noted(&Notes::column0); }  // the block's first key
  FG_DEVICE int key(int k) const { return warp_key + 16 * (k / 2) + fg::fragment_row(k % 2 * 2); }
  FG_DEVICE int tiles() const { return (fg::again(int(a.q_len)) + BR - 1) / BR; }
  FG_DEVICE int first_tile() const { return 0; }
  FG_DEVICE int end_tile() const { return tiles(); }
  FG_DEVICE KTile k_tile() const { return {reinterpret_cast<T*>(memory)}; }
  FG_DEVICE TheirK their_k_tile() const { return {reinterpret_cast<T*>(memory + Memory::THEIR_K)}; }
  FG_DEVICE VTile v_tile() const { return {reinterpret_cast<T*>(memory + Memory::V)}; }
  FG_DEVICE QTile q_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::Q + fg::stage_of<stages>(n) * QTile::bytes)}; }
  FG_DEVICE OTile d_o_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::O + fg::stage_of<more_stages>(n) * OTile::bytes)}; }
  FG_DEVICE PTile ds_tile(int n) const { return {reinterpret_cast<T*>(memory + Memory::DS + fg::stage_of<ds_stages>(n) * PTile::bytes)}; }
  FG_DEVICE PTile p_tile() const { return {reinterpret_cast<T*>(memory + Memory::PP)}; }
  FG_DEVICE float* rows(int which, int n) const {
    return reinterpret_cast<float*>(memory + Memory::ROWS) + (fg::stage_of<more_stages>(n) * RowWords::count + which) * BR;
  }
  FG_DEVICE uint32_t* seen_rows(int which, int n) const { return reinterpret_cast<uint32_t*>(rows(RowWords::seen + which, n)); }
  FG_DEVICE uint16_t* marks(int n) const { return reinterpret_cast<uint16_t*>(memory + Memory::MARKS) + fg::stage_of<more_stages>(n) * BR; }
  FG_DEVICE float* bins(int which) const {
    return reinterpret_cast<float*>(memory + Memory::HISTOGRAM) + (which * P::warps + fg::again(int(threadIdx.x)) / 32) * BINS;
  }
  FG_DEVICE float* sums_of_team() const { return reinterpret_cast<float*>(memory + Memory::SUMS); }

  // ---- which tiles of queries the mask keeps for the block ----
  FG_DEVICE fg::QueryTiles<Spec, BR, P::BC> classify() const {
    const int first = column0() - (paired ? first_of_own(BC) : 0);
    return {a, u, x, visits.noted(&Notes::head), {first, fg::min(P::BC, kv_len - first)}};
  }
  FG_DEVICE fg::WorkTile work_tile(unsigned number) const { return fg::work_tile_of<Spec>(number, Spec::sharers_of_keys(a), unsigned(a.group_of_keys), key_tiles()); }
  FG_DEVICE const uint4* list() const {
    if constexpr (Spec::longest_first) {
      return fg::list_of(a.visits_of_keys, work_tile(number()), tiles());
    } else {
      const int b = x.b - int(a.b_start), h = x.h - int(a.h_start), tile = unsigned(column0()) / P::BC;
      return fg::list_of(a, a.visits_of_keys, b, h, tile, int(key_tiles()), tiles());
    }
  }
  FG_DEVICE void find_visits(int window, int last_tile) {
    const int end = fg::min(window + fg::WINDOW, last_tile);
    if constexpr (Spec::lists) fg::take_visits<Team>(visits.list, list(), window, end, classify());
    else fg::find_visits<Team>(visits.list, window, end, classify());
  }

  // ---- what comes with a key tile, with a head ----
  FG_DEVICE void copy_keys(const Place& place) const {
    const auto k = rows_of_k<T>(a, first_of_k(a, place.b, place.hkv) + (clustered ? first_of_own(OWN_K) : 0));
    const auto v = rows_of_v<T>(a, first_of_v(a, place.b, place.hkv) + (clustered ? first_of_own(OWN_V) : 0));
    fg::copy_rows_async<threads, COPIED_K>(k_tile(), k, place.column0, place.count);
    fg::copy_rows_async<threads, COPIED_V>(v_tile(), v, place.column0, place.count);
    if constexpr (shares_dq) {
      const int theirs = place.column0 ^ BC;
      const auto half = rows_of_k<T>(a, first_of_k(a, place.b, place.hkv) + first_of_own(DP / 2));
      fg::copy_rows_async<threads, DP / 2>(their_k_tile(), half, theirs, fg::min(BC, kv_len - theirs));
    }
  }
  // By one thread: where those who copy find Q and dO.
  FG_DEVICE void note_operands(int b, int h) const {
    fg::shared_store(&visits.notes()->q, first_of_q(a, b, h));
    fg::shared_store(&visits.notes()->d_o, first_of_d_o(a, b, h));
  }

  // ---- what comes with a tile of queries ----
  // What row `at` of tile n carries; its scores are extreme where its top, or a mark, is not 0.
  FG_DEVICE void put_row(int n, int at, float lse, float delta) const {
    if constexpr (Spec::exponential) {
      const RowOffset offset = row_offset<Spec>(a, u, lse, [&] { return int64_t(visits.noted(&Notes::head)) * lse_rows() + visits.tile(n) * BR + at; });
      fg::shared_store(rows(RowWords::lse, n) + at, offset.lse);
      if constexpr (Spec::marked) fg::shared_store(marks(n) + at, uint16_t(offset.top != 0.0f));
      if constexpr (Spec::tops) fg::shared_store(rows(RowWords::top, n) + at, offset.top);
    } else {
      fg::shared_store(rows(RowWords::lse, n) + at, lse);
    }
    // Where a score is +inf the row has no lse and no delta; what is masked there, of weight 0, has no gradient all the same.
    fg::shared_store(rows(RowWords::delta, n) + at, !Spec::weighs_first || lse == lse ? delta : 0.0f);
  }
  // The row's lse, or 1 / Z.
  FG_DEVICE float load_lse(int place) const {
    if constexpr (Spec::divided) return row_inverse(a, place);
    else return fg::global_load(a.lse + place);
  }
  // Query `row` of a tile, the first of which is row0; past the last query it repeats that one.
  template <bool masked> FG_DEVICE Row make([[maybe_unused]] int n, int row0, int row) const {
    const int i = int(a.q_start) + (masked ? fg::min(row0 + row, q_len - 1) : row0 + row);
    if constexpr (masked && SEEN > 0) {
      uint32_t seen[SEEN];
#pragma unroll
      for (int k = 0; k < SEEN; ++k) seen[k] = fg::shared_load(seen_rows(k, n) + row);
      return make_row(a, u, x, i, seen);
    } else {
      return make_row(a, u, x, i);
    }
  }
  // The query of this lane's first pair, from where places of the others follow: where that is past the last query, so are the others,
  // and the last one is asked for what it reads instead.
  FG_DEVICE Row first_of_lane(int row0) const {
    return make_row(a, u, x, int(a.q_start) + fg::min(row0 + part * 8 * s_tiles + fg::fragment_column(0), q_len - 1));
  }
  // One row a thread: what it carries comes into registers well before it is needed, and then into shared memory.
  float next_lse, next_delta, next_moved, next_epsilon;
  uint32_t next_seen[SEEN > 0 ? SEEN : 1];
  FG_DEVICE void fetch_rows(int n) {
    if constexpr (Spec::row_state) {
      const int row = n < visits.count() && int(threadIdx.x) < BR ? visits.tile(n) * BR + int(threadIdx.x) : q_len;
      next_lse = Spec::divided ? 0.0f : -INFINITY, next_delta = next_moved = next_epsilon = 0.0f;
#pragma unroll
      for (int k = 0; k < SEEN; ++k) next_seen[k] = 0;
      if (row >= q_len) return;
      const int place = visits.noted(&Notes::head) * lse_rows() + row;
      next_lse = load_lse(place), next_delta = fg::global_load(delta_of(a) + place);
      if constexpr (Spec::tangent) next_moved = fg::global_load(a.t_lse + place), next_epsilon = fg::global_load(epsilon_of(a) + place);
      if constexpr (SEEN > 0)
        if (n < visits.partials()) see(next_seen, make_row(a, u, x, int(a.q_start) + row));
    }
  }
  FG_DEVICE void put_rows(int n) {
    if constexpr (Spec::row_state) {
      if (int(threadIdx.x) >= BR) return;
      put_row(n, int(threadIdx.x), next_lse, next_delta);
      if constexpr (Spec::tangent) {
        fg::shared_store(rows(RowWords::moved, n) + threadIdx.x, next_moved);
        fg::shared_store(rows(RowWords::epsilon, n) + threadIdx.x, next_epsilon);
      }
      if constexpr (SEEN > 0)
        if (n < visits.partials())
#pragma unroll
          for (int k = 0; k < SEEN; ++k) fg::shared_store(seen_rows(k, n) + threadIdx.x, next_seen[k]);
    }
  }

  // ---- from the products of a tile to Pᵀ and dSᵀ, pair by pair ----
  // This lane's first query of a tile.
  FG_DEVICE int begin_of_tile(int row0) const { return int(a.q_start) + row0 + part * 8 * s_tiles + fg::fragment_column(0); }
  // Whether the scores of a row of this warp's part of a tile are extreme. The products of such rows are counted from what the forward
  // pass has counted them from.
  FG_DEVICE bool any_extreme(int n) const {
    const int lane = fg::lane_index();
    const uint16_t* const own = marks(n) + part * 8 * s_tiles;
    uint32_t seen = 0;
#pragma unroll
    for (int first = 0; first < 2 * s_tiles; first += 32) {  // a lane looks at four rows at a time
      uint2 four = {0, 0};
      if (first + lane < 2 * s_tiles) four = fg::shared_load(reinterpret_cast<const uint2*>(own) + first + lane);
      seen |= four.x | four.y;
    }
    return fg::ballot(seen != 0) != 0;
  }
  FG_DEVICE void count_from_marks(fg::Accumulators<m_tiles, s_tiles>& s, int n) const {
    const int64_t row0 = int64_t(visits.noted(&Notes::head)) * lse_rows() + visits.tile(n) * BR;
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = part * 8 * s_tiles + 8 * t + fg::fragment_column(e);
        float top = 0.0f;
        if (fg::shared_load(marks(n) + row) != 0) top = fg::global_load(a.lse_parts + 2 * (row0 + row));
        if constexpr (Spec::sign_of_factor) top = product_of<Spec>(u, top);
#pragma unroll
        for (int k = 0; k < 2 * m_tiles; ++k) {
          float& value = s.at[k / 2][t][k % 2 * 2 + e];
          value = __fadd_rn(value, -top);
        }
      }
  }
  // Which pairs of this warp's part of a tile are kept.
  using KeptPairs = typename Spec::template KeptPairs<true, m_tiles, s_tiles>;
  FG_DEVICE KeptPairs drawn_pairs(int n) const {
    KeptPairs kept_pairs;
    const int query = int(a.q_start) + visits.tile(n) * BR + part * 8 * s_tiles;
    if constexpr (dropped) draw(kept_pairs, Spec::dropout(a, u, x), query, int(a.kv_start) + column0() + warp_key);
    return kept_pairs;
  }
  // Products to Pᵀ (in s) and dSᵀ ∘ ∂S/∂dot (in dp), but for a constant slope. Of forward mode in `moved` t(dot) to what reaches it, and dP
  // of tV to tPᵀ.
  using Scores = fg::Accumulators<m_tiles, s_tiles>;
  template <bool masked, class OnePair = Pair<Spec, masked, dropped, in_bounds>, class... Moved>
  FG_DEVICE void pairs(Scores& s, Scores& dp, const KeptPairs& kept_pairs, int n, Moved&... moved) {
    const int row0 = visits.tile(n) * BR;
    typename Sums::template OfTile<masked> of_tile;
    of_tile.find(*this, row0);
    of_tile.begin(*this, row0);
    if constexpr (Spec::marked)
      if (any_extreme(n)) count_from_marks(s, n);
    const int keys = kv_len - column0();
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = part * 8 * s_tiles + 8 * t + fg::fragment_column(e);
        Row r = make<masked>(n, row0, row);
        place_as_sum<Spec, masked>(r, x, begin_of_tile(row0), 8 * t + e);
        if constexpr (Spec::sqdist) r.qq = fg::shared_load(rows(RowWords::qq, n) + row);
        const MovingRow state = state_of_row<Spec, RowWords>(*this, n, r, row);
#pragma unroll
        for (int k = 0; k < 2 * m_tiles; ++k) {
          const int m = k / 2, at = k % 2 * 2 + e;
          OnePair pair = {a, u, x, r, columns[k], 1.0f, true};
          if (masked) pair.kept = row0 + row < q_len && key(k) < keys && keep(a, u, x, r, columns[k]);
          if constexpr (dropped) pair.survivor = kept_pairs.of(m, t, at, a.dropout_scale);
          pair.differentiate(s.at[m][t][at], dp.at[m][t][at], moved.at[m][t][at]..., state);
          of_tile.add(*this, pair, t, e, k);
          if constexpr (Spec::sqdist)
            if (pair.kept) by_column[k] += pair.d_norm();
        }
      }
    of_tile.end(*this);
  }

  // ---- what leaves at the end of a head, of all heads, and of a key tile ----
  // The gradients of captured values that do not go further than one query head, and than one key tile.
  FG_DEVICE void finish_head() {
    if constexpr (P::warpgroups) sums.leave_runs(*this);
    sums.end_head(*this);
  }
  FG_DEVICE void finish_keys() {
    sums.end_launch(*this);
    adder.finish(a);
  }
  // by_column of all queries: over the lanes of a row, and over the warps that share its key, each of which has a part of them.
  FG_DEVICE void add_up_columns() {
#pragma unroll
    for (int k = 0; k < 2 * m_tiles; ++k) by_column[k] = fg::row_sum(by_column[k]);
    if constexpr (split > 1) {
      static_assert(split * BC * sizeof(float) <= PTile::bytes, "dS makes room for them");
      float* const sums = reinterpret_cast<float*>(memory + Memory::DS);
      Team::barrier();  // everyone is done with dS
#pragma unroll
      for (int k = 0; k < 2 * m_tiles; ++k)
        if (fg::fragment_column(0) == 0) fg::shared_store(sums + part * BC + key(k), by_column[k]);
      Team::barrier();
#pragma unroll
      for (int k = 0; k < 2 * m_tiles; ++k) {
        by_column[k] = 0.0f;
#pragma unroll
        for (int n = 0; n < split; ++n) by_column[k] += fg::shared_load(sums + n * BC + key(k));
      }
    }
  }
  FG_DEVICE void finish_sums() {
#pragma unroll
    for (int m = 0; m < m_tiles; ++m)
#pragma unroll
      for (int t = 0; t < k_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) Spec::finish_sum(u, dk.at[m][t][e]);
    if constexpr (Spec::sqdist) {
      // ∂|k|²/∂k = 2 k, which has nothing of ∂S/∂dot
      add_up_columns();
#pragma unroll
      for (int k = 0; k < 2 * m_tiles; ++k) {
        const float factor = 2.0f * by_column[k];
#pragma unroll
        for (int t = 0; t < k_tiles; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            dk.at[k / 2][t][k % 2 * 2 + e] +=
                factor * fg::to_float(fg::shared_load(k_tile().at(key(k), part * 8 * k_tiles + 8 * t + fg::fragment_column(e))));
      }
    }
  }
};

// The way of a block through one key tile, or through many: K and V, then, head by head, what columns carry and the windows of its list.
template <class Base> struct KeyVisits : Base {
  using typename Base::Spec, typename Base::P, typename Base::Column, typename Base::Notes, typename Base::Place, typename Base::Sums, typename Base::Team;
  using Base::BINS, Base::m_tiles, Base::prefetches_next;
  using Base::a, Base::by_column, Base::columns, Base::kv_len, Base::sums, Base::u, Base::visits, Base::x;
  using Base::bins, Base::column0, Base::end_tile, Base::first_tile, Base::k_tile, Base::key, Base::place, Base::tiles;
  using Base::Base;

  FG_DEVICE void run() {
    const Place place = Base::locate(Base::number());
    begin_keys(place);
    visit_heads(place);
    Base::store_keys(this->place());
  }
  // K and V are on their way, and it is known which they are.
  FG_DEVICE void begin_keys(const Place& place) const {
    Base::copy_keys(place);
    fg::copy_async_commit();
    if (threadIdx.x == 0) fg::shared_store(&visits.notes()->column0, place.column0);
  }

  // dK and dV, and what goes no further than one key tile, of the query heads that share it.
  // `first`: it is the block's first key tile; `started`: its list and its first tile of queries are on their way.
  FG_DEVICE void visit_heads(const Place& place, [[maybe_unused]] bool first = true, [[maybe_unused]] bool started = false) {
    fg::clear(Base::dk);
    fg::clear(Base::dv);
    if constexpr (Sums::histograms > 0) {
      for (int which = 0; which < Sums::histograms; ++which)
        for (int n = fg::lane_index(); n < BINS; n += 32) fg::shared_store(bins(which) + n, 0.0f);
      fg::warp_barrier();
    }
    if constexpr (Spec::sqdist) {
      fg::copy_async_wait<0>();
      Team::barrier();
#pragma unroll
      for (int k = 0; k < 2 * m_tiles; ++k) {
        columns[k].kk = fg::squared_norm(k_tile(), key(k));
        by_column[k] = 0.0f;
      }
    }
    sums.begin_launch();
    int head = place.b * int(a.heads) + place.hkv * (int(a.heads) / int(a.kv_heads));  // counted through the batch
#pragma unroll 1
    for (int n = 0; n < int(a.heads) / int(a.kv_heads); ++n) {
      int b, h;
      if constexpr (Spec::longest_first) {
        if (n > 0) head = visits.noted(&Notes::head) + 1;
        b = unsigned(head) / unsigned(a.heads), h = head - b * int(a.heads);
      } else {
        const Place own = P::persistent && n == 0 ? place : this->place();
        b = own.b, h = own.hkv * (int(a.heads) / int(a.kv_heads)) + n, head = b * int(a.heads) + h;
      }
      x = make_head(a, u, b, h);
      Team::barrier();  // everyone is done with the head before
      if constexpr (P::producers > 0)
        if (tiles() > 0) Base::template meet<Base::LIST_FREE>();  // producers, too, though it had no tile
      if (threadIdx.x == 0) {
        Base::note_operands(b, h);
        fg::shared_store(&visits.notes()->head, head);
      }
      Team::barrier();
      if constexpr (Spec::distance) x.origin = int(a.kv_start) + column0();
#pragma unroll
      for (int k = 0; k < 2 * m_tiles; ++k) {
        Column c = make_column(a, u, x, int(a.kv_start) + fg::min(column0() + key(k), kv_len - 1));
        if constexpr (Spec::sqdist) c.kk = columns[k].kk;
        if constexpr (Spec::norms) c.from_norm = from_norm(a, u, x, c.kk);
        if constexpr (Spec::diagonals) {
          static_assert(16 * m_tiles <= Spec::BEYOND, "keys past the last one read, too");
          c.begin = int(a.kv_start) + fg::min(column0() + key(0), kv_len - 1), c.offset = 8 * k;
        }
        columns[k] = c;
      }
      sums.begin_head();
#pragma unroll 1
      for (int window = first_tile(); window < end_tile(); window = visits.first() + fg::WINDOW) {
        if constexpr (P::producers > 0)
          if (window > first_tile()) Base::template meet<Base::LIST_FREE>();
        [[maybe_unused]] const bool begins = n == 0 && window == first_tile();
        if constexpr (prefetches_next) {
          if (started && begins) fg::take_copied_visits<Team>(visits.list, Base::copied_list(), 0);
          else Base::find_visits(window, end_tile());
        } else {
          Base::find_visits(window, end_tile());
        }
        if constexpr (P::tensor_copies)
          if (!(started && begins)) Base::make_signals(!first || !begins);
        Team::barrier();  // everyone is done with the last tiles of the window before
        if constexpr (P::warpgroups) Base::multiply_window(begins, started && begins);
        else Base::visit();
      }
      Base::finish_head();
    }
    Base::finish_keys();
  }
};

}  // namespace backward
