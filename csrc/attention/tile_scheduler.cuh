// The order in which a persistent grid works on tiles (block of rows, head of a batch entry).
//
// Tiles are numbered; CTA b starts with tile b, then takes the next number nobody has; or all with
// that. Heads are
// numbered across the batch, so that those sharing K and V are neighbours, and come in sections. In
// a section, a block of rows of all heads is followed by the next block of all heads; the longest
// first where rows see unequally many keys. Sections are small, so that what the SMs ask of memory
// is spread over the whole kernel, but for the last one: that has a tile for every SM, and its
// short tiles at the end let all SMs finish together.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Of sequences of unequal lengths, written on the device before the kernel: which sequence is
// worked on at each place, and the row blocks of all places before it.
struct VarlenSchedule {
  int32_t* workspace;  // 2 * batch + 1; null: all sequences have num_blocks row blocks
  int batch;
  __device__ __forceinline__ int32_t* batch_indices() const { return workspace; }
  __device__ __forceinline__ int32_t* first_blocks() const {
    return workspace + batch;
  }  // batch + 1
};

struct TileSchedulerParams {
  int num_tiles;        // with a varlen order an upper bound
  int num_blocks;       // of the longest sequence
  int num_batch_heads;  // heads times batch
  int l2_group_heads;   // heads of a section but the last; divides what comes before that
  int last_l2_group_heads;
  bool last_block_first;
  VarlenSchedule varlen;
  // [0] counts the tiles handed out beyond one for each CTA, [1] the CTAs that are done; both are 0
  // before and after the kernel. Null: fixed order, every second round backwards, so that who had a
  // long tile gets a short one.
  int32_t* tile_counter;
  // Of one launch alone, 0 before it: counts all tiles handed out, in the order of the numbers, so
  // that a tile may wait for those before it. Then the counter above is not used; or null.
  int32_t* tile_semaphore = nullptr;
};

struct TileCoord {
  int block;
  int batch_head_idx;  // head + num_heads * batch entry
};

__device__ __forceinline__ TileCoord tile_coord(const TileSchedulerParams& params, int index) {
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

// With a varlen order: one sequence after the other, all its heads.
__device__ __forceinline__ TileCoord varlen_tile_coord(const TileSchedulerParams& params,
                                                       int index) {
  const int num_heads = params.num_batch_heads / params.varlen.batch;
  const int32_t* first_blocks = params.varlen.first_blocks();
  // The last place with first_blocks * num_heads <= index.
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

// Tiles that there are; with a varlen order fewer, mostly, than params.num_tiles.
__device__ __forceinline__ int count_tiles(const TileSchedulerParams& params) {
  if (params.varlen.workspace == nullptr) return params.num_tiles;
  return params.varlen.first_blocks()[params.varlen.batch] *
         (params.num_batch_heads / params.varlen.batch);
}

// The tiles of one CTA; used by one thread.
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

  // Asks for the next tile, which is this CTA's from then on; advance() waits for the answer.
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
    // A backwards round that is not full leaves nothing for some; no round follows it.
  }

  __device__ __forceinline__ void advance() { index_ = next_; }

  // The last CTA puts the counters back to 0.
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
