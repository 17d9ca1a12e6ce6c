// One kernel for each mistake with tensor copies and their mbarriers; marks as in faults.cu.
#include "flashgen_emulator.h"

struct Arguments {
  const uint16_t* x;
  float* y;
};
struct Maps {
  fg::TensorMap x;  // boxes of 8 rows of 128 bytes
};

constexpr int box_bytes = 1024;

FG_DEVICE int thread() { return int(threadIdx.x); }
FG_DEVICE fg::half_t* place(int bytes = 0) { return reinterpret_cast<fg::half_t*>(fg::shared_memory() + bytes); }
FG_DEVICE uint64_t* signal(int number = 0) { return reinterpret_cast<uint64_t*>(fg::shared_memory() + 3072) + number; }

constexpr int warp_size = 32;  // arrivals of a warp

FG_DEVICE void make(int arrivals = 1) {
  if (thread() == 0) {
    fg::mbarrier_init(signal(), arrivals);
    fg::publish_shared();
  }
  fg::block_barrier();
}
#define COPY(to) fg::copy_panel_async(to, maps.x, 0, 0, 0, signal())
#define EXPECT() fg::mbarrier_expect(signal(), box_bytes)

// ---- what a copy brings --------------------------------------------------------------------------------------------

extern "C" __global__ void read_before_the_wait(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // OTHER
  }
  fg::shared_load(place() + thread());  // FAULT
  fg::mbarrier_wait(signal(), 0);
}
extern "C" __global__ void written_before_the_wait(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // OTHER
    fg::shared_store(place(), fg::half_t{0});  // FAULT
  }
  fg::mbarrier_wait(signal(), 0);
}
extern "C" __global__ void never_waited_for(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // FAULT
  }
}
extern "C" __global__ void waited_for_by_another_warp(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // OTHER
  }
  if (thread() < 32) fg::mbarrier_wait(signal(), 0);
  else fg::shared_load(place());  // FAULT
}
extern "C" __global__ void product_of_warps_that_did_not_wait(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    fg::mbarrier_expect(signal(), 2 * box_bytes);
    COPY(place());  // OTHER
    COPY(place(1024));
  }
  if (thread() < 96) fg::mbarrier_wait(signal(), 0);
  float d[1][4] = {};
  const auto b = fg::shared_matrix<128>(place(), 0, 1024);
  const uint32_t a[4] = {};
  fg::warpgroup_arrive();
  fg::warpgroup_multiply<fg::half_t, false>(d, a, b, true);  // FAULT
  fg::warpgroup_commit();
  fg::warpgroup_wait<0>();
  fg::mbarrier_wait(signal(), 0);
}

// ---- where it is brought -------------------------------------------------------------------------------------------

extern "C" __global__ void copied_over_a_product(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place());
  }
  fg::mbarrier_wait(signal(), 0);
  float d[1][4] = {};
  const auto b = fg::shared_matrix<128>(place(), 0, 1024);
  const uint32_t a[4] = {};
  fg::warpgroup_arrive();
  fg::warpgroup_multiply<fg::half_t, false>(d, a, b, true);  // FAULT
  fg::warpgroup_commit();
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // OTHER
  }
  fg::warpgroup_wait<0>();
  fg::mbarrier_wait(signal(), 1);
}
extern "C" __global__ void copied_over_what_was_multiplied(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place());
  }
  fg::mbarrier_wait(signal(), 0);
  float d[1][4] = {};
  const auto b = fg::shared_matrix<128>(place(), 0, 1024);
  const uint32_t a[4] = {};
  fg::warpgroup_arrive();
  fg::warpgroup_multiply<fg::half_t, false>(d, a, b, true);  // OTHER
  fg::warpgroup_commit();
  fg::warpgroup_wait<0>();
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // FAULT
  }
  fg::mbarrier_wait(signal(), 1);
}
extern "C" __global__ void copied_over_what_is_read(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place());
  }
  fg::mbarrier_wait(signal(), 0);
  fg::block_barrier();
  if (thread() == 32) fg::shared_load(place());  // FAULT
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // OTHER
  }
  if (thread() < 32) fg::mbarrier_wait(signal(), 1);
}
extern "C" __global__ void copied_over_what_was_not_published(const Arguments p, const Maps maps) {
  make();
  fg::shared_store(place() + thread(), fg::half_t{0});  // OTHER
  fg::block_barrier();
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // FAULT
  }
  fg::mbarrier_wait(signal(), 0);
}
extern "C" __global__ void copied_to_half_a_group(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place(512));  // FAULT
  }
}
extern "C" __global__ void copied_outside(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place(4096));  // FAULT
  }
}
extern "C" __global__ void rows_that_are_not_there(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    fg::copy_panel_async(place(), maps.x, 0, 8, 0, signal());  // FAULT
  }
}
extern "C" __global__ void slab_that_is_not_there(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    fg::copy_panel_async(place(), maps.x, 0, 0, 1, signal());  // FAULT
  }
}

