// Calls functions of a shared library for a process of another architecture: this program runs under an emulator of its own.
// Usage: remote_main library.so. Requests come from stdin, answers go to stdout, in native (little-endian) numbers:
//   request   name; buffers (size and bytes); places (buffer, offset and buffer that it shall point to); arguments
//             (0 an integer, 1 a double, 2 a buffer)
//   answer    what the function returned, as 64 bits; the bytes of every buffer
// The last byte of a buffer is the last of a page that is followed by one that nobody may touch: who reads or writes beyond dies.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "remote_main: %s\n", what);
  std::exit(1);
}

void take(void* to, size_t size) {
  if (size != 0 && std::fread(to, 1, size, stdin) != size) fail("the request ends early");
}
uint64_t take_number() {
  uint64_t x;
  take(&x, sizeof(x));
  return x;
}

class Buffer {
 public:
  explicit Buffer(size_t size) : size_(size) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), pages = (size + page - 1) / page;
    mapped_ = (pages + 1) * page;
    void* const memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("no memory");
    first_ = static_cast<char*>(memory);
    if (mprotect(first_ + pages * page, page, PROT_NONE) != 0) fail("no guard page");
    at_ = first_ + pages * page - size;
  }
  ~Buffer() {
    if (first_ != nullptr) munmap(first_, mapped_);
  }
  Buffer(Buffer&& other) noexcept : first_(other.first_), at_(other.at_), size_(other.size_), mapped_(other.mapped_) {
    other.first_ = nullptr;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  char* at() const { return at_; }
  size_t size() const { return size_; }

 private:
  char *first_, *at_;
  size_t size_, mapped_;
};

void answer(void* library) {
  std::string name(take_number(), '\0');
  take(&name[0], name.size());
  std::vector<Buffer> buffers;
  for (uint64_t left = take_number(); left > 0; --left) {
    buffers.emplace_back(take_number());
    take(buffers.back().at(), buffers.back().size());
  }
  for (uint64_t left = take_number(); left > 0; --left) {
    const uint64_t in = take_number(), offset = take_number(), to = take_number();
    const char* const target = buffers.at(to).at();
    std::memcpy(buffers.at(in).at() + offset, &target, sizeof(target));
  }
  // Integers and doubles are counted apart, on every machine that this is for.
  int64_t x[16] = {};
  double d[2] = {};
  size_t integers = 0, doubles = 0;
  for (uint64_t left = take_number(); left > 0; --left) {
    const uint64_t kind = take_number();
    uint64_t value = take_number();
    if (kind == 1) {
      if (doubles == 2) fail("too many doubles");
      std::memcpy(&d[doubles++], &value, sizeof(value));
    } else {
      if (integers == 16) fail("too many arguments");
      x[integers++] = kind == 2 ? int64_t(reinterpret_cast<intptr_t>(buffers.at(value).at())) : int64_t(value);
    }
  }
  using Function = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                               int64_t, int64_t, int64_t, int64_t, int64_t, double, double);
  const auto function = reinterpret_cast<Function>(dlsym(library, name.c_str()));
  if (function == nullptr) fail(("there is no function " + name).c_str());
  const int64_t result = function(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15],
                                  d[0], d[1]);
  std::fwrite(&result, sizeof(result), 1, stdout);
  for (const Buffer& buffer : buffers) std::fwrite(buffer.at(), 1, buffer.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

int main(int, char** arguments) {
  void* const library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) fail(dlerror());
  for (int first; (first = std::fgetc(stdin)) != EOF;) {
    std::ungetc(first, stdin);
    answer(library);
  }
}
