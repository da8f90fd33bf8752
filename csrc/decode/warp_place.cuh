// Where the keys of a warp's KV block are in the cache.
#pragma once

#include "decode/arguments.h"
#include "decode/warp_traits.cuh"
#include "decode/work_share.cuh"

namespace flashattn3::decode {

// Whether a KV block may have keys of several pages.
template <class Traits>
__device__ __forceinline__ bool is_uneven(const Arguments& args) {
  if constexpr (Traits::kPages == Pages::kAny) return !args.even_blocks;
  return Traits::kPages == Pages::kUneven;
}

// If a block may have keys of several pages, lane i has the place of key i, else all lanes have
// that of the first one.
struct BlockPlace {
  int page, slot;  // page: of a dense cache the sequence's entry
  int last;        // keys of the KV block that the cache has, less one
};

// n_block: one of which the cache has a key.
template <class Traits>
__device__ __forceinline__ BlockPlace place_of(const Arguments& args,
                                               const CachedSequence& sequence, int n_block) {
  int key = n_block * Traits::kBlockN;
  const int last = args.capacity - 1 - key;
  if (is_uneven<Traits>(args)) key += min(static_cast<int>(threadIdx.x % Traits::kBlockN), last);
  BlockPlace place{sequence.cache_idx, key, last};
  if constexpr (Traits::kPages != Pages::kNone) {
    const bool paged = Traits::kPages != Pages::kAny || args.page_table != nullptr;
    if (paged && place.page >= 0) {
      int index;
      args.page_size(index, place.slot, key);
      place.page = args.page_table[place.page * args.page_table_stride + index];
    }
  }
  return place;
}

}  // namespace flashattn3::decode
