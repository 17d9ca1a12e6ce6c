// The border between the two sides of the emulator, which are compiled apart.
//
//   kernel/    pasted before the generated source: CUDA's words and the names of layer 1, each of which calls a Machine
//   machine/   one library for all kernels: fibers, memories, barriers, matrix units, counts; it sees no kernel's types
//
// Contract: both sides are compiled by the same compiler from the same text of this file. Everything that crosses is
// plain data; an error ends the launch and arrives as a Failure, never as an exception.
#pragma once
#include <stdint.h>

namespace fg {
namespace emulator {

constexpr int warp_lanes = 32;
constexpr int most_threads = 1024;

struct Index3 {
  unsigned x, y, z;
};

// ---- what a kernel asks for ----------------------------------------------------------------------------------------

// The last ones of what other blocks of the launch have left, and of what running ones hand on to each other.
enum class Access : int { load, store, add, load_left, hand, load_handed };

// What all lanes of a warp do together. The operands of one lane lie on its own stack while it waits.
enum class Together : int {
  warp_barrier,
  block_barrier,
  barrier_wait,  // these three of a barrier with a number
  barrier_meet,
  barrier_arrive,
  shuffle,
  ballot,
  load_matrix,
  load_matrix_transposed,
  store_matrix,
  mma_f16,
  mma_bf16,
  mma_tf32,
  mbarrier_arrive,  // these three of a barrier in shared memory
  mbarrier_arrive_at,  // of another block of the cluster, by one arrival
  mbarrier_wait,
  cluster_barrier,
  warpgroup_arrive,  // these four by the four warps of a warpgroup
  warpgroup_multiply,
  warpgroup_commit,
  warpgroup_wait,
};
struct Call {
  Together what;
  int line;
  void* out;          // shuffle: the value; ballot: the bits; load_matrix: its registers; store_matrix: the row; products: d, read and written
  const void* in[2];  // shuffle: the value; load_matrix: the row; store_matrix: its registers; mma: a and b; warpgroup_multiply: a Product;
                      // mbarrier: where it lies
  int number;         // shuffle: the lane that is read; load_matrix, store_matrix: how many; ballot: the condition; warpgroup_wait: the groups left;
                      // barrier: its number; mbarrier_wait: the parity; mbarrier_arrive_at: the block in its cluster
  int bytes;          // shuffle: the size of the value; barrier: the threads that it is for
};

// A matrix in shared memory as a warpgroup reads it; machine/operand.h says where its elements lie.
struct SharedOperand {
  const void* start;
  int leading_bytes, stride_bytes, row_bytes;
  bool across;
};
// What the elements of a and b are.
enum class Format : int { half, bfloat, e4m3 };
// d (64 x 8 n_tiles) = or += a (64 x 16) b (16 x 8 n_tiles), d in float32; of 8 bits 32 in the place of 16. The same for all
// lanes but for registers.
struct Product {
  const uint32_t* a_registers;  // null: a lies in shared memory
  SharedOperand a, b;
  int n_tiles;
  Format format;
  bool add;
};

// A tensor in global memory, and the boxes of it that tensor copies bring: what the emulator's hosts write
// into the words of a fg::TensorMap (flashgen/hosts/tensor_maps.py).
struct MappedTensor {
  uint64_t address, extents[5], strides[4];  // elements of a row, rows, slabs, two more; bytes between those, but elements
  uint32_t box[2], element_bytes;            // columns and rows
};
struct PanelCopy {
  void* to;
  MappedTensor from;
  int column, row, slab, more[2];  // of the first element
  const void* signal;
  int blocks;  // of the cluster that get it, by a bit each; 0: this one
};

class Machine {
 public:
  virtual void global_access(Access access, const void* p, unsigned bytes, int line) = 0;
  virtual void global_arrive(const void* p, int line) = 0;
  virtual void global_leave(uint32_t* p, int line) = 0;
  virtual void global_await(const uint32_t* p, uint32_t count, int line) = 0;
  virtual void global_add(float* p, const float* values, unsigned count, int line) = 0;  // one access of all of them
  virtual int cluster_rank() = 0;
  virtual char* shared_memory() = 0;
  virtual void shared_access(Access access, const void* p, unsigned bytes, int line) = 0;
  virtual void* shared_store_at(const void* p, unsigned bytes, int rank, int line) = 0;  // where it is in that block
  virtual void copy_async(void* shared, const void* global, unsigned bytes, bool valid, int line) = 0;
  virtual void copy_async_commit(int line) = 0;
  virtual void copy_async_wait(int pending, int line) = 0;
  virtual void publish_shared() = 0;
  virtual void bulk_add(float* to, const float* from, int bytes, int line) = 0;
  virtual void bulk_commit() = 0;
  virtual void bulk_wait() = 0;
  virtual void mbarrier_init(const void* signal, int arrivals, int line) = 0;
  virtual void mbarrier_invalidate(const void* signal, int line) = 0;
  virtual void mbarrier_expect(const void* signal, int bytes, int line) = 0;
  virtual void copy_panel(const PanelCopy& copy, int line) = 0;
  virtual void send_async(const void* to, const void* from, const void* signal, int rank, int line) = 0;  // 16 bytes
  virtual void send_bytes(const void* to, const void* from, int bytes, const void* signal, int rank, int line) = 0;
  virtual void together(const Call& call) = 0;

 protected:
  ~Machine() = default;
};

// What the running thread knows of itself. One for each host thread; the machine renews it at every switch.
struct Registers {
  Index3 thread, block, block_size, grid_size;
  Machine* machine;
};

// ---- what a host passes --------------------------------------------------------------------------------------------

struct Allocation {
  const char* name;
  uint64_t address, bytes;
};

// Bytes of global memory, summed over the requests of all lanes.
struct Traffic {
  uint64_t loaded, stored, added;
};

// Requests to shared memory from one place of the compiled code; without conflicts they take `least` wavefronts.
struct SharedRequests {
  uint64_t place;  // an address in the kernel's library, or 0
  uint64_t requests, wavefronts, least;
  int line;
};

enum class Fault : int {
  none,
  launch,         // the launch itself is impossible
  outside,        // global memory: not inside one allocation
  misaligned,
  shared_outside, // shared memory: beyond the launch's size
  uninitialized,  // shared memory: read before it was written
  not_awaited,    // an asynchronous copy, product or addition that no wait has covered
  not_committed,  // … that was never committed
  not_published,  // shared memory: read by a product or an addition, but its writer has not made it visible to them
  not_arrived,    // a product whose registers may still be in use
  race,
  global_race,    // global memory: written and loaded, or written by two threads, in one launch
  divergence,     // lanes of a warp, or warps of a warpgroup, at different collectives
  deadlock,       // a barrier that cannot complete
  mbarrier,       // a barrier in shared memory that is not there, or comes to more than it was made for
};
constexpr int most_frames = 24;
struct Failure {
  Fault fault;
  int line, other_line;  // 0: none
  int frames;
  uint64_t frame[most_frames];  // the calls that led to `line`: machine/trace.h
  char message[480];
};

struct Launch {
  void (*enter)(const void* arguments);
  Registers* (*registers)();  // of the calling host thread
  const void* arguments;
  Index3 grid, block;
  int cluster;  // blocks, neighbours in dimension x, that run together
  uint64_t shared_bytes;
  uint64_t seed;
  int host_threads;
  int lines;  // of the source
  int allocations;
  const Allocation* allocation;
  Traffic* traffic;        // one an allocation
  SharedRequests* shared;  // room for `places`; what is beyond is not told
  int places;
  int* places_used;
  Failure* failure;
};

}  // namespace emulator
}  // namespace fg
