// Global memory: the allocations of a launch, every access checked against them and counted.
//
// Contract: an access lies inside one allocation and is aligned to its size. Bytes are counted as lanes request them:
// there is no cache, and lanes that ask for the same bytes each count.
#pragma once
#include <inttypes.h>

#include <vector>

#include "faults.h"

namespace fg {
namespace emulator {

class GlobalMemory {
 public:
  GlobalMemory(const Launch& launch, Faults& faults)
      : traffic(static_cast<size_t>(launch.allocations)), launch_(launch), faults_(faults) {}

  std::vector<Traffic> traffic;

  void access(Access access, const void* p, unsigned bytes, int line) {
    const uint64_t address = reinterpret_cast<uint64_t>(p);
    const int index = find(address, bytes, line);
    if (index < 0) refuse(access, address, bytes, line);
    if (address % bytes != 0) {
      const Allocation& hit = launch_.allocation[index];
      faults_.report(Fault::misaligned, line, 0, "%s %u bytes at byte %" PRIu64 " of '%s': the address is no multiple of %u",
                     verb(access), bytes, address - hit.address, hit.name, bytes);
    }
    Traffic& count = traffic[static_cast<size_t>(index)];
    (access == Access::load ? count.loaded : access == Access::store ? count.stored : count.added) += bytes;
  }

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
      const uint64_t d = address < a.address ? a.address - address : address < a.address + a.bytes ? 0 : address - a.address - a.bytes;
      if (d < distance) nearest = &a, distance = d;
    }
    if (address < 65536)
      faults_.report(Fault::outside, line, 0, "%s %u bytes through a null pointer plus %" PRIu64, verb(access), bytes, address);
    if (!nearest)
      faults_.report(Fault::outside, line, 0, "%s %u bytes, and the launch has no allocation", verb(access), bytes);
    if (address < nearest->address)
      faults_.report(Fault::outside, line, 0, "%s %u bytes that begin %" PRIu64 " bytes before '%s'", verb(access), bytes,
                     nearest->address - address, nearest->name);
    faults_.report(Fault::outside, line, 0, "%s %u bytes at byte %" PRIu64 " of '%s', which has %" PRIu64, verb(access),
                   bytes, address - nearest->address, nearest->name, nearest->bytes);
  }
  static const char* verb(Access access) {
    return access == Access::load ? "reads" : access == Access::store ? "writes" : "adds to";
  }

  static constexpr int most_remembered = 256;
  const Launch& launch_;
  Faults& faults_;
  int last_[most_remembered] = {};  // the allocation that a line touched last
};

}  // namespace emulator
}  // namespace fg
