// Global memory: the allocations of a launch, every access checked against them and counted.
//
// Contract: an access lies inside one allocation and is aligned to its size. Bytes are counted as lanes request them:
// there is no cache, and lanes that ask for the same bytes each count. What may be written: global_shadow.h.
#pragma once
#include <inttypes.h>

#include <vector>

#include "faults.h"
#include "global_shadow.h"

namespace fg {
namespace emulator {

class GlobalMemory {
 public:
  GlobalMemory(const Launch& launch, GlobalShadow& shadow, Faults& faults)
      : traffic(static_cast<size_t>(launch.allocations)), launch_(launch), shadow_(shadow), faults_(faults) {}

  std::vector<Traffic> traffic;

  void access(Access access, const void* p, unsigned bytes, GlobalShadow::Writer thread, int line) {
    const uint64_t address = reinterpret_cast<uint64_t>(p);
    const int index = find(address, bytes, line);
    if (index < 0) refuse(access, address, bytes, line);
    if (address % bytes != 0) {
      const Allocation& hit = launch_.allocation[index];
      faults_.report(Fault::misaligned, line, 0,
                     "%s %u bytes at byte %" PRIu64 " of '%s': the address is no multiple of %u", verb(access), bytes,
                     address - hit.address, hit.name, bytes);
    }
    const uint64_t offset = address - launch_.allocation[index].address;
    const auto found = shadow_.access(static_cast<size_t>(index), access, offset, bytes, thread, line);
    if (found.conflict != GlobalShadow::Conflict::none) refuse(found, launch_.allocation[index], line);
    Traffic& count = traffic[static_cast<size_t>(index)];
    (is_load(access) ? count.loaded : is_store(access) ? count.stored : count.added) += bytes;
  }

  void arrive(uint64_t block) { shadow_.arrive(block); }
  void leave(GlobalShadow::Writer thread, const void* counter) { shadow_.leave(thread, counter); }
  void await(uint64_t block, const void* counter, uint32_t count) { shadow_.await(block, counter, count); }

 private:
  int find(uint64_t address, unsigned bytes, int line) {
    int& last = last_[line % most_remembered];
    if (last < launch_.allocations && holds(last, address, bytes)) return last;
    for (int k = 0; k < launch_.allocations; ++k)
      if (holds(k, address, bytes)) return last = k;
    return -1;
  }
  bool holds(int index, uint64_t address, unsigned bytes) const {
    const Allocation& a = launch_.allocation[index];
    return address >= a.address && address - a.address < a.bytes && a.bytes - (address - a.address) >= bytes;
  }

  // Names the allocation that is nearest: an index that is wrong is mostly wrong by little.
  [[noreturn]] void refuse(Access access, uint64_t address, unsigned bytes, int line) {
    const Allocation* nearest = nullptr;
    uint64_t distance = UINT64_MAX;
    for (int k = 0; k < launch_.allocations; ++k) {
      const Allocation& a = launch_.allocation[k];
      const uint64_t end = a.address + a.bytes;
      const uint64_t d = address < a.address ? a.address - address : address < end ? 0 : address - end;
      if (d < distance) nearest = &a, distance = d;
    }
    if (address < 65536)
      faults_.report(Fault::outside, line, 0, "%s %u bytes through a null pointer plus %" PRIu64, verb(access), bytes,
                     address);
    if (!nearest)
      faults_.report(Fault::outside, line, 0, "%s %u bytes, and the launch has no allocation", verb(access), bytes);
    if (address < nearest->address)
      faults_.report(Fault::outside, line, 0, "%s %u bytes that begin %" PRIu64 " bytes before '%s'", verb(access), bytes,
                     nearest->address - address, nearest->name);
    faults_.report(Fault::outside, line, 0, "%s %u bytes at byte %" PRIu64 " of '%s', which has %" PRIu64, verb(access),
                   bytes, address - nearest->address, nearest->name, nearest->bytes);
  }
  [[noreturn]] void refuse(const GlobalShadow::Finding& found, const Allocation& allocation, int line) {
    using Conflict = GlobalShadow::Conflict;
    const char* what = found.conflict == Conflict::loaded_after_write  ? "loaded and was written in this launch"
                       : found.conflict == Conflict::written_after_load ? "written and was loaded in this launch"
                       : found.conflict == Conflict::not_left           ? "loaded, and the block that stored it had not arrived by then"
                       : found.conflict == Conflict::not_handed         ? "loaded, added to or overwritten, and who wrote it had not left, or nobody awaited that"
                       : found.conflict == Conflict::stored_twice       ? "stored and was stored by another thread"
                                                                        : "stored by one block and added to by another";
    const int other = found.conflict == Conflict::written_after_load ? found.mark.load_line() : found.mark.write_line();
    faults_.report(Fault::global_race, line, other, "byte %" PRIu64 " of '%s' is %s", found.offset, allocation.name,
                   what);
  }

  static bool is_load(Access access) {
    return access == Access::load || access == Access::load_left || access == Access::load_handed;
  }
  static bool is_store(Access access) { return access == Access::store || access == Access::hand; }
  static const char* verb(Access access) {
    return is_load(access) ? "reads" : is_store(access) ? "writes" : "adds to";
  }

  static constexpr int most_remembered = 256;
  const Launch& launch_;
  GlobalShadow& shadow_;
  Faults& faults_;
  int last_[most_remembered] = {};  // the allocation that a line touched last
};

}  // namespace emulator
}  // namespace fg
