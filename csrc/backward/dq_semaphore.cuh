// Synchronisation of work tiles, across CTAs, that add to the same m_block of dq_accum.
#pragma once

#include <cstdint>

#include "attention/mask.cuh"
#include "backward/arguments.h"
#include "backward/work_tile.cuh"

namespace flashattn3::backward {

__device__ __forceinline__ int load_acquire(const int32_t* at) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ __forceinline__ void add_release(int32_t* at, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Proxy fence between a bulk copy's memory accesses and the semaphore accesses that order them;
// needed on both sides.
__device__ __forceinline__ void fence_global_proxies() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// States of an m_block of dq_accum. The first tile stores and the others add once that is done, so
// that dq_accum need not be zeroed beforehand.
constexpr int32_t kNobody = 0, kStoring = 1, kStored = 2;

// True: the caller is the first; it must store and then set kStored. False: it may add.
__device__ __forceinline__ bool claim_dq_accum(int32_t* state) {
  int32_t found;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(found)
               : "l"(state), "r"(kNobody), "r"(kStoring)
               : "memory");
  if (found == kNobody) return true;
  while (found != kStored) found = load_acquire(state);
  return false;
}

// Adds to four consecutive floats in global memory.
__device__ __forceinline__ void add_to_memory(float* at, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

// Deterministic: number of work tiles (kBlockN keys) that add to an m_block before this one.
template <int kBlockN>
__device__ __forceinline__ int tiles_before(const Arguments& args, const WorkTile& tile,
                                            int block) {
  const int index = tile.first_key / kBlockN;
  if (args.traversal == Traversal::kAscending) return index;
  const int last_row = min((block + 1) * kBlockM, tile.num_rows) - 1;
  return Mask::of(tile.num_rows, tile.num_keys, args.window.left, args.window.right)
             .template n_block_range<kBlockN>(block * kBlockM, last_row)
             .end -
         1 - index;
}

}  // namespace flashattn3::backward
