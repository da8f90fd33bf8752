// Finds this CTA's share of the work: a prefix sum over the sequences of the batch.
#pragma once

#include <cstdint>

#include "decode/traits.cuh"
#include "decode/work_share.cuh"
#include "ptx/warp_sum.cuh"

namespace flashattn3::decode {

// Returns the sum of x over the CTA's threads up to and with the calling one. All threads call it;
// `total` becomes the sum over all. Another call may follow after a __syncthreads.
template <int kWarps>
__device__ __forceinline__ int inclusive_sum(int x, int (&warp_sums)[kWarps], int& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  x = inclusive_sum_of_warp(x);
  if (lane == 31) warp_sums[warp] = x;
  __syncthreads();
  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) x += warp_sums[i];
    total += warp_sums[i];
  }
  return x;
}

// Sets storage.share to the units of this CTA. All threads call it. Each thread sums the units of
// neighbouring sequences; the one that has the share's first unit looks for its sequence.
template <int kBlockN, int kSpanStep = 0, bool kPrefix = false, class Storage>
__device__ __forceinline__ void find_share(const Arguments& args, Storage& storage) {
  constexpr int kThreads = 32 * sizeof(storage.warp_sums) / sizeof(int);  // of the CTA
  const int count = (args.batch + kThreads - 1) / kThreads;
  const int first = threadIdx.x * count, last = min(first + count, args.batch);
  WorkShare share;
  int units = 0, total;
  for (int b = first; b < last; ++b) {
    share.sequence = find_keys<kBlockN, kPrefix>(args, b);
    units += units_of_sequence<kSpanStep>(args, share.sequence);
  }
  const int end = inclusive_sum(units, storage.warp_sums, total);
  share.set<kSpanStep>(total, blockIdx.x, args);
  if (share.begin == share.end) {
    if (threadIdx.x == 0) storage.share = share;
  } else if (end - units <= share.begin && share.begin < end) {
    share.batch_idx = first;
    share.first_unit = end - units;
    for (int b = first; count > 1 && b < last; ++b) {
      share.batch_idx = b;
      share.sequence = find_keys<kBlockN, kPrefix>(args, b);
      units = units_of_sequence<kSpanStep>(args, share.sequence);
      if (share.begin < share.first_unit + units) break;
      share.first_unit += units;
    }
    // The lengths have changed: the share's sequence is none of these.
    if (share.begin >= share.first_unit + units) share.end = share.begin;
    storage.share = share;
  }
  __syncthreads();
}

}  // namespace flashattn3::decode
