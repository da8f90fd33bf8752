// One block of keys of one head, and the queries that see it.
#pragma once

#include "blocks/sequence.cuh"
#include "blocks/tile_order.cuh"
#include "blocks/visible_range.cuh"
#include "kernels/backward/arguments.h"

namespace flashattn3 {

struct alignas(16) KeyTile {
  int first_key;    // in the sequence; -1: no tile is left
  int head;         // of k and v
  int entry;        // of the batch, for pointers; 0 with cu_seqlens
  int key_offset;   // of the sequence in k and v
  int num_rows;     // of the sequence
  int num_keys;     // of the sequence
  int sequence;     // of the batch
  int row_offset;   // of the sequence in q
  BlockRange rows;  // blocks of queries that see one of its keys; may be none
  int start;        // the first of them that is worked on
  int first_head;   // and, of the heads that share the keys, the first at each block
};

// Where the room keeps a block of queries of a head of q: its first row.
__device__ __forceinline__ int64_t room_row(const BackwardArguments& args, const KeyTile& tile,
                                            int head, int block) {
  return args.room.first(args.rows, tile.sequence, head, args.num_heads_q, tile.row_offset) +
         block * kBackwardRows;
}

// Behind the last block comes the first.
__device__ __forceinline__ int next_block(const BlockRange& rows, int block) {
  return block + 1 == rows.end ? rows.begin : block + 1;
}

// The steps of a tile, one after the other: which block of queries, of which head.
class TileSteps {
 public:
  __device__ __forceinline__ TileSteps(const BackwardArguments& args, const BlockRange& rows,
                                       int start)
      : args_(args), rows_(rows), start_(start), block_(start) {}

  __device__ __forceinline__ int count() const {
    return (rows_.end - rows_.begin) * args_.heads_per_kv;
  }
  __device__ __forceinline__ int block() const { return block_; }
  // Of q.
  __device__ __forceinline__ int head(const KeyTile& tile) const {
    int head = tile.first_head + nth_head_;
    if (head >= args_.heads_per_kv) head -= args_.heads_per_kv;
    return tile.head * args_.heads_per_kv + head;
  }
  __device__ __forceinline__ void advance() {
    if (args_.walk == RowWalk::kHeadsInside) {
      if (++nth_head_ < args_.heads_per_kv) return;
      nth_head_ = 0;
      block_ = block_ == rows_.begin ? rows_.end - 1 : block_ - 1;
    } else {
      block_ = next_block(rows_, block_);
      nth_head_ += block_ == start_;
    }
  }

 private:
  const BackwardArguments& args_;
  BlockRange rows_;
  int start_;
  int block_;
  int nth_head_ = 0;
};

// The tile of a number in the order of the work, kKeys keys. It may have no key, in a batch of
// unequal lengths.
template <int kKeys>
__device__ __forceinline__ KeyTile describe_key_tile(const BackwardArguments& args, int index) {
  const TilePlace place = args.order.ragged.room != nullptr ? locate_ragged_tile(args.order, index)
                                                            : locate_tile(args.order, index);
  const int sequence = place.head_total / args.num_heads_kv;
  const Sequence rows = find_sequence(args.rows, sequence);
  const Sequence keys = find_sequence(args.keys, sequence);
  KeyTile tile;
  tile.first_key = place.row_block * kKeys;
  tile.head = place.head_total - sequence * args.num_heads_kv;
  tile.entry = args.keys.cu_seqlens != nullptr ? 0 : sequence;
  tile.key_offset = keys.offset;
  tile.num_rows = rows.length;
  tile.num_keys = keys.length;
  tile.sequence = sequence;
  tile.row_offset = rows.offset;
  tile.rows = Visibility::of(rows.length, keys.length, args.window_left, args.window_right)
                  .template row_blocks<kBackwardRows>(rows.length, tile.first_key,
                                                      min(tile.first_key + kKeys, keys.length) - 1);
  const int num_tiles = (keys.length + kKeys - 1) / kKeys;
  tile.start = tile.rows.begin;
  tile.first_head = 0;
  if (args.walk == RowWalk::kRotated) {
    tile.start = static_cast<int>(int64_t{place.row_block} * tile.rows.end / max(1, num_tiles));
  } else if (args.walk == RowWalk::kHeadsInside) {
    // Two steps behind the tile before, which by then has stored where it was first.
    const int behind = 2 * place.row_block;
    const int num_blocks = max(1, tile.rows.end - tile.rows.begin);
    tile.start = tile.rows.end - 1 - behind / args.heads_per_kv % num_blocks;
    tile.first_head = behind % args.heads_per_kv;
  }
  return tile;
}

}  // namespace flashattn3
