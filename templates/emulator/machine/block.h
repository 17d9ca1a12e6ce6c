// The threads of a block, or of a cluster of blocks: warps in random order, their lanes together, their memories.
//
// The unit of scheduling is a warp between two collective calls. Its lanes run one after the other, each up to its next
// such call; when all have arrived, the calls are compared, carried out at once, and another warp is chosen.
//
// Contract: all lanes of a warp make the same call from the same line; all warps of a block come to the same barrier. Otherwise
// the launch fails: that is divergence within a warp, deadlock between warps. Warps are counted through a cluster.
#pragma once
#include <chrono>
#include <memory>
#include <thread>

#include "banks.h"
#include "barriers.h"
#include "bulk.h"
#include "copies.h"
#include "global_memory.h"
#include "matrix.h"
#include "mbarriers.h"
#include "random.h"
#include "warpgroups.h"

namespace fg {
namespace emulator {

// What each block of a cluster has for itself.
struct Own {
  Own(const Launch& launch, GlobalMemory& global, Clocks& clocks, Publications& publications, Faults& faults, int rank, int threads)
      : barriers(clocks, faults),
        shared(launch.shared_bytes, clocks, publications, faults),
        copies(shared, threads),
        bulk(shared, faults, threads),
        mbarriers(shared, global, clocks, faults, rank),
        warpgroups(shared, clocks, faults, threads) {}

  void reset() {
    barriers.reset();
    shared.reset();
    copies.reset();
    bulk.reset();
    mbarriers.reset();
    warpgroups.reset();
  }

  Barriers barriers;
  SharedMemory shared;
  Copies copies;
  BulkAdditions bulk;
  Mbarriers mbarriers;
  Warpgroups warpgroups;
};

class Block final : public Machine {
 public:
  Block(const Launch& launch, GlobalShadow& shadow, Registers& registers)
      : faults(launch),
        global(launch, shadow, faults),
        banks(launch.lines),
        launch_(launch),
        registers_(registers),
        threads_(static_cast<int>(launch.block.x * launch.block.y * launch.block.z)),
        all_(launch.cluster * threads_),
        publications_(clocks_, all_),
        fibers_(all_, &Block::run_thread, this),
        lanes_(static_cast<size_t>(all_)),
        warps_(static_cast<size_t>(all_ / warp_lanes)) {
    for (int rank = 0; rank < launch.cluster; ++rank)
      owns_.emplace_back(new Own(launch, global, clocks_, publications_, faults, rank, all_));
    for (int k = 0; k < all_; ++k) {
      const unsigned flat = static_cast<unsigned>(k % threads_), x = launch.block.x, y = launch.block.y;
      lanes_[static_cast<size_t>(k)].index = {flat % x, flat / x % y, flat / x / y};
    }
  }

  Faults faults;
  GlobalMemory global;
  Banks banks;

  // The index of the block that has failed.
  Index3 index() const { return index_of(block_of(thread_.warp)); }

  // The blocks from `number` on, in the grid. False: faults.failure says why not.
  bool run(uint64_t number) {
    number_ = number;
    bool allocated = !fibers_.contexts.empty();
    for (const auto& own : owns_) allocated = allocated && own->shared.allocated();
    if (!allocated) {
      faults.failure.fault = Fault::launch;
      snprintf(faults.failure.message, sizeof faults.failure.message, "no host memory for stacks and shared memory");
      return false;
    }
    registers_ = {{}, index_of(0), launch_.block, launch_.grid, this};
    random_ = Random(launch_.seed, number);
    clocks_.reset(static_cast<int>(warps_.size()));
    publications_.reset();
    for (const auto& own : owns_) own->reset();
    for (Lane& lane : lanes_) lane.ended = false;
    for (Warp& warp : warps_) warp = {};
    if (_setjmp(faults.escape.state) == 0) {
      schedule();
      return true;
    }
    if (!faults.on_fiber && !faults.asked) {
      tracing_ = true;
      switch_context(scheduler_, fiber_of(thread_));
    }
    return false;
  }

  // ---- Machine -----------------------------------------------------------------------------------------------------

