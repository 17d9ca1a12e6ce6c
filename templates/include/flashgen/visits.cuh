// Which tiles a block visits. The tiles of a row (or column) of tiles are classified by interval arithmetic, one tile a lane, and listed:
// PARTIAL ones first, then FULL ones; EMPTY ones are never loaded. A list covers a window of tiles, so that its length is fixed.
#pragma once
#include "flashgen/observed.cuh"
#include "flashgen/spec.cuh"
#include "flashgen/team.cuh"

namespace fg {

using ranges::Bool;

constexpr int WINDOW = 1024;  // tiles: the planner says the same
template <int words_of_notes> struct VisitList {
  int first, partials, count;                        // of the window: its first tile; how many are PARTIAL, how many are listed
  int notes[words_of_notes];                         // what the block keeps beside it
  uint32_t partial[WINDOW / 32], full[WINDOW / 32];  // one bit a tile
  uint16_t tile[WINDOW];                             // counted from the first
};

// What a block reads of its list. It stays in shared memory, where it costs no registers.
template <class List, class Notes> struct Visits {
  static_assert(sizeof(Notes) <= sizeof(List::notes), "there is room for what a block keeps");
  List* list;

  FG_DEVICE int first() const { return shared_load(&list->first); }
  FG_DEVICE int partials() const { return shared_load(&list->partials); }
  FG_DEVICE int count() const { return shared_load(&list->count); }
  FG_DEVICE int tile(int n) const { return first() + int(shared_load(&list->tile[n])); }
  FG_DEVICE Notes* notes() const { return reinterpret_cast<Notes*>(list->notes); }
  FG_DEVICE int noted(int Notes::*which) const { return shared_load(&(notes()->*which)); }
};

template <class List> FG_DEVICE void set_visits(List* list, int first, int partials, int count) {
  shared_store(&list->first, first);
  shared_store(&list->partials, partials);
  shared_store(&list->count, count);
}

// What is known of the pairs of some queries and key tiles first … last - 1 as a whole, the last of which may reach past the end.
template <class Spec, int BR, int BC> struct KeyTiles {
  const typename Spec::Arguments& a;
  const typename Spec::Launch& u;
  const typename Spec::Head& x;
  int head;  // counted through the batch
  Span queries;

  FG_DEVICE Bool operator()(int first, int last) const {
    const int kv_len = int(a.kv_len), end = min(last * BC, kv_len);
    const Bool kept = keep_range<BR, BC>(a, u, x, head, queries, {first * BC, end - first * BC});
    return {kept.may_be_false || last * BC > kv_len, kept.may_be_true};
  }
};
// Classifies query tiles beside some keys: the last tile, and the tile of the keys, may reach past the end.
template <class Spec, int BR, int BC> struct QueryTiles {
  const typename Spec::Arguments& a;
  const typename Spec::Launch& u;
  const typename Spec::Head& x;
  int head;
  Span keys;

  FG_DEVICE Bool operator()(int first, int last) const {
    const int q_len = int(a.q_len), end = min(last * BR, q_len);
    const Bool kept = keep_range<BR, BC>(a, u, x, head, {first * BR, end - first * BR}, keys);
    return {kept.may_be_false || last * BR > q_len || keys.count < BC, kept.may_be_true};
  }
};

// Puts tiles in their order, as words of bits say their classes: `tile_of` a bit. Everyone sees the words.
template <class Team, class List, class TileOf> FG_DEVICE void order_visits(List* list, int first, int words, const TileOf& tile_of) {
  const int thread = Team::thread(), lane = lane_index(), warp = Team::warp();
  int partials = 0;
#pragma unroll 1
  for (int word = 0; word < words; ++word) partials += popcount(int(shared_load(&list->partial[word])));
  int next_partial = 0, next_full = partials;
  const uint32_t mine = 1u << lane, below = mine - 1;
#pragma unroll 1
  for (int word = 0; word < words; ++word) {
    const uint32_t partial = shared_load(&list->partial[word]), full = shared_load(&list->full[word]);
    if (word % (Team::threads / 32) == warp) {
      const uint16_t tile = (partial | full) & mine ? tile_of(32 * word + lane) : 0;
      if (partial & mine) shared_store(&list->tile[next_partial + popcount(int(partial & below))], tile);
      if (full & mine) shared_store(&list->tile[next_full + popcount(int(full & below))], tile);
    }
    next_partial += popcount(int(partial)), next_full += popcount(int(full));
  }
  if (thread == 0) set_visits(list, first, partials, next_full);
  Team::barrier();
}

// Lists the visits among tiles first … last - 1, at most WINDOW. classify(first, last) is the range of `kept` over those
// tiles, and `whole` of all of them. Everyone sees the list at once; where they `wait` someone may still read the one before.
template <class Team, bool wait = false, class List, class Classify>
FG_DEVICE void list_visits(List* list, int first, int last, const Classify& classify, const Bool& whole) {
  const int thread = Team::thread(), lane = lane_index(), warp = Team::warp(), words = (last - first + 31) / 32;
  if constexpr (wait) Team::barrier();
  if (!whole.may_be_true || !whole.may_be_false) {
    const int count = whole.may_be_true ? last - first : 0;
#pragma unroll 1
    for (int n = thread; n < count; n += Team::threads) shared_store(&list->tile[n], uint16_t(n));
    if (thread == 0) set_visits(list, first, 0, count);
    Team::barrier();
    return;
  }
#pragma unroll 1
  for (int word = warp; word < words; word += Team::threads / 32) {
    const int tile = first + 32 * word + lane;
    Bool kept = {true, false};
    if (tile < last) kept = classify(tile, tile + 1);
    const uint32_t partial = ballot(kept.may_be_true && kept.may_be_false), full = ballot(!kept.may_be_false);
    if (lane == 0) shared_store(&list->partial[word], partial), shared_store(&list->full[word], full);
  }
  Team::barrier();
  order_visits<Team>(list, first, words, [](int n) { return uint16_t(n); });
}
template <class Team, class List, class Classify> FG_DEVICE void find_visits(List* list, int first, int last, const Classify& classify) {
  list_visits<Team, true>(list, first, last, classify, classify(first, last));
}

// Finds visits where few tiles have a selected key, which may(tile) says: those alone are classified, one by each lane. Their numbers
// are kept in `candidates`, WINDOW of them.
template <class Team, class List, class May, class Classify>
FG_DEVICE void find_selected(List* list, uint16_t* candidates, int first, int last, const May& may, const Classify& classify) {
  const int lane = lane_index(), warp = Team::warp(), words = (last - first + 31) / 32;
  const uint32_t mine = 1u << lane, below = mine - 1;
  Team::barrier();
#pragma unroll 1
  for (int word = warp; word < words; word += Team::threads / 32) {
    const int tile = first + 32 * word + lane;
    const uint32_t found = ballot(tile < last && may(tile));
    if (lane == 0) shared_store(&list->partial[word], found);
  }
  Team::barrier();
  int count = 0;
#pragma unroll 1
  for (int word = 0; word < words; ++word) {
    const uint32_t found = shared_load(&list->partial[word]);
    if (word % (Team::threads / 32) == warp && (found & mine)) shared_store(&candidates[count + popcount(int(found & below))], uint16_t(32 * word + lane));
    count += popcount(int(found));
  }
  Team::barrier();
  const int chunks = (count + 31) / 32;
#pragma unroll 1
  for (int chunk = warp; chunk < chunks; chunk += Team::threads / 32) {
    const int n = 32 * chunk + lane;
    Bool kept = {true, false};
    if (n < count) {
      const int tile = first + int(shared_load(&candidates[n]));
      kept = classify(tile, tile + 1);
    }
    const uint32_t partial = ballot(kept.may_be_true && kept.may_be_false), full = ballot(!kept.may_be_false);
    if (lane == 0) shared_store(&list->partial[chunk], partial), shared_store(&list->full[chunk], full);
  }
  Team::barrier();
  order_visits<Team>(list, first, chunks, [&](int n) { return shared_load(&candidates[n]); });
}

}  // namespace fg
