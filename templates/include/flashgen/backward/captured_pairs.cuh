// Captured gradients as blocks of dK and dV sum them up: of columns, heads and launches in registers, of pairs where elements lie.
#pragma once
#include "flashgen/backward/captured.cuh"

namespace backward {

// The elements that a warp's part of a tile adds to. One: a sum in registers. Up to BINS: a histogram in shared memory,
// for each warp its own. More: straight to global memory.
struct Bins {
  int64_t lowest;
  int count;
};

// Neighbouring distances whose pairs add to one element.
struct Run {
  int first, last;
  FG_DEVICE bool has(int nearest, int farthest) const { return nearest >= first && farthest <= last; }
};
// The distances from this one on whose pairs add to the same element, as far as the lanes look; none where its neighbours do not.
template <class Of, class Block> FG_DEVICE Run find_run(const Block& block, int distance) {
  const auto& a = block.a;
  const int64_t number = block.x.diagonals - diagonals_of(a) - distance, run = number / Of::RUN, own = run - fg::lane_index();
  const int element = own < 0 ? -1 : fg::global_load(Of::elements(a) + own);
  const int nearest = fg::shuffle(element, 0);
  const uint32_t others = fg::ballot(element < 0 || element != nearest);
  const int first = distance - (Of::RUN - 1 - int(number - run * Of::RUN)), runs = others == 0 ? 32 : __ffs(int(others)) - 1;
  return {first, first + runs * Of::RUN - 1};
}
template <class Of, class Block> FG_DEVICE int element_of(const Block& block, const Run& run) {
  return fg::global_load(Of::elements(block.a) + (block.x.diagonals - diagonals_of(block.a) - run.first) / Of::RUN);
}

template <class Of, bool masked, class Block> FG_DEVICE Bins find_bins(const Block& block, int row0) {
  const auto& a = block.a;
  const auto& u = block.u;
  const auto& x = block.x;
  int lowest = INT32_MAX, highest = INT32_MIN;
  if constexpr (Of::by_distance) {
    // It follows from the distance: lanes divide those of the warp's part among them.
    const auto i = [&](int n) { return int(a.q_start) + fg::min(row0 + block.part * 8 * Block::s_tiles + n, block.q_len - 1); };
    const auto j = [&](int n) { return int(a.kv_start) + fg::min(block.column0() + block.warp_key + n, block.kv_len - 1); };
    const int nearest = i(0) - j(16 * Block::m_tiles - 1), farthest = i(8 * Block::s_tiles - 1) - j(0);
    if constexpr (Of::RUN > 0) {
      const Run run = find_run<Of>(block, nearest);
      if (farthest <= run.last) return {element_of<Of>(block, run), 1};
    }
#pragma unroll 1
    for (int distance = nearest + fg::lane_index(); distance <= farthest; distance += 32) {
      typename Of::Diagonals d;
      d.distance = distance;
      const int place = int(Of::offset_by_distance(a, u, x, d));
      lowest = fg::min(lowest, place), highest = fg::max(highest, place);
    }
  } else {
#pragma unroll
    for (int t = 0; t < Block::s_tiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = row0 + block.part * 8 * Block::s_tiles + 8 * t + fg::fragment_column(e);
        const auto r = make_row(a, u, x, int(a.q_start) + (masked ? fg::min(row, block.q_len - 1) : row));
#pragma unroll
        for (int k = 0; k < 2 * Block::m_tiles; ++k) {
          const int place = int(Of::offset(a, u, x, r, block.columns[k]));
          lowest = fg::min(lowest, place), highest = fg::max(highest, place);
        }
      }
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    lowest = fg::min(lowest, fg::shuffle_xor(lowest, mask));
    highest = fg::max(highest, fg::shuffle_xor(highest, mask));
  }
  return {lowest, highest - lowest < Block::BINS ? highest - lowest + 1 : Block::BINS + 1};
}
template <class Of, class Block> FG_DEVICE void flush_bins(Block& block, Bins found, float sum) {
  const auto add = [&](int64_t place, float value) { block.adder.template add<Of::number>(block.a, Of::target(block.a), place, value); };
  if (found.count == 1) {
    sum = fg::warp_sum(sum);
    if (fg::lane_index() == 0) add(found.lowest, sum);
  } else if (Block::adding == Adding::atomic && found.count <= Block::BINS) {
    float* const own = block.bins(Of::number_of_bins);
    fg::warp_barrier();
#pragma unroll 1
    for (int n = fg::lane_index(); n < found.count; n += 32) {
      const float value = fg::shared_load(own + n);
      if (value == 0.0f) continue;
      add(found.lowest + n, value);
      fg::shared_store(own + n, 0.0f);
    }
    fg::warp_barrier();
  }
}

// What a block keeps of one gradient from tile to tile: sums of its lanes' columns, of a head, of all.
template <class Of, int columns> struct KeySum {
  static constexpr bool of_columns = Of::level == Level::column, of_heads = Of::level == Level::head, of_launches = Of::level == Level::launch;
  static constexpr int count = of_columns ? columns : 1;
  float of[count];
  Run run;     // of distances, whose element
  float held;  // goes to
};

// ---- From dSᵀ of a warp's part of a tile, of 16 keys, where what pairs add is a number times it ----

// Each pair to an element of its own. In a masked tile nothing is added where dS is 0: pairs that are not kept may have none.
template <class Of, bool masked, class Block, class Ds> FG_DEVICE void add_pairs(Block& block, const Ds& ds, int row0) {
  const auto& a = block.a;
  const auto& u = block.u;
  const int64_t first = Of::offset(a, u, block.x, block.first_of_lane(row0), block.columns[0]), by_row = Of::by_row(a), by_column = Of::by_column(a);
#pragma unroll
  for (int t = 0; t < Block::s_tiles; ++t)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float value = ds.at[0][t][k * 2 + e];
        if (!masked || value != 0.0f) block.adder.template add<Of::number>(a, Of::target(a), first + (8 * t + e) * by_row + 8 * k * by_column, value * Of::factor(a, u));
      }
}
template <class Of, class Block, class Sum> FG_DEVICE void leave_run(Block& block, Sum& own) {
  if (own.run.first > own.run.last) return;
  const float total = fg::warp_sum(own.held) * Of::factor(block.a, block.u);
  if (fg::lane_index() == 0) block.adder.template add<Of::number>(block.a, Of::target(block.a), element_of<Of>(block, own.run), total);
  own.held = 0.0f, own.run = {0, -1};
}
template <int s_tiles, class Ds> FG_DEVICE float sum_of_part(const Ds& ds) {
  float sum = 0.0f;
#pragma unroll
  for (int t = 0; t < s_tiles; ++t) sum += (ds.at[0][t][0] + ds.at[0][t][1]) + (ds.at[0][t][2] + ds.at[0][t][3]);
  return sum;
}
// Added up by distance, and what is as far apart by element: first by lane, then over the lanes that share distances, then in shared
// memory. Where all of it is of one element nobody asks how far; if elements are known for runs of distances it goes to a sum of this
// lane's, which leaves once another element comes: blocks would wait for each other, as most pairs of all blocks add to few elements.
template <class Of, bool masked, class Block, class Sum, class Ds> FG_DEVICE void add_diagonals(Block& block, [[maybe_unused]] Sum& own, const Ds& ds, int row0) {
  const auto& a = block.a;
  const auto& u = block.u;
  const auto& x = block.x;
  constexpr int s_tiles = Block::s_tiles, count = 8 * s_tiles + 15;  // distances of 16 keys and so many queries
  const int first_row = row0 + block.part * 8 * s_tiles, first_key = block.column0() + block.warp_key, last_key = first_key + 15;
  const int apart = int(a.q_start) - int(a.kv_start), begin = apart + first_row - last_key;
  if constexpr (Of::RUN > 0) {
    const int q_last = block.q_len - 1, k_last = block.kv_len - 1, last_row = first_row + 8 * s_tiles - 1;
    const int nearest = apart + (masked ? fg::min(first_row, q_last) : first_row) - (masked ? fg::min(last_key, k_last) : last_key);
    const int farthest = apart + (masked ? fg::min(last_row, q_last) : last_row) - (masked ? fg::min(first_key, k_last) : first_key);
    if (fg::ballot(!own.run.has(nearest, farthest)) != 0) {
      const Run run = find_run<Of>(block, nearest);
      if (run.has(nearest, farthest)) {
        leave_run<Of>(block, own);
        own.run = run;
      }
    }
    if (fg::ballot(!own.run.has(nearest, farthest)) == 0) {
      own.held += sum_of_part<s_tiles>(ds);
      return;
    }
  } else {
    const Bins found = find_bins<Of, masked>(block, row0);
    if (found.count == 1) return flush_bins<Of>(block, found, sum_of_part<s_tiles>(ds) * Of::factor(a, u));
  }
  static_assert(count <= Block::BINS, "each has a place");
  float* const bins = block.bins(Of::number_of_bins);
  // Lane 4 * key + query has queries 2 * query + 8 * t + e, keys key + 8 * k.
  const int lane = fg::lane_index(), query = lane % 4, key = lane / 4;
  const int first = 7 + 2 * query - key;
#pragma unroll
  for (int m = 0; m <= s_tiles; ++m)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float sum = m > 0 ? ds.at[0][m > 0 ? m - 1 : 0][e] : 0.0f;
      if (m < s_tiles) sum += ds.at[0][m < s_tiles ? m : 0][2 + e];
      const float next = fg::shuffle(sum, fg::min(lane + 9, 31));  // one query tile's lane, two keys further
      sum += query < 3 && key < 6 ? next : 0.0f;
      const float after = fg::shuffle(sum, fg::min(lane + 18, 31));
      sum += query < 2 && key < 4 ? after : 0.0f;
      if (query == 0 || key < 2) fg::shared_store(bins + first + 8 * m + e, fg::shared_load(bins + first + 8 * m + e) + sum);
      fg::warp_barrier();
    }
