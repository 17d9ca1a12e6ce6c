// What no spec and no plan changes: the standard library, and primitives. GCC compiles it once for all libraries
// (flashgen/toolchains/cpp.py).
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include "flashgen/cpu/flush.h"
#include "flashgen/cpu/philox.h"
#include "flashgen/cpu/vector.h"
#include "flashgen/cpu/convert.h"
#include "flashgen/cpu/vector_math.h"
#include "flashgen/cpu/captured.h"
#include "flashgen/cpu/tile_product.h"
#include "flashgen/cpu/few_rows.h"
