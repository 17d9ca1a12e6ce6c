// What schedules of dK and dV share where warpgroups multiply: who copies, what rows carry, and P and then dS from products, where what
// follows the weights needs no dot product.
#pragma once
#include "flashgen/backward/keys.cuh"
#include "flashgen/lane_bits.cuh"
#include "flashgen/tensor_copies.cuh"
#include "flashgen/warpgroup.cuh"

namespace backward {

// Q and dO as tensor copies read them: flashgen/targets/gpu/launches.py says the same.
struct Maps {
  fg::TensorMap q, d_o;
};

// What is known of a warp's part of a tile before its products are: whether scores of a row are extreme, which then are counted from
// their tops, and what scores read by distance where no pair is masked. Where dK and dV leave few registers pairs look for themselves.
template <bool diagonals, class Spec, int s_tiles> struct KnownOfTile {
  bool extreme = false;
};
template <class Spec, int s_tiles> struct KnownOfTile<true, Spec, s_tiles> {
  bool extreme;
  typename Spec::Diagonals diagonals[s_tiles][2][2];
};

template <class Base> struct WarpgroupKeys : Base {
  using typename Base::Spec, typename Base::T, typename Base::P, typename Base::Arguments, typename Base::Call, typename Base::Column, typename Base::Notes, typename Base::Row, typename Base::RowWords, typename Base::Sums;
  using Base::BC, Base::BR, Base::DP, Base::DVP, Base::SEEN, Base::atomic, Base::in_bounds, Base::paired, Base::pairs_staged, Base::s_tiles;
  using Base::a, Base::columns, Base::kv_len, Base::part, Base::q_len, Base::sums, Base::u, Base::visits, Base::warp_key, Base::x;
  using Base::begin_of_tile, Base::column0, Base::key, Base::load_lse, Base::lse_rows, Base::rows;

  const Maps* maps;

  FG_DEVICE WarpgroupKeys(const Call& whole, const Arguments& arguments, const Maps* tensor_maps = nullptr) : Base(whole, arguments), maps(tensor_maps) {
    if (P::tensor_copies && threadIdx.x == 0) fg::prefetch_map(maps->q), fg::prefetch_map(maps->d_o);
  }
  FG_DEVICE void note_operands(int b, int h) const {
    if constexpr (P::tensor_copies) {  // slabs in the place of elements
      fg::shared_store(&visits.notes()->q, fg::slab_of(maps->q, b, h));
      fg::shared_store(&visits.notes()->d_o, fg::slab_of(maps->d_o, b, h));
    } else {
      Base::note_operands(b, h);
    }
  }

  // ---- who copies ----
  static constexpr bool has_producers = P::producers > 0;
  static constexpr int PRODUCERS = 32 * P::producers, CONSUMERS = 32 * P::warps;
  // Of those who copy, the threads that bring what rows carry, and how much each; one warp is enough where that is nothing.
  static constexpr int CARRIERS = !Spec::row_state ? 32 : has_producers && PRODUCERS < BR ? PRODUCERS : BR, rows_each = (BR + CARRIERS - 1) / CARRIERS;
  static constexpr int COPIERS_OF_PAIRS = 32 * pairs_staged;  // those behind
  static_assert(!pairs_staged || CARRIERS + COPIERS_OF_PAIRS <= PRODUCERS, "one warp is left for what pairs read");
  static constexpr int ROWS_SHOWN = 1;  // what a signal says, beside that copies are there
  FG_DEVICE bool is_producer() const { return int(threadIdx.x) >= CONSUMERS; }
  // Who copies and who multiplies, of both blocks where each arrives at the other's signals.
  template <int barrier> FG_DEVICE static void meet() {
    if constexpr (paired) fg::Cluster<P::cluster>::barrier();  // who copies comes from elsewhere than who multiplies
    else fg::barrier_meet(barrier, P::threads);
  }

  // What rows carry comes into registers while there is no room for it: of this thread's rows among those who copy.
  FG_DEVICE void carry(float (&lses)[rows_each], float (&deltas)[rows_each], int n, int thread) const {
    const int row0 = visits.tile(n) * BR + thread, place = visits.noted(&Notes::head) * lse_rows() + row0;
#pragma unroll
    for (int k = 0; k < rows_each; ++k) {
      const bool real = row0 + k * CARRIERS < q_len;
      lses[k] = real ? load_lse(place + k * CARRIERS) : Spec::divided ? 0.0f : -INFINITY;
      deltas[k] = real ? fg::global_load(delta_of(a) + place + k * CARRIERS) : 0.0f;
    }
  }
  template <int words> FG_DEVICE void carry(uint32_t (&seen)[rows_each][words], int n, int thread) const {
    const int row0 = visits.tile(n) * BR + thread;
#pragma unroll
    for (int k = 0; k < rows_each; ++k) see(seen[k], make_row(a, u, x, int(a.q_start) + fg::min(row0 + k * CARRIERS, q_len - 1)));
  }
  FG_DEVICE void put_carried(const float (&lses)[rows_each], const float (&deltas)[rows_each], const uint32_t (&seen)[rows_each][SEEN > 0 ? SEEN : 1], bool partial, int n, int thread) const {
#pragma unroll
    for (int k = 0; k < rows_each; ++k) {
      const int at = thread + k * CARRIERS;
      if (at >= BR) continue;
      Base::put_row(n, at, lses[k], deltas[k]);
      if constexpr (SEEN > 0)
        if (partial)
#pragma unroll
          for (int word = 0; word < SEEN; ++word) fg::shared_store(Base::seen_rows(word, n) + at, seen[k][word]);
    }
  }

  // ---- what pairs read of a captured tensor ----
  using PairElement = typename Spec::PairElement;
  using Ahead = typename Spec::template Ahead<2, s_tiles>;
  struct Key {
    int j;
  };
  // That of a query of the call's and its `key`, from where its neighbours follow.
  FG_DEVICE const PairElement* first_pair(int query, int key) const {
    const Key c = {int(a.kv_start) + key};
    return pairs_of(a) + offset_of_pair(a, u, x, make_row(a, u, x, int(a.q_start) + query), c);
  }
  // Pairs of tile n will read rows, a row a thread of those who copy: they come from memory meanwhile.
  FG_DEVICE void prefetch_pairs(int n, int thread) const {
    const int row0 = visits.tile(n) * BR, count = fg::min(BC, kv_len - column0());
    if (pairs_by_column(a) != 1) return;
#pragma unroll 1
    for (int row = thread; row < fg::min(BR, q_len - row0); row += CARRIERS) {
      const PairElement* const first = first_pair(row0 + row, column0());
#pragma unroll 1
      for (int k = 0; k < count; k += 128 / int(sizeof(PairElement))) fg::global_prefetch(first + k);
    }
  }
  // What pairs of this warp's part of tile n read, before products are waited for: of 16 bits by two neighbouring keys of a query, which
  // are transposed afterwards. Whether they are to be.
  template <bool masked> FG_DEVICE bool read_ahead([[maybe_unused]] Ahead& ahead, [[maybe_unused]] int n) const {
    if constexpr (Spec::prefetch) {
      using E = PairElement;
      const int own_row = visits.tile(n) * BR + part * 8 * s_tiles, first_row = masked ? fg::min(own_row, q_len - 1) : own_row;  // a row is asked for what it reads
      const int first_key = column0() + warp_key, last_row = q_len - 1 - first_row, last_key = kv_len - 1 - first_key;
      const int64_t by_row = pairs_by_row(a), by_column = pairs_by_column(a);
      const E* const first = first_pair(first_row, first_key);
      if constexpr (sizeof(E) == 2) {
        if (by_column == 1 && by_row % 2 == 0 && uintptr_t(first) % 4 == 0 && (!masked || last_key >= 15)) {
          const E* const own = first + fg::fragment_column(0);
#pragma unroll
          for (int t = 0; t < s_tiles; ++t) {
            const int row = 8 * t + fg::fragment_row(0);
            const auto* const at = reinterpret_cast<const uint32_t*>(own + (masked ? fg::min(row, last_row) : row) * by_row);
#pragma unroll
            for (int k = 0; k < 2; ++k) ahead.at[k][t] = fg::global_load(at + 4 * k);
          }
          return true;
        }
      }
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          ahead.at[k][t] = 0;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = 8 * t + fg::fragment_column(e), key = fg::fragment_row(2 * k);
            const E* const at = first + (masked ? fg::min(row, last_row) : row) * by_row + (masked ? fg::min(key, last_key) : key) * by_column;
            ahead.at[k][t] |= fg::to_word(fg::global_load(at)) << 8 * sizeof(E) * e;
          }
        }
    }
    return false;
  }
  FG_DEVICE static void transpose([[maybe_unused]] Ahead& ahead) {
    if constexpr (Spec::prefetch)
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int t = 0; t < s_tiles; ++t) ahead.at[k][t] = fg::transposed(ahead.at[k][t]);
  }

  // ---- P ----
  FG_DEVICE void load_rows(float (&values)[2 * s_tiles], const float* of_rows) const {
#pragma unroll
    for (int t = 0; t < s_tiles; ++t) {
      const auto pair = fg::shared_load(reinterpret_cast<const float2*>(of_rows + 8 * t + fg::fragment_column(0)));
      values[2 * t] = pair.x, values[2 * t + 1] = pair.y;
    }
  }
  // The row of this lane's pairs (8 t + e, …) of tile n.
  template <bool masked> FG_DEVICE Row row_of(int n, int t, int e) const {
    const int row0 = visits.tile(n) * BR;
    Row r = Base::template make<masked>(n, row0, 8 * s_tiles * part + 8 * t + fg::fragment_column(e));
    place_as_sum<Spec, masked>(r, x, begin_of_tile(row0), 8 * t + e);
    return r;
  }
  FG_DEVICE float top_of(int n, int t, int e) const { return fg::shared_load(rows(RowWords::top, n) + part * 8 * s_tiles + 8 * t + fg::fragment_column(e)); }

  // Tops may be asked for before products are waited for.
  static constexpr bool asked = Spec::tops && Spec::weighs_first && !Spec::weighs_with_slope && !Spec::split_score && !P::halves_dq, asks_before = asked && DP + DVP <= 128;
  static constexpr bool known_diagonals = asked && Spec::knows_diagonals;
  using Known = KnownOfTile<known_diagonals, Spec, s_tiles>;
  template <bool masked> FG_DEVICE void ask([[maybe_unused]] Known& known, [[maybe_unused]] int n) const {
    if constexpr (Spec::marked) known.extreme = Base::any_extreme(n);
    if constexpr (asks_before) {
      const int lane = fg::lane_index();
      bool extreme = false;
#pragma unroll
      for (int first = 0; first < 2 * s_tiles; first += 32) {  // a lane looks at four rows at a time
        float4 four = {0.0f, 0.0f, 0.0f, 0.0f};
        if (first + lane < 2 * s_tiles) four = fg::shared_load(reinterpret_cast<const float4*>(rows(RowWords::top, n) + part * 8 * s_tiles) + first + lane);
        extreme |= four.x != 0.0f || four.y != 0.0f || four.z != 0.0f || four.w != 0.0f;
      }
      known.extreme = fg::ballot(extreme) != 0;
    }
    if constexpr (asks_before && known_diagonals && !masked)
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Row r = row_of<masked>(n, t, e);
#pragma unroll
          for (int k = 0; k < 2; ++k) known.diagonals[t][e][k] = diagonals_of_pair(a, x, r, columns[k]);
        }
  }
  FG_DEVICE void count_from_tops(fg::Accumulators<1, s_tiles>& s, int n) const {
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float top = top_of(n, t, e);
#pragma unroll
        for (int k = 0; k < 2; ++k) s.at[0][t][k * 2 + e] = __fadd_rn(s.at[0][t][k * 2 + e], -top);
      }
  }
  // Which queries of a masked tile keep this lane's key k, as bits of its elements: none of one past the last of so many `keys`.
  FG_DEVICE fg::LaneBits<s_tiles> queries_of(int k, int row0, int keys) const {
    const int first = row0 + 8 * s_tiles * part + fg::fragment_column(0);
    return queries_of_column<s_tiles>(a, u, x, columns[k], int(a.q_start) + first, key(k) < keys ? 8 * s_tiles : 0);
  }
  // What the scores of a row are less.
  FG_DEVICE float top_of_scores([[maybe_unused]] int n, [[maybe_unused]] const Row& r, [[maybe_unused]] int t, [[maybe_unused]] int e) const {
    if constexpr (!Spec::tops || asks_before) return 0.0f;
    else if constexpr (Spec::split_score) return top_of(n, t, e) - row_score(a, u, x, r);
    else return top_of(n, t, e);
  }
  // Products to Pᵀ and, in their place, Pᵀ ∘ ∂S/∂dot: all that dS needs of them. One selection a pair hides what is masked: with one for
  // each of both, or a branch for the end of the keys, registers do not suffice, and the assembler waits for each product.
  template <bool masked, class Carried> FG_DEVICE void weigh_with_slope(fg::Accumulators<1, s_tiles>& s, fg::Accumulators<1, s_tiles>& weights, const Carried& lses, int n, const Ahead& ahead) {
    [[maybe_unused]] const int row0 = visits.tile(n) * BR, keys = kv_len - column0();
    [[maybe_unused]] fg::LaneBits<s_tiles> kept[2];
    if constexpr (masked && Spec::queries_of_column) kept[0] = queries_of(0, row0, keys), kept[1] = queries_of(1, row0, keys);
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const Row r = row_of<masked>(n, t, e);
        const float lse = lses[2 * t + e], top = top_of_scores(n, r, t, e);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& value = s.at[0][t][k * 2 + e];
          const Column& c = columns[k];
          float exponent = exponent_of<Spec, in_bounds>(u, score(a, u, x, r, ahead.of(c, k, t, e), value), top, lse);  // past the last query lse is +inf
          if constexpr (masked && Spec::queries_of_column) {
            if (!kept[k].has(t, e)) exponent = -INFINITY;
          } else if constexpr (masked) {
            if (!(key(k) < keys && keep(a, u, x, r, ahead.of(c, k, t, e)))) exponent = -INFINITY;
          }
          const float p = fg::exp2_approximate(exponent);
          weights.at[0][t][k * 2 + e] = p;
          const float slope = score_by_dot(a, u, x, r, ahead.of(c, k, t, e), value);
          value = !Spec::tops || in_bounds ? p * slope : fg::chained(p, slope);
        }
      }
  }
  // Products to Pᵀ.
  template <bool masked, class Carried> FG_DEVICE void weigh_pairs(fg::Accumulators<1, s_tiles>& s, const Carried& lses, int n, [[maybe_unused]] const Known& known, const Ahead& ahead) {
    [[maybe_unused]] const int row0 = visits.tile(n) * BR, keys = kv_len - column0();
    if constexpr (Spec::marked)
      if (known.extreme) Base::count_from_marks(s, n);
    if constexpr (asks_before) {
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const Row r = row_of<masked>(n, t, e);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            float& value = s.at[0][t][k * 2 + e];
            if constexpr (known_diagonals && !masked) value = score(a, u, x, r, ahead.of(columns[k], k, t, e), known.diagonals[t][e][k], value);
            else value = score(a, u, x, r, ahead.of(columns[k], k, t, e), value);
          }
        }
      if (known.extreme) count_from_tops(s, n);
    }
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        [[maybe_unused]] const Row r = row_of<masked>(n, t, e);
        const float lse = lses[2 * t + e];
        [[maybe_unused]] const float top = top_of_scores(n, r, t, e);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float& value = s.at[0][t][k * 2 + e];
          [[maybe_unused]] const Column& c = columns[k];
          if constexpr (Spec::product) value = fg::exp2_approximate(value * Spec::factor(u) - lse);
          else if constexpr (asks_before) value = fg::exp2_approximate(exponent_of<Spec, true>(u, value, top, lse));
          else value = fg::exp2_approximate(exponent_of<Spec, in_bounds>(u, score(a, u, x, r, ahead.of(c, k, t, e), value), top, lse));
          if constexpr (masked && !Spec::queries_of_column)
            if (!keep(a, u, x, r, ahead.of(c, k, t, e))) value = 0.0f;  // past the last query lse is +inf
        }
      }
    if constexpr (masked && Spec::queries_of_column) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {  // by keys, so that a lane's neighbouring bits are asked together
        const auto kept = queries_of(k, row0, keys);
#pragma unroll
        for (int t = 0; t < s_tiles; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!kept.has(t, e)) s.at[0][t][2 * k + e] = 0.0f;  // past the last query it is
      }
    } else if (masked && keys < BC) {  // few tiles reach past the last key: their pairs need no look at the end
      const int count = fg::again(keys);  // a branch: the compiler would make it a selection a pair
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (key(k) >= count)
#pragma unroll
          for (int t = 0; t < s_tiles; ++t) s.at[0][t][2 * k] = s.at[0][t][2 * k + 1] = 0.0f;
    }
  }
  // Products to Pᵀ, which `use` takes.
  template <bool masked, class Carried, class Use> FG_DEVICE void weigh(fg::Accumulators<1, s_tiles>& s, const Carried& lses, int n, const Known& known, const Ahead& ahead, const Use& use) {
    if constexpr (Spec::weighs_with_slope) {
      fg::Accumulators<1, s_tiles> weights;
      weigh_with_slope<masked>(s, weights, lses, n, ahead);
      use(weights);
    } else {
      weigh_pairs<masked>(s, lses, n, known, ahead);
      use(s);
    }
  }

  // ---- dS ----
  // Pᵀ, or Pᵀ ∘ ∂S/∂dot (in s), and dPᵀ (in dp) to dSᵀ ∘ ∂S/∂dot, but for a constant slope. Where all pairs of a warp add to one element
  // none asks where.
  template <bool masked, class Carried> FG_DEVICE void differentiate_pairs(const fg::Accumulators<1, s_tiles>& s, fg::Accumulators<1, s_tiles>& dp, const Carried& deltas, int n) {
    typename Sums::template OfTile<masked, true> of_tile;
    of_tile.find(*this, visits.tile(n) * BR);
    if constexpr (Sums::apart)
      if (of_tile.is_scattered()) return differentiate_pairs<masked, true>(s, dp, deltas, n, of_tile);
    differentiate_pairs<masked, false>(s, dp, deltas, n, of_tile);
  }
  template <bool masked, bool scattered, class Carried, class OfTile>
  FG_DEVICE void differentiate_pairs(const fg::Accumulators<1, s_tiles>& s, fg::Accumulators<1, s_tiles>& dp, const Carried& deltas, int n, OfTile& of_tile) {
    constexpr bool captures = Sums::any, later = Sums::later, apart = Sums::apart;
    [[maybe_unused]] const int row0 = visits.tile(n) * BR;
    of_tile.begin(*this, row0);
#pragma unroll
    for (int t = 0; t < s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        [[maybe_unused]] const int row = 8 * s_tiles * part + 8 * t + fg::fragment_column(e);
        Row r;
        if constexpr (captures) r = row_of<masked>(n, t, e);
        const float delta = deltas[2 * t + e];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const float p = s.at[0][t][k * 2 + e];
          float& d_value = dp.at[0][t][k * 2 + e];
          const float d_score = Spec::reaching(d_value, p, delta, 0.0f);
          d_value = d_score;
          if constexpr (captures) {
            // past the last query P is NaN where keys are
            Pair<Spec, masked, false, in_bounds> pair = {a, u, x, r, columns[k], 1.0f, !masked || (p != 0.0f && (!(later || apart) || row0 + row < q_len))};
            pair.terms.d_score = d_score;
            if constexpr (later) d_value = pair.kept ? d_score : 0.0f;
            of_tile.template add<scattered>(*this, pair, t, e, k);
          }
        }
      }
    of_tile.end(*this);
    sums.template add_later<masked>(*this, dp, row0);
  }
};

}  // namespace backward
