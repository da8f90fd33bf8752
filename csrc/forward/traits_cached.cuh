// Additional arguments, work tile and shared storage of cached kernel configs, whose K and V are in
// a paged or dense cache.
#pragma once

#include <type_traits>

#include "attention/cached_keys.cuh"
#include "attention/tree_mask.cuh"
#include "forward/arguments.h"
#include "forward/traits.cuh"

namespace flashattn3::forward {

// Query rows that one TMA box loads. In a work tile of a cached config the warpgroups have rows of
// different heads.
constexpr int query_box_rows(const Config& config) { return config.cached ? 64 : config.block_m; }

// How TMA boxes fill a K or V tile of a cache.
struct CacheTile {
  TileStrides strides;
  // If a box has all atoms of its slots: from one page to the next, in groups of 8 slots. The map
  // is (columns of an atom, 8 slots of a group, atoms, groups, heads). 0: a box has one atom, and
  // the map is (head_dim, slots, heads, pages). Innermost first.
  int page_groups;
};

// Additional arguments of cached kernel configs, whose K and V are in a paged or dense cache.
// seqlens_k is not read.
struct CachedArguments : Arguments {
  CachedKeys keys;
  CacheTile k_tile, v_tile;  // of the maps k and v
  int slices_of_tile;        // slices of a work tile, at most one for each warpgroup
  int log2_box_rows;         // slots of a box; they divide the page and block_n
  int span_blocks;           // KV blocks of a span, of kernel configs with spans, and the
  float4* span_totals;       // totals of all CTAs, span_total_bytes each
};
// Bytes of a CTA's totals of spans in device memory (span_total.cuh).
template <Config kConfig>
constexpr int64_t span_total_bytes() {
  using Options = OptionTraits<kConfig>;
  if (!kConfig.spans || Options::kSpansInShared) return 0;
  return int64_t{kConfig.block_m} * Options::kSpanRowBytes;
}
struct TreeArguments : CachedArguments {
  TreeMask tree;
};
template <Config kConfig>
using CachedArgumentsOf = std::conditional_t<kConfig.tree, TreeArguments, CachedArguments>;

// A WorkTile of a cached sequence: slices_of_tile slices, each 64 rows of one of the query heads
// that share a KV head. The slices of these heads are numbered together, those of the same rows one
// after the other, so that few tokens fill whole work tiles and few tiles load the same keys.
// first_row and head are those of the first slice.
struct CachedWorkTile : WorkTile {
  // The slice of each warpgroup. A slice without rows has num_rows as its row_origin.
  struct Slice {
    int row_origin, head;
  } slices[3];
  int first_key;  // no query of the sequence sees a key before it
  int cache_idx;  // entry of the cache (CachedKeys)
  int kv_head;

  __device__ __forceinline__ int row_origin(int warpgroup) const {
    return slices[warpgroup].row_origin;
  }
  __device__ __forceinline__ int head_of(int warpgroup) const { return slices[warpgroup].head; }

  static __device__ __forceinline__ TileStrides k_strides(const Arguments& args, auto) {
    return static_cast<const CachedArguments&>(args).k_tile.strides;
  }
  static __device__ __forceinline__ TileStrides v_strides(const Arguments& args, auto) {
    return static_cast<const CachedArguments&>(args).v_tile.strides;
  }
  static constexpr int kProducerReaders = 3;  // the warps that load K and V and write zero fill
  __device__ __forceinline__ Mask mask(int rows, int keys, const Window& window) const {
    const int left = window.left, right = window.right;  // ptxas needs this before the shuffle
    return Mask::of(rows, keys, {left, right}, uniform(first_key));
  }
  // The new tokens that a row sees; none if it does not exist.
  __device__ __forceinline__ uint64_t tree_bits(const Arguments& args, int row) const {
    const TreeMask& tree = static_cast<const TreeArguments&>(args).tree;
    return row < num_rows ? tree.bits_of(batch_coord, row_offset + row) : 0;
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
