// Fibers: the threads of a block, which take turns on one host thread.
//
// Contract: a fiber is started once, runs its body again and again, and is left in the middle of it when a launch
// fails: nothing on its stack may own anything. A fiber never moves to another host thread.
//
// A switch is _setjmp here and _longjmp there. These save a dozen registers and make no system call, where swapcontext
// asks the operating system for the signal mask each time: measured, 25 ns against 200 ns, and a backward pass switches
// millions of times. What _longjmp cannot do is enter a fresh stack; for that, once a fiber, there is makecontext.
#pragma once
#undef _FORTIFY_SOURCE  // its longjmp refuses to jump to a stack that lies below the current one
#include <setjmp.h>
#include <stddef.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <vector>

namespace fg {
namespace emulator {

struct Context {
  jmp_buf state;
};

inline void switch_context(Context& from, Context& to) {
  if (_setjmp(from.state) == 0) _longjmp(to.state, 1);
}

class Fibers {
 public:
  using Body = void (*)(void*);

  static constexpr size_t stack_bytes = 256 << 10, guard_bytes = 16 << 10;  // untouched pages cost nothing

  Fibers(int count, Body body, void* argument)
      : contexts(static_cast<size_t>(count)), body_(body), argument_(argument) {
    bytes_ = contexts.size() * (stack_bytes + guard_bytes);
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      contexts.clear();
      bytes_ = 0;
      return;
    }
    memory_ = static_cast<char*>(memory);
    for (size_t k = 0; k < contexts.size(); ++k)
      start(contexts[k], memory_ + k * (stack_bytes + guard_bytes), k % 64 * 1088);
  }
  ~Fibers() {
    if (bytes_) munmap(memory_, bytes_);
  }
  Fibers(const Fibers&) = delete;
  Fibers& operator=(const Fibers&) = delete;

  std::vector<Context> contexts;  // empty where there was no memory for the stacks

 private:
  // Stacks begin at different places of their pages, so that those of a warp fall into different sets of the cache.
  void start(Context& fiber, char* stack, size_t shift) {
    mprotect(stack, guard_bytes, PROT_NONE);  // stacks grow down into it
    ucontext_t first;
    getcontext(&first);
    first.uc_stack.ss_sp = stack + guard_bytes;
    first.uc_stack.ss_size = stack_bytes - shift;
    first.uc_link = nullptr;
    starting() = {this, &fiber};
    makecontext(&first, &Fibers::run, 0);
    if (_setjmp(creator_.state) == 0) setcontext(&first);
  }

  struct Starting {
    Fibers* fibers;
    Context* self;
  };
  static Starting& starting() {
    static thread_local Starting value;
    return value;
  }
  static void run() {
    const Starting mine = starting();
    switch_context(*mine.self, mine.fibers->creator_);
    for (;;) mine.fibers->body_(mine.fibers->argument_);  // never returns: a trace ends here
  }

  Body body_;
  void* argument_;
  Context creator_;
  char* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace emulator
}  // namespace fg
