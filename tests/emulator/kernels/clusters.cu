// Two blocks of a cluster: one kernel that shares copies and numbers, then one for each mistake; marks as in faults.cu.
#include "flashgen_emulator.h"

struct Arguments {
  const uint16_t* x;
  float* y;
};
struct Maps {
  fg::TensorMap x;  // boxes of 8 rows of 128 bytes
};

constexpr int box_bytes = 1024, warps = 4;

FG_DEVICE int thread() { return int(threadIdx.x); }
FG_DEVICE int warp() { return thread() / 32; }
FG_DEVICE fg::half_t* place(int box = 0) { return reinterpret_cast<fg::half_t*>(fg::shared_memory() + box * box_bytes); }
FG_DEVICE int* number() { return reinterpret_cast<int*>(fg::shared_memory() + 2048); }
// 0 and 1: a box is there; 2 and 3: all are done with it; 4: a number is there.
FG_DEVICE uint64_t* signal(int n) { return reinterpret_cast<uint64_t*>(fg::shared_memory() + 3072) + n; }

FG_DEVICE void make(int users) {
  if (thread() == 0) {
    for (int n = 0; n < 5; ++n) fg::mbarrier_init(signal(n), n < 2 || n == 4 ? 1 : users);
    fg::publish_shared();
  }
}
// Block h brings box h to both; each expects what comes.
FG_DEVICE void bring(const Maps& maps, int h, int row) {
  fg::mbarrier_expect(signal(h), box_bytes);
  if (fg::cluster_rank() == h) fg::copy_panel_to_all(place(h), maps.x, 0, row, 0, signal(h), 3);  // BRING
}

// Rows 16 n + 8 h … of x come as box h, for all n; each block adds up what its threads read.
extern "C" __global__ void __cluster_dims__(2, 1, 1) shared_copies(const Arguments p, const Maps maps) {
  make(2 * (warps - 1));
  fg::cluster_barrier();
  constexpr int rounds = 4;
  if (warp() == 0) {
    for (int n = 0; n < rounds; ++n)
      for (int h = 0; h < 2; ++h) {
        if (fg::cluster_rank() == h && n > 0) fg::mbarrier_wait(signal(2 + h), (n - 1) % 2);
        if (fg::cluster_rank() != h && n > 0) fg::mbarrier_wait(signal(h), (n - 1) % 2);
        if (thread() == 0) bring(maps, h, 16 * n + 8 * h);
      }
  } else {
    float sum = 0.0f;
    for (int n = 0; n < rounds; ++n)
      for (int h = 0; h < 2; ++h) {
        fg::mbarrier_wait(signal(h), n % 2);
        for (int k = thread() - 32; k < 512; k += 96) sum += float(fg::shared_load(reinterpret_cast<const uint16_t*>(place(h)) + k));
        fg::mbarrier_arrive_at(signal(2 + h), h);
      }
    fg::global_store(p.y + fg::block_index() * 128 + thread(), sum);
  }
  fg::cluster_barrier();
}
// Block 0 tells a number to each.
extern "C" __global__ void __cluster_dims__(2, 1, 1) told_numbers(const Arguments p, const Maps maps) {
  make(1);
  fg::cluster_barrier();
  if (fg::cluster_rank() == 0 && warp() == 0)
    for (int rank = 0; rank < 2; ++rank) {
      if (thread() == 0) fg::shared_store_at(number(), 7 + rank, rank);
      fg::mbarrier_tell(signal(4), rank);
    }
  fg::mbarrier_wait_for_cluster(signal(4), 0);
  fg::global_store(p.y + fg::block_index() * 128 + thread(), float(fg::shared_load(number())));
  fg::cluster_barrier();
}
// Each warp sends its numbers to the same one of the other block, over what that has read of those before: it got the other's last ones.
// Places and signals of two kinds take turns.
FG_DEVICE float4* sent(int kind) { return reinterpret_cast<float4*>(fg::shared_memory()) + kind * 64 + thread(); }
FG_DEVICE void send(int kind, float value) {
  const float fours[1][4] = {{value, value, value, value}};
  if (thread() % 32 == 0) fg::mbarrier_expect(signal(2 * kind + warp()), 512);
  fg::send_async<32>(sent(kind), fours, signal(2 * kind + warp()), fg::cluster_rank() ^ 1);
}
FG_DEVICE float receive(int kind, int parity) {
  fg::mbarrier_wait(signal(2 * kind + warp()), parity);
  const float4 four = fg::shared_load(sent(kind));
  return four.x + four.w;
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) exchanged(const Arguments p, const Maps maps) {
  make(1);
  fg::cluster_barrier();
  if (warp() < 2) {
    float sum = 0.0f;
    for (int n = 0; n < 4; ++n) {
      send(0, float(fg::cluster_rank() + 1));
      sum += receive(0, n % 2);
      send(1, float(thread()));
      sum += receive(1, n % 2);
    }
    fg::global_store(p.y + fg::block_index() * 128 + thread(), sum);
  }
}

