// A prefix sum over the lanes of a warp.
#pragma once

namespace flashattn3 {

// Returns the sum of x over the lanes up to and with the calling one. All lanes call it.
__device__ __forceinline__ int inclusive_sum_of_warp(int x) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, x, distance);
    if (lane >= distance) x += before;
  }
  return x;
}

}  // namespace flashattn3