  void global_access(Access access, const void* p, unsigned bytes, int line) override {
    global.access(access, p, bytes, writer(), line);
  }
  void global_arrive(const void* p, int line) override {
    global.access(Access::add, p, sizeof(uint32_t), writer(), line);
    global.arrive(writer().block);
  }
  void global_leave(uint32_t* p, int line) override {
    global.access(Access::add, p, sizeof *p, writer(), line);
    global.leave(writer(), p);
    __atomic_fetch_add(p, 1, __ATOMIC_ACQ_REL);
  }
  // With one host thread blocks run one after another: what is not there by then never comes.
  void global_await(const uint32_t* p, uint32_t count, int line) override {
    global.access(Access::add, p, sizeof *p, writer(), line);
    const auto begin = std::chrono::steady_clock::now();
    while (__atomic_load_n(p, __ATOMIC_ACQUIRE) < count) {
      if (launch_.host_threads < 2 || std::chrono::steady_clock::now() - begin > std::chrono::seconds(60))
        faults.report(Fault::deadlock, line, 0, "waits for %u that have left, of which %u have", count,
                      __atomic_load_n(p, __ATOMIC_ACQUIRE));
      std::this_thread::yield();
    }
    global.await(writer().block, p, count);
  }
  void global_add(float* p, const float* values, unsigned count, int line) override {
    global.access(Access::add, p, count * static_cast<unsigned>(sizeof *p), writer(), line);
    uint32_t* bits = reinterpret_cast<uint32_t*>(p);
    for (unsigned k = 0; k < count; ++k) {
      uint32_t old = __atomic_load_n(bits + k, __ATOMIC_RELAXED), sum;
      do {
        const float x = float_of_bits(old) + values[k];
        memcpy(&sum, &x, sizeof sum);
      } while (!__atomic_compare_exchange_n(bits + k, &old, sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    }
  }
  int cluster_rank() override { return block_of(thread_.warp); }
  char* shared_memory() override { return shared().data(); }
  void shared_access(Access access, const void* p, unsigned bytes, int line) override {
    const char* verb = access == Access::load ? "reads" : access == Access::store ? "writes" : "adds to";
    const size_t offset = shared().place(verb, p, bytes, line);
    banks.access(access == Access::load ? Banks::load : Banks::store, thread_.lane, offset, bytes, line,
                 __builtin_return_address(0));
    if (access == Access::load) return shared().read(thread_, offset, bytes, line);
    if (access == Access::add) shared().require_written(offset, bytes, line);
    shared().write(thread_, offset, bytes, line, access == Access::add ? Mark::atomic : 0);
  }
  void* shared_store_at(const void* p, unsigned bytes, int rank, int line) override {
    SharedMemory& theirs = block_at(rank, line).shared;
    const size_t offset = shared().place("writes", p, bytes, line);
    theirs.write(thread_, offset, bytes, line);
    return theirs.data() + offset;
  }
  void copy_async(void* target, const void* source, unsigned bytes, bool valid, int line) override {
    const size_t offset = shared().place("copies to", target, bytes, line);
    if (valid) global.access(Access::load, source, bytes, writer(), line);
    banks.access(Banks::copy, thread_.lane, offset, bytes, line, __builtin_return_address(0));
    own_of(thread_.warp).copies.issue(thread_, offset, valid ? source : nullptr, line);
  }
  void copy_async_commit(int) override { own_of(thread_.warp).copies.commit(thread_); }
  void copy_async_wait(int pending, int) override { own_of(thread_.warp).copies.wait(thread_, pending); }
  void publish_shared() override { publications_.publish(thread_); }
  void bulk_add(float* to, const float* from, int bytes, int line) override {
    constexpr int chunk = BulkAdditions::chunk_bytes, floats = chunk / static_cast<int>(sizeof(float));
    if (bytes <= 0 || bytes % chunk != 0)
      faults.report(Fault::misaligned, line, 0, "adds %d bytes asynchronously: no multiple of %d", bytes, chunk);
    for (int done = 0; done < bytes; done += chunk, to += floats, from += floats) {
      own_of(thread_.warp).bulk.issue(thread_, shared().place("reads", from, chunk, line), line);
      global_add(to, from, floats, line);
    }
  }
  void bulk_commit() override { own_of(thread_.warp).bulk.commit(thread_); }
  void bulk_wait() override { own_of(thread_.warp).bulk.wait(thread_); }
  void mbarrier_init(const void* signal, int arrivals, int line) override {
    own_of(thread_.warp).mbarriers.init(thread_, signal, arrivals, line);
  }
  void mbarrier_invalidate(const void* signal, int line) override { own_of(thread_.warp).mbarriers.invalidate(thread_, signal, line); }
  void mbarrier_expect(const void* signal, int bytes, int line) override {
    own_of(thread_.warp).mbarriers.expect(thread_, signal, bytes, line);
  }
  void copy_panel(const PanelCopy& copy, int line) override {
    const int blocks = copy.blocks ? copy.blocks : 1 << cluster_rank();
    bool counts = true;  // it is read once
    for (int rank = 0; blocks >> rank; ++rank) {
      if (!(blocks >> rank & 1)) continue;
      Mbarriers& theirs = block_at(rank, line).mbarriers;
      PanelCopy own = copy;
      own.to = const_cast<void*>(theirs.place(copy.to, shared())), own.signal = theirs.place(copy.signal, shared());
      theirs.copy(thread_, writer(), own, counts, line);
      counts = false;
    }
  }
  void send_async(const void* to, const void* from, const void* signal, int rank, int line) override {
    Mbarriers& theirs = block_at(rank, line).mbarriers;
    theirs.send(thread_, theirs.place(to, shared()), from, theirs.place(signal, shared()), line);
  }
  void send_bytes(const void* to, const void* from, int bytes, const void* signal, int rank, int line) override {
    Mbarriers& theirs = block_at(rank, line).mbarriers;
    theirs.send_bytes(thread_, theirs.place(to, shared()), shared(), from, bytes, theirs.place(signal, shared()), line);
  }
  void together(const Call& call) override {
    current().call = call;
    current().place = __builtin_return_address(0);
    if (call.what == Together::warpgroup_multiply && thread_.warp % Warpgroups::warps == 0 && thread_.lane == 0)
      here(own_of(thread_.warp).warpgroups.next_stack(thread_.warp));
    next_lane();
  }

 private:
  struct Lane {
    Call call;
    const void* place;  // where the call returns to
    Index3 index;
    bool ended;
  };
  struct Warp {
    enum State { ready, at_block_barrier, at_barrier, at_mbarrier, in_warpgroup, at_cluster_barrier, ended } state = ready;
    int line = 0;  // where it waits for other warps
    Mbarriers::Wait wait;
  };

  int warps_of_block() const { return threads_ / warp_lanes; }
  int block_of(int warp) const { return warp / warps_of_block(); }
  Own& own_of(int warp) { return *owns_[static_cast<size_t>(block_of(warp))]; }
  const Own& own_of(int warp) const { return *owns_[static_cast<size_t>(block_of(warp))]; }
  SharedMemory& shared() { return own_of(thread_.warp).shared; }
  Index3 index_of(int rank) const {
    const uint64_t number = number_ + static_cast<uint64_t>(rank);
    const unsigned x = launch_.grid.x, y = launch_.grid.y;
    return {static_cast<unsigned>(number % x), static_cast<unsigned>(number / x % y), static_cast<unsigned>(number / x / y)};
  }
  // Of the cluster, which still runs.
  Own& block_at(int rank, int line) {
    if (rank < 0 || rank >= launch_.cluster)
      faults.report(Fault::mbarrier, line, 0, "asks for block %d of a cluster of %d", rank, launch_.cluster);
    bool runs = false;
    for (int w = rank * warps_of_block(); w < (rank + 1) * warps_of_block(); ++w) runs = runs || warp_of(w).state != Warp::ended;
    if (!runs) faults.report(Fault::mbarrier, line, 0, "asks for block %d of the cluster, which has ended", rank);
    return own_of(rank * warps_of_block());
  }

  Warp& warp_of(int warp) { return warps_[static_cast<size_t>(warp)]; }
  Lane& lane_of(Thread t) { return lanes_[static_cast<size_t>(t.warp * warp_lanes + t.lane)]; }
  Context& fiber_of(Thread t) { return fibers_.contexts[static_cast<size_t>(t.warp * warp_lanes + t.lane)]; }
  GlobalShadow::Writer writer() const {
    const int rank = block_of(thread_.warp), warp = thread_.warp - rank * warps_of_block();
    return {number_ + static_cast<uint64_t>(rank), static_cast<uint32_t>(warp * warp_lanes + thread_.lane)};
  }
  Lane& current() { return lane_of(thread_); }

  static void run_thread(void* block) { static_cast<Block*>(block)->run_thread(); }
  void run_thread() {
    launch_.enter(launch_.arguments);
    own_of(thread_.warp).bulk.require_idle(thread_);
    current().ended = true;
    next_lane();
  }

  // The running lane has come to a stop: the next one of its warp runs, or the scheduler.
  void next_lane() {
    Context& mine = fiber_of(thread_);
    switch_context(mine, choose_lane(thread_.lane + 1) ? fiber_of(thread_) : scheduler_);
    if (tracing_) {
      faults.trace_here();
      switch_context(mine, scheduler_);
    }
  }
  bool choose_lane(int first) {
    for (thread_.lane = first; thread_.lane < warp_lanes; ++thread_.lane)
      if (!current().ended) {
        registers_.thread = current().index;
        banks.begin_lane();
        return true;
      }
    return false;
  }

  // ---- the scheduler -----------------------------------------------------------------------------------------------

  void schedule() {
    int ready[Clocks::most_warps];
    for (;;) {
      int count = 0;
      for (int w = 0; w < static_cast<int>(warps_.size()); ++w)
        if (may_run(w)) ready[count++] = w;
      if (count > 0) {
        run_warp(ready[random_.below(static_cast<unsigned>(count))]);
      } else if (!go_on()) {
        return;
      }
    }
  }

  // Whether what a warp waits for is there, which may come as late as the warp is chosen.
  bool may_run(int w) const {
    const Warp& warp = warps_[static_cast<size_t>(w)];
    return warp.state == Warp::ready || (warp.state == Warp::at_mbarrier && own_of(w).mbarriers.may_pass(warp.wait));
  }

  void run_warp(int warp) {
    if (warp_of(warp).state == Warp::at_mbarrier) own_of(warp).mbarriers.pass(warp, warp_of(warp).wait);
    warp_of(warp).state = Warp::ready;
    thread_ = {warp, 0};
    registers_.block = index_of(block_of(warp));
    faults.on_fiber = true;
    if (choose_lane(0)) switch_context(scheduler_, fiber_of(thread_));
    faults.on_fiber = false;
    banks.end_segment();
    thread_ = {warp, 0};
    arrive(warp);
  }

  // All lanes of the warp have stopped.
  void arrive(int warp) {
    Lane* lanes = &lanes_[static_cast<size_t>(warp * warp_lanes)];
    int ended = 0;
    for (int l = 0; l < warp_lanes; ++l) ended += lanes[l].ended;
    if (ended == warp_lanes) {
      warp_of(warp).state = Warp::ended;
      own_of(warp).warpgroups.require_idle(warp);
      return;
    }
    for (int l = 1; l < warp_lanes; ++l) compare(warp, 0, l);
    Call calls[warp_lanes];
    for (int l = 0; l < warp_lanes; ++l) calls[l] = lanes[l].call;
    carry_out(warp, calls);
  }

  void compare(int warp, int a, int b) {
    const Lane &one = lane_of({warp, a}), &other = lane_of({warp, b});
    if (one.ended && other.ended) return;
    if (one.ended != other.ended) {
      const int waits = one.ended ? b : a, left = one.ended ? a : b;
      thread_.lane = waits;
      const Call& call = lane_of({warp, waits}).call;
      faults.report(Fault::divergence, call.line, 0, "lane %d of warp %d comes to '%s', but lane %d has ended", waits,
                    warp, name(call.what), left);
    }
    if (one.call.what != other.call.what || one.call.line != other.call.line)
      faults.report(Fault::divergence, one.call.line, other.call.line,
                    "lane %d of warp %d comes to '%s', but lane %d to '%s' of line %d", a, warp, name(one.call.what),
                    b, name(other.call.what), other.call.line);
  }

  void carry_out(int warp, const Call (&calls)[warp_lanes]) {
    switch (calls[0].what) {
      case Together::warp_barrier: clocks_.warp_barrier(warp); break;
      case Together::block_barrier:
        warp_of(warp).state = Warp::at_block_barrier;
        warp_of(warp).line = calls[0].line;
        break;
      case Together::cluster_barrier:
        warp_of(warp).state = Warp::at_cluster_barrier;
        warp_of(warp).line = calls[0].line;
        break;
      case Together::barrier_wait:
      case Together::barrier_meet:
      case Together::barrier_arrive: come_to_barrier(warp, calls); break;
      case Together::mbarrier_arrive:
      case Together::mbarrier_arrive_at:
      case Together::mbarrier_wait: come_to_mbarrier(warp, calls); break;
      case Together::shuffle: shuffle(calls); break;
      case Together::ballot: ballot(calls); break;
      case Together::load_matrix: load_matrix(warp, calls, false); break;
      case Together::load_matrix_transposed: load_matrix(warp, calls, true); break;
      case Together::store_matrix: store_matrix(warp, calls); break;
      case Together::mma_f16: matrix::mma_16bit<float_of_half>(calls); break;
      case Together::mma_bf16: matrix::mma_16bit<float_of_bfloat>(calls); break;
      case Together::mma_tf32: matrix::mma_tf32(calls); break;
      case Together::warpgroup_arrive:
      case Together::warpgroup_multiply:
      case Together::warpgroup_commit:
      case Together::warpgroup_wait: join_warpgroup(warp, calls[0]); break;
    }
  }

  void come_to_barrier(int warp, const Call (&calls)[warp_lanes]) {
    const Call& call = calls[0];
    for (int l = 1; l < warp_lanes; ++l)
      if (calls[l].number != call.number || calls[l].bytes != call.bytes)
        faults.report(Fault::divergence, call.line, 0, "lanes 0 and %d of warp %d come to '%s' of different barriers",
                      l, warp, name(call.what));
    const bool waits = call.what != Together::barrier_arrive;
    if (waits) warp_of(warp).state = Warp::at_barrier;
    warp_of(warp).line = call.line;
    const uint32_t released = own_of(warp).barriers.come(warp, call, name(call.what));
    for (uint32_t rest = released; rest; rest &= rest - 1) warp_of(__builtin_ctz(rest)).state = Warp::ready;
  }

  void come_to_mbarrier(int warp, const Call (&calls)[warp_lanes]) {
    const Call& call = calls[0];
    for (int l = 1; l < warp_lanes; ++l)
      if (calls[l].in[0] != call.in[0] || calls[l].number != call.number)
        faults.report(Fault::divergence, call.line, 0, "lanes 0 and %d of warp %d come to '%s' of different mbarriers", l,
                      warp, name(call.what));
    Mbarriers& own = own_of(warp).mbarriers;
    if (call.what == Together::mbarrier_arrive) return own.arrive(warp, call.in[0], warp_lanes, call.line);
    if (call.what == Together::mbarrier_arrive_at) {
      Mbarriers& theirs = block_at(call.number, call.line).mbarriers;
      return theirs.arrive(warp, theirs.place(call.in[0], own_of(warp).shared), 1, call.line);
    }
    warp_of(warp).wait = own.wait(warp, call.in[0], call.number, call.line);
    warp_of(warp).state = Warp::at_mbarrier;
    warp_of(warp).line = call.line;
  }

  // The last of its four warps carries the call out.
  void join_warpgroup(int warp, const Call& call) {
    const int group = warp / Warpgroups::warps, first = group * Warpgroups::warps, last = first + Warpgroups::warps - 1;
    if (last >= static_cast<int>(warps_.size()))
      faults.report(Fault::divergence, call.line, 0,
                    "warp %d comes to '%s', which takes warps %d to %d, but the block has %zu warps", warp,
                    name(call.what), first, last, warps_.size());
    warp_of(warp).state = Warp::in_warpgroup;
    warp_of(warp).line = call.line;
    for (int w = first; w <= last; ++w)
      if (warp_of(w).state != Warp::in_warpgroup) return;
    const Call* calls[Warpgroups::lanes];
    for (int l = 0; l < Warpgroups::lanes; ++l) calls[l] = &lane_of({first + l / warp_lanes, l % warp_lanes}).call;
    for (int w = first; w <= last; ++w) {
      const Call& other = *calls[(w - first) * warp_lanes];
      if (other.what != call.what || other.line != call.line)
        faults.report(Fault::divergence, call.line, other.line,
                      "warp %d comes to '%s', but warp %d of its warpgroup to '%s' of line %d", warp, name(call.what),
                      w, name(other.what), other.line);
    }
    switch (call.what) {
      case Together::warpgroup_arrive: own_of(warp).warpgroups.arrive(group); break;
      case Together::warpgroup_multiply: own_of(warp).warpgroups.multiply(group, calls); break;
      case Together::warpgroup_commit: own_of(warp).warpgroups.commit(group); break;
      default: own_of(warp).warpgroups.wait(group, call.number, call.line); break;
    }
    for (int w = first; w <= last; ++w) warp_of(w).state = Warp::ready;
  }

  static void shuffle(const Call (&calls)[warp_lanes]) {
    for (const Call& call : calls)
      memcpy(call.out, calls[call.number & (warp_lanes - 1)].in[0], static_cast<size_t>(call.bytes));
  }

  static void ballot(const Call (&calls)[warp_lanes]) {
    uint32_t bits = 0;
    for (int lane = 0; lane < warp_lanes; ++lane) bits |= static_cast<uint32_t>(calls[lane].number) << lane;
    for (const Call& call : calls) memcpy(call.out, &bits, sizeof bits);
  }

  // Rows of matrices, each by the lane that has its address; `access` checks it and says where in shared memory it lies.
  template <class Checked> void access_rows(int warp, const Call (&calls)[warp_lanes], Banks::Kind kind, Checked access) {
    for (int lane = 0; lane < 8 * calls[0].number; ++lane) {
      thread_.lane = lane;
      const size_t offset = access(lane, calls[lane]);
      banks.begin_lane();
      banks.access(kind, lane, offset, 16, calls[lane].line, lane_of({warp, 0}).place);
    }
    banks.end_segment();
  }
  void load_matrix(int warp, const Call (&calls)[warp_lanes], bool transposed) {
    access_rows(warp, calls, Banks::load, [&](int lane, const Call& call) {
      const size_t offset = shared().place("reads", call.in[0], 16, call.line);
      shared().read({warp, lane}, offset, 16, call.line);
      return offset;
    });
    matrix::load(calls, transposed);
  }
  void store_matrix(int warp, const Call (&calls)[warp_lanes]) {
    access_rows(warp, calls, Banks::store, [&](int lane, const Call& call) {
      const size_t offset = shared().place("writes", call.out, 16, call.line);
      shared().write({warp, lane}, offset, 16, call.line);
      return offset;
    });
    matrix::store(calls);
  }

  // No warp is ready. True if a barrier of a block, or of the cluster, was complete and all go on, false if all have ended.
  bool go_on() {
    const int warps = static_cast<int>(warps_.size()), of_block = warps_of_block();
    int first[Warp::ended + 1], count[Warp::ended + 1] = {};
    for (int w = warps - 1; w >= 0; --w) first[warp_of(w).state] = w, ++count[warp_of(w).state];
    if (count[Warp::ended] == warps) {
      for (const auto& own : owns_) {
        own->barriers.require_complete();
        own->mbarriers.require_idle();
      }
      return false;
    }
    bool goes_on = pass(Warp::at_cluster_barrier, 0, warps);
    for (int w = 0; w < warps; w += of_block) goes_on = pass(Warp::at_block_barrier, w, of_block) || goes_on;
    if (goes_on) return true;
    if (count[Warp::at_mbarrier] > 0) refuse_half_a_phase(first[Warp::at_mbarrier]);
    if (count[Warp::in_warpgroup] > 0) refuse_half_a_warpgroup(first[Warp::in_warpgroup]);
    if (count[Warp::at_block_barrier] > 0) {
      const int waits = first[Warp::at_block_barrier];
      refuse(waits, block_of(waits) * of_block, of_block);
    }
    if (count[Warp::at_barrier] > 0) refuse_half_a_barrier(first[Warp::at_barrier]);
    refuse(first[Warp::at_cluster_barrier], 0, warps);
  }

  // Whether `count` warps from `first` on have all come to one barrier, and go on.
  bool pass(typename Warp::State state, int first, int count) {
    for (int w = first; w < first + count; ++w)
      if (warp_of(w).state != state || warp_of(w).line != warp_of(first).line) return false;
    clocks_.barrier(first, count);
    for (int w = first; w < first + count; ++w) warp_of(w).state = Warp::ready;
    return true;
  }
  // A warp waits for the others of its block, or cluster: `count` from `first` on.
  [[noreturn]] void refuse(int waits, int first, int count) {
    thread_ = {waits, 0};
    const int line = warp_of(waits).line;
    const char* const barrier = name(lane_of(thread_).call.what);
    for (int w = first; w < first + count; ++w)
      if (warp_of(w).state == Warp::ended)
        faults.report(Fault::deadlock, line, 0, "warp %d waits at '%s' for warp %d, which has ended", waits, barrier, w);
    int other = first;
    while (warp_of(other).state == warp_of(waits).state && warp_of(other).line == line) ++other;
    faults.report(Fault::deadlock, line, warp_of(other).line, "warp %d waits at '%s', but warp %d at %s line %d", waits, barrier,
                  other, warp_of(other).state == Warp::at_barrier ? "'barrier_wait' of" : "that of", warp_of(other).line);
  }

  [[noreturn]] void refuse_half_a_phase(int warp) {
    thread_ = {warp, 0};
    own_of(warp).mbarriers.refuse(warp, warp_of(warp).wait, warp_of(warp).line);
  }
  [[noreturn]] void refuse_half_a_barrier(int warp) {
    thread_ = {warp, 0};
    const Call& call = lane_of(thread_).call;
    faults.report(Fault::deadlock, call.line, 0,
                  "warp %d waits at 'barrier_wait' of barrier %d for %d threads, of which %d have come, and no warp "
                  "goes on",
                  warp, call.number, call.bytes, own_of(warp).barriers.came(call.number));
  }

  // The warp waits for others of its warpgroup, and none of them is going to come.
  [[noreturn]] void refuse_half_a_warpgroup(int warp) {
    int other = warp / Warpgroups::warps * Warpgroups::warps;
    while (warp_of(other).state == Warp::in_warpgroup) ++other;
    const bool ended = warp_of(other).state == Warp::ended;
    thread_ = {warp, 0};
    const Call& call = lane_of(thread_).call;
    faults.report(Fault::divergence, call.line, ended ? 0 : warp_of(other).line,
                  "warp %d comes to '%s', but warp %d of its warpgroup %s", warp, name(call.what), other,
                  ended ? "has ended" : "waits at a barrier");
  }

  static const char* name(Together what) {
    switch (what) {
      case Together::warp_barrier: return "warp_barrier";
      case Together::block_barrier: return "block_barrier";
      case Together::barrier_wait: return "barrier_wait";
      case Together::barrier_meet: return "barrier_meet";
      case Together::barrier_arrive: return "barrier_arrive";
      case Together::mbarrier_arrive: return "mbarrier_arrive";
      case Together::mbarrier_arrive_at: return "mbarrier_arrive_at";
      case Together::mbarrier_wait: return "mbarrier_wait";
      case Together::cluster_barrier: return "cluster_barrier";
      case Together::shuffle: return "shuffle";
      case Together::ballot: return "ballot";
      case Together::load_matrix: return "load_matrix";
      case Together::load_matrix_transposed: return "load_matrix_transposed";
      case Together::store_matrix: return "store_matrix";
      case Together::mma_f16: return "mma_f16";
      case Together::mma_bf16: return "mma_bf16";
      case Together::mma_tf32: return "mma_tf32";
      case Together::warpgroup_arrive: return "warpgroup_arrive";
      case Together::warpgroup_multiply: return "warpgroup_multiply";
      case Together::warpgroup_commit: return "warpgroup_commit";
      case Together::warpgroup_wait: return "warpgroup_wait";
    }
    return "";
  }

  const Launch& launch_;
  Registers& registers_;
  int threads_, all_;  // of a block, of the cluster
  Clocks clocks_;
  Publications publications_;
  std::vector<std::unique_ptr<Own>> owns_;
  Fibers fibers_;
  std::vector<Lane> lanes_;
  std::vector<Warp> warps_;
  Context scheduler_;
  Thread thread_ = {};     // that runs
  bool tracing_ = false;  // the launch has failed, and a fiber is asked where it is
  uint64_t number_ = 0;  // of the first block in the grid
  Random random_{0, 0};
};

}  // namespace emulator
}  // namespace fg
