// Work tile of the backward: an n_block of one KV head, and the m_blocks that see it.
#pragma once

#include <type_traits>

#include "attention/block_list.cuh"
#include "attention/mask_lists.cuh"
#include "attention/seqlen.cuh"
#include "attention/tile_scheduler.cuh"
#include "backward/arguments.h"
#include "backward/waves.h"
#include "ptx/opaque.cuh"

namespace flashattn3::backward {

// The list of blocks of kM rows, of num_rows rows, in which a row sees a key from first_key to
// last_key.
template <int kM>
__host__ __device__ __forceinline__ BlockRange m_blocks_of(const Mask& mask, int num_rows,
                                                           int first_key, int last_key) {
  if (last_key < first_key) return {0, 0};
  const int low = max(0, first_key - mask.last) / kM;
  const int high = (max(0, min(num_rows, last_key - mask.first + 1)) + kM - 1) / kM;
  return low < high ? BlockRange{low, high} : BlockRange{0, 0};
}

// Those in which every row sees every key. The range may end past the last block of the sequence.
template <int kM>
__host__ __device__ __forceinline__ BlockRange full_m_blocks(const Mask& mask, int first_key,
                                                             int last_key) {
  if (last_key >= mask.num_keys) return {0, 0};
  const int low = (max(0, last_key - mask.last) + kM - 1) / kM;
  const int high = max(0, first_key - mask.first + 1) / kM;
  return {low, max(low, high)};
}

struct alignas(16) WorkTile {
  int first_key;        // in the sequence; -1: no tile is left
  int head;             // a part of a KV head: head_parts for each one of k and v
  int batch_coord;      // batch coordinate for TMA and pointers; 0 with cu_seqlens
  int key_offset;       // of the sequence in k and v
  int num_rows;         // of the sequence
  int num_keys;         // of the sequence
  int batch_idx;        // index of the sequence
  int row_offset;       // of the sequence in q
  BlockRange m_blocks;  // m_blocks that see at least one of its keys; may be empty
  int start;            // the position that is visited first
  bool descending;      // positions are visited from the last to the first
  int first_head;       // the query head of the KV head that is visited first at each m_block

  // The m_block at a position.
  __device__ __forceinline__ int block(int position) const { return m_blocks.block(position); }
};

// With lists m_blocks are all positions of the n_block's list.
struct ListedWorkTile : WorkTile {
  ListedBlocks blocks;
  const int32_t* turns;  // ListedArguments::turns of this list

  __device__ __forceinline__ int block(int position) const {
    return __ldg(blocks.entries + position);
  }
};

// First workspace row of an m_block of a head of q.
__device__ __forceinline__ int64_t workspace_row(const Arguments& args, const WorkTile& tile,
                                                 int head, int block) {
  return args.workspace.first(args.seqlens_q, tile.batch_idx, head, args.num_heads_q,
                              tile.row_offset) +
         block * kBlockM;
}

// Head of k and v.
__device__ __forceinline__ int kv_head(const Arguments& args, const WorkTile& tile) {
  return args.head_parts.div(tile.head);
}

// The order in which a work tile visits the positions of its m_blocks, of which there is at least
// one: from the first to the last or back, wrapping around. No step branches on that.
struct BlockOrder {
  int first, last, distance;

  static __device__ __forceinline__ BlockOrder of(const WorkTile& tile) {
    const BlockRange& blocks = tile.m_blocks;
    return tile.descending ? BlockOrder{blocks.end - 1, blocks.begin, -1}
                           : BlockOrder{blocks.begin, blocks.end - 1, 1};
  }
  // The same in uniform registers; a whole warp calls it.
  static __device__ __forceinline__ BlockOrder uniform_of(const WorkTile& tile) {
    const BlockOrder order = of(tile);
    return {opaque_uniform(order.first), opaque_uniform(order.last),
            opaque_uniform(order.distance)};
  }
  __device__ __forceinline__ int next(int position) const {
    return position == last ? first : position + distance;
  }
};

// BlockRange::has, with the range by value: by reference ptxas allocates other registers.
__device__ __forceinline__ bool contains(BlockRange range, int position) {
  return static_cast<uint32_t>(position - range.begin) <
         static_cast<uint32_t>(range.end - range.begin);
}

// Iterator over the steps of a work tile: m_block and query head of each.
class WorkTileSteps {
 public:
  __device__ __forceinline__ WorkTileSteps(const Arguments& args, const WorkTile& tile)
      : args_(args), order_(BlockOrder::of(tile)), start_(tile.start), position_(tile.start) {}

  static __device__ __forceinline__ int count(const Arguments& args, const WorkTile& tile) {
    return tile.m_blocks.count() * args.qhead_per_kvhead;
  }
  __device__ __forceinline__ int block(const WorkTile& tile) const {
    return tile.m_blocks.block(position_);
  }
  __device__ __forceinline__ int block(const ListedWorkTile& tile) const {
    return tile.block(position_);
  }
  __device__ __forceinline__ int position() const { return position_; }
  // Head of q.
  __device__ __forceinline__ int head(const WorkTile& tile) const {
    int head = tile.first_head + nth_head_;
    if (head >= args_.qhead_per_kvhead) head -= args_.qhead_per_kvhead;
    return tile.head * args_.qhead_per_kvhead + head;
  }
  __device__ __forceinline__ void advance() {
    if (args_.traversal == Traversal::kHeadsInnermost) {
      if (++nth_head_ < args_.qhead_per_kvhead) return;
      nth_head_ = 0;
      position_ = order_.next(position_);
    } else {
      position_ = order_.next(position_);
      nth_head_ += position_ == start_;
    }
  }