#pragma unroll 1
  for (int n = lane; n < count; n += 32) {
    const float value = fg::shared_load(bins + n);
    if (value == 0.0f) continue;
    fg::shared_store(bins + n, 0.0f);
    typename Of::Diagonals d;
    d.distance = begin + n;
    block.adder.template add<Of::number>(a, Of::target(a), Of::offset_by_distance(a, u, x, d), value * Of::factor(a, u));
  }
  fg::warp_barrier();
}

// What pairs of a tile add. `later`: what is a number times dS is summed up once that is there.
template <class Of, bool masked, bool later> struct SumOfTile {
  static constexpr bool is_pair = Of::level == Level::pair, is_short = Of::level == Level::head || Of::level == Level::launch;
  static constexpr bool here = Of::of_pairs && !(later && Of::has_factor && is_pair), in_bins = is_pair && here && !Of::own_elements;
  float sum = 0.0f;   // short sums of sums lose less than one long sum
  Bins bins{0, 0};
  int64_t place = 0;  // of this lane's first pair, where each adds to an element of its own

  template <class Block> FG_DEVICE void find(const Block& block, int row0) {
    if constexpr (in_bins)
      if (Of::target(block.a)) bins = find_bins<Of, masked>(block, row0);
  }
  template <class Block> FG_DEVICE void begin(const Block& block, int row0) {
    if constexpr (is_pair && here && Of::own_elements) place = Of::offset(block.a, block.u, block.x, block.first_of_lane(row0), block.columns[0]);
  }
  // Of pair (8 t + e, 8 k) from the lane's first. Not `scattered`: all pairs of the warp add to one element.
  template <bool scattered, class Block, class Pair>
  FG_DEVICE void add(Block& block, KeySum<Of, 2 * Block::m_tiles>& own, const Pair& pair, int t, int e, int k) {
    if constexpr (here) {
      const auto of_pair = [&] { return Of::of_pair(pair.a, pair.u, pair.x, pair.r, pair.c, pair.terms); };
      if constexpr (!is_pair) {
        if (pair.kept) (is_short ? sum : own.of[Of::level == Level::column ? k : 0]) += of_pair();
      } else if constexpr (Of::own_elements) {
        if (is_wanted(block.a) && pair.kept) leave(block, place + int64_t(8 * t + e) * Of::by_row(pair.a) + int64_t(8 * k) * Of::by_column(pair.a), of_pair());
      } else if constexpr (!scattered) {
        if (pair.kept) sum += of_pair();
      } else if (Of::target(block.a) && pair.kept) {
        const float loss = of_pair();
        const int64_t place = Of::offset(pair.a, pair.u, pair.x, pair.r, pair.c);
        if (bins.count == 1) sum += loss;
        else if (Block::adding == Adding::atomic && bins.count <= Block::BINS) fg::shared_add(block.bins(Of::number_of_bins) + (place - bins.lowest), loss);
        else block.adder.template add<Of::number>(block.a, Of::target(block.a), place, loss);
      }
    }
  }
  template <class Arguments> FG_DEVICE static bool is_wanted(const Arguments& a) {
    if constexpr (Of::is_stored) return Of::target(a) || Of::stored(a);
    else return Of::target(a);
  }
  template <class Block> FG_DEVICE static void leave(Block& block, int64_t place, float loss) {
    if constexpr (Of::is_stored && Block::adding == Adding::atomic)
      if (auto* const stored = Of::stored(block.a)) return fg::global_store(stored + place, fg::Element<typename Of::Stored>::round(loss));
    block.adder.template add<Of::number>(block.a, Of::target(block.a), place, loss);
  }
  template <class Block> FG_DEVICE void end(Block& block, KeySum<Of, 2 * Block::m_tiles>& own) {
    if constexpr (is_short) own.of[0] += sum;
    if constexpr (in_bins)
      if (Of::target(block.a)) flush_bins<Of>(block, bins, sum);
  }
};

