// Gradients of which each pair of a call has an element of its own, where warpgroups multiply: dSᵀ is stored a fragment at a time.
#pragma once
#include "flashgen/backward/captured_pairs.cuh"
#include "flashgen/fragments.cuh"
#include "flashgen/pairs.cuh"

namespace backward {

template <class Base> struct StoredPairs : Base {
  using typename Base::Spec, typename Base::T, typename Base::P, typename Base::Memory, typename Base::Notes;
  using Stored = typename Spec::StoredGradients;
  using InTurn = typename Spec::SummedGradients;
  using Base::BC, Base::BR, Base::CONSUMERS, Base::PRODUCERS, Base::adding, Base::atomic, Base::more_stages, Base::s_tiles, Base::takes_turns;
  using Base::a, Base::adder, Base::kv_len, Base::memory, Base::part, Base::q_len, Base::u, Base::visits, Base::warp_key, Base::x;
  using Base::column0, Base::key_tiles, Base::tiles;
  using Base::Base;
  struct Key {
    int j;
  };

  // Rounded and stored, by 16 queries and keys an operand. Past the last row and key nothing is. Addresses follow from one another:
  // registers do not hold all of them.
  template <class Of, bool masked, class E> FG_DEVICE void store_operand(E* whole, const fg::LeftRows<E, 1, 8 * s_tiles>& ds, int row0) const {
    const int first_row = row0 + part * 8 * s_tiles, rows_left = q_len - first_row, keys_left = kv_len - column0() - warp_key;
    const int64_t by_row = Of::by_row(a), by_column = Of::by_column(a);
    const Key c = {int(a.kv_start) + column0() + warp_key};
    E* const first = whole + Of::offset(a, u, x, make_row(a, u, x, int(a.q_start) + fg::min(first_row, q_len - 1)), c);
    if constexpr (Of::neighbours)
      if (by_row % 2 == 0 && uintptr_t(first) % 4 == 0 && (!masked || keys_left >= 16)) {  // lanes have neighbouring keys of a query each
        const int row = fg::fragment_row(0);
        auto* at = first + row * by_row + fg::fragment_column(0);
#pragma unroll
        for (int t = 0; t < s_tiles; ++t, at += 8 * by_row)
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const uint32_t word = fg::transposed(ds.at[0][t / 2].r[t % 2 * 2 + k]);
            if (!masked || 8 * t + row < rows_left) fg::global_store(reinterpret_cast<uint32_t*>(at + 8 * k), word);
          }
        return;
      }
    auto* at = first + fg::fragment_column(0) * by_row + fg::fragment_row(0) * by_column;
#pragma unroll
    for (int t = 0; t < s_tiles; ++t, at += 6 * by_row)
#pragma unroll
      for (int e = 0; e < 2; ++e, at += by_row)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const E value = {uint16_t(ds.at[0][t / 2].r[t % 2 * 2 + k] >> 16 * e)};
          if (!masked || (8 * t + fg::fragment_column(e) < rows_left && fg::fragment_row(2 * k) < keys_left)) fg::global_store(at + 8 * k * by_column, value);
        }
  }
  // dSᵀ times the number of a gradient.
  template <class Of, bool masked, class E> FG_DEVICE void store_rounded(E* whole, fg::Accumulators<1, s_tiles> ds, int row0) const {
    if constexpr (Of::scales)
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) ds.at[0][t][e] *= Of::factor(a, u);
    fg::LeftRows<E, 1, 8 * s_tiles> rounded;
    fg::round_into(rounded, ds);
    store_operand<Of, masked>(whole, rounded, row0);
  }
  // dSᵀ, and what it is rounded to.
  template <bool masked> FG_DEVICE void store_pairs(const fg::Accumulators<1, s_tiles>& exact, const fg::LeftRows<T, 1, 8 * s_tiles>& ds, int n) {
    if constexpr (adding == Adding::atomic) store_all<masked>(Stored{}, exact, ds, visits.tile(n) * BR);
    if constexpr (takes_turns)
      if (in_turn()) add_in_turn<masked>(InTurn{}, exact, n);
  }
  template <bool masked, class... Of>
  FG_DEVICE void store_all(GradientList<Of...>, const fg::Accumulators<1, s_tiles>& exact, const fg::LeftRows<T, 1, 8 * s_tiles>& ds, int row0) const {
    (store_one<Of, masked>(exact, ds, row0), ...);
  }
  template <class Of, bool masked> FG_DEVICE void store_one(const fg::Accumulators<1, s_tiles>& exact, const fg::LeftRows<T, 1, 8 * s_tiles>& ds, int row0) const {
    if (!Of::stored(a) || !adder.adds) return;
    if constexpr (!Of::scales && fg::are_alike<T, typename Of::Stored>) store_operand<Of, masked>(Of::stored(a), ds, row0);
    else store_rounded<Of, masked>(Of::stored(a), exact, row0);
  }

  // ---- turns ----
  // Batch entries share a gradient of pairs. Those that come to a tile claim turns at it; the first one leaves its dS as it lies in
  // registers, others add to that once it is there, and the last one, once they have, stores the sum. A block claims one once it need
  // not wait for another, in no order: whoever is waited for waits for those before alone. Of a cluster one block takes them.
  bool handed = false;  // whether the warp has dS of the last tile for the next batch entry

  // Which number of all that add to this tile the block is.
  FG_DEVICE uint32_t* turn(int n) const { return reinterpret_cast<uint32_t*>(memory + Memory::TURN) + fg::stage_of<more_stages>(n); }
  template <class Of> FG_DEVICE bool has_sum(GradientList<Of>) const { return Of::summed(a); }
  FG_DEVICE bool in_turn() const { return has_sum(InTurn{}) && adder.adds; }
  FG_DEVICE int64_t tile_of_turn(int n) const {
    const unsigned head = unsigned(visits.noted(&Notes::head)) % unsigned(a.heads);
    return (int64_t(head) * key_tiles() + column0() / BC) * tiles() + visits.tile(n);
  }
  FG_DEVICE uint32_t* counts_of_turn(int n) const { return turns_of(a) + 2 * tile_of_turn(n); }
  FG_DEVICE uint32_t claim_turn(int n) const {
    if (in_turn()) return fg::global_next(counts_of_turn(n));
    return 0;
  }
  FG_DEVICE void await_turn(int n, uint32_t number) const {
    if (!in_turn()) return;
    const uint32_t others = number + 1 < unsigned(a.batch) ? fg::min(1, int(number)) : number;  // who have to be done
    if (others > 0) fg::global_await(counts_of_turn(n) + 1, others * P::warps);
    fg::shared_store(turn(n), number);
  }
  // What comes first of a tile is left for the others, which add theirs; the last one has the sum.
  template <bool masked, class Of> FG_DEVICE void add_in_turn(GradientList<Of>, const fg::Accumulators<1, s_tiles>& exact, int n) {
    const int64_t tile = tile_of_turn(n);
    const int number = int(fg::shared_load(turn(n))), own = warp_key / 16 * (BR / (8 * s_tiles)) + part;
    float4* const left = turn_sums(a) + (tile * (BC / 16 * (BR / (8 * s_tiles))) + own) * (32 * s_tiles) + fg::lane_index();
    if (number + 1 < int(a.batch)) {
      handed = true;
      if (number > 0) {
#pragma unroll
        for (int t = 0; t < s_tiles; ++t) fg::global_add(reinterpret_cast<float*>(left + 32 * t), exact.at[0][t]);
      } else {
#pragma unroll
        for (int t = 0; t < s_tiles; ++t)
          fg::global_hand(left + 32 * t, make_float4(exact.at[0][t][0], exact.at[0][t][1], exact.at[0][t][2], exact.at[0][t][3]));
      }
      return;
    }
    fg::Accumulators<1, s_tiles> sums = exact;
    if (number > 0) {
#pragma unroll
      for (int t = 0; t < s_tiles; ++t) {
        const float4 before = fg::global_load_handed(left + 32 * t);
        sums.at[0][t][0] += before.x, sums.at[0][t][1] += before.y, sums.at[0][t][2] += before.z, sums.at[0][t][3] += before.w;
      }
    }
    store_rounded<Of, masked>(Of::summed(a), sums, visits.tile(n) * BR);
  }
  // Once products are done, and stores have had time to arrive: it takes as long as they, and the other warpgroup waits for dS before.
  FG_DEVICE void leave_turn(int n) {
    if (!handed) return;
    handed = false;
    fg::warp_barrier();  // all lanes have left theirs
    if (fg::lane_index() == 0) fg::global_leave(counts_of_turn(n) + 1);
  }

  // ---- gradients of pairs that nobody visits ----
  static constexpr bool clears = atomic && adding == Adding::atomic && P::stores_whole;
  // By the warps that have nothing to copy, or by all of those who copy, once they have; of a cluster, by one block.
  static constexpr int BUSY = Base::CARRIERS + Base::COPIERS_OF_PAIRS, FIRST_TO_CLEAR = PRODUCERS > BUSY ? BUSY : 0, CLEARING = (PRODUCERS - FIRST_TO_CLEAR) / 32;
  FG_DEVICE void clear_rest(int window) const {
    const int warp = (int(threadIdx.x) - CONSUMERS - FIRST_TO_CLEAR) / 32, last = fg::min(window + fg::WINDOW, tiles()), count = visits.count();
    if (!adder.adds || int(threadIdx.x) - CONSUMERS < FIRST_TO_CLEAR) return;
#pragma unroll 1
    for (int tile = window + warp; tile < last; tile += CLEARING) {
      bool visited = false;
#pragma unroll 1
      for (int n = fg::lane_index(); n < count; n += 32) visited |= visits.tile(n) == tile;
      if (fg::ballot(visited) == 0) clear_tile(Stored{}, InTurn{}, tile * BR);
    }
  }
  template <class... Of, class... Summed> FG_DEVICE void clear_tile(GradientList<Of...>, GradientList<Summed...>, int row0) const {
    (clear_elements<Of>(Of::stored(a), row0), ...);
    if (visits.noted(&Notes::head) < int(a.heads)) (clear_elements<Summed>(Summed::summed(a), row0), ...);
  }
  template <class Of, class E> FG_DEVICE void clear_elements(E* whole, int row0) const {
    if (!whole) return;
    const int rows = fg::min(BR, q_len - row0), keys = fg::min(BC, kv_len - column0());
    const Key c = {int(a.kv_start) + column0()};
    const int64_t by_row = Of::by_row(a), by_column = Of::by_column(a);
    E* const first = whole + Of::offset(a, u, x, make_row(a, u, x, int(a.q_start) + row0), c);
    constexpr int chunk = 16 / int(sizeof(E)), chunks = BC / chunk;
    const bool whole_rows = by_column == 1 && (uintptr_t(first) | uintptr_t(by_row * int64_t(sizeof(E)))) % 16 == 0 && keys == BC;
    if (whole_rows) {
#pragma unroll 1
      for (int n = fg::lane_index(); n < rows * chunks; n += 32)
        fg::global_stream(reinterpret_cast<uint4*>(first + n / chunks * by_row + n % chunks * chunk), uint4{0, 0, 0, 0});
    } else {
#pragma unroll 1
      for (int n = fg::lane_index(); n < rows * BC; n += 32)
        if (n % BC < keys) fg::global_store(first + n / BC * by_row + n % BC * by_column, E{});
    }
  }
};

}  // namespace backward
