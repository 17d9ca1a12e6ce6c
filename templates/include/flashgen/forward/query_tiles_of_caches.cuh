// Over caches a tile has queries of the heads that share a key/value head, and a part of the keys.
#pragma once
#include "flashgen/forward/state.cuh"

namespace fg::forward {

template <class Base> struct QueryTilesOfCaches : Base {
  using typename Base::Spec, typename Base::P, typename Base::Head, typename Base::Place, typename Base::Arguments, typename Base::Launch, typename Base::Column;
  using typename Base::Memory, typename Base::Team;
  using Base::a, Base::u, Base::x, Base::kv_len, Base::visits, Base::BR, Base::BC, Base::tiles, Base::row_count;
  using Base::Base;

  // A tile of the rows of a key/value head, by its number.
  FG_DEVICE Place locate(unsigned number) const {
    const unsigned tiles = (unsigned(a.group_rows) + BR - 1) / BR, head = quotient(number, tiles);
    return {int(head), int(number - head * tiles) * BR};
  }

  // What hooks know of the head, and of where the tile lies.
  FG_DEVICE Head head_of(int h) const {
    Head head = make_head(a, u, 0, h);
    if constexpr (Spec::distance) head.origin = int(a.q_start);
    return head;
  }
  FG_DEVICE void enter(const Place& place) { x = head_of(place.head * group_of(a)); }

  // Over the queries and the heads of a tile.
  struct KeyTilesOfGroup {
    const QueryTilesOfCaches& block;
    int first_head, heads;
    Span queries;

    FG_DEVICE ranges::Bool operator()(int first, int last) const {
      ranges::Bool found = {false, false};
#pragma unroll 1
      for (int h = first_head; h < first_head + heads; ++h) {
        const Head head = block.head_of(h);
        const ranges::Bool kept = KeyTiles<Spec, BR, BC>{block.a, block.u, head, h, queries}(first, last);
        found.may_be_false |= kept.may_be_false, found.may_be_true |= kept.may_be_true;
      }
      return found;
    }
  };
  struct Selected {
    // Of two words of bits together, or of two bits of a word, nothing is known but their ends: blocks are asked for one by one, and so
    // are few queries, as pairs, which takes a fraction of what ranges take.
    static constexpr int BLOCK = Spec::selected_block;
    const KeyTilesOfGroup& of;

    FG_DEVICE bool operator()(int tile) const {
      const Arguments& a = of.block.a;
      const Launch& u = of.block.u;
      const int i = int(a.q_start) + of.queries.first, end = i + of.queries.count;
      const int first = int(a.kv_start) + tile * BC, last = int(a.kv_start) + min(tile * BC + BC, of.block.kv_len) - 1;
      bool may = false;
#pragma unroll 1
      for (int h = of.first_head; h < of.first_head + of.heads; ++h) {
        const Head x = of.block.head_of(h);
#pragma unroll 1
        for (int j = first; j <= last; j = j / BLOCK * BLOCK + BLOCK) {
          if (of.queries.count > Spec::few_queries) {
            may |= selected_range(a, u, x, {i, end - 1}, {j, min(j / BLOCK * BLOCK + BLOCK - 1, last)}).may_be_true;
            continue;
          }
          const Column c = make_column(a, u, x, j);
#pragma unroll 1
          for (int n = i; n < end; ++n) may |= is_selected(a, u, x, make_row(a, u, x, n), c);
        }
      }
      return may;
    }
  };
  // What a tile visits of the window at key tile `window`, before key tile `end`, where some keys are selected.
  FG_DEVICE void find_window(const Place& place, int window, int end) {
    const auto of = classify(place);
    const int last = min(window + WINDOW, end);
    static_assert(!P::finds_selected || Memory::V + Memory::V_bytes - Memory::K >= int(WINDOW * sizeof(uint16_t)), "K and V leave room");
    if constexpr (!P::finds_selected) find_visits<Team>(visits.list, window, last, of);
    else find_selected<Team>(visits.list, reinterpret_cast<uint16_t*>(this->memory + Memory::K), window, last, Selected{of}, of);
  }
  FG_DEVICE KeyTilesOfGroup classify(const Place& place) const {
    const int group = group_of(a), last_row = place.row0 + row_count(place) - 1;
    const int first = int(position_of(place.row0, group)), last = int(position_of(last_row, group));
    if constexpr (Spec::masks_by_head) {
      const bool is_whole = last > first;
      const int first_head = is_whole ? 0 : place.row0 - first * group, heads = is_whole ? group : row_count(place);
      return {*this, place.head * group + first_head, heads, {first, last - first + 1}};
    } else {
      return {*this, place.head * group, 1, {first, last - first + 1}};
    }
  }
  // The tiles of a part of the keys.
  FG_DEVICE int tiles_of_part() const { return int(quotient(unsigned(tiles()) + unsigned(a.splits) - 1, unsigned(a.splits))); }
};

}  // namespace fg::forward
