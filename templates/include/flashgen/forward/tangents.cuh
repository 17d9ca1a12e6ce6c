// Forward mode: what a block keeps of tangents, and what scores change by to what weights change by.
#pragma once
#include "flashgen/forward/pairs.cuh"

namespace fg::forward {

template <class Base> struct Tangents : Base {
  using typename Base::Spec, typename Base::T, typename Base::QTile, typename Base::KTile, typename Base::VTile;
  using Base::a, Base::x, Base::memory, Base::m_tiles;
  using typename Base::Memory;

  Accumulators<m_tiles, Base::o_tiles> t_o;  // what O changes by, but for the denominator's part
  float t_sum[2 * m_tiles];                  // of row_sum, but for a factor
  float t_base[2 * m_tiles];                 // what the row's tangents of scores are less
  float t_qq[2 * m_tiles];                   // 2 q · tq

  FG_DEVICE Tangents(const typename Base::Kernel::Call& whole, const typename Base::Arguments& arguments, const typename Base::Kernel::Maps* tensor_maps = nullptr)
      : Base(whole, arguments, tensor_maps) {
    if constexpr (Base::P::tensor_copies)
      if (threadIdx.x == 0) {
        if (a.t_q) prefetch_map(tensor_maps->t_q);
        if (a.t_k) prefetch_map(tensor_maps->t_k);
        if (a.t_v) prefetch_map(tensor_maps->t_v);
      }
  }

  template <class Tile> FG_DEVICE Tile t_tile(int place, int n) const {
    return {reinterpret_cast<T*>(memory + place + stage_of<Base::stages>(Base::part_of(n)) * Tile::bytes)};
  }
  FG_DEVICE QTile t_q_tile() const { return {reinterpret_cast<T*>(memory + Memory::T_Q)}; }
  FG_DEVICE KTile t_k_tile(int n) const { return t_tile<KTile>(Memory::T_K, n); }
  FG_DEVICE VTile t_v_tile(int n) const { return t_tile<VTile>(Memory::T_V, n); }
  FG_DEVICE float* t_norms(int n) const { return Base::norms(n) + (Memory::T_KK - Memory::KK) / int(sizeof(float)); }
  FG_DEVICE int batch_entry() const { return x.b - int(a.b_start); }
  FG_DEVICE int key_head() const { return unsigned(x.h - int(a.h_start)) / (unsigned(a.heads) / unsigned(a.kv_heads)); }

  // tO less so much of O.
  FG_DEVICE void move_back(const float (&by)[2 * m_tiles]) {
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r)
#pragma unroll
      for (int t = 0; t < Base::o_tiles; ++t)
#pragma unroll
        for (int e = r % 2 * 2; e < r % 2 * 2 + 2; ++e) t_o.at[r / 2][t][e] -= by[r] * Base::o.at[r / 2][t][e];
  }
  FG_DEVICE void rescale(const float (&shrink)[2 * m_tiles]) {
    Base::rescale(shrink);
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) t_o.scale_row(r, shrink[r]);
  }
};

// What scores and weights change by, pair by pair, key after key: `t_s` has what products change by.
template <class Block> struct MovingPairs {
  using Spec = typename Block::Spec;
  Block& block;
  typename Block::Scores& t_s;
  int n;
  mutable float t_kk = 0.0f;  // of the present key: 2 k · tk

  template <class Column> FG_DEVICE float of_score(const Column& c, int r, [[maybe_unused]] int t, [[maybe_unused]] int e, float dot, float t_dot) const {
    const auto& row = block.rows[r];
    if constexpr (Spec::sqdist) {
      if (r == 0) t_kk = shared_load(block.t_norms(n) + 8 * t + fragment_column(e));
      return score_tangent(block.a, block.u, block.x, row, c, dot, squared_distance(row, c, dot), t_dot, block.t_qq[r] + t_kk);
    } else {
      return score_tangent(block.a, block.u, block.x, row, c, dot, t_dot);
    }
  }
  // Before a product is a score; before a score is a weight that is a function of it: whether this moves.
  template <class Column> FG_DEVICE void move(const Column& c, int r, int t, int e, float dot) const {
    float& t_value = t_s.at[r / 2][t][r % 2 * 2 + e];
    t_value = of_score(c, r, t, e, dot, t_value);
  }
  template <class Column> FG_DEVICE bool move(const Column& c, int r, int t, int e, float dot, bool kept, float score) const {
    float& t_value = t_s.at[r / 2][t][r % 2 * 2 + e];
    const float d_score = weight_by_score(block.a, block.u, block.x, block.rows[r], c, score), moved = of_score(c, r, t, e, dot, t_value);
    if constexpr (Spec::moves_weight) t_value = kept ? Spec::through_score(moved, d_score) + weight_tangent(block.a, block.u, block.x, block.rows[r], c, score) : 0.0f;
    else t_value = kept ? Spec::through_score(moved, d_score) : 0.0f;
    return Spec::moves_weight || d_score != 0.0f;
  }
  FG_DEVICE void add(int r, int t, int e, float weight) const { block.t_sum[r] += Spec::share(weight, t_s.at[r / 2][t][r % 2 * 2 + e]); }
};

