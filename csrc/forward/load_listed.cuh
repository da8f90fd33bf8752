// Loads of kernel configs whose mask is lists of blocks: stages of any blocks, and bits.
#pragma once

#include "attention/mask_lists.cuh"
#include "forward/listed_work_tile.cuh"
#include "tile/permuted_v_tile.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::forward {

// The blocks of the i-th stage of a work tile, in configs whose work tiles are row blocks.
template <class Traits, class Tile>
__device__ __forceinline__ auto group_of(const Tile& tile, int i) {
  return ListedGroup<Traits::kBlockN>(tile.blocks, i, tile.num_keys);
}

// A box for each block. In place of those past the end of the list, boxes past the end of K and V
// arrive as zeros.
template <class Traits, int kAtoms, class Load, class Group>
__device__ __forceinline__ void load_boxes(uint8_t* stage, const CUtensorMap* map, Barrier& full,
                                           const Load& load, const Group& group) {
#pragma unroll
  for (int j = 0; j < Group::kBlocks; ++j) {
    copy_tile<kListColumns, kAtoms, Traits::kAtomColumns, Traits::kBlockN>(
        stage + j * kListColumns * 128, map, full, kReadAgain, group.first_key[j], load.kv_head,
        load.kv_batch_coord);
  }
}

// K of a stage, and the bits of its partial blocks.
template <class Traits, class Load, class Group>
__device__ __forceinline__ void load_listed_k(const Arguments& args, uint8_t* stage, uint8_t* bits,
                                              Barrier& full, const Load& load, const Group& group) {
  full.arrive_and_expect(Traits::kKBytes + group.num_partial() * kBitTileBytes);
  load_boxes<Traits, Traits::kAtoms>(stage, &args.k, full, load, group);
  const MaskLists& lists = static_cast<const ListedArguments&>(args).lists;
#pragma unroll
  for (int j = 0; j < Group::kBlocks; ++j) {
    if (!group.is_partial(j)) continue;
    copy_bytes(bits + j * kBitTileBytes, lists.tile(group.tile(j)), full, kBitTileBytes);
  }
}

template <class Traits, class Load, class Group>
__device__ __forceinline__ void load_listed_v(const Arguments& args, uint8_t* stage, Barrier& full,
                                              const Load& load, const Group& group) {
  if constexpr (Traits::kQuantized) {
    const int head = load.kv_batch_coord * args.num_heads_kv + load.kv_head;
    full.arrive_and_expect(Traits::kBlockN * Traits::kHeadDim);
#pragma unroll
    for (int j = 0; j < Group::kBlocks; ++j) {
      copy_permuted_v(stage + j * (Traits::kVBytes / Group::kBlocks), &args.v, full, kReadAgain,
                      group.first_key[j], head);
    }
  } else {
    full.arrive_and_expect(Traits::kVBytes);
    load_boxes<Traits, Traits::kAtomsV>(stage, &args.v, full, load, group);
  }
}

struct NoLists {
  __device__ __forceinline__ NoLists(const Arguments&, uint8_t*) {}
};

// The producer's side of configs whose work tiles are row blocks.
template <Config kConfig>
class RowBlockLoader {
  using Traits = KernelTraits<kConfig>;
  using Storage = SharedStorageOf<kConfig>;

 public:
  __device__ __forceinline__ RowBlockLoader(const Arguments&, uint8_t* shared)
      : storage_(*reinterpret_cast<Storage*>(shared)), shared_(shared) {}

  // rank: of the row block, among those of its head.
  template <class Load>
  __device__ __forceinline__ void place(const Arguments& args, Load& load, int rank) const {
    load.tile.set_lists(args, rank);
    load.q_row = load.tile.first_row;
  }
  // K of the i-th stage. The list is read before the wait for the stage.
  template <class Load, class State>
  __device__ __forceinline__ void load_k(const Arguments& args, const Load& load, int i,
                                         const State& k) const {
    const auto group = group_of<Traits>(load.tile, i);
    // Sync: every consumer warp has released the stage.
    storage_.k_empty[k.index()].wait(k.phase());
    uint8_t* stage = shared_ + Traits::kKOffset + k.index() * Traits::kKBytes;
    load_listed_k<Traits>(args, stage, shared_ + Traits::beside_k_offset(k.index()),
                          storage_.k_full[k.index()], load, group);
  }
  template <class Load, class State>
  __device__ __forceinline__ void load_v(const Arguments& args, const Load& load, int i,
                                         const State& v) const {
    const auto group = group_of<Traits>(load.tile, i);
    storage_.v_empty[v.index()].wait(v.phase());  // Sync: as for K.
    uint8_t* stage = shared_ + Traits::kVOffset + v.index() * Traits::kVBytes;
    // Sync: v_full, or the barrier that the zero fill warp waits for before it arrives at v_full.
    const bool fills = Traits::kQuantized && group.ends_inside(load.tile.num_keys);
    Barrier& full = fills ? storage_.v_unfilled_full[v.index()] : storage_.v_full[v.index()];
    load_listed_v<Traits>(args, stage, full, load, group);
  }

