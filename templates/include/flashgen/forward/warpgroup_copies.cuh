// How Q and the parts of K and V come to warpgroups: part n is K of tile n, into stage n % stages, and V of the tile before.
#pragma once
#include "flashgen/forward/state.cuh"
#include "flashgen/tensor_copies.cuh"
#include "flashgen/warpgroup.cuh"

namespace fg::forward {

// Operands as tensor copies read them: flashgen/targets/gpu/launches.py says the same.
struct Maps {
  TensorMap q, k, v;
};
struct MapsOfTangents : Maps {
  TensorMap t_q, t_k, t_v;
};

template <class Base> struct WarpgroupCopies : Base {
  using typename Base::Spec, typename Base::P, typename Base::T, typename Base::Memory, typename Base::Head, typename Base::Place, typename Base::Notes;
  using typename Base::QTile, typename Base::KTile, typename Base::VTile, typename Base::Team;
  using Base::a, Base::x, Base::maps, Base::memory, Base::visits, Base::kv_len, Base::parts_before, Base::BC, Base::stages, Base::threads, Base::has_producers, Base::overlaps_next;
  using Base::q_tile, Base::k_tile, Base::v_tile;
  using Base::Base;
  // A part is there, the warps that multiply are done with it; the same of Q. Blocks that overlap the next query tile have a ring of K and
  // one of V: K's place is free as soon as its scores are there. Where two warpgroups take turns K and V come by halves.
  using Signals = fg::Signals<P::ping_pong ? 4 : stages, Base::shows_columns && has_producers ? 2 : 1>;
  using QSignals = fg::Signals<overlaps_next ? Base::q_places : 1>;
  using VSignals = fg::Signals<P::ping_pong ? 2 : stages>;
  using NormSignals = fg::Signals<stages>;

  static constexpr int groups = P::warps / 4;
  FG_DEVICE static int group() { return warpgroup_index<groups>(); }
  FG_DEVICE int first_row_of_group() const {
    if constexpr (Spec::f8) return this->group_row;
    else return 64 * group();
  }

  FG_DEVICE Signals signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::SIGNALS)}; }
  FG_DEVICE QSignals q_signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::Q_SIGNALS)}; }
  FG_DEVICE VSignals v_signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::V_SIGNALS)}; }
  FG_DEVICE NormSignals norm_signals() const { return {reinterpret_cast<uint64_t*>(memory + Memory::NORM_SIGNALS)}; }

  FG_DEVICE void start_q(const Place& place, const Head& head, int ordinal) const {
    uint64_t* const there = q_signals().full(ordinal);
    bool moves = false;
    if constexpr (Spec::tangent) moves = this->moves_q();
    mbarrier_expect(there, (moves ? 2 : 1) * QTile::bytes);
    copy_q(q_tile(), place, head, there);
    if constexpr (Spec::tangent)
      if (moves) copy_tile_async(this->t_q_tile(), maps->t_q, place.row0, slab_of(maps->t_q, head.b - int(a.b_start), head.h - int(a.h_start)), there);
  }
  FG_DEVICE void copy_q(QTile to, const Place& place, const Head& head, uint64_t* there) const {
    const int slab = slab_of(maps->q, head.b - int(a.b_start), head.h - int(a.h_start));
    if constexpr (Spec::ragged) copy_tile_async(to, maps->q, rows_of_queries(a), place.row0, slab, there);
    else copy_tile_async(to, maps->q, place.row0, slab, there);
  }
  template <class Tile, class Map> FG_DEVICE void copy_keys(Tile to, const Map& map, int tile, int slab, uint64_t* there) const {
    if constexpr (Spec::ragged) copy_tile_async(to, map, rows_of_keys(a), tile * BC, slab, there);
    else copy_tile_async(to, map, tile * BC, slab, there);
  }
  FG_DEVICE void start_part(int n) const {
    const bool has_k = overlaps_next || n < visits.count(), has_v = !overlaps_next && n > 0;
    uint64_t* const there = signals().full(parts_before + n);
    if constexpr (Spec::tangent) {
      const bool moves_k = has_k && this->moves_k(), moves_v = has_v && this->moves_v();
      mbarrier_expect(there, (has_k + moves_k) * int(KTile::bytes) + (has_v + moves_v) * int(VTile::bytes));
      if (moves_k) copy_tile_async(this->t_k_tile(n), maps->t_k, visits.tile(n) * BC, slab_of_keys(maps->t_k), there);
      if (moves_v) copy_tile_async(this->t_v_tile(n - 1), maps->t_v, visits.tile(n - 1) * BC, slab_of_keys(maps->t_v), there);
    } else {
      mbarrier_expect(there, (has_k ? int(KTile::bytes) : 0) + (has_v ? int(VTile::bytes) : 0));
    }
    if (has_k) copy_keys(k_tile(n), maps->k, visits.tile(n), visits.noted(&Notes::k), there);
    if constexpr (Spec::f8) {
      if (has_v) copy_turned_async(v_tile(n - 1), maps->v, visits.tile(n - 1) * BC, visits.noted(&Notes::v), there);
    } else {
      if (has_v) copy_keys(v_tile(n - 1), maps->v, visits.tile(n - 1), visits.noted(&Notes::v), there);
    }
  }
  // Of the present query tile.
  template <class Map> FG_DEVICE int slab_of_keys(const Map& map) const {
    const unsigned head = visits.noted(&Notes::head), b = head / unsigned(a.heads), h = head - b * unsigned(a.heads);
    return slab_of(map, int(b), int(h / (unsigned(a.heads) / unsigned(a.kv_heads))));
  }

  FG_DEVICE void await_q() const {
    if constexpr (P::tensor_copies) q_signals().await(visits.noted(&Notes::ordinal));  // else it comes with part 0
  }
  FG_DEVICE void release_q() const {
    if constexpr (has_producers)
      if (this->ends()) q_signals().release(visits.noted(&Notes::ordinal));
  }
  FG_DEVICE void await_v(int n) const {
    if constexpr (overlaps_next) v_signals().await(parts_before + n);
  }
  FG_DEVICE void release_k(int n) const {
    if constexpr (overlaps_next) signals().release(parts_before + n);
  }
  // Without warps that copy, where the places of part n are free.
  FG_DEVICE void copy_next_part(int n) {
    if constexpr (P::tensor_copies) {
      if (threadIdx.x == 32 * stage_of<P::warps>(n)) start_part(n);  // in turn: what it takes a warp, others wait for
    } else {
      if (n < visits.count()) {
        const int first = visits.tile(n) * BC;
        copy_rows_async<threads, Base::D>(k_tile(n), rows_of_k<T>(a, visits.noted(&Notes::k)), first, kv_len - first);
      }
      if (n > 0) {
        const int first = visits.tile(n - 1) * BC;
        copy_rows_async<threads, Base::DV>(v_tile(n - 1), rows_of_v<T>(a, visits.noted(&Notes::v)), first, kv_len - first);
      }
      copy_async_commit();
    }
  }
  FG_DEVICE void await_part(int n) {
    if constexpr (P::tensor_copies) {
      if constexpr (!has_producers) Team::barrier();  // everyone is done with the places of part n + 1
      signals().await(parts_before + n);
    } else {
      copy_async_wait<0>();
      publish_shared();
      Team::barrier();  // part n is there, and everyone is done with the places of part n + 1
      if (n < visits.count()) copy_next_part(n + 1);
    }
  }
  FG_DEVICE void release_part([[maybe_unused]] int n) const {
    if constexpr (overlaps_next) v_signals().release(parts_before + n - 1);
    else if constexpr (has_producers) signals().release(parts_before + n);
  }
  // Norms of the keys of tile n, while its products run: producers have taken them, or everyone does.
  FG_DEVICE void take_norms(int n) const {
    if constexpr (has_producers) return norm_signals().await(parts_before + n);
    Base::template measure<threads>(n, int(threadIdx.x));
    Team::barrier();
  }
};

}  // namespace fg::forward
