// Row sums of e4m3 probabilities by WGMMA: products with a tile of ones, whose column g has them at
// the keys of group g, so that each group of keys is summed by itself.
#pragma once

#include <cstdint>

#include "blocks/barrier.cuh"
#include "blocks/tile_product.cuh"
#include "blocks/wgmma.cuh"

namespace flashattn3 {

constexpr int kSumGroups = 8;                // columns of the tile
constexpr int kOnesBytes = 32 * kSumGroups;  // of the tile, for 32 keys of a group

// Of a tile of kN keys. Threads of the CTA, before its first __syncthreads. ones: kOnesBytes for
// each group.
template <int kN, int kGroupKeys>
__device__ __forceinline__ void write_ones(uint8_t* ones) {
  static_assert(kN / kGroupKeys <= kSumGroups && kGroupKeys % 32 == 0);
  for (int i = threadIdx.x; i < kN / kGroupKeys * kOnesBytes / 4; i += blockDim.x) {
    // 16 keys of a column lie side by side, the columns one after the other.
    const int column = i * 4 / 16 % kSumGroups, group = i * 4 / kOnesBytes;
    reinterpret_cast<uint32_t*>(ones)[i] = column == group ? 0x38383838u : 0u;
  }
  fence_async_proxy();
}

// Starts o += p * v and sum = p * ones. A thread holds of the sums, for its two rows, those of the
// groups 2 * (lane % 4) and the next.
template <int kN, int kGroupKeys, int kHeadDim>
__device__ __forceinline__ void start_values_and_sums(
    float (&o)[kHeadDim / 2], float (&sum)[4], const Probabilities<ElementType::kE4m3, kN>& p,
    uint32_t v, uint32_t ones) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = 0.f;
  pin_registers(sum);
  pin_registers(o);
  cute::warpgroup_arrive();
  multiply_values<ElementType::kE4m3, kN, kHeadDim>(o, p, v);
#pragma unroll
  for (int step = 0; step < kN / 32; ++step) {
    Wgmma<ElementType::kE4m3, kSumGroups>::values(
        sum, p[step], slots_descriptor(ones + step * 32 / kGroupKeys * (kOnesBytes / 16)));
  }
  cute::warpgroup_commit_batch();
}

}  // namespace flashattn3
