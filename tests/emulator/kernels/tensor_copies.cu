// Boxes of a tensor [slabs, rows, columns] of 16 bits, brought to shared memory. Stands behind the primitives, and before one
// instance of `bring` for each kernel that is asked for.

struct Arguments {
  uint16_t* y;
  int column, row, slab;
};
struct Maps {
  fg::TensorMap x;
};

FG_DEVICE int thread() { return int(threadIdx.x); }
FG_DEVICE uint64_t* signal() { return reinterpret_cast<uint64_t*>(fg::shared_memory() + 64 * 1024); }

// A tile, to y [rows, columns]. The box begins at the arguments' place.
template <int rows, int columns> FG_DEVICE void bring(const Arguments& p, const Maps& maps) {
  using Tile = fg::SharedTile<fg::half_t, rows, columns>;
  const Tile tile{reinterpret_cast<fg::half_t*>(fg::shared_memory())};
  if (thread() == 0) {
    fg::prefetch_map(maps.x);
    fg::mbarrier_init(signal(), 1);
    fg::publish_shared();
  }
  fg::block_barrier();
  if (thread() == 0) {
    fg::mbarrier_expect(signal(), int(Tile::bytes));
#pragma unroll
    for (int panel = 0; panel < Tile::panels; ++panel)
      fg::copy_panel_async(tile.base + panel * Tile::rows * Tile::width, maps.x, p.column + panel * Tile::width, p.row, p.slab, signal());
  }
  fg::mbarrier_wait(signal(), 0);
  for (int n = thread(); n < rows * columns; n += int(blockDim.x))
    fg::global_store(p.y + n, fg::shared_load(tile.at(n / columns, n % columns)).bits);
}