// Of exponentials.
template <class Base> struct MovingExponentials : Base {
  using typename Base::Spec, typename Base::Column, typename Base::Scores;
  using Base::m_tiles, Base::s_tiles, Base::o_tiles, Base::chains, Base::row_sum, Base::o, Base::t_o, Base::t_sum, Base::t_base;
  using Base::Base;

  // Products to scores, and what these change by; where weights come first, later.
  template <bool masked> FG_DEVICE bool scores_of_both(Scores& s, Scores& t_s, int n, float (&shrink)[2 * m_tiles]) {
    if constexpr (Spec::weighs_first) return Base::template scores<masked>(s, n, shrink);
    else return Base::template scores<masked>(s, n, shrink, NoneAhead(), MovingPairs<Base>{*this, t_s, n});
  }
  // tS of each pair, from products where weights come first: `use(r, t, e, tS)`.
  template <bool masked, class Use> FG_DEVICE void for_tangents(Scores& t_s, int n, const Use& use) {
    const MovingPairs<Base> moving = {*this, t_s, n};
    if constexpr (Spec::weighs_first) {
      Base::template for_pairs<masked>(n, Base::visits.tile(n) * Base::BC, [&](const Column& c, int r, int t, int e) { use(r, t, e, moving.of_score(c, r, t, e, 0.0f, t_s.at[r / 2][t][r % 2 * 2 + e])); });
    } else {
#pragma unroll
      for (int t = 0; t < s_tiles; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int r = 0; r < 2 * m_tiles; ++r) use(r, t, e, t_s.at[r / 2][t][r % 2 * 2 + e]);
    }
  }
  // tP = P (tS - t_base). What all scores of a row change by alike changes no weight, but is lost where tP and P are rounded, each
  // by itself: tS is counted from a mean of its row, a new one where weights have grown, and after each doubling of the visits.
  // What is masked has no weight, and so changes nothing, whatever its score changes by.
  template <bool masked> FG_DEVICE void move(const Scores& p, Scores& t_s, int n, bool grown) {
    if (grown || (n & (n - 1)) == 0) count_from_means<masked>(p, t_s, n);
    float sums[2 * m_tiles][chains] = {};
    for_tangents<masked>(t_s, n, [&](int r, int t, int e, float moved) {
      const float value = p.at[r / 2][t][r % 2 * 2 + e];
      float& t_value = t_s.at[r / 2][t][r % 2 * 2 + e];
      if constexpr (Spec::product && !masked) t_value = (moved - t_base[r]) * value;
      else t_value = chained(moved - t_base[r], value);
      sums[r][(2 * t + e) % chains] += Spec::share(value, t_value);
    });
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r)
#pragma unroll
      for (int k = 0; k < chains; ++k) t_sum[r] += sums[r][k];
  }
  // Of all tiles so far and this one, whose P is in row_sum, but not in O.
  template <bool masked> FG_DEVICE void count_from_means(const Scores& p, Scores& t_s, int n) {
    float moved_sums[2 * m_tiles] = {}, sums[2 * m_tiles] = {}, by[2 * m_tiles];
    for_tangents<masked>(t_s, n, [&](int r, int t, int e, float moved) {
      const float value = p.at[r / 2][t][r % 2 * 2 + e];
      sums[r] += value;
      moved_sums[r] += chained(moved - t_base[r], value);
    });
#pragma unroll
    for (int r = 0; r < 2 * m_tiles; ++r) {
      const float sum = fg::row_sum(row_sum[r]), moved = fg::row_sum(t_sum[r] + moved_sums[r]);
      by[r] = sum == 0.0f ? 0.0f : moved / sum;
      t_base[r] += by[r];
      t_sum[r] -= by[r] * (row_sum[r] - sums[r]);
    }
    Base::move_back(by);
  }
};

}  // namespace fg::forward
