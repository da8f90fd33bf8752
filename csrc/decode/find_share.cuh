// Finds this CTA's share of the work: a prefix sum over the sequences of the batch.
#pragma once

#include <cstdint>

#include "decode/traits.cuh"
#include "decode/work_share.cuh"

namespace flashattn3::decode {

// Returns the sum of x over the CTA's threads up to and with the calling one. All threads call it;
// `total` becomes the sum over all. Another call may follow after a __syncthreads.
__device__ __forceinline__ int inclusive_sum(int x, int (&warp_sums)[kThreads / 32], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = __shfl_up_sync(~0u, x, distance);
    if (lane >= distance) x += before;
  }
  if (lane == 31) warp_sums[warp] = x;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < warp) x += warp_sums[i];
    total += warp_sums[i];
  }
  return x;
}

// Sets storage.share to the units of this CTA. All threads call it.
template <int kBlockN, class Storage>
__device__ __forceinline__ void find_share(const Arguments& args, Storage& storage) {
  int mine = 0, total;
  for (int b = threadIdx.x; b < args.batch; b += kThreads) {
    mine += units_of_sequence<kBlockN>(args, b);
  }
  inclusive_sum(mine, storage.warp_sums, total);
  const WorkShare share = WorkShare::of(total, blockIdx.x, gridDim.x);
  if (threadIdx.x == 0) storage.share = share;
  int before = 0;  // units of the sequences of earlier rounds
  for (int first = 0; share.begin < share.end && before <= share.begin; first += kThreads) {
    __syncthreads();  // all threads have read warp_sums, and thread 0 has written the share
    const int b = first + threadIdx.x;
    const int units = b < args.batch ? units_of_sequence<kBlockN>(args, b) : 0;
    int of_round;
    const int end = before + inclusive_sum(units, storage.warp_sums, of_round);
    if (end - units <= share.begin && share.begin < end) {
      storage.share.batch_idx = b;
      storage.share.first_unit = end - units;
    }
    before += of_round;
  }
  __syncthreads();
}

}  // namespace flashattn3::decode
