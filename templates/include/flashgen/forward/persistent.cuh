// Persistent blocks take one query tile after another. A list of visits stands for one window of one query tile.
#pragma once
#include "flashgen/forward/state.cuh"
#include "flashgen/persistent.cuh"

namespace fg::forward {

template <class Sequence> FG_DEVICE void note_sequence(Sequence* noted, const Sequence& sequence) { note(noted, sequence); }

template <class Base> struct Persistent : Base {
  using typename Base::P, typename Base::T, typename Base::Head, typename Base::Place, typename Base::Notes;
  using Base::a, Base::visits, Base::call, Base::BR, Base::moves, Base::note;
  using Base::Base;
  static constexpr int BEGINS = 1, ENDS = 2;  // a query tile, by the edges of a list
  static constexpr int NO_MORE = -1;          // in the place of a count

  FG_DEVICE bool begins() const { return visits.noted(&Notes::edges) & BEGINS; }
  FG_DEVICE bool ends() const { return visits.noted(&Notes::edges) & ENDS; }
  FG_DEVICE int work_tiles() const {
    if constexpr (moves) return numbers_of_queries<BR>(call);
    else return int(a.batch * a.heads) * ((int(a.q_len) + P::BR - 1) / P::BR);
  }
  // Of a ragged batch, by a warp: a tile that nobody has taken, as its number in its sequence, or NO_MORE.
  template <class Sequence> FG_DEVICE int take_tile(bool first, Sequence& sequence) const {
    const auto find = [this](int number, int& own) { return sequence_of_query_tile<T, BR>(call, number, own); };
    return fetch_tile(tile_counter_of(a), work_tiles(), first, sequence, find);
  }
  // By one thread: what the others read of a list beside the visits.
  FG_DEVICE void note(const Place& place, const Head& head, int window, int ordinal) const {
    note(place, head);
    if constexpr (moves) note_sequence<decltype(this->sequence())>(visits.notes(), {a.sequence, int(a.q_begin), int(a.kv_begin), int(a.q_len), int(a.kv_len)});
    shared_store(&visits.notes()->edges, (window == 0 ? BEGINS : 0) | (window + WINDOW >= Base::tiles() ? ENDS : 0));
    shared_store(&visits.notes()->ordinal, ordinal);
  }
};

}  // namespace fg::forward