template <class List, int columns> struct KeySums;
template <class... Of, int columns> struct KeySums<GradientList<Of...>, columns> : KeySum<Of, columns>... {
  template <class One> FG_DEVICE KeySum<One, columns>& of() { return *this; }
  FG_DEVICE void begin_launch() { ((KeySum<Of, columns>::of_launches ? void(KeySum<Of, columns>::of[0] = 0.0f) : void()), ...); }
  FG_DEVICE void begin_head() { (begin_head_of<Of>(), ...); }
  template <class One> FG_DEVICE void begin_head_of() {
    auto& own = of<One>();
    if constexpr (KeySum<One, columns>::of_heads) own.of[0] = 0.0f;
    if constexpr (KeySum<One, columns>::of_columns)
#pragma unroll
      for (int k = 0; k < columns; ++k) own.of[k] = 0.0f;
    if constexpr (One::RUN > 0) own.held = 0.0f, own.run = {0, -1};
  }
  template <class Block> FG_DEVICE void end_head([[maybe_unused]] Block& block) { (end_head_of<Of>(block), ...); }
  template <class One, class Block> FG_DEVICE void end_head_of(Block& block) {
    auto& own = of<One>();
    const auto& a = block.a;
    const auto& u = block.u;
    const auto& x = block.x;
    if constexpr (KeySum<One, columns>::of_columns)
      if (One::target(a))
#pragma unroll
        for (int k = 0; k < columns; ++k) {
          const float total = fg::row_sum(own.of[k]);
          if (fg::fragment_column(0) == 0 && block.column0() + block.key(k) < block.kv_len)
            block.adder.template add<One::number>(a, One::target(a), One::offset(a, u, x, typename Block::Row{}, block.columns[k]), total);
        }
    if constexpr (KeySum<One, columns>::of_heads) end_team<One>(block);
  }
  template <class Block> FG_DEVICE void end_launch([[maybe_unused]] Block& block) { (end_launch_of<Of>(block), ...); }
  template <class One, class Block> FG_DEVICE void end_launch_of(Block& block) {
    if constexpr (KeySum<One, columns>::of_launches) end_team<One>(block);
  }
  // The sum of all threads.
  template <class One, class Block> FG_DEVICE void end_team(Block& block) {
    const auto& a = block.a;
    const auto& u = block.u;
    const auto& x = block.x;
    if (!One::target(a)) return;
    const float total = fg::team_sum<typename Block::Team>(of<One>().of[0], block.sums_of_team());
    if (threadIdx.x == 0) block.adder.template add<One::number>(a, One::target(a), One::offset(a, u, x, typename Block::Row{}, typename Block::Column{}), total);
  }

  // Whether some of pairs are summed up while these are weighed, or once dS is there, where what is a number times dS can be.
  static constexpr bool any = sizeof...(Of) > 0, later = ((Of::level == Level::pair && Of::has_factor) || ...);
  static constexpr int histograms = (int(Of::level == Level::pair) + ... + 0);
  static constexpr bool apart = ((Of::level == Level::pair && !Of::has_factor) || ...);

  // Those of a tile.
  template <bool masked, bool later = false> struct OfTile : SumOfTile<Of, masked, later>... {
    template <class One> using OfOne = SumOfTile<One, masked, later>;
    template <class Block> FG_DEVICE void find([[maybe_unused]] const Block& block, [[maybe_unused]] int row0) { (OfOne<Of>::find(block, row0), ...); }
    FG_DEVICE bool is_scattered() const { return ((OfOne<Of>::is_pair && OfOne<Of>::here && (Of::own_elements || OfOne<Of>::bins.count > 1)) || ...); }
    template <class Block> FG_DEVICE void begin([[maybe_unused]] const Block& block, [[maybe_unused]] int row0) { (OfOne<Of>::begin(block, row0), ...); }
    template <bool scattered = true, class Block, class Pair>
    FG_DEVICE void add([[maybe_unused]] Block& block, [[maybe_unused]] const Pair& pair, [[maybe_unused]] int t, [[maybe_unused]] int e, [[maybe_unused]] int k) {
      (OfOne<Of>::template add<scattered>(block, block.sums.template of<Of>(), pair, t, e, k), ...);
    }
    template <class Block> FG_DEVICE void end([[maybe_unused]] Block& block) { (OfOne<Of>::end(block, block.sums.template of<Of>()), ...); }
  };
  // What is summed up later, from dSᵀ of a warp's part; and what was summed up so far of runs of distances.
  template <bool masked, class Block, class Ds> FG_DEVICE void add_later([[maybe_unused]] Block& block, [[maybe_unused]] const Ds& ds, [[maybe_unused]] int row0) {
    (add_one_later<Of, masked>(block, ds, row0), ...);
  }
  template <class One, bool masked, class Block, class Ds> FG_DEVICE void add_one_later(Block& block, const Ds& ds, int row0) {
    if constexpr (One::level == Level::pair && One::has_factor)
      if (One::target(block.a)) {
        if constexpr (One::own_elements) add_pairs<One, masked>(block, ds, row0);
        else add_diagonals<One, masked>(block, of<One>(), ds, row0);
      }
  }
  template <class Block> FG_DEVICE void leave_runs([[maybe_unused]] Block& block) { (leave_run_of<Of>(block), ...); }
  template <class One, class Block> FG_DEVICE void leave_run_of(Block& block) {
    if constexpr (One::RUN > 0)
      if (One::target(block.a)) leave_run<One>(block, of<One>());
  }
};

}  // namespace backward
