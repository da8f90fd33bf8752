// The order in which a persistent grid works on tiles (block of rows, head of a batch entry).
//
// Tiles are numbered; CTA b starts with tile b, then takes the next number nobody has. Heads are
// numbered across the batch, so that those sharing K and V are neighbours, and come in sections. In
// a section, a block of rows of all heads is followed by the next block of all heads; the longest
// first where rows see unequally many keys. Sections are small, so that what the SMs ask of memory
// is spread over the whole kernel, but for the last one: that has a tile for every SM, and its
// short tiles at the end let all SMs finish together.
#pragma once

#include <cstdint>

namespace flashattn3 {

struct TileOrder {
  int num_tiles;
  int num_row_blocks;   // of the longest sequence
  int num_heads_total;  // heads times batch
  int section_heads;    // heads of a section but the last; divides what comes before that
  int last_section_heads;
  bool last_rows_first;
  // [0] counts the tiles handed out beyond one for each CTA, [1] the CTAs that are done; both are 0
  // before and after the kernel. Null: fixed order, every second round backwards, so that who had a
  // long tile gets a short one.
  int32_t* counter;
};

struct TilePlace {
  int row_block;
  int head_total;  // head + num_heads * batch entry
};

__device__ __forceinline__ TilePlace locate_tile(const TileOrder& order, int index) {
  const int last_head = order.num_heads_total - order.last_section_heads;
  const int section_tiles = order.section_heads * order.num_row_blocks;
  const bool last = index >= last_head * order.num_row_blocks;
  const int first_head = last ? last_head : index / section_tiles * order.section_heads;
  const int heads = last ? order.last_section_heads : order.section_heads;
  const int within = index - first_head * order.num_row_blocks;
  const int row_block = within / heads;
  return {order.last_rows_first ? order.num_row_blocks - 1 - row_block : row_block,
          first_head + within - row_block * heads};
}

// The tiles of one CTA; used by one thread.
class TileSequence {
 public:
  __device__ __forceinline__ explicit TileSequence(const TileOrder& order)
      : order_(order), round_(0), index_(blockIdx.x) {}

  __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ bool done() const { return index_ >= order_.num_tiles; }

  // Asks for the next tile, which is this CTA's from then on; advance() waits for the answer.
  __device__ __forceinline__ void request() {
    if (order_.counter != nullptr) {
      next_ = static_cast<int>(gridDim.x) + atomicAdd(order_.counter, 1);
      return;
    }
    ++round_;
    const int first = round_ * static_cast<int>(gridDim.x);
    next_ = first + (round_ % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    // A backwards round that is not full leaves nothing for some; no round follows it.
  }

  __device__ __forceinline__ void advance() { index_ = next_; }

  // The last CTA puts the counters back to 0.
  __device__ __forceinline__ void finish() const {
    if (order_.counter == nullptr) return;
    __threadfence();
    if (atomicAdd(order_.counter + 1, 1) + 1 < static_cast<int>(gridDim.x)) return;
    atomicExch(order_.counter, 0);
    atomicExch(order_.counter + 1, 0);
  }

 private:
  const TileOrder& order_;
  int round_;
  int index_;
  int next_;
};

}  // namespace flashattn3
