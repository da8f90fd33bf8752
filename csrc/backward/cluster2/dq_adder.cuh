// Adds a warpgroup's quarter of dQ's columns to dq_accum, in a 2-CTA cluster.
#pragma once

#include "backward/arguments.h"
#include "backward/dq_semaphore.cuh"
#include "backward/work_tile.cuh"
#include "ptx/mbarrier.cuh"

namespace flashattn3::backward::cluster2 {

template <class Traits>
class DqAdder {
 public:
  using Quarter = float[Traits::kQuarter / 2];
  using Tile = typename Traits::Tile;

  __device__ __forceinline__ DqAdder(const Arguments& args, const Tile& tile,
                                     typename Traits::Storage& storage, int warpgroup, int rank)
      : args_(args), tile_(tile), storage_(storage), warpgroup_(warpgroup), rank_(rank) {}

  // start: the position that the tile starts with.
  __device__ __forceinline__ void begin(const BlockOrder& order, int start) {
    order_ = order;
    position_ = start_ = start;
    dq_accum_of_head_ = uniform(static_cast<int>(
        args_.workspace.first(args_.seqlens_q, tile_.batch_idx, tile_.head * args_.qhead_per_kvhead,
                              args_.num_heads_q, tile_.row_offset) /
        kBlockM));
  }

  // Adds the first or second half of a step's quarter, the first half first. The warp's later
  // memory accesses, also to shared memory, wait until these are issued.
  template <bool kFirst>
  __device__ __forceinline__ void add(const Quarter& dq) {
    const int64_t block = dq_accum_of_head_ + tile_.block(position_);
    const int quarter = rank_ * 2 + warpgroup_;
    const bool waits = args_.deterministic || args_.zeroes_dq;
    // Sync: all earlier tiles have added their dQ, or dq_accum is zero.
    if (kFirst && waits) storage_.dq_ready[at_.index()].wait(at_.phase());
    float* dq_accum = args_.workspace.dq_accum + block * (kBlockM * Traits::kHeadDim) +
                      (quarter * (Traits::kQuarter / 8) * 128 + threadIdx.x % 128) * 4;
    constexpr int kHalfOfParts = Traits::kQuarter / 16;
    constexpr int kBegin = kFirst ? 0 : kHalfOfParts;
#pragma unroll
    for (int i = kBegin; i < kBegin + kHalfOfParts; ++i) {
      add_to_memory(dq_accum + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    if (kFirst) return;
    if (args_.deterministic) {
      __syncwarp();
      storage_.dq_added[at_.index()].arrive_warp();  // Sync: this warp has added.
    }
    if (waits) at_.advance();
    position_ = order_.next(position_);
    if (position_ == start_) {
      dq_accum_of_head_ += static_cast<int>(args_.workspace.num_rows / kBlockM);
    }
  }

  // Ends the tile, whose additions are all issued; the thread that counts tiles_done waits for
  // that.
  __device__ __forceinline__ void end() {
    if (args_.deterministic) return;  // it waits for each step
    __syncwarp();
    storage_.dq_added[0].arrive_warp();  // Sync: this warp has added.
  }

 private:
  const Arguments& args_;
  const Tile& tile_;
  typename Traits::Storage& storage_;
  int warpgroup_, rank_;
  BlockOrder order_;
  int start_;
  int position_;            // of the next addition's m_block
  int dq_accum_of_head_;    // first m_block of its head in the workspace
  PipelineState<2> at_{0};  // the step of the next addition, if additions wait
};

}  // namespace flashattn3::backward::cluster2
