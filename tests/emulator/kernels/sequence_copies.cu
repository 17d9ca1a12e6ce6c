// Rows of one sequence of a ragged tensor [rows, heads, columns] of 16 bits, brought to shared memory. Stands behind the primitives.

struct Arguments {
  uint16_t* y;
  int begin, count, first, head;
};
struct Maps {
  fg::TensorMap x;
};

// A tile from row `first` of the sequence on, to y [32, 96].
extern "C" __global__ void __launch_bounds__(64) bring_sequence(const __grid_constant__ Arguments p, const __grid_constant__ Maps maps) {
  using Tile = fg::SharedTile<fg::half_t, 32, 96>;
  const Tile tile{reinterpret_cast<fg::half_t*>(fg::shared_memory())};
  uint64_t* const signal = reinterpret_cast<uint64_t*>(fg::shared_memory() + 64 * 1024);
  if (threadIdx.x == 0) {
    fg::mbarrier_init(signal, 1);
    fg::publish_shared();
  }
  fg::block_barrier();
  if (threadIdx.x == 0) {
    fg::mbarrier_expect(signal, int(Tile::bytes));
    fg::copy_tile_async(tile, maps.x, fg::SequenceRows{p.begin, p.count}, p.first, fg::slab_of(maps.x, 0, p.head), signal);
  }
  fg::mbarrier_wait(signal, 0);
  for (int n = int(threadIdx.x); n < 32 * 96; n += 64) fg::global_store(p.y + n, fg::shared_load(tile.at(n / 96, n % 96)).bits);
}
