// Lists of visits that calls share, and what the passes look visits up in.
//
// Of masks that depend on positions alone, where a row may keep many runs of keys. What query tiles visit is found once
// for a shape and kept, for every batch entry and head that the mask tells apart: heads, batch entries and later calls
// share it. A library holds LIST_BYTES of lists; those that were not asked for longest make room. Where one would be
// larger none is made, and tasks find their visits as they go.
#pragma once
#include "flashgen/cpu/visits.h"

namespace {

constexpr int64_t LIST_BYTES = int64_t(8) << 20;

// The list of query tile n % tiles of mask n / tiles is visits first[n] … first[n + 1] - 1.
struct Lists {
  std::vector<int64_t> first;  // empty where the lists would be too large
  std::vector<Visit> visits;

  bool are_made() const { return !first.empty(); }
  int64_t bytes() const { return int64_t(first.size() * sizeof(int64_t) + visits.size() * sizeof(Visit)); }
  const Visit* of(int64_t n) const { return visits.data() + first[size_t(n)]; }
  int count(int64_t n) const { return int(first[size_t(n) + 1] - first[size_t(n)]); }
};

// The lists of one library, the last that was asked for first. Calls hold on to what they use, whoever drops it here.
template <class Question> class ListCache {
 public:
  std::shared_ptr<const Lists> find(const Question& question) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return found(question);
  }
  // What is held from now on: another thread may have been here first.
  std::shared_ptr<const Lists> keep(const Question& question, const std::shared_ptr<const Lists>& lists) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (const auto others = found(question)) return others;
    entries_.insert(entries_.begin(), {question, lists});
    bytes_ += lists->bytes();
    while (entries_.size() > MOST_ENTRIES || bytes_ > LIST_BYTES) {
      bytes_ -= entries_.back().lists->bytes();
      entries_.pop_back();
    }
    return lists;
  }

 private:
  struct Entry {
    Question question;
    std::shared_ptr<const Lists> lists;
  };
  static constexpr size_t MOST_ENTRIES = 64;

  std::shared_ptr<const Lists> found(const Question& question) {
    for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
      if (std::memcmp(entry->question.data(), question.data(), question.size() * sizeof(double)) != 0) continue;
      std::rotate(entries_.begin(), entry, entry + 1);
      return entries_.front().lists;
    }
    return nullptr;
  }

  std::mutex mutex_;
  std::vector<Entry> entries_;
  int64_t bytes_ = 0;
};

template <class Spec>
std::shared_ptr<const Lists> make_lists(const Arguments& a, const Launch& u, int tile_rows, int tile_columns) {
  const int64_t tiles = ceil_div(a.q_len, tile_rows), count = Spec::masks_of(a) * tiles;
  auto lists = std::make_shared<Lists>();
  const int64_t most = (LIST_BYTES - (count + 1) * int64_t(sizeof(int64_t))) / int64_t(sizeof(Visit));
  if (most < 0) return lists;
  std::vector<int64_t> first(size_t(count) + 1);
  std::vector<std::vector<Visit>> parts(size_t(a.threads));  // of the threads, each a run of lists
  std::atomic<int64_t> found{0};
  run_in_team(a.threads, [&] {
    const fg::FlushSubnormals flush;
    std::vector<Visit>& mine = parts[size_t(thread_index())];
    std::vector<Visit> visits(size_t(ceil_div(a.kv_len, tile_columns)));
#pragma omp for schedule(static)
    for (int64_t n = 0; n < count; ++n) {
      if (found > most) continue;
      const int64_t b = Spec::batch_of_mask(a, n / tiles), h = Spec::head_of_mask(a, n / tiles);
      const int64_t row0 = n % tiles * tile_rows;
      const int rows = int(std::min<int64_t>(tile_rows, a.q_len - row0));
      const int visited = find_visits(a, u, make_head(a, u, b, h), row0, rows, tile_columns, nullptr, visits.data());
      first[size_t(n) + 1] = visited;
      found += visited;
      mine.insert(mine.end(), visits.begin(), visits.begin() + visited);
    }
  });
  if (found > most) return lists;
  for (size_t n = 1; n < first.size(); ++n) first[n] += first[n - 1];
  lists->first = std::move(first);
  lists->visits.reserve(size_t(int64_t(found)));
  for (const std::vector<Visit>& part : parts) lists->visits.insert(lists->visits.end(), part.begin(), part.end());
  return lists;
}

// Null where the library keeps none.
template <class Spec>
std::shared_ptr<const Lists> lists_of(const Arguments& a, const Launch& u, int tile_rows, int tile_columns) {
  if constexpr (Spec::keeps_lists) {
    const auto question = Spec::question_of(a, tile_rows, tile_columns);  // all that lists depend on
    using Cache = ListCache<std::decay_t<decltype(question)>>;
    static Cache& list_cache = *new Cache;  // never destroyed: threads may still run when a process ends
    const std::shared_ptr<const Lists> lists = list_cache.find(question);
    return lists != nullptr ? lists : list_cache.keep(question, make_lists<Spec>(a, u, tile_rows, tile_columns));
  } else {
    return nullptr;
  }
}

// ---- The visits of a query tile, as both passes find them ----------------------------------------------------------

// What visits are found with: what the mask reads of keys, lists where the library keeps them, and a thread's own
// memory for as many visits as there are key tiles.
struct Lookup {
  const ColumnBounds* trees;
  const Lists* lists;
  Visit* own;
};
struct Visits {
  const Visit* at;
  int count;
};
// Of rows row0 … row0 + rows - 1 of query tile `query_tile`, tiles having `tile_rows`.
inline Visits visits_of(const Call& a, const Launch& u, const Head& x, int64_t b, int64_t h, int64_t query_tile,
                        int64_t tile_rows, int64_t row0, int rows, int tile_columns, const Lookup& lookup) {
  if (Spec::keeps_lists && lookup.lists->are_made()) {
    const int64_t list = Spec::mask_of(a, b, h) * ceil_div(a.q_len, tile_rows) + query_tile;
    return {lookup.lists->of(list), lookup.lists->count(list)};
  }
  const ColumnBounds* const tree = tree_of(a, lookup.trees, b, h, tile_columns);
  return {lookup.own, find_visits(a, u, x, row0, rows, tile_columns, tree, lookup.own)};
}

// The work of query tile n % tiles under mask n / tiles.
inline int32_t work_of_tile(const Call& a, const Launch& u, int64_t n, int64_t tiles, int tile_rows, int tile_columns,
                            const Lookup& lookup) {
  if (Spec::keeps_lists && lookup.lists->are_made()) return 1 + lookup.lists->count(n);
  return work_of(a, u, n / tiles, n % tiles, tile_rows, tile_columns, lookup.trees, lookup.own);
}

}  // namespace
