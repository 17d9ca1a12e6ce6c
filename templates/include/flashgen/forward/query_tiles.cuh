// Query tiles by their numbers, what hooks know of one's head, and the key tiles that it visits.
#pragma once
#include "flashgen/forward/state.cuh"
#include "flashgen/lists.cuh"
#include "flashgen/persistent.cuh"

namespace fg::forward {

template <class Base> struct QueryTiles : Base {
  using typename Base::Spec, typename Base::P, typename Base::T, typename Base::Head, typename Base::Place;
  using Base::a, Base::u, Base::x, Base::kv_len, Base::visits, Base::BR, Base::BC, Base::tiles;
  using Base::Base;

  // A query tile, by its number. The last ones of a head come first: under a causal mask they are the longest.
  FG_DEVICE Place locate(unsigned number) const {
    const unsigned tiles = (unsigned(a.q_len) + P::BR - 1) / P::BR;
    if constexpr (Spec::longest_first)
      if (a.visits_of_queries) {
        const WorkTile work_tile = this->work_tile(number);
        return {work_tile.head, tile_of(list_of(a.visits_of_queries, work_tile, this->tiles()), this->tiles()) * P::BR};
      }
    if constexpr (Spec::in_groups && Base::has_producers) {
      constexpr int bytes_of_key = (Spec::tangent ? 2 : 1) * (Base::DP + Base::DVP) * int(sizeof(T));  // and its value, with tangents of both
      const int64_t outside = Spec::batch_inside ? 1 : a.batch, inside = Spec::batch_inside ? a.batch : 1;
      const TileOfGroup own = tile_of_group<Spec>(number, tiles, unsigned(outside * a.kv_heads), unsigned(a.heads) / unsigned(a.kv_heads), unsigned(a.batch), bytes_of_key, int(inside * a.kv_len));
      return {int(own.head), int(tiles - 1 - own.tile) * P::BR};
    } else if constexpr (Spec::batch_inside) {
      const TileOfGroup own = tile_of_group<Spec>(number, tiles, unsigned(a.heads), 1, unsigned(a.batch), ALONE, 1);  // of one head
      return {int(own.head), int(tiles - 1 - own.tile) * P::BR};
    } else {
      const unsigned head = number / tiles;
      return {int(head), int(tiles - 1 - (number - head * tiles)) * P::BR};
    }
  }

  // What hooks know of the head, and of where the tile lies.
  FG_DEVICE Head head_at(const Place& place) const {
    const int b = unsigned(place.head) / unsigned(a.heads), h = place.head - b * int(a.heads);
    Head head = make_head(a, u, b, h);
    if constexpr (Spec::distance) head.origin = int(a.q_start) + place.row0;
    return head;
  }
  FG_DEVICE void enter(const Place& place) { x = head_at(place); }

  // What this block of a cluster has of a tile; the last ones may have no rows.
  FG_DEVICE static Place rows_of_block(const Place& place) {
    if constexpr (P::cluster == 1) return place;
    else return {place.head, place.row0 + Base::rank() * BR};
  }
  FG_DEVICE KeyTiles<Spec, P::BR, BC> classify(const Place& place, const Head& head) const {
    return {a, u, head, place.head, {place.row0, min(P::BR, int(a.q_len) - place.row0)}};
  }
  // What the tile of a number visits of a window, which begins at key tile `window`.
  template <class Team> FG_DEVICE void find_window(unsigned number, const Place& place, const Head& head, int window) const {
    const int last = min(window + WINDOW, tiles());
    if constexpr (Spec::lists) take_visits<Team>(visits.list, list(number, place, head), window, last, classify(place, head));
    else find_visits<Team>(visits.list, window, last, classify(place, head));
  }
  FG_DEVICE WorkTile work_tile(unsigned number) const {
    return work_tile_of<Spec>(number, sharers_of_queries(a), unsigned(a.group_of_queries), (unsigned(a.q_len) + P::BR - 1) / P::BR);
  }
  FG_DEVICE const uint4* list([[maybe_unused]] unsigned number, const Place& place, const Head& head) const {
    if constexpr (Spec::longest_first) return list_of(a.visits_of_queries, work_tile(number), tiles());
    const int b = head.b - int(a.b_start), h = head.h - int(a.h_start), tile = unsigned(place.row0) / P::BR;
    return list_of(a, a.visits_of_queries, b, h, tile, (unsigned(a.q_len) + P::BR - 1) / P::BR, tiles());
  }

  // Of ragged batches.
  template <class Sequence> FG_DEVICE void move_to(const Sequence& sequence) {
    a = sequence_of<T>(this->call, sequence);
    u = make_launch(a), kv_len = int(a.kv_len);
  }
  FG_DEVICE auto sequence() const { return noted(visits.notes()); }  // of the present list
  FG_DEVICE Place enter_tile() {
    if constexpr (Base::moves) move_to(sequence());
    const Place place = this->place();
    enter(place);
    return place;
  }
};

}  // namespace fg::forward
