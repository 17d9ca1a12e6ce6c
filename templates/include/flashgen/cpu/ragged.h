// Ragged batches: sequences of any lengths, one behind the other. Each is a call of its own, of one batch entry, whose
// passes are those of dense calls; what is shared is the team of threads: work comes in pieces, those of the longest
// sequences first.
//
// Included behind `NumbersOfSequences`, which a generated source prints.
#pragma once
#include "flashgen/cpu/backward.h"
#include "flashgen/cpu/forward.h"

namespace {

// The sequences. Or their keys are in a cache: each has the same number of queries, its last ones. Both are checked by
// the caller.
struct Ragged {
  int64_t sequences;
  const int32_t *q_starts,
      *k_starts;  // where they begin among the rows of q and of k and v, [sequences + 1]; null for a cache
  const int32_t *lengths,
      *padding;  // of a cache: its rows by sequence, [sequences]; those in front that are not to be seen
  const int32_t *entries, *blocks;  // and which entry of the cache it is, or its pages, [sequences, blocks_each]
  int64_t blocks_each, page_rows;
  int64_t splits;                    // of the keys of each query tile; 0: as many as lengths ask for
  int64_t key_element;               // of a cache
  const float *k_scales, *v_scales;  // what its numbers are multiplied by, [sequences, kv_heads]; null: 1
  NumbersOfSequences numbers;
};

namespace ragged {

inline int64_t q_len(const Arguments& all, const Ragged& r, int64_t number) {
  return r.q_starts ? r.q_starts[number + 1] - int64_t(r.q_starts[number]) : all.q_len;
}
inline int64_t kv_len(const Ragged& r, int64_t number) {
  return r.k_starts ? r.k_starts[number + 1] - int64_t(r.k_starts[number])
                    : r.lengths[number] - int64_t(r.padding[number]);
}

// One sequence of a cache as a call: a dense one that is a part of the whole, its last rows and the keys from the first
// that is seen on. q, o and lse are [B, H, N, …], k and v [entries or pages, Hkv, rows, width].
inline Call cached_sequence_of(const Arguments& all, const Ragged& r, int64_t number) {
  Call a = packed(all);
  const int64_t bytes = element_bytes(all.element), key_bytes = element_bytes(int(r.key_element)),
                before = r.padding[number], length = r.lengths[number];
  const int64_t entry = r.blocks ? 0 : r.entries[number], rows = r.blocks ? 0 : before;
  const auto from = [](const void* at, int64_t offset, int64_t each) -> const void* {
    return static_cast<const char*>(at) + offset * each;
  };
  a.q = from(all.q, number * all.q_stride_b, bytes), a.o = static_cast<char*>(all.o) + number * a.rows_of_o.b * bytes;
  a.lse = all.lse ? all.lse + number * a.rows_of_lse.b : nullptr;
  a.k = from(all.k, entry * all.k_stride_b + rows * all.k_stride_n, key_bytes);
  a.v = from(all.v, entry * all.v_stride_b + rows * all.v_stride_n, key_bytes);
  a.key_element = int(r.key_element);
  if (r.k_scales) a.k_scales = r.k_scales + number * all.kv_heads;
  if (r.v_scales) a.v_scales = r.v_scales + number * all.kv_heads;
  if (r.blocks) {
    const int32_t* const table = r.blocks + number * r.blocks_each;
    a.k_pages = {table, r.page_rows, all.k_stride_b, before}, a.v_pages = {table, r.page_rows, all.v_stride_b, before};
  }
  a.batch = 1, a.b_start = all.b_start + number;
  a.kv_start = before, a.kv_len = length - before, a.q_start = length - all.q_len;
  a.q_total = a.kv_total = length;
  put_heads_into_rows(a);
  r.numbers.put(a, number);
  return a;
}

// One sequence as a call. Of the whole, `all`, the lengths are sums over sequences; rows are [T, heads, width], those
// of lse [heads, T].
inline Call sequence_of(const Arguments& all, const Ragged& r, int64_t number) {
  if (!r.q_starts) return cached_sequence_of(all, r, number);
  Call a{};
  static_cast<Arguments&>(a) = all;
  a.key_element = a.element;
  const int64_t q0 = r.q_starts[number], k0 = r.k_starts[number], bytes = element_bytes(all.element);
  const auto from = [bytes](const void* at, int64_t row, int64_t stride) -> const void* {
    return at ? static_cast<const char*>(at) + row * stride * bytes : nullptr;
  };
  const auto to = [bytes](void* at, int64_t row, int64_t stride) -> void* {
    return at ? static_cast<char*>(at) + row * stride * bytes : nullptr;
  };
  a.rows_of_o = {0, all.o_stride_h, all.o_stride_n}, a.rows_of_dq = {0, all.dq_stride_h, all.dq_stride_n};
  a.rows_of_dk = {0, all.dk_stride_h, all.dk_stride_n}, a.rows_of_dv = {0, all.dv_stride_h, all.dv_stride_n};
  a.rows_of_lse = {0, all.q_len, 1};
  a.q = from(all.q, q0, all.q_stride_n), a.k = from(all.k, k0, all.k_stride_n), a.v = from(all.v, k0, all.v_stride_n);
  a.o = to(all.o, q0, a.rows_of_o.n), a.d_o = from(all.d_o, q0, all.d_o_stride_n);
  a.dq = to(all.dq, q0, a.rows_of_dq.n), a.dk = to(all.dk, k0, a.rows_of_dk.n), a.dv = to(all.dv, k0, a.rows_of_dv.n);
  a.lse = all.lse ? all.lse + q0 : nullptr, a.lse_parts = all.lse_parts ? all.lse_parts + 2 * q0 : nullptr;
  a.d_lse = all.d_lse ? all.d_lse + q0 : nullptr;
  a.batch = 1, a.b_start = all.b_start + number;
  a.q_len = a.q_total = a.queries = q_len(all, r, number), a.kv_len = a.kv_total = kv_len(r, number);
  r.numbers.put(a, number);
  return a;
}

// The longest sequence and the pairs of all.
struct Totals {
  int64_t q_len, kv_len, pairs, sequences;
};
inline Totals totals_of(const Arguments& all, const Ragged& r, const std::vector<int32_t>& numbers) {
  Totals t{};
  for (const int32_t number : numbers) {
    t.q_len = std::max(t.q_len, q_len(all, r, number)), t.kv_len = std::max(t.kv_len, kv_len(r, number));
    t.pairs += q_len(all, r, number) * kv_len(r, number), t.sequences += 1;
  }
  return t;
}

// perform(products, numbers) for the sequences that the same kind of products goes with. Each gets the kind of its
// dense call.
template <class Perform>
inline void for_each_kind(const Arguments& all, const Ragged& r, const Perform& perform) {
  std::array<std::vector<int32_t>, KINDS_OF_PRODUCTS> numbers;
  for (int64_t n = 0; n < r.sequences; ++n)
    if (q_len(all, r, n) > 0 || kv_len(r, n) > 0)
      numbers[products_of(all, q_len(all, r, n))].push_back(int32_t(n));
  for (int kind = KINDS_OF_PRODUCTS - 1; kind >= 0; --kind) {
    if (numbers[kind].empty()) continue;
    Arguments like = all;
    like.q_len = q_len(all, r, numbers[kind][0]);
    with_products(like, [&](auto products) { perform(products, numbers[kind]); });
  }
}

inline int useful_threads(const Arguments& all, const Totals& t, int64_t pieces) {
  const double useful = std::min(double(pieces), double(t.pairs * all.heads) * (D + DV) / double(THREAD_GRAIN));
  return int(std::max(1.0, std::min(double(all.threads), useful)));
}

// What the mask reads of the keys of each sequence.
class Trees {
 public:
  Trees(const Arguments& all, const Ragged& r, const std::vector<int32_t>& numbers, int tile_columns)
      : tile_columns_(tile_columns), first_(numbers.size() + 1) {
    if (!Spec::observed_columns) return;
    for (size_t e = 0; e < numbers.size(); ++e)
      first_[e + 1] =
          first_[e] + (kv_len(r, numbers[e]) == 0 ? 0 : bytes_of_trees(sequence_of(all, r, numbers[e]), tile_columns));
    memory_ = std::make_unique<Memory>(first_.back());
  }
  // Null where it reads none.
  ColumnBounds* of(size_t e) const {
    return memory_ ? reinterpret_cast<ColumnBounds*>(memory_->at(first_[e])) : nullptr;
  }
  void build(size_t e, const Call& a, const Launch& u) const {
    if (a.kv_len == 0) return;
    for (int64_t n = 0; n < trees_of(a); ++n)
      build_tree(a, u, n, tile_columns_, of(e) + n * nodes_of_tree(a, tile_columns_));
  }

