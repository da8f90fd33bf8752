// Persistent tile scheduler: the order of work tiles (block, flattened batch x head).
//
// CTA b starts with tile b and then draws tile indices from an atomic counter; with tile_semaphore
// it draws all of them. Heads are numbered across the batch, so that heads that share K and V are
// neighbours, and are divided into L2 head groups. Within a group, one block of all heads is
// followed by the next block of all heads, the longest first if rows see different numbers of keys.
// Groups are small, which spreads memory traffic over the whole kernel, except the last: it has a
// tile for every SM, and its short tiles at the end let all SMs finish together.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Varlen order, written on the device before the kernel: batch_idx at each position of the order,
// and the number of blocks of all positions before it.
struct VarlenSchedule {
  int32_t* workspace;  // 2 * batch + 1; null: all sequences have num_blocks blocks
  int batch;
  // Arrays of `batch` and of batch + 1 elements.
  __host__ __device__ __forceinline__ int32_t* batch_indices() const { return workspace; }
  __host__ __device__ __forceinline__ int32_t* first_blocks() const { return workspace + batch; }
};

struct TileSchedulerParams {
  int num_tiles;        // varlen: an upper bound
  int num_blocks;       // of the longest sequence
  int num_batch_heads;  // heads times batch
  int l2_group_heads;   // heads of each group but the last; divides the heads before the last group
  int last_l2_group_heads;
  bool last_block_first;
  VarlenSchedule varlen;
  // [0] counts the tiles drawn after the first of each CTA, [1] the CTAs that are done; both are 0
  // before and after the kernel. Null: static order, every second round reversed, so that a CTA
  // with a long tile gets a short one next.
  int32_t* tile_counter;
  // Null, or 0 before the launch and used by this launch alone: counts all tiles drawn, in index
  // order, so that a tile may wait for those before it. tile_counter is then not used.
  int32_t* tile_semaphore = nullptr;
};

struct TileCoord {
  int block;
  int batch_head_idx;  // head + num_heads * batch_idx
};

__host__ __device__ __forceinline__ TileCoord tile_coord(const TileSchedulerParams& params,
                                                         int index) {
  const int last_head = params.num_batch_heads - params.last_l2_group_heads;
  const int l2_group_tiles = params.l2_group_heads * params.num_blocks;
  const bool last = index >= last_head * params.num_blocks;
  const int first_head = last ? last_head : index / l2_group_tiles * params.l2_group_heads;
  const int heads = last ? params.last_l2_group_heads : params.l2_group_heads;
  const int within = index - first_head * params.num_blocks;
  const int block = within / heads;
  return {params.last_block_first ? params.num_blocks - 1 - block : block,
          first_head + within - block * heads};
}

// Varlen: one sequence after the other, all heads of each.
__host__ __device__ __forceinline__ TileCoord varlen_tile_coord(const TileSchedulerParams& params,
                                                                int index) {
  const int num_heads = params.num_batch_heads / params.varlen.batch;
  const int32_t* first_blocks = params.varlen.first_blocks();
  // Binary search: the last position with first_blocks * num_heads <= index.
  int low = 0, high = params.varlen.batch;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_blocks[middle] * num_heads <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int num_blocks = first_blocks[low + 1] - first_blocks[low];
  const int within = index - first_blocks[low] * num_heads;
  const int head = within / num_blocks, block = within - head * num_blocks;
  return {params.last_block_first ? num_blocks - 1 - block : block,
          head + params.varlen.batch_indices()[low] * num_heads};
}

__host__ __device__ __forceinline__ TileCoord find_tile(const TileSchedulerParams& params,
                                                        int index) {
  return params.varlen.workspace != nullptr ? varlen_tile_coord(params, index)
                                            : tile_coord(params, index);
}

// The actual number of tiles; varlen: mostly fewer than params.num_tiles.
__host__ __device__ __forceinline__ int count_tiles(const TileSchedulerParams& params) {
  if (params.varlen.workspace == nullptr) return params.num_tiles;
  return params.varlen.first_blocks()[params.varlen.batch] *
         (params.num_batch_heads / params.varlen.batch);
}

// Draws the tiles of one CTA; one thread uses it.
class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const TileSchedulerParams& params)
      : params_(params),
        num_tiles_(count_tiles(params)),
        round_(0),
        index_(params.tile_semaphore != nullptr ? atomicAdd(params.tile_semaphore, 1)
                                                : blockIdx.x) {}

  __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ bool done() const { return index_ >= num_tiles_; }

  // Draws the next tile for this CTA; advance() waits for the result of the atomic.
  __device__ __forceinline__ void request() {
    if (params_.tile_semaphore != nullptr) {
      next_ = atomicAdd(params_.tile_semaphore, 1);
      return;
    }
    if (params_.tile_counter != nullptr) {
      next_ = static_cast<int>(gridDim.x) + atomicAdd(params_.tile_counter, 1);
      return;
    }
    ++round_;
    const int first = round_ * static_cast<int>(gridDim.x);
    next_ = first + (round_ % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    // A reversed round that is not full gives some CTAs no tile; no round follows it.
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
  int num_tiles_;
  int round_;
  int index_;
  int next_;
};

}  // namespace flashattn3
