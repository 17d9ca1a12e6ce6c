// What ranges.h is written over, for CPUs: the standard library.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#define FG_FUNCTION inline

namespace fg {
namespace standard = std;
}
