// How tiles of keys, in whatever CTAs, follow one another at the sums of dQ in memory.
#pragma once

#include <cstdint>

#include "blocks/visible_range.cuh"
#include "kernels/backward/arguments.h"
#include "kernels/backward/key_tile.cuh"

namespace flashattn3 {

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

// Up to 128 columns the state of a block's sums: in the two lowest bits who comes first to them
// stores, and the others add once that is done, so that nothing has to be zero beforehand; above
// them, how many tiles have stored or added and are through.
constexpr int32_t kNobody = 0, kStoring = 1, kStored = 2, kThrough = 4;

// Whether the caller is the first and is to store, and then to set kStored; else it may add.
__device__ __forceinline__ bool claim_sums(int32_t* state) {
  int32_t found;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(found)
               : "l"(state), "r"(kNobody), "r"(kStoring)
               : "memory");
  if (found == kNobody) return true;
  while (found % kThrough != kStored) found = load_acquire(state);
  return false;
}

// All threads of a CTA: until so many tiles are through, whose additions they can then read.
__device__ __forceinline__ void wait_for_sums(const int32_t* state, int num_tiles) {
  if (threadIdx.x == 0) {
    while (load_acquire(state) / kThrough < num_tiles) __nanosleep(256);
  }
  __syncthreads();
  fence_global_proxies();
}

// Adds to four neighbouring sums.
__device__ __forceinline__ void add_to_memory(float* at, float a, float b, float c, float d) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

// The tiles of kKeys keys that a block of queries sees, of which each adds to its sums.
template <int kKeys>
__device__ __forceinline__ BlockRange tiles_seen(const BackwardArguments& args, int num_rows,
                                                 int num_keys, int block) {
  const int last_row = min((block + 1) * kBackwardRows, num_rows) - 1;
  return Visibility::of(num_rows, num_keys, args.window_left, args.window_right)
      .template blocks<kKeys>(block * kBackwardRows, last_row);
}

// How many of them come before this one, in order.
template <int kKeys>
__device__ __forceinline__ int tiles_before(const BackwardArguments& args, const KeyTile& tile,
                                            int block) {
  const int index = tile.first_key / kKeys;
  if (args.walk == RowWalk::kUpwards) return index;
  return tiles_seen<kKeys>(args, tile.num_rows, tile.num_keys, block).end - 1 - index;
}

}  // namespace flashattn3
