// How tiles of keys, in whatever CTAs, follow one another at the sums of dQ in memory.
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

// Between a bulk copy's accesses to memory and what orders them, a count's, on both sides.
__device__ __forceinline__ void fence_global_proxies() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

// Whoever comes first to a block's sums stores, and the others add once that is done, so that
// nothing has to be zero beforehand.
constexpr int32_t kNobody = 0, kStoring = 1, kStored = 2;

// Whether the caller is the first and is to store, and then to set kStored; else it may add.
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

// Adds to four neighbouring sums.
__device__ __forceinline__ void add_to_memory(float* at, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

// How many tiles of keys come before this one, of kKeys keys, in order, at a block of queries.
template <int kBlockN>
__device__ __forceinline__ int tiles_before(const Arguments& args, const WorkTile& tile,
                                            int block) {
  const int index = tile.first_key / kBlockN;
  if (args.traversal == Traversal::kAscending) return index;
  const int last_row = min((block + 1) * kBlockM, tile.num_rows) - 1;
  return Mask::of(tile.num_rows, tile.num_keys, args.window_left, args.window_right)
             .template n_block_range<kBlockN>(block * kBlockM, last_row)
             .end -
         1 - index;
}

}  // namespace flashattn3::backward
