// Work tile and shared storage of cached kernel configs, whose K and V are in a paged or dense
// cache.
#pragma once

#include "forward/traits.cuh"

namespace flashattn3::forward {

// A WorkTile of a cached sequence.
struct CachedWorkTile : WorkTile {
  int first_key;  // no query of the sequence sees a key before it
  int cache_idx;  // entry of the cache (CachedKeys)
  int kv_head;

  static constexpr int kProducerReaders = 3;  // the warps that load K and V and write zero fill
  __device__ __forceinline__ Mask mask(int rows, int keys, const Window& window) const {
    const int left = window.left, right = window.right;  // ptxas needs this before the shuffle
    return Mask::of(rows, keys, {left, right}, uniform(first_key));
  }
};

// Barriers as in SharedStorage. K and V have a warp each, whose lanes all wait for k_empty or
// v_empty and whose lane 0 is the producer of K or V. These warps, like the zero fill warp, wait
// for and release work tiles as the consumers do. Arrivals per phase:
//   tile_ends  1: the warp that loads K, once for each work tile; the producer waits for it before
//              it publishes the next one
template <Config kConfig>
struct CachedStorageOf : SharedStorage<kConfig.num_stages, kConfig.num_q_buffers, CachedWorkTile> {
  static_assert(kConfig.cached && kConfig.masked && !is_quantized(kConfig.dtype));
  Barrier tile_ends;
};

}  // namespace flashattn3::forward
