// By blocks of keys: which queries list a block.
//
// Two kernels turn the lists. The first counts how many queries of a span list each block of keys; a query learns how many came before it,
// in which order is of no matter, as each row is computed by itself. The second knows by the counts where the queries of a block begin, and
// brings them there.
#pragma once
#include "flashgen/reduce.cuh"
#include "flashgen/visits.cuh"

namespace by_blocks {

constexpr int UNIT = 8;           // rows that lanes hold half of an accumulator of: heads that share keys are whole units
constexpr float NO_PART = -1.0f;  // in the place of a sum

// Positions are counted from the first query.
template <class Spec, class Head> FG_DEVICE void place_origin([[maybe_unused]] Head& head, [[maybe_unused]] int origin) {
  if constexpr (Spec::distance) head.origin = origin;
}
FG_DEVICE int group_of(const Arguments& a) { return int(a.heads) / int(a.kv_heads); }
FG_DEVICE int blocks_of(const Arguments& a) { return (int(a.kv_len) + BLOCK - 1) / BLOCK; }
FG_DEVICE int spans_of(const Arguments& a) { return (int(a.q_len) + QUERIES - 1) / QUERIES; }  // of queries whose lists are turned together
// Items that these may have at most: each block of keys has one more than it fills.
FG_DEVICE int units_of_query(const Arguments& a) { return group_of(a) / UNIT; }
FG_DEVICE int items_of_span(const Arguments& a) { return QUERIES / ITEM * units_of_query(a) * numbers_of(a) + blocks_of(a); }

FG_DEVICE Head head_of(const Arguments& a, const Launch& u, int b, int h) {
  Head head = make_head(a, u, b, h);
  place_origin<Spec>(head, int(a.q_start));
  return head;
}

// Some queries of a key/value head, by their number.
struct Span {
  int b, kv_head, first, count;
  int64_t head;  // counted through the batch
};
FG_DEVICE Span span_of(const Arguments& a, unsigned number) {
  const unsigned spans = unsigned(spans_of(a)), head = number / spans, b = head / unsigned(a.kv_heads);
  const int first = int(number - head * spans) * QUERIES;
  return {int(b), int(head - b * unsigned(a.kv_heads)), first, fg::min(QUERIES, int(a.q_len) - first), int64_t(head)};
}

// A query of a span, and at which place of its list a block of keys stands, in a word.
FG_DEVICE uint32_t entry_of(int query, int place) { return uint32_t(query) | uint32_t(place) << 16; }
FG_DEVICE int query_of(uint32_t entry) { return int(entry & 0xffff); }
FG_DEVICE int place_of(uint32_t entry) { return int(entry >> 16); }


constexpr int LISTERS = 256;  // threads of a block of either
constexpr uint32_t NOT_LISTED = ~0u;
static_assert(QUERIES % COUNTED == 0 && QUERIES % BROUGHT == 0 && QUERIES <= 4096, "a span has whole blocks of threads");

// What a number of a list becomes: its block, and how many queries of the span listed that before.
FG_DEVICE uint32_t rank_of(uint32_t block, uint32_t before) { return block << 12 | before; }

// Some queries of a head, `count` of which a block of threads has; its number.
template <int count> FG_DEVICE Span part_of_span(const Arguments& a, unsigned number, int& own) {
  const unsigned each = QUERIES / count, of_span = number / each;
  own = int(number - of_span * each) * count;
  return span_of(a, of_span);
}

template <class T> FG_DEVICE void count_queries(const Arguments& a) {
  int own;
  const Span span = part_of_span<COUNTED>(a, unsigned(fg::block_index()), own);
  const unsigned of_span = unsigned(fg::block_index()) / (QUERIES / COUNTED);
  const Launch u = make_launch(a);
  [[maybe_unused]] const Head x = head_of(a, u, span.b, span.kv_head * group_of(a));
  const int numbers = numbers_of(a), at_once = 32 / numbers, lane = fg::lane_index(), warp = fg::warp_index();
  const int of_lane = int(unsigned(lane) / unsigned(numbers)), place = lane - of_lane * numbers, units = units_of_query(a);
  const int64_t blocks = blocks_of(a);
  constexpr int of_warp = COUNTED / (LISTERS / 32);
#pragma unroll 1
  for (int first = 0; first < of_warp; first += at_once) {
    const int n = own + warp * of_warp + first + of_lane;  // of the span
    const bool is_query = of_lane < at_once && first + of_lane < of_warp && n < span.count;
    int64_t block = -1;
    if (is_query) {
      [[maybe_unused]] const Row r = make_row(a, u, x, int(a.q_start) + span.first + n);
      block = fg::global_load(number_of_list(a, u, x, r, place));
    }
    const bool is_block = block >= 0 && block < blocks;
    const int own_block = is_block ? int(block) : -1;
    bool is_new = is_block;  // and not one of those that stand before it
#pragma unroll 1
    for (int back = 1; back < numbers; ++back) {
      const int other = fg::shuffle(own_block, (lane - back) & 31);
      is_new = is_new && (place < back || other != own_block);
    }
    if (!is_query) continue;
    const int64_t query = span.head * a.q_len + span.first + n;
    uint32_t rank = NOT_LISTED;
    if (is_new) {
      rank = rank_of(uint32_t(own_block), fg::global_next(Parts::counts(a) + int64_t(of_span) * blocks + own_block));
    } else {  // no part
#pragma unroll 1
      for (int row = 0; row < units * UNIT; ++row)
        fg::global_store(Parts::rows(a) + ((query * units + row / UNIT) * numbers + place) * UNIT + row % UNIT, make_float2(-INFINITY, NO_PART));
    }
    fg::global_store(Parts::ranks(a) + query * numbers + place, rank);
  }
}

// The sums of lanes up to this one.
FG_DEVICE int summed_up(int value) {
  const int lane = fg::lane_index();
#pragma unroll
  for (int far = 1; far < 32; far *= 2) {
    const int other = fg::shuffle(value, (lane - far) & 31);
    if (lane >= far) value += other;
  }
  return value;
}

template <class T> FG_DEVICE void bring_queries(const Arguments& a) {
  int own;
  const Span span = part_of_span<BROUGHT>(a, unsigned(fg::block_index()), own);
  const int number = int(unsigned(fg::block_index()) / (QUERIES / BROUGHT));  // of the span
  const int thread = int(threadIdx.x), own_warp = fg::warp_index(), blocks = blocks_of(a), numbers = numbers_of(a), units = units_of_query(a);
  int* const starts = reinterpret_cast<int*>(fg::shared_memory());  // of the queries of each block of keys
  int2* const sums = reinterpret_cast<int2*>(starts + MOST_BLOCKS);  // of warps
  const uint32_t* const counts = Parts::counts(a) + int64_t(number) * blocks;

  // A thread has some neighbouring blocks: how many queries and items those before have.
  const int each = (blocks + LISTERS - 1) / LISTERS, begin = thread * each, end = fg::min(begin + each, blocks);
  int listed = 0, items = 0;
#pragma unroll 4
  for (int n = begin; n < end; ++n) {
    const int count = int(fg::global_load(counts + n));
    fg::shared_store(starts + n, count);
    listed += count, items += (count * units + ITEM - 1) / ITEM;
  }
  const int upto_listed = summed_up(listed), upto_items = summed_up(items);
  if (fg::lane_index() == 31) fg::shared_store(sums + own_warp, make_int2(upto_listed, upto_items));
  fg::block_barrier();
  int at = upto_listed - listed, item = upto_items - items;
#pragma unroll 1
  for (int warp = 0; warp < own_warp; ++warp) {
    const int2 before = fg::shared_load(sums + warp);
    at += before.x, item += before.y;
  }
  uint4* const to_items = Parts::items(a) + int64_t(number) * items_of_span(a);
#pragma unroll 1
  for (int n = begin; n < end; ++n) {
    const int count = int(fg::shared_load(starts + n));
    fg::shared_store(starts + n, at);
#pragma unroll 1
    for (int first = 0; own == 0 && first < count * units; first += ITEM)  // by the first block of threads of the span
      fg::global_store(to_items + item++, make_uint4(uint32_t(n), uint32_t(at), uint32_t(first), uint32_t(fg::min(ITEM, count * units - first))));
    at += count;
  }
  if (own == 0 && thread == LISTERS - 1) fg::global_store(Parts::item_counts(a) + number, uint32_t(item));
  fg::block_barrier();

  const int count = fg::min(BROUGHT, span.count - own) * numbers;
  const uint32_t* const ranks = Parts::ranks(a) + (span.head * a.q_len + span.first + own) * numbers;
  uint32_t* const entries = Parts::listed(a) + int64_t(number) * QUERIES * numbers;
#pragma unroll 4
  for (int n = thread; n < count; n += LISTERS) {
    const uint32_t rank = fg::global_load(ranks + n);
    if (rank == NOT_LISTED) continue;
    const unsigned query = unsigned(n) / unsigned(numbers), place = unsigned(n) - query * unsigned(numbers);
    fg::global_store(entries + fg::shared_load(starts + (rank >> 12)) + (rank & 0xfff), entry_of(own + int(query), int(place)));
  }
}

}  // namespace by_blocks