 private:
  Storage& storage_;
  uint8_t* shared_;
};

// The rows of K and V of a stage of a joined list.
template <int kN>
struct JoinedGroup {
  static constexpr int kBlocks = kN / kListColumns;
  int first_key[kBlocks];  // without a block: past the end, as in ListedGroup
};

// The producer's side of joined lists: asks for the next one, waits for its stages, and loads K and
// V of these, K of one stage ahead.
template <Config kConfig>
class JoinedLoader {
  using Traits = KernelTraits<kConfig>;
  using Storage = JoinedStorage<kConfig>;
  using Group = JoinedGroup<Traits::kBlockN>;

 public:
  __device__ __forceinline__ JoinedLoader(const Arguments& args, uint8_t* shared)
      : lists_(static_cast<const ListedArguments&>(args).lists),
        storage_(*reinterpret_cast<Storage*>(shared)),
        shared_(shared) {}

  // The work tile in whose place the rank-th longest row block of its head comes. Of three row
  // blocks the middle one is part of the tiles of the two others; then there is none. Asks for its
  // list.
  template <class Load>
  __device__ __forceinline__ void place(const Arguments&, Load& load, int rank) const {
    constexpr int kNone = 1 << 30;  // a row past all others
    const int64_t before = lists_.row_blocks_before(load.tile.batch_idx, load.tile.head);
    const int row_block = lists_.row_block_of(before, rank), of_three = row_block % 3;
    const int in_three = of_three > 0 ? Traits::kBlockM : 0;
    const bool is_part = of_three == 1 && row_block + 1 < lists_.row_blocks;
    load.tile.first_row = is_part ? kNone : row_block / 3 * (3 * kListRows) + in_three;
    load.q_row = load.tile.first_row;
    if (load.tile.first_row < load.tile.num_rows) {
      ask(load.tile.batch_idx, load.tile.head, load.tile.first_row);
    }
  }

  // Sync: the stages of the list before the last one have been published.
  __device__ __forceinline__ void ask(int batch_idx, int head, int first_row) const {
    storage_.wanted[at_.index()] = {batch_idx, head, first_row};
    storage_.wanted_full[at_.index()].arrive();
  }

  // Waits for the list that was asked for last, that of this tile.
  template <class Tile>
  __device__ __forceinline__ void finish(Tile& tile) {
    storage_.joined_full[at_.index()].wait(at_.phase());
    tile.stages = storage_.stages[at_.index()];
    tile.n_blocks = {0, tile.stages.count()};
    at_.advance();
  }

  // K of the i-th stage, with the bits of its partial blocks.
  template <class Load, class State>
  __device__ __forceinline__ void load_k(const Arguments& args, const Load& load, int i,
                                         const State& k) {
    // Sync: every consumer warp has released the stage.
    storage_.k_empty[k.index()].wait(k.phase());
    const int stage = k.index();
    Barrier& full = storage_.k_full[stage];
    const int in_chunk = i % Storage::kChunk;
    if (in_chunk == 0) storage_.chunk_full[chunk_.index()].wait(chunk_.phase());
    const auto& joined = storage_.chunk[chunk_.index()][in_chunk];
    const int first_row = load.tile.first_row % kListRows;  // in the first row block
    uint8_t* bits = shared_ + Traits::beside_k_offset(stage);
    const uint32_t kinds = joined.kinds;
    int bytes = Traits::kKBytes;
    held_ = ahead_;
#pragma unroll
    for (int j = 0; j < Group::kBlocks; ++j, bits += Traits::kBlockM * 8) {
      const int block = joined.column_block[j];
      ahead_.first_key[j] = (block < 0 ? lists_.column_blocks : block) * kListColumns;
      if (kinds >> 2 * j & kPartialBlock) {
        const int rows = kListRows - first_row;
        copy_bytes(bits, lists_.tile(joined.tile[j][0]) + 8 * first_row, full, 8 * rows);
        bytes += 8 * rows;
      }
      if (kinds >> (8 + 2 * j) & kPartialBlock) {
        const int before = kListRows - first_row, rows = Traits::kBlockM - before;
        copy_bytes(bits + 8 * before, lists_.tile(joined.tile[j][1]), full, 8 * rows);
        bytes += 8 * rows;
      }
    }
    storage_.kinds[stage] = kinds;
    full.arrive_and_expect(bytes);
    load_boxes<Traits, Traits::kAtoms>(shared_ + Traits::kKOffset + stage * Traits::kKBytes,
                                       &args.k, full, load, ahead_);
    if (in_chunk == Storage::kChunk - 1 || i + 1 == load.tile.n_blocks.end) {
      storage_.chunk_empty[chunk_.index()].arrive();
      chunk_.advance();
    }
  }