// Its bytes of box 0 go to box 1 of the other block, which says that it has read them.
FG_DEVICE void fill(int value) {
  for (int k = thread(); k < 256; k += 128) fg::shared_store(reinterpret_cast<float*>(place()) + k, float(value));
}
FG_DEVICE void send_box() {
  if (thread() != 0) return;
  fg::mbarrier_expect(signal(0), box_bytes);
  fg::send_bytes_async(place(1), place(), box_bytes, signal(0), fg::cluster_rank() ^ 1);
}
FG_DEVICE float sum_of_box() {
  float sum = 0.0f;
  for (int k = thread(); k < 256; k += 128) sum += fg::shared_load(reinterpret_cast<const float*>(place(1)) + k);
  return sum;
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) sent_boxes(const Arguments p, const Maps maps) {
  make(warps);
  fg::cluster_barrier();
  float sum = 0.0f;
  for (int n = 0; n < 4; ++n) {
    if (n > 0) fg::mbarrier_wait(signal(2), (n - 1) % 2);
    fill(10 * n + fg::cluster_rank());
    fg::publish_shared();
    fg::block_barrier();
    send_box();
    fg::mbarrier_wait(signal(0), n % 2);
    sum += sum_of_box();
    if (n < 3) fg::mbarrier_arrive_at(signal(2), fg::cluster_rank() ^ 1);
  }
  fg::global_store(p.y + fg::block_index() * 128 + thread(), sum);
  fg::cluster_barrier();
}

// ---- mistakes ------------------------------------------------------------------------------------------------------

