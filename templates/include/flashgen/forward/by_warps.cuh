// A block has a query tile, and everyone copies, multiplies and weighs: Algorithm 1 of FlashAttention-2.
#pragma once
#include "flashgen/forward/one_tile.cuh"
#include "flashgen/forward/products_of_warps.cuh"

namespace fg::forward {

template <class Weighing> using Block = KeyTilesInTurn<ProductsOfWarps<Weighing>>;

}  // namespace fg::forward
