// D = C + A B by a warpgroup for A [64, k], B [k, n] of 16 bits, C and D [64, n] in float32, row-major.
// Stands behind the primitives, and before one instance for each kernel that is asked for.

struct Arguments {
  const uint16_t* a;
  const uint16_t* b;
  const float* c;
  float* d;
};

FG_DEVICE int thread() { return int(threadIdx.x); }

// A tile of any width in panels of `width` columns, each of them a SharedTile.
template <class T, int rows, int columns, int width> struct Panels {
  using Panel = fg::SharedTile<T, rows, width>;
  static_assert(Panel::width == width, "one panel");
  static constexpr int row_bytes = 2 * width, panel_bytes = rows * row_bytes;
  static constexpr int bytes = (columns + width - 1) / width * panel_bytes;
  char* base;

  FG_DEVICE T* at(int row, int column) const {
    return Panel{reinterpret_cast<T*>(base + column / width * panel_bytes)}.at(row, column % width);
  }
  FG_DEVICE fg::SharedMatrix matrix() const { return fg::shared_matrix<row_bytes>(base, panel_bytes, 8 * row_bytes); }
  // Bytes from the matrix at the inner index 0 to that at `inner`.
  static FG_CONSTEXPR int along(int inner) { return inner / width * panel_bytes + inner % width * 2; }
  static FG_CONSTEXPR int across(int inner) { return inner * row_bytes; }

  // From row-major global memory, or its transpose.
  FG_DEVICE void fill(const uint16_t* x, bool transposed) const {
    for (int n = thread(); n < rows * columns; n += int(blockDim.x)) {
      const int row = n / columns, column = n % columns;
      fg::shared_store(at(row, column), T{fg::global_load(x + (transposed ? column * rows + row : n))});
    }
  }
};

template <int n_tiles> FG_DEVICE void touch(float (&d)[n_tiles][4]) {
#pragma unroll
  for (int t = 0; t < n_tiles; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e) fg::touch(d[t][e]);
}

// Of the upper or the lower half of a fragment.
FG_DEVICE int row_of(int half) { return thread() / 32 * 16 + thread() % 32 / 4 + 8 * half; }

// Visits place(row, column) of D for each number that this thread holds.
template <int n_tiles, class Visit> FG_DEVICE void for_each(float (&d)[n_tiles][4], Visit visit) {
#pragma unroll
  for (int t = 0; t < n_tiles; ++t)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      visit(row_of(e / 2) * 8 * n_tiles + 8 * t + thread() % 4 * 2 + e % 2, d[t][e]);
}

// `add`: C is added, by the first product; otherwise that one ignores what D was.
template <class T, int a_width, int b_width, bool a_across, bool b_across, int n, int k, bool add>
FG_DEVICE void multiply(const Arguments& p) {
  using A = Panels<T, a_across ? k : 64, a_across ? 64 : k, a_width>;
  using B = Panels<T, b_across ? k : n, b_across ? n : k, b_width>;
  const A a{fg::shared_memory()};
  const B b{fg::shared_memory() + (A::bytes + 1023) / 1024 * 1024};
  a.fill(p.a, a_across);
  b.fill(p.b, !b_across);
  fg::publish_shared();
  fg::block_barrier();
  float d[n / 8][4];
  for_each(d, [&](int place, float& x) { x = fg::global_load(p.c + place); });
  touch(d);
  fg::warpgroup_arrive();
#pragma unroll
  for (int inner = 0; inner < k; inner += 16) {
    const auto left = fg::advance(a.matrix(), a_across ? A::across(inner) : A::along(inner));
    const auto right = fg::advance(b.matrix(), b_across ? B::across(inner) : B::along(inner));
    fg::warpgroup_multiply<T, a_across, b_across>(d, left, right, add || inner > 0);
  }
  fg::warpgroup_commit();
  fg::warpgroup_wait<0>();
  touch(d);
  for_each(d, [&](int place, float& x) { fg::global_store(p.d + place, x); });
}

// The same with A in registers; every step is a group of its own, and all but the last two are waited for early.
template <class T, int b_width, bool b_across, int n, int k> FG_DEVICE void multiply_registers(const Arguments& p) {
  using B = Panels<T, b_across ? k : n, b_across ? n : k, b_width>;
  const B b{fg::shared_memory()};
  b.fill(p.b, !b_across);
  fg::publish_shared();
  fg::block_barrier();
  float d[n / 8][4];
  for_each(d, [&](int place, float& x) { x = fg::global_load(p.c + place); });
  uint32_t a[k / 16][4];
#pragma unroll
  for (int step = 0; step < k / 16; ++step)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int column = 16 * step + thread() % 4 * 2 + r / 2 * 8;
      a[step][r] = fg::global_load(reinterpret_cast<const uint32_t*>(p.a + row_of(r % 2) * k + column));
      fg::touch(a[step][r]);
    }
  touch(d);
#pragma unroll
  for (int step = 0; step < k / 16; ++step) {
    fg::warpgroup_arrive();
    const auto right = fg::advance(b.matrix(), b_across ? B::across(16 * step) : B::along(16 * step));
    fg::warpgroup_multiply<T, b_across>(d, a[step], right, true);
    fg::warpgroup_commit();
    fg::warpgroup_wait<2>();
  }
  fg::warpgroup_wait<0>();
  touch(d);
  for_each(d, [&](int place, float& x) { fg::global_store(p.d + place, x); });
}
