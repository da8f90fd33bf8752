// dQ writer, one thread per consumer warpgroup: adds a step's 64 rows of dQ in fp32 to dq_accum,
// which sums over the work tiles that the rows see.
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

 public:
  __device__ __forceinline__ DqWriter(const Arguments& args, uint8_t* shared, int warpgroup)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        dq_smem_(cute::cast_smem_ptr_to_uint(shared) + Traits::kDqOffset +
                 warpgroup * Traits::kDqBytes),
        warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    while (true) {
      // Sync: the producer has written the work tile.
      storage_.tile_full[tile_.index()].wait(tile_.phase());
      const WorkTile tile = storage_.tile[tile_.index()];
      storage_.tile_empty[tile_.index()].arrive();  // Sync: this thread has read it.
      tile_.advance();
      if (tile.first_key < 0) return;
      WorkTileSteps steps(args_, tile.m_blocks, tile.start);
      const int count = steps.count();
      for (int i = 0; i < count; ++i, steps.advance()) {
        if (dq_warpgroup_ == warpgroup_) write(tile, steps.head(tile), steps.block());
        dq_warpgroup_ = dq_warpgroup_ + 1 == Traits::kConsumers ? 0 : dq_warpgroup_ + 1;
      }
      wait_for_memory();
      // Sync: this thread's additions for the tile are in memory.
      add_release(args_.workspace.tiles_done + tile.batch_idx * args_.num_heads_kv + tile.head, 1);
    }
  }

 private:
  // Writes dQ of one m_block of a head: the first tile stores, later tiles add.
  __device__ __forceinline__ void write(const WorkTile& tile, int head, int block) {
    const int64_t row = workspace_row(args_, tile, head, block);
    int32_t* dq_semaphore = args_.workspace.dq_semaphore + row / kBlockM;
    const int before = args_.deterministic ? tiles_before<Traits::kBlockN>(args_, tile, block) : 0;
    // Sync: all earlier tiles have added their dQ.
    while (before > 0 && load_acquire(dq_semaphore) < before) {
    }
    storage_.dq_full[warpgroup_].wait(dq_.phase());  // Sync: all four warps have written.
    // Sync: if another tile was the first, it has stored.
    const bool first = args_.deterministic ? before == 0 : claim_dq_accum(dq_semaphore);
    fence_global_proxies();
    float* dq_accum = args_.workspace.dq_accum + row * Traits::kHeadDim;
    if (first) {
      store_floats(dq_accum, dq_smem_, Traits::kDqBytes);
    } else {
      add_floats(dq_accum, dq_smem_, Traits::kDqBytes);
    }
    commit_stores();
    wait_for_stores();
    storage_.dq_empty[warpgroup_].arrive();  // Sync: the dQ buffer has been read.
    dq_.advance();
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
  uint32_t dq_smem_;
  int warpgroup_;
  int dq_warpgroup_ = 0;  // the warpgroup that computes dQ of the step
  PipelineState<2> tile_{0};
  PipelineState<1> dq_{0};
};

}  // namespace flashattn3::backward
