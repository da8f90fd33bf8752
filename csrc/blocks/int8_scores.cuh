// The product of the scores of int8 on tiles in shared memory, as start_scores of tile_product.cuh.
#pragma once

#include <cstdint>

#include "blocks/barrier.cuh"
#include "blocks/tile_product.cuh"
#include "blocks/wgmma.cuh"

namespace flashattn3 {

// Where scores start, so that none is negative (score_register.cuh): 32 * 255^2 for each 128
// columns, whose products are -128 * 127 at least.
template <int kHeadDim>
constexpr int kInt8Zero = (kHeadDim + 127) / 128 * 32 * 255 * 255;

// What scores of int8 start from is itself a product, of a tile of 255s with itself: eight rows of
// 16 bytes, which stand for all. To write so many registers instead would take a third of all
// instructions of a step. (H100, full, 16384 tokens, TFLOP/s: d64 794 to 860, d128 1124 to 1206.)
constexpr int kStartBytes = 128;

// Threads of the CTA, before its first __syncthreads.
__device__ __forceinline__ void write_start(uint8_t* start) {
  for (int i = threadIdx.x; i < kStartBytes; i += blockDim.x) start[i] = 255;
  fence_async_proxy();
}

__device__ __forceinline__ uint4 load_shared_unit(uint32_t address) {
  uint4 unit;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(unit.x), "=r"(unit.y), "=r"(unit.z), "=r"(unit.w)
               : "r"(address)
               : "memory");
  return unit;
}

// Starts s = kInt8Zero + q * k^T, as above. start: address of its tile.
template <int kBlockM, int kN, int kHeadDim>
__device__ __forceinline__ void start_int8_scores(uint32_t (&s)[kN / 2], uint32_t q, uint32_t k,
                                                  uint32_t start) {
  using Product = Wgmma<ElementType::kInt8, kN>;
  const uint64_t all_rows = start >> 4;  // no distance between rows, no swizzle
  pin_registers(s);
  cute::warpgroup_arrive();
#pragma unroll
  for (int i = 0; i < kInt8Zero<kHeadDim> / kInt8Zero<128>; ++i) {
    Product::unsigned_scores(s, all_rows, all_rows, i > 0);
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 32; ++step) {
    Product::scores(s, descriptor(q + score_step(step, kBlockM)),
                    descriptor(k + score_step(step, kN)), true);
  }
  cute::warpgroup_commit_batch();
}

// The score of one query row and one key once more, from tiles that are still in shared memory, by
// the four lanes of a quad, each with units of 16 bytes of its own. q, k: addresses of tiles of
// kBlockM and kN rows (tile_product.cuh).
template <int kBlockM, int kN, int kHeadDim>
__device__ __forceinline__ int int8_score(uint32_t q, uint32_t k, int row, int key) {
  int sum = 0;
  q += row * 128;
  k += key * 128;
#pragma unroll
  for (int i = 0; i < kHeadDim / 64; ++i) {
    const int chunk = i / 2, unit = i % 2 * 4 + threadIdx.x % 4;
    const uint4 a = load_shared_unit(q + chunk * kBlockM * 128 + (unit ^ (row % 8)) * 16);
    const uint4 b = load_shared_unit(k + chunk * kN * 128 + (unit ^ (key % 8)) * 16);
    sum = __dp4a(static_cast<int>(a.x), static_cast<int>(b.x), sum);
    sum = __dp4a(static_cast<int>(a.y), static_cast<int>(b.y), sum);
    sum = __dp4a(static_cast<int>(a.z), static_cast<int>(b.z), sum);
    sum = __dp4a(static_cast<int>(a.w), static_cast<int>(b.w), sum);
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}

}  // namespace flashattn3
