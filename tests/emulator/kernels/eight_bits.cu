// O = P V of 8 bits by a warpgroup: P [64, 64] in float32 is rounded, V [64, 64] turned; O in bfloat16, and the sums.
// Stands behind the primitives.

struct Arguments {
  const float* p;
  const uint32_t* v;  // four numbers each
  uint16_t* o;
  float* sums;
};

using Rows = fg::SharedTile<fg::f8e4m3, 64, 64>;

extern "C" __global__ void __launch_bounds__(128) weigh(const Arguments given) {
  const Rows turned{reinterpret_cast<fg::f8e4m3*>(fg::shared_memory())};
  if (threadIdx.x < 64) {
    const int column = int(threadIdx.x) % 16 * 4, first = int(threadIdx.x) / 16 * 16;
    uint32_t keys[16];
    for (int k = 0; k < 16; ++k) keys[k] = fg::global_load(given.v + (first + k) * 16 + column / 4);
    uint4 rows[4];
    fg::turn(rows, keys);
    for (int e = 0; e < 4; ++e)
      fg::shared_store(reinterpret_cast<uint4*>(turned.at(fg::row_of_turned(column + e), first)), rows[e]);
  }
  fg::publish_shared();
  fg::block_barrier();
  const int row0 = int(threadIdx.x) / 32 * 16;
  fg::Accumulators<1, 8> s, d;
  for (int t = 0; t < 8; ++t)
    for (int e = 0; e < 4; ++e)
      s.at[0][t][e] = fg::global_load(given.p + (row0 + fg::fragment_row(e)) * 64 + 8 * t + fg::fragment_column(e));
  fg::LeftRows<fg::f8e4m3, 1, 64> p;
  fg::round_into(p, s);
  fg::clear(d);
  fg::begin_products(d, p);
  fg::start_product_across(d, p, turned);
  fg::warpgroup_commit();
  fg::wait_products<0>(d, p);
  for (int t = 0; t < 8; ++t)
    for (int e = 0; e < 4; ++e)
      fg::global_store(given.sums + (row0 + fg::fragment_row(e)) * 64 + 8 * t + fg::fragment_column(e), d.at[0][t][e]);
  fg::store_turned_fragments<64>(reinterpret_cast<fg::bfloat_t*>(given.o), d.at[0], row0, 64);
}

extern "C" __global__ void __launch_bounds__(128) round_all(const Arguments given) {
  const int n = int(threadIdx.x) + 128 * fg::block_index();
  const auto at = [&](int k) { return fg::global_load(given.p + 4 * n + k); };
  fg::global_store(reinterpret_cast<uint32_t*>(given.sums) + n, fg::pack_e4m3(at(0), at(1), at(2), at(3)));
}