// ---- phases --------------------------------------------------------------------------------------------------------

extern "C" __global__ void nothing_expected(const Arguments p, const Maps maps) {
  make(warp_size);
  if (thread() == 0) COPY(place());  // OTHER
  fg::mbarrier_arrive(signal());
  fg::mbarrier_wait(signal(), 0);  // FAULT
}
extern "C" __global__ void more_expected(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    fg::mbarrier_expect(signal(), box_bytes + 128);
    COPY(place());  // OTHER
  }
  fg::mbarrier_wait(signal(), 0);  // FAULT
}
extern "C" __global__ void less_expected(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    fg::mbarrier_expect(signal(), box_bytes - 128);  // OTHER
    COPY(place());  // FAULT
  }
  fg::mbarrier_wait(signal(), 0);
}
extern "C" __global__ void too_much_expected(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) fg::mbarrier_expect(signal(), 1 << 20);  // FAULT
}
extern "C" __global__ void arrival_missing(const Arguments p, const Maps maps) {
  make(2);
  if (thread() == 0) {
    EXPECT();  // OTHER
    COPY(place());
  }
  fg::mbarrier_wait(signal(), 0);  // FAULT
}
extern "C" __global__ void one_arrival_more(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();  // OTHER
    COPY(place());
  }
  fg::mbarrier_arrive(signal());  // FAULT
  fg::mbarrier_wait(signal(), 0);
}
extern "C" __global__ void phase_that_nobody_begins(const Arguments p, const Maps maps) {
  make(warp_size);
  fg::mbarrier_arrive(signal());  // OTHER
  fg::mbarrier_wait(signal(), 0);
  fg::mbarrier_wait(signal(), 1);  // FAULT
}
extern "C" __global__ void parity_of_two(const Arguments p, const Maps maps) {
  make(warp_size);
  fg::mbarrier_arrive(signal());
  fg::mbarrier_wait(signal(), 2);  // FAULT
}

// ---- mbarriers -----------------------------------------------------------------------------------------------------

extern "C" __global__ void never_made(const Arguments p, const Maps maps) {
  fg::mbarrier_wait(signal(), 0);  // FAULT
}
extern "C" __global__ void made_twice(const Arguments p, const Maps maps) {
  if (thread() != 0) return;
  fg::mbarrier_init(signal(), 1);  // OTHER
  fg::mbarrier_init(signal(), 1);  // FAULT
}
extern "C" __global__ void made_for_nobody(const Arguments p, const Maps maps) {
  make(0);
}
extern "C" __global__ void made_too_many(const Arguments p, const Maps maps) {
  if (thread() != 0) return;
  for (int n = 0; n < 33; ++n) fg::mbarrier_init(signal(n), 1);  // FAULT
}
extern "C" __global__ void made_at_half_a_word(const Arguments p, const Maps maps) {
  if (thread() == 0) fg::mbarrier_init(reinterpret_cast<uint64_t*>(place(4)), 1);  // FAULT
}
extern "C" __global__ void made_without_a_barrier(const Arguments p, const Maps maps) {
  if (thread() == 0) fg::mbarrier_init(signal(), warp_size);  // OTHER
  if (thread() >= 32) fg::mbarrier_arrive(signal());  // FAULT
}
extern "C" __global__ void not_published(const Arguments p, const Maps maps) {
  if (thread() == 0) fg::mbarrier_init(signal(), 1);  // OTHER
  fg::block_barrier();
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // FAULT
  }
  fg::mbarrier_wait(signal(), 0);
}
extern "C" __global__ void overwritten(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) fg::shared_store(reinterpret_cast<float*>(signal()), 0.0f);  // OTHER
  fg::mbarrier_wait(signal(), 0);  // FAULT
}
extern "C" __global__ void invalidated_under_a_copy(const Arguments p, const Maps maps) {
  make();
  if (thread() == 0) {
    EXPECT();
    COPY(place());  // OTHER
    fg::mbarrier_invalidate(signal());  // FAULT
  }
}
extern "C" __global__ void invalidated_while_in_use(const Arguments p, const Maps maps) {
  make(2 * warp_size);
  if (thread() >= 32) fg::mbarrier_arrive(signal());  // OTHER
  if (thread() == 0) fg::mbarrier_invalidate(signal());  // FAULT
}
extern "C" __global__ void lanes_at_two_mbarriers(const Arguments p, const Maps maps) {
  if (thread() == 0) fg::mbarrier_init(signal(1), 1);
  make();
  fg::mbarrier_wait(signal(thread() == 9), 0);  // FAULT
}
extern "C" __global__ void half_a_warp_waits(const Arguments p, const Maps maps) {
  make();
  if (thread() < 16) fg::mbarrier_wait(signal(), 0);  // OTHER
  fg::warp_barrier();  // FAULT
}
