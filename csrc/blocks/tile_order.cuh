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
struct RaggedOrder {
  int32_t* room;  // 2 * batch + 1; null: all sequences have num_row_blocks row blocks
  int batch;
  __device__ __forceinline__ int32_t* entries() const { return room; }
  __device__ __forceinline__ int32_t* first_blocks() const { return room + batch; }  // batch + 1
};

struct TileOrder {
  int num_tiles;        // with a ragged order an upper bound
  int num_row_blocks;   // of the longest sequence
  int num_heads_total;  // heads times batch
  int section_heads;    // heads of a section but the last; divides what comes before that
  int last_section_heads;
  bool last_rows_first;
  RaggedOrder ragged;
  // [0] counts the tiles handed out beyond one for each CTA, [1] the CTAs that are done; both are 0
  // before and after the kernel. Null: fixed order, every second round backwards, so that who had a
  // long tile gets a short one.
  int32_t* counter;
  // Of one launch alone, 0 before it: counts all tiles handed out, in the order of the numbers, so
  // that a tile may wait for those before it. Then the counter above is not used; or null.
  int32_t* tickets = nullptr;
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

// With a ragged order: one sequence after the other, all its heads.
__device__ __forceinline__ TilePlace locate_ragged_tile(const TileOrder& order, int index) {
  const int num_heads = order.num_heads_total / order.ragged.batch;
  const int32_t* first_blocks = order.ragged.first_blocks();
  // The last place with first_blocks * num_heads <= index.
  int low = 0, high = order.ragged.batch;
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
  return {order.last_rows_first ? num_blocks - 1 - block : block,
          head + order.ragged.entries()[low] * num_heads};
}

// Tiles that there are; with a ragged order fewer, mostly, than order.num_tiles.
__device__ __forceinline__ int count_tiles(const TileOrder& order) {
  if (order.ragged.room == nullptr) return order.num_tiles;
  return order.ragged.first_blocks()[order.ragged.batch] *
         (order.num_heads_total / order.ragged.batch);
}

// The tiles of one CTA; used by one thread.
class TileSequence {
 public:
  __device__ __forceinline__ explicit TileSequence(const TileOrder& order)
      : order_(order),
        num_tiles_(count_tiles(order)),
        round_(0),
        index_(order.tickets != nullptr ? atomicAdd(order.tickets, 1) : blockIdx.x) {}

  __device__ __forceinline__ int index() const { return index_; }
  __device__ __forceinline__ bool done() const { return index_ >= num_tiles_; }

  // Asks for the next tile, which is this CTA's from then on; advance() waits for the answer.
  __device__ __forceinline__ void request() {
    if (order_.tickets != nullptr) {
      next_ = atomicAdd(order_.tickets, 1);
      return;
    }
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
  int num_tiles_;
  int round_;
  int index_;
  int next_;
};

}  // namespace flashattn3
