// Runs one tile of rows of a window's forward pass. Prints which shares of the lines it asks for that the next tile reads first, of K, V and
// Q, and how many lines it asks for that are neither of tensors nor of the workspace.
#include <cstdint>
#include <set>
static std::set<uintptr_t> asked;
#define __builtin_prefetch(at, ...) asked.insert(reinterpret_cast<uintptr_t>(at) / 64)
#define FLASHGEN_PART 1
#include "kernel.cpp"
#include <cstdio>

constexpr int N = 2048, WINDOW = 256, TILE = N / FLASHGEN_BR / 2;
alignas(64) static float q[N * D], k[N * D], v[N * D], o[N * D];

static double share(const float* of, int64_t first, int64_t rows) {
  int found = 0;
  for (int64_t at = first * D; at < (first + rows) * D; at += 16) found += int(asked.count(reinterpret_cast<uintptr_t>(of + at) / 64));
  return double(found) / double(rows * D / 16);
}
static bool is_within(uintptr_t line, const void* of, int64_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(of);
  return line >= at / 64 && line <= (at + uintptr_t(bytes) - 1) / 64;
}

int main() {
  Arguments a{};
  a.q = q, a.k = k, a.v = v, a.o = o;
  a.q_stride_n = a.k_stride_n = a.v_stride_n = D;
  a.threads = 1;
  a.batch = a.heads = a.kv_heads = a.b_total = a.h_total = 1;
  a.q_len = a.kv_len = a.q_total = a.kv_total = N;
  using Pass = ForwardPass<VectorProducts>;
  const int64_t bytes = Pass::thread_bytes(a);
  const Memory memory(bytes);
  auto* const scratch = reinterpret_cast<Pass::Scratch*>(memory.at(0));
  auto* const visits = reinterpret_cast<Visit*>(memory.at(sizeof(*scratch)));
  const Call call = packed(a);
  Pass::tile(call, make_launch(call), 0, 0, TILE, {nullptr, nullptr, visits}, *scratch);

  const int64_t row0 = TILE * FLASHGEN_BR - FLASHGEN_BR, key0 = (row0 - WINDOW + 1) / FLASHGEN_BC * FLASHGEN_BC;
  int stray = 0;
  for (const uintptr_t line : asked) {
    bool known = is_within(line, memory.at(0), bytes);
    for (const float* tensor : {q, k, v, o}) known = known || is_within(line, tensor, sizeof(q));
    stray += !known;
  }
  std::printf("%f %f %f %d\n", share(k, key0, FLASHGEN_BC), share(v, key0, FLASHGEN_BC), share(q, row0, FLASHGEN_BR), stray);
}