 private:
  int tile_columns_;
  std::vector<int64_t> first_;
  std::unique_ptr<Memory> memory_;
};

// The visits of a query tile of batch entry 0 and its first head, or as many as there may be: what orders sequences.
inline int64_t work_of(const Call& a, const Launch& u, int64_t query_tile, int tile_rows, int tile_columns,
                       const Lookup& lookup) {
  // Where heads are rows, other rows than those of the first are no positions.
  if (Spec::keep_everything || a.queries < a.q_len) return 1 + ceil_div(a.kv_len, tile_columns);
  return a.kv_len == 0 ? 1 : ::work_of(a, u, 0, query_tile, tile_rows, tile_columns, lookup.trees, lookup.own);
}

// The part, of those in their order, that a piece is of.
template <class Part> const Part* part_of(const std::vector<Part>& parts, int64_t piece) {
  const auto is_before = [](int64_t n, const Part& each) { return n < each.first; };
  return &*(std::upper_bound(parts.begin(), parts.end(), piece, is_before) - 1);
}

// Lists of visits repay themselves for sequences of many query tiles, of which a batch has few.
constexpr int64_t TILES_WITH_LISTS = 8;
constexpr size_t MOST_LISTS = 16;

template <class Spec> class SequenceLists {
 public:
  // `rows_of(a)`: those of a query tile of a sequence.
  template <class RowsOf>
  SequenceLists(const Arguments& all, const Ragged& r, const std::vector<int32_t>& numbers, int threads,
                int tile_columns, const RowsOf& rows_of) {
    for (size_t e = 0; Spec::keeps_lists && e < numbers.size() && found_.size() < MOST_LISTS; ++e) {
      Call a = sequence_of(all, r, numbers[e]);
      const int tile_rows = rows_of(a);
      if (a.q_len <= TILES_WITH_LISTS * tile_rows) continue;
      a.threads = threads;
      found_.emplace_back(e, lists_of<Spec>(a, make_launch(a), tile_rows, tile_columns));
    }
  }
  const Lists& of(size_t e) const {
    for (const auto& each : found_)
      if (each.first == e) return *each.second;
    return none_;
  }

 private:
  std::vector<std::pair<size_t, std::shared_ptr<const Lists>>> found_;
  const Lists none_{};
};

}  // namespace ragged

// The forward pass of a batch. Pass: Forward.
template <class Spec, class Pass> struct RaggedForward {
  using Products = typename Pass::Products;

  // Of a batch, one sequence.
  struct Part {
    size_t entry;                  // among those of its kind of products
    int64_t tiles, heads, splits;  // a piece is one split of one query tile of so many heads
    int64_t pieces;
    int64_t work;        // of its longest query tile
    int64_t first;       // piece
    int64_t left, each;  // where what splits leave begins, and how long it is, in floats
  };

  static int64_t bytes(const Arguments& all, const ragged::Totals& t) {
    Arguments longest = all;
    longest.kv_len = t.kv_len;
    return Pass::thread_bytes(longest) * all.threads;
  }

  // A short sequence is a piece as a whole, or some heads of it: this many multiplications and additions, at least.
  static constexpr int64_t PIECE_GRAIN = int64_t(1) << 18;

  static void run(const Arguments& all, const Ragged& r, const std::vector<int32_t>& numbers) {
    const ragged::Totals totals = ragged::totals_of(all, r, numbers);
    int64_t most_splits = 1;
    for (const int32_t number : numbers)
      most_splits = std::max(most_splits, Pass::splits_of(ragged::sequence_of(all, r, number), r.splits));
    const int threads =
        ragged::useful_threads(all, totals, totals.sequences * all.heads * ceil_div(totals.q_len, W) * most_splits);
    const auto call_of = [&](size_t entry) {
      Call a = ragged::sequence_of(all, r, numbers[entry]);
      a.threads =
          int(ceil_div(threads, totals.sequences));  // that its own query tiles are for: as in a dense call of all
      return a;
    };
    std::vector<Part> parts;
    int64_t floats = 0;
    for (size_t entry = 0; entry < numbers.size(); ++entry) {
      const Call a = call_of(entry);
      if (a.q_len == 0) continue;
      Part part = {entry, ceil_div(a.q_len, Pass::tile_rows(a)), 1, Pass::splits_of(a, r.splits), 0, 1, 0, floats, 0};
      if (part.splits > 1)
        part.each = Pass::floats_of_split(a), floats += a.heads * part.tiles * part.splits * part.each;
      const int64_t of_head = std::max<int64_t>(1, a.q_len * a.kv_len * (D + DV));
      if (part.tiles == 1)
        part.heads = std::max<int64_t>(
            1, std::min(a.heads, std::min(PIECE_GRAIN / of_head, totals.sequences * a.heads / (8 * threads))));
      part.pieces = part.tiles * ceil_div(a.heads, part.heads) * part.splits;
      parts.push_back(part);
    }
    const Memory left(floats * int64_t(sizeof(float)));
    int64_t pieces = 0;
    const ragged::Trees trees(all, r, numbers, Pass::BC);
    const ragged::SequenceLists<Spec> lists(all, r, numbers, threads, Pass::BC, [&](Call a) {
      a.threads = int(ceil_div(threads, totals.sequences));
      return Pass::tile_rows(a);
    });
    Arguments longest = all;
    longest.kv_len = totals.kv_len;
    char* const workspace = aligned_workspace(all);
    run_in_team(threads, [&] {
      const fg::FlushSubnormals flush;
      [[maybe_unused]] const typename Products::Thread thread;
      char* const mine = workspace + Pass::thread_bytes(longest) * thread_index();
      auto& scratch = *reinterpret_cast<typename Pass::Scratch*>(mine);
      auto* const visits = reinterpret_cast<Visit*>(mine + sizeof(typename Pass::Scratch));
      const auto lookup_of = [&](const Part& part) -> Lookup {
        return {trees.of(part.entry), &lists.of(part.entry), visits};
      };
      // Read by all at once: what they observe of keys, and how long their longest query tile takes.
#pragma omp for schedule(dynamic, 8)
      for (size_t n = 0; n < parts.size(); ++n) {
        Part& part = parts[n];
        const Call a = call_of(part.entry);
        const Launch u = make_launch(a);
        trees.build(part.entry, a, u);
        for (int64_t tile = 0; threads > 1 && tile < part.tiles; ++tile)
          part.work = std::max(part.work, ragged::work_of(a, u, tile, Pass::tile_rows(a), Pass::BC, lookup_of(part)) *
                                              std::min<int64_t>(a.q_len, Pass::tile_rows(a)));
        part.work = ceil_div(part.work, part.splits);
      }
#pragma omp single
      {
        if (threads > 1)
          std::stable_sort(parts.begin(), parts.end(), [](const Part& x, const Part& y) { return x.work > y.work; });
        for (Part& part : parts) {
          part.first = pieces;
          pieces += part.pieces;
        }
      }
      const auto left_by = [&](const Part& of, int64_t h, int64_t query_tile, int64_t n) {
        return reinterpret_cast<float*>(left.at(0)) + of.left + ((h * of.tiles + query_tile) * of.splits + n) * of.each;
      };
      const Part* part = nullptr;
      Call a;
      Launch u;
      divide_tasks(threads, pieces, [&](int64_t piece) {
        if (const Part* const now = ragged::part_of(parts, piece); part != now)
          part = now, a = call_of(part->entry), u = make_launch(a);
        // Head by head, the last query tiles first: under a causal mask they are the longest.
        const int64_t n = (piece - part->first) % part->splits, local = (piece - part->first) / part->splits;
        const int64_t first_head = local / part->tiles * part->heads,
                      query_tile = part->tiles - 1 - local % part->tiles;
        for (int64_t h = first_head; h < std::min(first_head + part->heads, a.heads); ++h) {
          if (part->splits == 1) Pass::tile(a, u, 0, h, query_tile, lookup_of(*part), scratch);
          else
            Pass::split(a, u, 0, h, query_tile, Pass::tiles_of_split(a, n, part->splits), lookup_of(*part),
                        left_by(*part, h, query_tile, n), scratch);
        }
      });
      for (const Part& each : parts) {
        if (each.splits == 1) continue;
        const Call cut = call_of(each.entry);
        const Launch of_cut = make_launch(cut);
#pragma omp for schedule(dynamic) nowait
        for (int64_t n = 0; n < cut.heads * each.tiles; ++n)
          Pass::merge(cut, of_cut, 0, n / each.tiles, n % each.tiles, left_by(each, n / each.tiles, n % each.tiles, 0),
                      each.splits, scratch);
      }
    });
  }
};

// The backward pass of a batch. Pass: Backward.
template <class Spec, class Pass> struct RaggedBackward {
  using Products = typename Pass::Products;

  // Of a batch, one sequence; a piece is one of `chunks` runs of the query tiles of heads that share keys.
  struct Part {
    size_t entry;
    int64_t tiles, chunks;
    int64_t work;               // of all query tiles of a head
    int64_t first;              // piece
    int64_t slot;               // of its first chunk, in floats; one thread's own where there is one chunk
    int64_t key_tiles;          // of these and earlier slots
    std::vector<int32_t> runs;  // for each mask where the chunks' query tiles begin
  };

  // Captured gradients are the same bit by bit on any number of threads where they are summed in so many parts.
  static constexpr int REPEATABLE_PARTS = 16;

  struct Layout {
    int64_t slot, touched, thread;             // bytes of a thread's share, and where in it these begin
    int64_t copies_of[Pass::captured_values];  // of captured gradients, behind the threads' shares; -1: there are none
    int64_t total;
    int copies, threads;
  };

  static Layout make_layout(const Arguments& all, const ragged::Totals& t) {
    Layout l{};
    l.threads =
        ragged::useful_threads(all, t, t.sequences * all.kv_heads * std::max<int64_t>(1, ceil_div(t.q_len, Pass::BR)));
    const int64_t key_tiles = ceil_div(t.kv_len, Pass::BC), keys = std::max<int64_t>(0, Pass::padded_keys_of(t.kv_len));
    l.slot = round_up(int64_t(sizeof(typename Pass::Scratch)) + key_tiles * int64_t(sizeof(Visit)), 64);
    l.touched = l.slot + round_up(Pass::floats_of_sums(all, keys) * int64_t(sizeof(float)), 64);
    l.thread = l.touched + round_up(key_tiles, 64);
    l.copies = all.deterministic ? REPEATABLE_PARTS : l.threads;
    int64_t at = all.threads * l.thread;
    int n = 0;
    for (const fg::Captured& each : Spec::captured(all)) {
      int64_t& copies = l.copies_of[n++] = -1;
      if (each.owned_by_head || !each.gradient) continue;
      if (l.copies * each.elements <= Pass::MOST_COPIES)
        copies = at, at += round_up(l.copies * each.elements * int64_t(sizeof(double)), 64);
      else if (all.deterministic) l.threads = 1;
    }
    l.total = at;
    return l;
  }

  static int64_t bytes(const Arguments& all, const ragged::Totals& t) { return make_layout(all, t).total; }

  static void run(const Arguments& all, const Ragged& r, const std::vector<int32_t>& numbers) {
    const ragged::Totals totals = ragged::totals_of(all, r, numbers);
    const Layout l = make_layout(all, totals);
    const int threads = l.threads, parts_of_sums = all.deterministic ? Pass::REPEATABLE_THREADS : threads;
    const int64_t group = all.heads / all.kv_heads;
    char* const workspace = aligned_workspace(all);
    const auto call_of = [&](size_t entry) { return ragged::sequence_of(all, r, numbers[entry]); };
    std::vector<Part> parts(numbers.size());
    for (size_t entry = 0; entry < numbers.size(); ++entry) {
      parts[entry].entry = entry, parts[entry].tiles = ceil_div(ragged::q_len(all, r, numbers[entry]), Pass::BR);
      parts[entry].chunks = 1, parts[entry].work = 1;
    }
    // Whether an order that others share has to be kept, and whether any gradient goes to the result head by head.
    bool in_parts = false, direct = false;
    const auto captured = Spec::captured(all);
    for (size_t n = 0; n < captured.size(); ++n) {
      direct = direct || (captured[n].owned_by_head && captured[n].gradient);
      in_parts = in_parts || (all.deterministic && l.copies_of[n] >= 0);
    }
    const auto copies_of = [&](size_t n) {
      return l.copies_of[n] < 0 ? nullptr : reinterpret_cast<double*>(workspace + l.copies_of[n]);
    };
    int64_t pieces = 0, floats = 0, flags = 0;
    std::unique_ptr<Memory> sums, touched;
    const ragged::Trees trees(all, r, numbers, Pass::BC);
    const ragged::SequenceLists<Spec> lists(all, r, numbers, threads, Pass::BC, [](const Call&) { return Pass::BR; });
    run_in_team(threads, [&] {
      const fg::FlushSubnormals flush;
      [[maybe_unused]] const typename Products::Thread thread;
      char* const mine = workspace + l.thread * thread_index();
      auto& scratch = *reinterpret_cast<typename Pass::Scratch*>(mine);
      auto* const visits = reinterpret_cast<Visit*>(&scratch + 1);
      const auto lookup_of = [&](const Part& part) -> Lookup {
        return {trees.of(part.entry), &lists.of(part.entry), visits};
      };
      alignas(64) float row[DP > DVP ? DP : DVP];
#pragma omp for schedule(dynamic, 8)
      for (size_t n = 0; n < parts.size(); ++n) {
        Part& part = parts[n];
        const Call a = call_of(part.entry);
        const Launch u = make_launch(a);
        trees.build(part.entry, a, u);
        for (int64_t tile = 0; parts_of_sums > 1 && tile < part.tiles; ++tile)
          part.work += ragged::work_of(a, u, tile, Pass::BR, Pass::BC, lookup_of(part));
      }
#pragma omp single
      {
        std::stable_sort(parts.begin(), parts.end(), [](const Part& x, const Part& y) { return x.work > y.work; });
        int64_t work = 0;
        for (const Part& part : parts) work += part.work * all.kv_heads;
        // Sequences that are alike and divide evenly are cut no more than in a dense call.
        const bool even =
            parts.front().work == parts.back().work && int64_t(parts.size()) * all.kv_heads % parts_of_sums == 0;
        for (Part& part : parts) {
          const int64_t keys = ragged::kv_len(r, numbers[part.entry]),
                        slot = Pass::floats_of_sums(all, Pass::padded_keys_of(keys));
          int64_t most = part.tiles, queries = ragged::q_len(all, r, numbers[part.entry]);
          if (all.deterministic) most = std::min(most, std::max<int64_t>(2, queries / Pass::REPEATABLE_ROWS));
          if (all.deterministic && direct) most = 1;
          if (!even && keys > 0)
            part.chunks = std::max<int64_t>(1, std::min(most, ceil_div(2 * parts_of_sums * part.work, work)));
          while (part.chunks > 1 && floats + all.kv_heads * part.chunks * slot > Pass::MOST_PARTIAL_SUMS) --part.chunks;
          part.first = pieces, part.slot = floats, part.key_tiles = flags;
          pieces += all.kv_heads * part.chunks;
          if (part.chunks == 1) continue;
          floats += round_up(all.kv_heads * part.chunks * slot, 16);
          flags += all.kv_heads * part.chunks * ceil_div(keys, Pass::BC);
        }
        sums = std::make_unique<Memory>(floats * int64_t(sizeof(float)));
        touched = std::make_unique<Memory>(flags);
        for (size_t n = 0; n < captured.size(); ++n)
          if (copies_of(n)) std::fill_n(copies_of(n), l.copies * captured[n].elements, 0.0);
      }
      if constexpr (!Spec::keep_everything) {
#pragma omp for schedule(dynamic)
        for (size_t n = 0; n < parts.size(); ++n) {
          Part& part = parts[n];
          if (part.chunks == 1) continue;
          const Call a = call_of(part.entry);
          const Launch u = make_launch(a);
          std::vector<int32_t> work(size_t(part.tiles));
          part.runs.resize(size_t(Spec::masks_of(a) * (part.chunks + 1)));
          for (int64_t mask = 0; mask < Spec::masks_of(a); ++mask) {
            for (int64_t tile = 0; tile < part.tiles; ++tile)
              work[size_t(tile)] = ::work_of(a, u, mask, tile, Pass::BR, Pass::BC, trees.of(part.entry), visits);
            cut_evenly(part.runs.data() + mask * (part.chunks + 1), part.chunks, work.data(), part.tiles);
          }
        }
      }
      const auto task_of = [&](const Part& part, int64_t keys, int64_t number) {
        const int64_t padded = Pass::padded_keys_of(keys), floats = Pass::floats_of_sums(all, padded);
        const bool whole = part.chunks == 1;  // a thread's own
        char* const slot = whole ? mine + l.slot : sums->at(int64_t(sizeof(float)) * (part.slot + number * floats));
        char* const flags = whole ? mine + l.touched : touched->at(part.key_tiles + number * ceil_div(keys, Pass::BC));
        return Pass::summing(all, reinterpret_cast<float*>(slot), reinterpret_cast<bool*>(flags), padded);
      };
      const Part* part = nullptr;
      Call a;
      Launch u;
      const auto perform = [&](int64_t piece, [[maybe_unused]] int64_t copy) {
        if (const Part* const now = ragged::part_of(parts, piece); part != now)
          part = now, a = call_of(part->entry), u = make_launch(a);
        const int64_t local = piece - part->first, hkv = local / part->chunks, chunk = local % part->chunks;
        Task own = task_of(*part, a.kv_len, local);
        std::fill_n(own.touched, ceil_div(a.kv_len, Pass::BC), false);
        Pass::capture(own, a, copies_of, copy, threads > 1, part->chunks > 1);
        for (int64_t h = hkv * group; h < (hkv + 1) * group; ++h) {
          const auto run = Pass::run_of(a, 0, h, part->tiles, chunk, part->chunks, part->runs.data());
          for (int64_t query_tile = run.first; query_tile < run.end; ++query_tile)
            Pass::tile(a, u, 0, h, query_tile, lookup_of(*part), scratch, own);
        }
        if (part->chunks > 1) return;
        for (int64_t tile = 0; tile < ceil_div(a.kv_len, Pass::BC); ++tile)
          Pass::finish(a, hkv, [&](int64_t) { return own; }, 1, tile, row);
      };
      if (in_parts) {
        divide_tasks(threads, REPEATABLE_PARTS, [&](int64_t copy) {
          for (int64_t piece = copy; piece < pieces; piece += REPEATABLE_PARTS) perform(piece, copy);
        });
      } else {
        divide_tasks(threads, pieces, [&](int64_t piece) { perform(piece, thread_index()); });
      }
      for (const Part& each : parts) {
        if (each.chunks == 1) continue;
        const Call cut = call_of(each.entry);
        const int64_t tiles = ceil_div(cut.kv_len, Pass::BC);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < cut.kv_heads * tiles; ++n) {
          const int64_t first = n / tiles * each.chunks;
          const auto chunk_of = [&](int64_t chunk) { return task_of(each, cut.kv_len, first + chunk); };
          Pass::finish(cut, n / tiles, chunk_of, each.chunks, n % tiles, row);
        }
      }
    });
    for (size_t n = 0; n < captured.size(); ++n) {
      const double* const copies = copies_of(n);
      for (int64_t e = 0; copies && e < captured[n].elements; ++e)
        captured[n].gradient[e] += Pass::sum_of_copies(copies, l.copies, captured[n], e);  // kinds of products add up
    }
  }
};

namespace ragged {

// The bytes that a pass takes, and the pass. Pass<Products> is one of the above.
template <template <class> class Pass> int64_t workspace_bytes(const Arguments& all, const Ragged& r) {
  int64_t most = 0;
  for_each_kind(all, r, [&](auto products, const std::vector<int32_t>& numbers) {
    most = std::max(most, Pass<decltype(products)>::bytes(all, totals_of(all, r, numbers)));
  });
  return most + 64;
}
template <template <class> class Pass> void run(const Arguments& all, const Ragged& r) {
  for_each_kind(all, r, [&](auto products, const std::vector<int32_t>& numbers) {
    Pass<decltype(products)>::run(all, r, numbers);
  });
}

}  // namespace ragged

}  // namespace
