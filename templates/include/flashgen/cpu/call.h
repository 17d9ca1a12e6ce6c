// A call as the passes see it, and the threads that share it.
//
// Included behind `Arguments` and `Spec`, which a generated source prints.
#pragma once
#include "flashgen/cpu/spec.h"

namespace {

constexpr int D = Spec::D, DV = Spec::DV;
constexpr int W = fg::W, MR = fg::row_multiple;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Head dimensions padded to whole vectors and whole register blocks.
constexpr int DP = int(round_up(round_up(D, W), MR)), DVP = int(round_up(round_up(DV, W), MR));
static_assert(DP % W == 0 && DVP % W == 0, "register blocks divide vectors, or the other way round");

constexpr int F32 = 0, BF16 = 1, F16 = 2, F8E4M3 = 3;  // what an element is; the last in a cache alone
constexpr int64_t element_bytes(int element) { return element == F32 ? 4 : element == F8E4M3 ? 1 : 2; }

// How the rows [b, h, n] of a result lie: strides in elements.
struct RowStrides {
  int64_t b, h, n;
  int64_t at(int64_t batch, int64_t head, int64_t row) const { return batch * b + head * h + row * n; }
};

// Where rows lie that are kept in pages of so many rows: row n is row n % rows of page table[n / rows], a page `stride`
// elements behind the one before it in memory. Without a table they lie one behind the other.
struct Pages {
  const int32_t* table;
  int64_t rows, stride;
  int64_t first;  // of the rows that are counted from
};

// A call: what a caller passes, and how the rows of its results lie. lse_parts has two numbers for each of lse.
struct Call : Arguments {
  RowStrides rows_of_lse, rows_of_o, rows_of_dq, rows_of_dk, rows_of_dv;
  Pages k_pages, v_pages;
  int key_element;                   // of k and v
  const float *k_scales, *v_scales;  // of a cache of 8 bits, [kv_heads]; null: 1
  int64_t queries;  // rows of one head: q_len, unless heads that share a key/value head follow one another as rows

  int64_t kv_head(int64_t h) const { return h / (heads / kv_heads); }
  int64_t head_of(int64_t h, int64_t row) const { return h * (q_len / queries) + row / queries; }
  int64_t query_of(int64_t row) const { return row % queries; }
  int64_t at(const RowStrides& rows, int64_t b, int64_t h, int64_t row) const {
    return rows.at(b, head_of(h, row), query_of(row));
  }
  int element_of_rows() const { return Spec::writes_f32 ? F32 : element; }          // of o and dQ
  int element_of_keys() const { return Spec::writes_f32_of_keys ? F32 : element; }  // of dK and dV
};

// A dense call: what is one number a row is contiguous, [B, H, N].
inline Call packed(const Arguments& arguments) {
  Call a{};
  static_cast<Arguments&>(a) = arguments;
  a.key_element = a.element;
  a.rows_of_o = {a.o_stride_b, a.o_stride_h, a.o_stride_n};
  a.rows_of_dq = {a.dq_stride_b, a.dq_stride_h, a.dq_stride_n};
  a.rows_of_dk = {a.dk_stride_b, a.dk_stride_h, a.dk_stride_n};
  a.rows_of_dv = {a.dv_stride_b, a.dv_stride_h, a.dv_stride_n};
  a.rows_of_lse = {a.heads * Spec::head_rows(a), Spec::head_rows(a), 1};
  a.queries = a.q_len;
  return a;
}

// Query rows that are too few to fill the lanes of a vector: keys and features are its lanes then. Tiles have no say:
// they differ with the number of threads. Nor is it for calls with a backward pass, which has to find the same scores
// to the bit: it weighs them by lse, and exp forgives no rounding; nor for dropout, whose random numbers go by the row.
// Where there are matrix registers, bfloat16 is soon multiplied faster in them.
inline bool are_few(const Arguments& a, int64_t queries) {
  if (Spec::tangent || a.lse_parts || (Spec::dropout && a.dropout_threshold != 0)) return false;
#if FLASHGEN_MATRIX_PRODUCTS
  if (a.element == BF16) return queries <= 4;
#endif
  return queries <= std::max(4, 3 * W / 4);
}

// Heads that share a key/value head become rows of one tile, so that K and V are read once for them: where their rows
// are few, or one each, and dropout does not go by the head.
inline void put_heads_into_rows(Call& a) {
  const bool few = are_few(a, a.q_len);
  if (!Spec::heads_are_alike || (Spec::dropout && a.dropout_threshold != 0)) return;
  if (a.kv_heads == 0 || a.q_len == 0 || !(few || a.q_len == 1)) return;
  int64_t together = std::min<int64_t>((few ? fg::most_few_rows : W) / a.q_len, a.heads / a.kv_heads);
  if (together <= 1) return;
  while (a.heads / a.kv_heads % together != 0) --together;
  a.q_len *= together, a.heads /= together;
  if (!few) a.q_stride_n = a.q_stride_h, a.q_stride_h *= together;  // as rows of one head
}

constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;
constexpr float SCORES_IN_BASE_2 = float(LOG2_E);
// Scores are extreme where the rounding of what a row's exponents are less, 2^-24 of it, would show in its weights:
// beyond these, in base 2 and of a log-sum-exp. Then they are counted from a maximum m. The forward pass leaves m, and
// the logarithm of the sum, in lse_parts.
constexpr float MOST_OFFSET = 128.0f, MOST_LSE = 88.0f, MOST_FLOAT = 0x1.fffffep127f;
inline bool is_extreme(float lse) { return std::fabs(lse) > MOST_LSE && std::fabs(lse) < INFINITY; }

// ---- Memory and threads --------------------------------------------------------------------------------------------

inline char* aligned_workspace(const Arguments& a) {
  return reinterpret_cast<char*>(round_up(int64_t(reinterpret_cast<uintptr_t>(a.workspace)), 64));
}

// Memory that nothing has written to.
class Memory {
 public:
  explicit Memory(int64_t bytes) : own_(new char[size_t(bytes) + 64]) {
    at_ = reinterpret_cast<char*>(round_up(int64_t(reinterpret_cast<uintptr_t>(own_.get())), 64));
  }
  char* at(int64_t byte) const { return at_ + byte; }

 private:
  std::unique_ptr<char[]> own_;
  char* at_;
};

// Fewer multiplications and additions than these are done before another thread has begun.
constexpr int64_t THREAD_GRAIN = int64_t(1) << 19;

// The arguments of a pass cut into at most `tasks`, with no more threads than have something worth their while.
inline Arguments with_useful_threads(const Arguments& arguments, int64_t tasks) {
  Arguments a = arguments;
  const double work = double(a.batch * a.heads * a.q_len) * double(a.kv_len) * (D + DV);
  const double useful = std::min(double(tasks), work / double(THREAD_GRAIN));
  a.threads = int(std::max(1.0, std::min(double(a.threads), useful)));
  return a;
}

inline int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Every thread of a team runs `share`. One alone needs no team: each of its barriers would be a system call.
template <class Share> inline void run_in_team(int threads, const Share& share) {
#ifdef _OPENMP
  if (threads > 1 || omp_in_parallel()) {
#pragma omp parallel num_threads(threads)
    share();
    return;
  }
#endif
  share();
}

// Divides tasks among the threads of a team, as they become free.
template <class Perform> inline void divide_tasks(int threads, int64_t tasks, const Perform& perform) {
  if (threads == 1) {
    for (int64_t task = 0; task < tasks; ++task) perform(task);
    return;
  }
#pragma omp for schedule(dynamic)
  for (int64_t task = 0; task < tasks; ++task) perform(task);
}

}  // namespace
