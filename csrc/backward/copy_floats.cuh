// TMA loads of floats: lse and delta of a block of query rows.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>

#include "ptx/mbarrier.cuh"

namespace flashattn3::backward {

// Copies a box of floats, from (column, row) of a matrix on; otherwise like copy_tile
// (tma_load.cuh).
__device__ __forceinline__ void copy_floats(float* to, const void* tensor_map, Barrier& full,
                                            uint64_t cache_hint, int column, int row) {
  cute::SM90_TMA_LOAD_2D::copy(tensor_map, &full.word, cache_hint, to, column, row);
}

}  // namespace flashattn3::backward
