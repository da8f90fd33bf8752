// Matrix descriptors that cost no instruction per WGMMA, for the GEMMs of tile/gemm.cuh and
// tile/gemm_mn.cuh.
#pragma once

#include <cstdint>

#include "ptx/opaque.cuh"
#include "ptx/smem_desc.cuh"

namespace flashattn3 {

// A matrix descriptor whose high word ptxas does not know (nvcc 13.0). ptxas copies a high word
// that is a constant or a loop invariant for each WGMMA (UMOV). It leaves one in the uniform
// register beside the low word if A and B have different unknown high words, computed in the basic
// block of the WGMMAs, if at most eight WGMMAs use them and if nothing uses them later.
struct SmemOperand {
  uint32_t low, high;
  __device__ __forceinline__ SmemOperand operator+(uint32_t offset) const {
    return {low + offset, high};
  }
};
// The high word has the stride between groups, too.
__device__ __forceinline__ uint64_t smem_desc(SmemOperand operand, uint32_t = 0) {
  return static_cast<uint64_t>(operand.high) << 32 | operand.low;
}

// Returns the high word of an atom-major tile, computed from opaque_ones() in one of four ways, so
// that ptxas does not know that the results are equal.
template <int kForm>
__device__ __forceinline__ uint32_t opaque_desc_high(uint32_t ones) {
  constexpr uint32_t kHigh = smem_desc_high(AtomMajor<8>::group);
  static_assert(kForm >= 0 && kForm < 4);
  if constexpr (kForm == 0) return ones & kHigh;
  if constexpr (kForm == 1) return ones + (kHigh + 1);
  if constexpr (kForm == 2) return ones ^ ~kHigh;
  return kHigh - 1 - ones;
}

}  // namespace flashattn3
