// Lists of visits that heads share: what tiles visit is found once, for every batch entry and head that the mask does not tell apart,
// by kernels of its own. A mask that depends on positions alone, and keeps many runs of keys of a row, has them once for a shape: the
// host keeps them (flashgen/hosts/schedule.py), for later calls, too. For a mask that reads captured tensors they are found for a call, in
// the workspace. Where there are none, or too few blocks would read them, blocks find what they visit.
#pragma once
#include "flashgen/visits.cuh"

namespace fg {

// A list has for each window first CHUNK bytes that begin with two numbers of 16 bits, how many tiles are PARTIAL and how
// many are listed, then the tiles, counted from the window's first.
constexpr int CHUNK = 16, TILES_OF_CHUNK = CHUNK / sizeof(uint16_t), CHUNKS = WINDOW / TILES_OF_CHUNK;
FG_DEVICE int chunks_of(int tiles) { return int((unsigned(tiles) + TILES_OF_CHUNK - 1) / TILES_OF_CHUNK); }
FG_DEVICE int chunks_of_list(int visited) { return int((unsigned(visited) + WINDOW - 1) / WINDOW) + chunks_of(visited); }
// The first chunk of a window, by its first tile.
template <class Chunk> FG_DEVICE Chunk* window_of(Chunk* list, int first) { return list + unsigned(first) / WINDOW * (1 + CHUNKS); }

// Where Spec::longest_first, those of a mask lie longest first, each with its tile behind the first window's counts. Blocks take them in this order, so
// that no long one begins last: one list after another, by neighbours for the heads of a group that shares it. A group is as
// large as the cache holds what all its blocks read. So many heads in a row are `sharers` of a mask.
struct WorkTile {
  int head, list;  // the head counted through the batch
};
template <class Spec> FG_DEVICE WorkTile work_tile_of(unsigned block, [[maybe_unused]] unsigned sharers, unsigned group, unsigned tiles) {
  const unsigned first = block / (tiles * group) * group, place = block - first * tiles, list = place / group;
  const unsigned head = first + (place - list * group);
  return {int(head), int((Spec::masks_by_batch ? head / sharers * tiles : 0) + list)};
}
FG_DEVICE const uint4* list_of(const uint4* lists, const WorkTile& tile, int visited) {
  return lists ? lists + tile.list * chunks_of_list(visited) : nullptr;
}
// All that a block does waits for this read: while one lane of a warp reads which tile the list is of, the others touch the rest
// of it, which is near when it is taken.
FG_DEVICE int tile_of(const uint4* list, int visited) {
  const int near = min(8 * lane_index(), chunks_of_list(visited) - 1);
  return int(shuffle(global_load(reinterpret_cast<const uint32_t*>(list + near) + 1), 0));
}

// The list of a tile of `tiles` under the mask of a batch entry and head, of `visited` tiles; null where there are no lists.
template <class Arguments>
FG_DEVICE const uint4* list_of(const Arguments& a, const uint4* lists, int b, int h, int tile, int tiles, int visited) {
  return lists ? lists + (mask_of(a, b, h) * tiles + tile) * chunks_of_list(visited) : nullptr;
}

FG_DEVICE int partials_of(uint32_t counts) { return int(counts & 0xffff); }
FG_DEVICE int visits_of(uint32_t counts) { return int(counts >> 16); }

// Visits from a list where there is one, else as find_visits finds them.
template <class Team, class List, class Classify>
FG_DEVICE void take_visits(List* list, const uint4* shared, int first, int last, const Classify& classify) {
  if (!shared) return find_visits<Team>(list, first, last, classify);
  constexpr int most = (CHUNKS + Team::threads - 1) / Team::threads;  // of a thread
  const uint4* const window = window_of(shared, first);
  const int thread = Team::thread(), chunks = chunks_of(last - first);
  uint4 chunk[most] = {};
  uint32_t counts = 0;
#pragma unroll
  for (int n = 0; n < most; ++n)
    if (thread + n * Team::threads < chunks) chunk[n] = global_load(window + 1 + thread + n * Team::threads);
  if (thread == 0) counts = global_load(reinterpret_cast<const uint32_t*>(window));
  Team::barrier();
#pragma unroll
  for (int n = 0; n < most; ++n) {
    const int at = thread + n * Team::threads;
    if (at >= chunks) break;
    uint32_t* const words = reinterpret_cast<uint32_t*>(list->tile + TILES_OF_CHUNK * at);
    shared_store(words, chunk[n].x), shared_store(words + 1, chunk[n].y);
    shared_store(words + 2, chunk[n].z), shared_store(words + 3, chunk[n].w);
  }
  if (thread == 0) set_visits(list, first, partials_of(counts), visits_of(counts));
  Team::barrier();
}

// Visits of the first window, in parts: the list is copied; once that is there, which tile it is of is known, and it takes
// the place of another list, where its visits count from `number` on. The first thread of those who copy has what it may read
// before the others have waited: how many visits there are, of which tile, and the first of them.
constexpr int COPIED_BYTES = CHUNK * (1 + CHUNKS);
template <class Team> FG_DEVICE void copy_visits_async(uint4* copied, const uint4* shared, int visited) {
  const int chunks = chunks_of(min(visited, WINDOW));
  if (Team::thread() == 0) copy_async_16(copied, shared, true);
#pragma unroll 1
  for (int n = Team::thread(); n < chunks; n += Team::threads) copy_async_16(copied + 1 + n, shared + 1 + n, true);
  copy_async_commit();
}
FG_DEVICE uint32_t counts_of_copied(const uint4* copied) { return shared_load(reinterpret_cast<const uint32_t*>(copied)); }
FG_DEVICE int tile_of_copied(const uint4* copied) { return int(shared_load(reinterpret_cast<const uint32_t*>(copied) + 1)); }
FG_DEVICE uint16_t visit_of_copied(const uint4* copied, int n) { return shared_load(reinterpret_cast<const uint16_t*>(copied + 1) + n); }
template <class Team, class List> FG_DEVICE void take_copied_visits(List* list, const uint4* copied, int number) {
  const uint32_t counts = counts_of_copied(copied);
#pragma unroll 1
  for (int n = Team::thread(); n < visits_of(counts); n += Team::threads) shared_store(&list->tile[number + n], visit_of_copied(copied, n));
  if (Team::thread() == 0) set_visits(list, 0, number + partials_of(counts), number + visits_of(counts));
  Team::barrier();
}

namespace lists {

// One block a list.
using Team = Team<128, 0>;

// Writes one, and returns the number of its visits.
template <class List, class Classify> FG_DEVICE int write(uint4* list, int visited, const Classify& classify) {
  List* const found = reinterpret_cast<List*>(shared_memory());
  const int thread = int(threadIdx.x);
  int length = 0;
#pragma unroll 1
  for (int first = 0; first < visited; first += WINDOW) {
    const int last = min(first + WINDOW, visited);
    find_visits<Team>(found, first, last, classify);
    uint4* const window = window_of(list, first);
    const int count = shared_load(&found->count);
    length += count;
    if (thread == 0) global_store(window, make_uint4(uint32_t(shared_load(&found->partials)) | uint32_t(count) << 16, 0, 0, 0));
    const auto tile = [&](int n) { return n < count ? uint32_t(shared_load(&found->tile[n])) : 0; };
#pragma unroll 1
    for (int at = thread; at < chunks_of(last - first); at += Team::threads) {
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) words[k] = tile(TILES_OF_CHUNK * at + 2 * k) | tile(TILES_OF_CHUNK * at + 2 * k + 1) << 16;
      global_store(window + 1 + at, make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
  return length;
}

// Where the lists of all masks and tiles lie. Where the longest come first they are as found behind these, in the order of their
// numbers; then how many visits each has.
struct Memory {
  uint4* lists;
  int tiles, count, chunks;  // lists of a mask; of all; chunks of each

  FG_DEVICE uint4* list(int n) const { return lists + n * chunks; }
  FG_DEVICE uint4* found(int n) const { return list(count + n); }
  FG_DEVICE uint32_t* lengths() const { return reinterpret_cast<uint32_t*>(list(2 * count)); }
};
template <class Arguments> FG_DEVICE Memory memory_of(const Arguments& a, uint4* lists, int tiles, int visited) {
  return {lists, tiles, int(masks_of(a)) * tiles, chunks_of_list(visited)};
}
template <class P, class Arguments> FG_DEVICE Memory memory_of_queries(const Arguments& a) {
  return memory_of(a, a.visits_of_queries, (int(a.q_len) + P::BR - 1) / P::BR, (int(a.kv_len) + P::BC - 1) / P::BC);
}
template <class P, class Arguments> FG_DEVICE Memory memory_of_keys(const Arguments& a) {
  return memory_of(a, a.visits_of_keys, (int(a.kv_len) + P::BC - 1) / P::BC, (int(a.q_len) + P::BR - 1) / P::BR);
}

// The block's number is that of its list.
template <class Spec, class Classify> FG_DEVICE void make(const Memory& memory, int visited, const Classify& classify) {
  using List = VisitList<Spec::words_of_notes>;
  const int number = block_index();
  if constexpr (Spec::longest_first) {
    const int length = write<List>(memory.found(number), visited, classify);
    if (threadIdx.x == 0) global_store(memory.lengths() + number, uint32_t(length));
  } else {
    write<List>(memory.list(number), visited, classify);
  }
}
template <class Spec, class P> FG_DEVICE void of_queries(const typename Spec::Arguments& a) {
  const int tiles = (int(a.q_len) + P::BR - 1) / P::BR, visited = (int(a.kv_len) + P::BC - 1) / P::BC;
  const int block = block_index(), mask = block / tiles, row0 = (block - mask * tiles) * P::BR;
  const int b = batch_of_mask(a, mask), h = head_of_mask(a, mask);
  const auto u = make_launch(a);
  const auto x = make_head(a, u, b, h);
  make<Spec>(memory_of_queries<P>(a), visited, KeyTiles<Spec, P::BR, P::BC>{a, u, x, b * int(a.heads) + h, {row0, min(P::BR, int(a.q_len) - row0)}});
}
template <class Spec, class P> FG_DEVICE void of_keys(const typename Spec::Arguments& a) {
  const int tiles = (int(a.kv_len) + P::BC - 1) / P::BC, visited = (int(a.q_len) + P::BR - 1) / P::BR;
  const int block = block_index(), mask = block / tiles, column0 = (block - mask * tiles) * P::BC;
  const int b = batch_of_mask(a, mask), h = head_of_mask(a, mask);
  const auto u = make_launch(a);
  const auto x = make_head(a, u, b, h);
  make<Spec>(memory_of_keys<P>(a), visited, QueryTiles<Spec, P::BR, P::BC>{a, u, x, b * int(a.heads) + h, {column0, min(P::BC, int(a.kv_len) - column0)}});
}

// Longest first: a warp brings one list to its place: behind those that are longer, or as long and before it.
FG_DEVICE void order(const Memory& memory) {
  const int number = block_index() * (Team::threads / 32) + warp_index(), lane = lane_index();
  if (number >= memory.count) return;
  const uint32_t* const lengths = memory.lengths();
  const uint32_t length = global_load(lengths + number);
  const int first = number / memory.tiles * memory.tiles;  // of the mask
  int place = 0;
#pragma unroll 4
  for (int n = first + lane; n < first + memory.tiles; n += 32) {
    const uint32_t other = global_load(lengths + n);
    place += other > length || (other == length && n < number);
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) place += shuffle_xor(place, mask);
#pragma unroll 4
  for (int n = lane; n < memory.chunks; n += 32) {
    uint4 chunk = global_load(memory.found(number) + n);
    if (n == 0) chunk.y = uint32_t(number - first);
    global_store(memory.list(first + place) + n, chunk);
  }
}

}  // namespace lists

}  // namespace fg
