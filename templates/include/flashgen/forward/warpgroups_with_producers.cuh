// Persistent blocks of warpgroups, for which other warps copy, and find what is visited.
#pragma once
#include "flashgen/forward/warpgroups.cuh"
#include "flashgen/forward/with_producers.cuh"

namespace fg::forward {

template <class Weighing> using Block = WithProducers<Warpgroups<Producers<CopiesOfTiles<Weighing>>>>;

}  // namespace fg::forward