extern "C" __global__ void __cluster_dims__(2, 1, 1) copied_before_all_have_begun(const Arguments p, const Maps maps) {
  make(1);
  fg::block_barrier();
  if (thread() == 0) bring(maps, 0, 0);  // FAULT
  fg::mbarrier_wait(signal(0), 0);
  fg::cluster_barrier();
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) copied_over_what_the_other_reads(const Arguments p, const Maps maps) {
  make(1);
  fg::cluster_barrier();
  if (thread() == 0) bring(maps, 0, 0);
  fg::mbarrier_wait(signal(0), 0);
  fg::shared_load(place() + thread());  // READ
  fg::block_barrier();  // its own threads are done
  if (thread() == 0) bring(maps, 0, 8);
  fg::mbarrier_wait(signal(0), 1);
  fg::cluster_barrier();
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) read_without_a_wait(const Arguments p, const Maps maps) {
  make(1);
  fg::cluster_barrier();
  if (thread() == 0) bring(maps, 0, 0);
  if (fg::cluster_rank() == 0) fg::mbarrier_wait(signal(0), 0);
  fg::cluster_barrier();
  fg::shared_load(place() + thread());  // FAULT
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) told_without_a_signal(const Arguments p, const Maps maps) {
  make(1);
  if (thread() == 0) fg::shared_store(number(), 0);  // OTHER
  fg::cluster_barrier();
  if (fg::cluster_rank() == 0 && thread() == 0) fg::shared_store_at(number(), 7, 1);  // FAULT
  if (fg::cluster_rank() == 1) fg::shared_load(number());  // FAULT
  fg::cluster_barrier();
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) arrival_of_the_other_missing(const Arguments p, const Maps maps) {
  make(2);
  fg::cluster_barrier();
  if (fg::cluster_rank() == 0 && warp() == 0) {
    fg::mbarrier_arrive_at(signal(2), 0);  // OTHER
    fg::mbarrier_wait(signal(2), 0);  // FAULT
  }
  fg::cluster_barrier();
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) arrives_where_all_have_ended(const Arguments p, const Maps maps) {
  make(1);
  fg::cluster_barrier();
  if (fg::cluster_rank() == 1) return;
  for (int n = 0; n < 64; ++n) fg::block_barrier();
  if (warp() == 0) fg::mbarrier_arrive_at(signal(2), 1);  // FAULT
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) a_block_that_is_not_there(const Arguments p, const Maps maps) {
  make(1);
  fg::cluster_barrier();
  if (warp() == 0) fg::mbarrier_arrive_at(signal(2), 2);  // FAULT
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) half_a_cluster_barrier(const Arguments p, const Maps maps) {
  if (fg::cluster_rank() == 0) fg::cluster_barrier();  // FAULT
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) a_barrier_of_the_block_for_the_cluster(const Arguments p, const Maps maps) {
  if (warp() == 0) fg::block_barrier();  // FAULT
  else fg::cluster_barrier();  // OTHER
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) sent_over_what_the_other_reads(const Arguments p, const Maps maps) {
  make(1);
  fg::cluster_barrier();
  if (warp() < 2) {
    send(0, 1.0f);
    send(1, 1.0f);  // says nothing of what was read
    receive(0, 0);  // READ
    receive(1, 0);
    send(0, 2.0f);  // FAULT
    receive(0, 1);
  }
  fg::cluster_barrier();
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) sent_before_all_have_begun(const Arguments p, const Maps maps) {
  make(1);
  fg::block_barrier();
  if (warp() < 2) {
    send(0, 1.0f);  // FAULT
    receive(0, 0);
  }
  fg::cluster_barrier();
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) sent_more_than_expected(const Arguments p, const Maps maps) {
  make(1);
  fg::cluster_barrier();
  if (warp() == 0) {
    const float fours[1][4] = {};
    if (thread() == 0) fg::mbarrier_expect(signal(0), 256);
    fg::send_async<32>(sent(0), fours, signal(0), fg::cluster_rank() ^ 1);  // FAULT
    fg::mbarrier_wait(signal(0), 0);  // FAULT
  }
  fg::cluster_barrier();
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) a_sent_box_overwritten(const Arguments p, const Maps maps) {
  make(warps);
  fg::cluster_barrier();
  fill(1);
  fg::publish_shared();
  fg::block_barrier();
  send_box();
  fg::mbarrier_wait(signal(0), 0);  // of the other's box: says nothing of this one's
  fill(2);  // FAULT
  fg::cluster_barrier();
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) a_sent_box_not_published(const Arguments p, const Maps maps) {
  make(warps);
  fg::cluster_barrier();
  fill(1);
  fg::block_barrier();
  send_box();  // FAULT
  fg::mbarrier_wait(signal(0), 0);
  fg::cluster_barrier();
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) a_sent_box_not_awaited(const Arguments p, const Maps maps) {
  make(warps);
  fg::cluster_barrier();
  fill(1);
  fg::publish_shared();
  fg::block_barrier();
  send_box();
  sum_of_box();  // FAULT
  fg::cluster_barrier();
}
