// Persistent tile scheduler: the order of work tiles (block, flattened batch x head).
// CTA b starts with tile b and then draws tile indices from an atomic counter; with tile_semaphore
// it draws all of them. Heads are numbered across the batch, so that heads that share K and V are
// neighbours, and divided into L2 head groups: one block of all heads of a group is followed by the
// next block, the longest first if rows see different numbers of keys. Groups are small, to spread
// memory traffic over the kernel, except the last: with a tile for every SM, all end together.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Heads, numbered across the batch, that have as many blocks each.
struct HeadGroups {
  int num_blocks;      // of a head
  int num_heads;       // heads times batch
  int l2_group_heads;  // heads of each group but the last; divides those before the last group
  int last_l2_group_heads;

  // The last group: heads that are no whole group, or one group, and more up to last_group_tiles.
  __host__ __device__ static HeadGroups of(int num_blocks, int num_heads, int l2_group_heads,
                                           int last_group_tiles) {
    const int group = max(1, min(l2_group_heads, num_heads));
    int last = num_heads % group == 0 ? group : num_heads % group;
    for (int more = group; last < num_heads && last * num_blocks < last_group_tiles; more *= 2) {
      last = min(num_heads, last + more);
    }
    return {num_blocks, num_heads, group, last};
  }
};

// A sequence in the order of a varlen batch. Consecutive sequences with as many blocks of queries
// and of keys form a run, whose tiles are ordered as those of a dense batch.
struct alignas(16) VarlenPlace {
  int32_t first_block, num_blocks;   // blocks of all sequences before, and of this one
  int32_t first_of_run, run_length;  // place of the run's first sequence, and how many it has
};

// The order of the sequences with blocks, which varlen/prepare.cuh writes before the kernel.
struct VarlenSchedule {
  void* workspace;  // of batch + 1 VarlenPlace and batch int32; null: all have as many blocks
  int batch;

  // [-1]: first_block of all sequences together, and as num_blocks the number of sequences.
  __host__ __device__ __forceinline__ VarlenPlace* places() const {
    return static_cast<VarlenPlace*>(workspace) + 1;
  }
  __host__ __device__ __forceinline__ int32_t* batch_indices() const {
    return reinterpret_cast<int32_t*>(places() + batch);
  }
};

struct TileSchedulerParams {
  int num_tiles;     // varlen: an upper bound
  HeadGroups heads;  // varlen: of sequences that are as long as the longest
  int last_group_tiles;
  bool last_block_first;
  VarlenSchedule varlen;
  // [0] counts the tiles drawn after the first of each CTA, [1] the CTAs that are done; 0 before
  // and after the kernel. Null: static order, every second round reversed: short tiles follow long
  // ones.
  int32_t* tile_counter;
  // Null, or 0 before the launch and used by this launch alone: counts all tiles drawn, in index
  // order, so that a tile may wait for those before it. tile_counter is then not used.
  int32_t* tile_semaphore = nullptr;
};

struct TileCoord {
  int block;
  int batch_head_idx;  // head + num_heads * batch_idx
};

__host__ __device__ __forceinline__ TileCoord tile_coord(const HeadGroups& heads,
                                                         bool last_block_first, int index) {
  const int last_head = heads.num_heads - heads.last_l2_group_heads;
  const int l2_group_tiles = heads.l2_group_heads * heads.num_blocks;
  const bool last = index >= last_head * heads.num_blocks;
  const int first_head = last ? last_head : index / l2_group_tiles * heads.l2_group_heads;
  const int group = last ? heads.last_l2_group_heads : heads.l2_group_heads;
  const int within = index - first_head * heads.num_blocks;
  const int block = within / group;
  return {last_block_first ? heads.num_blocks - 1 - block : block,
          first_head + within - block * group};
}

__host__ __device__ __forceinline__ TileCoord find_tile(const TileSchedulerParams& params,
                                                        int index) {
  const VarlenSchedule& schedule = params.varlen;
  if (schedule.workspace == nullptr)
    return tile_coord(params.heads, params.last_block_first, index);
  const int num_heads = params.heads.num_heads / schedule.batch;
  // Binary search: the last place with first_block * num_heads <= index.
  int low = 0;
  for (int high = schedule.places()[-1].num_blocks; high - low > 1;) {
    const int middle = (low + high) / 2;
    (schedule.places()[middle].first_block * num_heads <= index ? low : high) = middle;
  }
  const VarlenPlace place = schedule.places()[low];
  const int blocks_before = place.first_block - (low - place.first_of_run) * place.num_blocks;
  const HeadGroups run = HeadGroups::of(place.num_blocks, place.run_length * num_heads,
                                        params.heads.l2_group_heads, params.last_group_tiles);
  TileCoord coord = tile_coord(run, params.last_block_first, index - blocks_before * num_heads);
  const int sequence = coord.batch_head_idx / num_heads, at = place.first_of_run + sequence;
  coord.batch_head_idx += (schedule.batch_indices()[at] - sequence) * num_heads;
  return coord;
}

// The actual number of tiles; varlen: mostly fewer than params.num_tiles.
__host__ __device__ __forceinline__ int count_tiles(const TileSchedulerParams& params) {
  if (params.varlen.workspace == nullptr) return params.num_tiles;
  return params.varlen.places()[-1].first_block * (params.heads.num_heads / params.varlen.batch);
}

// Draws the tiles of one CTA; one thread uses it.
class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const TileSchedulerParams& params)
      : params_(params),
        num_tiles_(count_tiles(params)),
        index_(params.tile_semaphore != nullptr ? atomicAdd(params.tile_semaphore, 1)
                                                : blockIdx.x) {}

  __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ bool done() const { return index_ >= num_tiles_; }

  // Draws the next tile for this CTA; advance() waits for the result of the atomic.
  __device__ __forceinline__ void request() {
    if (params_.tile_semaphore != nullptr) {
      next_ = atomicAdd(params_.tile_semaphore, 1);
    } else if (params_.tile_counter != nullptr) {
      next_ = static_cast<int>(gridDim.x) + atomicAdd(params_.tile_counter, 1);
    } else {
      // A reversed round that is not full gives some CTAs no tile; no round follows it.
      const int first = ++round_ * static_cast<int>(gridDim.x);
      next_ = first + (round_ % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    }
  }

  __device__ __forceinline__ void advance() { index_ = next_; }

  // The last CTA resets the counters to 0.
  __device__ __forceinline__ void reset() const {
    if (params_.tile_counter == nullptr) return;
    __threadfence();
    if (atomicAdd(params_.tile_counter + 1, 1) + 1 < static_cast<int>(gridDim.x)) return;
    atomicExch(params_.tile_counter, 0);
    atomicExch(params_.tile_counter + 1, 0);
  }

 private:
  const TileSchedulerParams& params_;
  int num_tiles_, index_, next_, round_ = 0;
};

}  // namespace flashattn3
