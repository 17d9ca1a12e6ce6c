// Bank conflicts of shared memory, counted for each place in the code.
//
// The model: 32 banks of 4 bytes. A warp's request of up to 4 bytes a lane is served at once, one of 8 bytes in two
// halves of the warp, one of 16 bytes in four quarters (ldmatrix: its four matrices). Each of these takes as many
// wavefronts as the fullest bank has distinct words; lanes that want one word share it. Without conflicts that is one.
//
// What belongs to one request: lanes run one after the other between two points where the warp is together, so the n-th
// time that a lane passes a line since then is taken as one request with the n-th time of the other lanes.
#pragma once
#include <unordered_map>
#include <vector>

#include "../interface.h"

namespace fg {
namespace emulator {

class Banks {
 public:
  enum Kind : int { load, store, copy, kinds };

  explicit Banks(int lines) : lines_(static_cast<size_t>(lines)), sites_((lines_ + 1) * kinds) {}

  std::unordered_map<uint64_t, SharedRequests> counts;  // by line and place, the address that the call returns to

  // The next lane of the warp runs.
  void begin_lane() { ++turn_; }

  void access(Kind kind, int lane, size_t offset, unsigned bytes, int line, const void* place) {
    if (line < 0 || static_cast<size_t>(line) > lines_) return;
    Site& site = sites_[static_cast<size_t>(line) * kinds + kind];
    if (site.segment != segment_) {
      site.segment = segment_;
      site.requests.clear();
    }
    if (site.turn != turn_) {
      site.turn = turn_;
      site.passed = 0;
    }
    const size_t occurrence = site.passed++;
    if (occurrence == site.requests.size()) {
      site.requests.push_back(used_);
      if (used_ == requests_.size()) requests_.emplace_back();
      requests_[used_++] = {place, line, bytes, 0, {}};
    }
    Request& request = requests_[site.requests[occurrence]];
    if (bytes > request.bytes) request.bytes = bytes;
    request.lanes |= 1u << lane;
    request.offset[lane] = static_cast<uint32_t>(offset);
  }

  // The warp is together: its requests are complete.
  void end_segment() {
    for (size_t k = 0; k < used_; ++k) count(requests_[k]);
    used_ = 0;
    ++segment_;
    ++turn_;
  }

 private:
  struct Request {
    const void* place;  // of the first lane
    int line;
    unsigned bytes;
    uint32_t lanes;
    uint32_t offset[warp_lanes];
  };
  struct Site {
    uint64_t segment = 0, turn = 0;
    size_t passed = 0;
    std::vector<size_t> requests;  // by occurrence
  };

  void count(const Request& request) {
    const uint64_t place = reinterpret_cast<uint64_t>(request.place);
    SharedRequests& total = counts[place ^ static_cast<uint64_t>(request.line) << 48];
    total.place = place;
    total.line = request.line;
    const int lanes = request.bytes <= 4 ? 32 : request.bytes == 8 ? 16 : 8;  // served at a time
    ++total.requests;
    for (int first = 0; first < warp_lanes; first += lanes) {
      const int wavefronts = served(request, first, lanes);
      total.wavefronts += static_cast<uint64_t>(wavefronts);
      total.least += wavefronts > 0;
    }
  }
  static int served(const Request& request, int first, int lanes) {
    uint32_t word_of[warp_lanes][warp_lanes];  // bank, its distinct words
    int fill[warp_lanes] = {}, fullest = 0;
    for (int lane = first; lane < first + lanes; ++lane) {
      if (!(request.lanes >> lane & 1)) continue;
      const uint32_t begin = request.offset[lane] / 4, end = (request.offset[lane] + request.bytes + 3) / 4;
      for (uint32_t word = begin; word < end; ++word) {
        const uint32_t bank = word % warp_lanes;
        int k = 0;
        while (k < fill[bank] && word_of[bank][k] != word) ++k;
        if (k < fill[bank]) continue;
        word_of[bank][fill[bank]++] = word;
        if (fill[bank] > fullest) fullest = fill[bank];
      }
    }
    return fullest;
  }

  size_t lines_;
  std::vector<Site> sites_;
  std::vector<Request> requests_;
  size_t used_ = 0;
  uint64_t segment_ = 1, turn_ = 1;
};

}  // namespace emulator
}  // namespace fg
