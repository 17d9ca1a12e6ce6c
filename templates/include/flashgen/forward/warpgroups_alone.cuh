// Warpgroups where no tensor copies can bring K and V: a block has one query tile, and everyone copies a part during the one before.
#pragma once
#include "flashgen/forward/one_tile.cuh"
#include "flashgen/forward/warpgroup_copies.cuh"
#include "flashgen/forward/warpgroups.cuh"

namespace fg::forward {

template <class Weighing> using Block = OneTile<Warpgroups<WarpgroupCopies<Results<Rows<QueryTiles<Weighing>>>>>>;

}  // namespace fg::forward
