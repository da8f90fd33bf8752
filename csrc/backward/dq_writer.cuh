// dQ writer, one thread per consumer warpgroup or per part of dQ: adds a step's 64 rows of dQ, or a
// part of their columns, in fp32 to dq_accum, which sums over the work tiles that the rows see.
#pragma once

#include <cute/arch/util.hpp>

#include "backward/arguments.h"
#include "backward/dq_semaphore.cuh"
#include "backward/traits.cuh"
#include "ptx/bulk_copy.cuh"

namespace flashattn3::backward {

template <Config kConfig>
class DqWriter {
  using Traits = KernelTraits<kConfig>;
  using Tile = typename SharedStorageOf<kConfig>::Tile;
  static constexpr bool kAddsBeforeNextTile = kConfig.listed;

 public:
  // writer: number of the warpgroup, or of the part of dQ.
  __device__ __forceinline__ DqWriter(const Arguments& args, uint8_t* shared, int writer)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        smem_(cute::cast_smem_ptr_to_uint(shared)),
        writer_(writer) {}

  __device__ __forceinline__ void run() {
    while (true) {
      // Sync: the producer has written the work tile.
      storage_.tile_full[tile_.index()].wait(tile_.phase());
      const Tile tile = storage_.tile[tile_.index()];
      if (!kAddsBeforeNextTile) storage_.tile_empty[tile_.index()].arrive();  // Sync: it is read.
      if (tile.first_key < 0) return;
      WorkTileSteps steps(args_, tile);
      const int count = WorkTileSteps::count(args_, tile);
      for (int i = 0; i < count; ++i, steps.advance(), turn_.advance()) {
        const int warpgroup = turn_.index();
        if (Traits::kDqParts > 1 && writer_ < Traits::kConsumers) {
          Barrier& full = storage_.dq_full[Traits::kConsumers + writer_];
          write(tile, steps.head(tile), steps.block(tile), steps.position(), writer_, full,
                own_.phase());
          own_.advance();
        } else if (Traits::kDqParts > 1 || warpgroup == writer_) {
          write(tile, steps.head(tile), steps.block(tile), steps.position(), warpgroup,
                storage_.dq_full[warpgroup], turn_.phase());
        }
      }
      wait_for_memory();
      // Sync: this thread's additions for the tile are in memory.
      add_release(args_.workspace.tiles_done + tile.batch_idx * args_.num_heads_kv + tile.head, 1);
      // Sync: the same, for the producer, which may draw another tile.
      if (kAddsBeforeNextTile) storage_.tile_empty[tile_.index()].arrive();
      tile_.advance();
    }
  }

 private:
  // Writes dQ, or this thread's part, of one m_block of a head, which a warpgroup has computed: the
  // first tile stores, later tiles add.
  __device__ __forceinline__ void write(const Tile& tile, int head, int block, int position,
                                        int warpgroup, Barrier& full, uint32_t phase) {
    const int part = Traits::kDqParts > 1 ? writer_ : 0;
    const int64_t row = workspace_row(args_, tile, head, block);
    int32_t* dq_semaphore = args_.workspace.dq_semaphore + row / kBlockM * Traits::kDqParts + part;
    const int before =
        args_.deterministic ? tiles_before<Traits::kBlockN>(args_, tile, position) : 0;
    // Sync: all earlier tiles have added their dQ.
    while (before > 0 && load_acquire(dq_semaphore) < before) {
    }
    full.wait(phase);  // Sync: all four warps have written.
    // Sync: if another tile was the first, it has stored.
    const bool first = args_.deterministic ? before == 0 : claim_dq_accum(dq_semaphore);
    fence_global_proxies();
    const uint32_t dq = smem_ + Traits::dq_offset(warpgroup);
    float* dq_accum =
        args_.workspace.dq_accum + row * Traits::kHeadDim + part * (Traits::kDqBytes / 4);
    if (first) {
      store_floats(dq_accum, dq, Traits::kDqBytes);
    } else {
      add_floats(dq_accum, dq, Traits::kDqBytes);
    }
    commit_stores();
    wait_for_stores();
    storage_.dq_empty[warpgroup].arrive();  // Sync: the dQ buffer has been read.
    if (first || args_.deterministic) {
      wait_for_memory();
      add_release(dq_semaphore,
                  args_.deterministic ? 1 : kStored - kStoring);  // Sync: others may add to it.
    }
  }

  // Waits until all bulk copies of this thread are in memory.
  __device__ __forceinline__ static void wait_for_memory() {
    wait_until_stored();
    fence_global_proxies();
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint32_t smem_;  // address of shared memory
  int writer_;
  PipelineState<2> tile_{0};
  PipelineState<1> own_{0};                    // of the part that a warpgroup computes in each step
  PipelineState<Traits::kConsumers> turn_{0};  // index: the warpgroup whose turn it is
};

}  // namespace flashattn3::backward
