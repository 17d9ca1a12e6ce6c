// How a launch ends early: the first fault is written down and the scheduler takes over.
//
// Contract: `report` does not return. It leaves the fibers where they are, so that nothing above it is unwound. The
// calls that led to the fault are traced on the stack of its fiber: here, or by the scheduler, which wakes it once more.
// Of what was asked for earlier, the calls have been remembered.
#pragma once
#include <stdarg.h>
#include <stdio.h>

#include "../interface.h"
#include "fiber.h"
#include "trace.h"

namespace fg {
namespace emulator {

class Faults {
 public:
  explicit Faults(const Launch& launch) : kernel_(reinterpret_cast<const void*>(launch.enter)) {}

  Context escape;         // where the scheduler waits for a fault
  bool on_fiber = false;  // a thread of the kernel runs, not the scheduler
  Failure failure = {};
  const Stack* asked = nullptr;  // where what is carried out was asked for, if its thread has gone on since

  void trace_here() {
    Stack stack;
    here(stack);
    failure.frames = trace(kernel_, stack, failure.frame);
  }

  [[noreturn]] __attribute__((format(printf, 5, 6))) void report(Fault fault, int line, int other_line,
                                                                const char* format, ...) {
    failure.fault = fault;
    failure.line = line;
    failure.other_line = other_line;
    va_list values;
    va_start(values, format);
    vsnprintf(failure.message, sizeof failure.message, format, values);
    va_end(values);
    if (on_fiber) trace_here();
    if (asked) failure.frames = trace(kernel_, *asked, failure.frame);
    _longjmp(escape.state, 1);
  }

 private:
  const void* kernel_;
};

}  // namespace emulator
}  // namespace fg
