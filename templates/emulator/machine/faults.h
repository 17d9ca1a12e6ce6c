// How a launch ends early: the first fault is written down and the scheduler takes over.
//
// Contract: `report` does not return. It leaves the fibers where they are, so that nothing above it is unwound.
#pragma once
#include <stdarg.h>
#include <stdio.h>

#include "../interface.h"
#include "fiber.h"

namespace fg {
namespace emulator {

class Faults {
 public:
  Context escape;  // where the scheduler waits for a fault
  Failure failure = {};

  [[noreturn]] __attribute__((format(printf, 5, 6))) void report(Fault fault, int line, int other_line,
                                                                const char* format, ...) {
    failure.fault = fault;
    failure.line = line;
    failure.other_line = other_line;
    va_list values;
    va_start(values, format);
    vsnprintf(failure.message, sizeof failure.message, format, values);
    va_end(values);
    _longjmp(escape.state, 1);
  }
};

}  // namespace emulator
}  // namespace fg