  // V of the i-th stage, whose K was loaded last if it is the last one, else before.
  template <class Load, class State>
  __device__ __forceinline__ void load_v(const Arguments& args, const Load& load, int i,
                                         const State& v) {
    storage_.v_empty[v.index()].wait(v.phase());  // Sync: as for K.
    const bool is_last = i + 1 == load.tile.n_blocks.end;
    Group group;
#pragma unroll
    for (int j = 0; j < Group::kBlocks; ++j) {  // a choice of references would be in local memory
      group.first_key[j] = is_last ? ahead_.first_key[j] : held_.first_key[j];
    }
    load_listed_v<Traits>(args, shared_ + Traits::kVOffset + v.index() * Traits::kVBytes,
                          storage_.v_full[v.index()], load, group);
  }

 private:
  const MaskLists& lists_;
  Storage& storage_;
  uint8_t* shared_;
  Group held_{}, ahead_{};
  PipelineState<2> at_{0}, chunk_{0};
};

template <Config kConfig>
using ListLoader =
    std::conditional_t<KernelTraits<kConfig>::kJoined, JoinedLoader<kConfig>,
                       std::conditional_t<kConfig.listed, RowBlockLoader<kConfig>, NoLists>>;

// A warp that joins the lists that the producer asks for, and writes their stages, a chunk at a
// time, a stage a lane.
template <Config kConfig>
class ListJoiner {
  using Traits = KernelTraits<kConfig>;
  using Storage = JoinedStorage<kConfig>;
  static constexpr int kBlocks = Traits::kBlockN / kListColumns;

 public:
  __device__ __forceinline__ ListJoiner(const Arguments& args, uint8_t* shared)
      : lists_(static_cast<const ListedArguments&>(args).lists),
        storage_(*reinterpret_cast<Storage*>(shared)),
        num_words_(min((lists_.column_blocks + 31) / 32, kJoinedWords)) {}

  __device__ __forceinline__ void run() {
    const auto stages_of = [](int blocks) { return (blocks + kBlocks - 1) / kBlocks; };
    for (PipelineState<2> at(0);; at.advance()) {
      storage_.wanted_full[at.index()].wait(at.phase());  // Sync: `wanted` is written.
      const auto wanted = storage_.wanted[at.index()];
      if (uniform(wanted.first_row) < 0) return;
      const int64_t before = lists_.row_blocks_before(wanted.batch_idx, wanted.head);
      const int first = wanted.first_row / kListRows;
      ListedBlocks blocks[2] = {lists_.blocks_of(before, first), {nullptr, 0, 0, 0}};
      if (first + 1 < lists_.row_blocks) blocks[1] = lists_.blocks_of(before, first + 1);
      const int3 count = storage_.lists.join(blocks, num_words_);
      const JoinedStages stages =
          JoinedStages::of(stages_of(count.x), stages_of(count.y), stages_of(count.z));
      if (threadIdx.x % 32 == 0) storage_.stages[at.index()] = stages;
      storage_.joined_full[at.index()].arrive();  // Sync: this lane has written its share.
      write(stages, count);
    }
  }

 private:
  __device__ __forceinline__ void write(const JoinedStages& stages, int3 count) {
    const int end = uniform(stages.count());
    for (int first = 0; first < end; first += Storage::kChunk) {
      // Sync: the producer has read the chunk.
      storage_.chunk_empty[chunk_.index()].wait(chunk_.phase());
      const int i = first + static_cast<int>(threadIdx.x % 32);
      if (i < end) {
        int rank;
        const int owner = stages.owner(i, rank);
        const int of_owner = owner == 0 ? count.x : owner == 1 ? count.y : count.z;
        storage_.chunk[chunk_.index()][i - first] =
            storage_.lists.template stage<kBlocks>(owner, rank * kBlocks, of_owner, num_words_);
      }
      storage_.chunk_full[chunk_.index()].arrive();  // Sync: this lane has written its stage.
      chunk_.advance();
    }
    __syncwarp();  // the lists are read; the next join clears them
  }

  const MaskLists& lists_;
  Storage& storage_;
  int num_words_;
  PipelineState<2> chunk_{1};
};

}  // namespace flashattn3::forward
