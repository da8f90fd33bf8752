// Memory in which the CTAs of a warp kernel give each other their parts of a work tile
// (warp_join.cuh). It belongs to one launch, which initialises it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flashattn3::decode {

// A block is two vectors of four columns of a row: what one warp joins. After the struct follow the
// records: a part's values of each block, then its statistics, (max, sum) of the block's row. The
// parts of a block are neighbours, so that its warp reads whole lines.
//
// Before a CTA counts that it has started, it writes its own words: kUnwritten to its records
// (ptx/marked_memory.cuh), its Split to `splits`, and to `joins` what it knows by then.
struct PartMemory {
  // CTAs of a launch at most: compute capability 9.0 has up to 144 SMs.
  static constexpr int kMostCtas = 144;

  uint32_t splits[kMostCtas];  // of each CTA: Split::word()
  uint32_t joins[kMostCtas];  // of each CTA: 1: no other CTA joins its blocks, 0: another one does,
                              // kUnwritten: not known yet

  static constexpr int64_t bytes(int num_records) {
    return sizeof(PartMemory) + int64_t{num_records} * (2 * sizeof(float4) + sizeof(float2));
  }

  __host__ __device__ float4* values() { return reinterpret_cast<float4*>(this + 1); }
  __host__ __device__ float2* stats(int num_records) {
    return reinterpret_cast<float2*>(values() + 2 * num_records);
  }
};

}  // namespace flashattn3::decode