 private:
  const Arguments& args_;
  BlockOrder order_;
  int start_;
  int position_;
  int nth_head_ = 0;
};

// Iterator over the m_blocks of the same steps, for consumer warps, which need no heads. It hides
// the constants of the traversal from ptxas: they stay in uniform registers, and a step neither
// loads the traversal from the arguments nor branches on it.
class WorkTileBlocks {
 public:
  __device__ __forceinline__ WorkTileBlocks(const Arguments& args, const WorkTile& tile)
      : order_(BlockOrder::uniform_of(tile)), position_(opaque_uniform(tile.start)) {
    const bool heads_innermost = args.traversal == Traversal::kHeadsInnermost;
    steps_per_block_ = opaque_uniform(heads_innermost ? args.qhead_per_kvhead : 1);
    count_ = opaque_uniform(WorkTileSteps::count(args, tile));
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ int position() const { return position_; }
  __device__ __forceinline__ void advance() {
    if (++nth_step_ < steps_per_block_) return;
    nth_step_ = 0;
    position_ = order_.next(position_);
  }

 private:
  BlockOrder order_;
  int count_, position_, steps_per_block_;
  int nth_step_ = 0;  // with this block
};

// Work tile of a scheduler index, with kBlockN keys. With varlen it may have no keys.
template <int kBlockN, bool kBias = false, class Tile = WorkTile>
__device__ __forceinline__ Tile describe_work_tile(const Arguments& args, int index) {
  const HeadGroups& heads = args.scheduler.heads;
  TileCoord coord;
  if constexpr (std::is_same_v<Tile, ListedWorkTile>) {
    coord = args.deterministic ? wave_tile(heads, index) : listed_tile(heads, index);
  } else {
    coord = find_tile(args.scheduler, index);
  }
  const bool reversed = args.traversal == Traversal::kDiagonalReversed &&
                        coord.batch_head_idx >= heads.num_heads - heads.last_l2_group_heads;
  if (reversed) coord.block = heads.num_blocks - 1 - coord.block;
  int batch_idx = coord.batch_head_idx / args.num_heads_kv;
  int head = coord.batch_head_idx - batch_idx * args.num_heads_kv;
  if constexpr (kBias) {
    // Sequences that share a bias are neighbours, so that its tiles are read from L2.
    const auto& bias = static_cast<const BiasArguments&>(args);
    if (!bias.sequences_differ) {
      head = coord.batch_head_idx / bias.batch;
      batch_idx = coord.batch_head_idx - head * bias.batch;
    }
  }
  const Sequence rows = find_sequence(args.seqlens_q, batch_idx);
  const Sequence keys = find_sequence(args.seqlens_k, batch_idx);
  Tile tile;
  tile.first_key = coord.block * kBlockN;
  tile.head = head;
  tile.batch_coord = args.seqlens_k.cu_seqlens != nullptr ? 0 : batch_idx;
  tile.key_offset = keys.offset;
  tile.num_rows = rows.length;
  tile.num_keys = keys.length;
  tile.batch_idx = batch_idx;
  tile.row_offset = rows.offset;
  const Mask mask = Mask::of(rows.length, keys.length, args.window);
  tile.m_blocks = m_blocks_of<kBlockM>(mask, rows.length, tile.first_key,
                                       min(tile.first_key + kBlockN, keys.length) - 1);
  if constexpr (std::is_same_v<Tile, ListedWorkTile>) {
    static_assert(kBlockN == kListRows && kBlockM == kListColumns);
    const auto& listed = static_cast<const ListedArguments&>(args);
    int n_block;
    tile.blocks =
        listed.lists.blocks_of(batch_idx, head * args.qhead_per_kvhead, coord.block, n_block);
    tile.first_key = n_block * kBlockN;
    tile.m_blocks = {0, tile.blocks.num_blocks};
    tile.turns = listed.turns + (tile.blocks.entries - listed.lists.entries);
  }
  const int num_tiles = (keys.length + kBlockN - 1) / kBlockN;
  tile.descending = reversed || args.traversal == Traversal::kHeadsInnermost;
  tile.start = reversed ? tile.m_blocks.end - 1 : tile.m_blocks.begin;
  tile.first_head = 0;
  if (args.traversal == Traversal::kStaggered) {
    tile.start = static_cast<int>(int64_t{coord.block} * tile.m_blocks.end / max(1, num_tiles));
  } else if (args.traversal == Traversal::kHeadsInnermost) {
    // Two steps behind the previous tile, which by then has stored the dQ that it claimed first.
    const int behind = 2 * coord.block;
    const int num_blocks = max(1, tile.m_blocks.count());
    tile.start = tile.m_blocks.end - 1 - behind / args.qhead_per_kvhead % num_blocks;
    tile.first_head = behind % args.qhead_per_kvhead;
  } else if constexpr (std::is_same_v<Tile, ListedWorkTile>) {
    // Deterministic. Partial blocks first: where they are a diagonal, as under a causal mask, the
    // tiles of a head, of which the shortest adds first, then advance at one pace.
    tile.start = tile.blocks.num_full < tile.m_blocks.end ? tile.blocks.num_full : 0;
  }
  return tile;
}

}  // namespace flashattn3::backward
