// Loads rows of 16-bit values that stage_rows (tma_store.cuh) has staged.
#pragma once

#include <cstdint>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/util.hpp>

namespace flashattn3 {

// Loads what stage_rows has staged to the registers that it came from.
template <int kWords>
__device__ __forceinline__ void load_staged_rows(uint32_t (&word)[kWords], const uint8_t* tile,
                                                 int first = 0) {
  const int lane = threadIdx.x % 32;
  const int row = lane % 16;
  const int vec = (lane / 16) ^ (row % 8);
#pragma unroll
  for (int i = 0; i < kWords / 4; ++i) {
    const auto* at =
        reinterpret_cast<const cute::uint128_t*>(tile + row * 128 + (vec ^ (2 * (first + i))) * 16);
    cute::SM75_U32x4_LDSM_N::copy(*at, word[4 * i], word[4 * i + 1], word[4 * i + 2],
                                  word[4 * i + 3]);
  }
}

}  // namespace flashattn3
