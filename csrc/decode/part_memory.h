// Memory in which the CTAs of a warp kernel give each other their parts of a work tile
// (warp_join.cuh). The launches of a stream share it.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>

namespace flashattn3::decode {

// A block is two vectors of four columns of a row: what one warp joins. After the struct follow the
// records: a part's values of each block, then its statistics, (max, sum) of the block's row. The
// parts of a block are neighbours, so that its warp reads whole lines.
//
// Between launches `started` is zero and all other words are kUnwritten (ptx/marked_memory.cuh).
struct PartMemory {
  // CTAs of a launch at most: compute capability 9.0 has up to 144 SMs.
  static constexpr int kMostCtas = 144;
  // Blocks of a work tile at most: 16 rows of 128 columns, or 8 of 256.
  static constexpr int kMostBlocks = 256;

  uint32_t started[kMostCtas];  // of each work tile, CTAs that have started; 0 again with the last
  uint32_t joins[kMostCtas];    // of each CTA: 1: it joins its blocks, 0: it does not

  // Records of a launch whose work tiles have so many blocks. Few sizes, since each has memory of
  // its own.
  static constexpr int num_records(int num_blocks) {
    return kMostCtas * static_cast<int>(std::bit_ceil(static_cast<uint32_t>(num_blocks)));
  }
  static constexpr int64_t bytes(int num_records) {
    return sizeof(PartMemory) + int64_t{num_records} * (2 * sizeof(float4) + sizeof(float2));
  }

  __host__ __device__ float4* values() { return reinterpret_cast<float4*>(this + 1); }
  __host__ __device__ float2* stats(int num_records) {
    return reinterpret_cast<float2*>(values() + 2 * num_records);
  }
};

}  // namespace flashattn3::decode
