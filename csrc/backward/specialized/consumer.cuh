// Base of both consumer warpgroups of a CTA: dQ, zero fill, and addresses.
#pragma once

#include "attention/block_list.cuh"
#include "backward/arguments.h"
#include "backward/cluster2/dq_adder.cuh"
#include "backward/reduce_parts.cuh"
#include "backward/specialized/traits.cuh"
#include "backward/work_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/opaque.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"
#include "tile/gemm_mn.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::backward::specialized {

template <Config kConfig>
class Consumer {
 protected:
  using Traits = KernelTraits<kConfig>;
  using Storage = typename Traits::Storage;
  using Scores = float[kBlockM / 2];  // of 64 keys x 64 queries
  using QueryGradient = float[Traits::kQuarter / 2];
  static constexpr ElementType kElement = Traits::kElement;

  // warpgroup: 0 or 1, the same in all lanes of a warp.
  __device__ __forceinline__ Consumer(const Arguments& args, const WorkTile& tile, uint8_t* shared,
                                      int warpgroup, int rank)
      : args_(args),
        tile_(tile),
        storage_(*reinterpret_cast<Storage*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup),
        rank_(rank),
        first_key_(tile.first_key + rank * Traits::kBlockN),
        order_(BlockOrder::uniform_of(tile)),
        adder_(args, tile, storage_, warpgroup, rank) {
    low_ = smem_desc_low(cute::cast_smem_ptr_to_uint(shared), Traits::kAtomBytes);
  }

  __device__ __forceinline__ int num_steps() const {
    const int num_blocks = uniform(tile_.m_blocks.end) - uniform(tile_.m_blocks.begin);
    return num_blocks * args_.qhead_per_kvhead;
  }

  // reduce_parts() with the accumulators of one of dK and dV, which this warpgroup has all columns
  // of.
  __device__ __forceinline__ bool reduce(float (&gradient)[Traits::kHeadDim / 2]) const {
    constexpr int kHalf = Traits::kHeadDim / 4;
    const int warp = rank_ * 4 * Traits::kConsumers + threadIdx.x / 32;
    return reduce_parts<kConfig>(args_, tile_, warp,
                                 reinterpret_cast<float (&)[kHalf]>(gradient[0]),
                                 reinterpret_cast<float (&)[kHalf]>(gradient[kHalf]));
  }

  // Starts dq = this quarter of dS^T K of the step at step_, over the keys of both CTAs.
  __device__ __forceinline__ void start_dq(QueryGradient& dq) {
    const uint32_t b = step_.index();
    storage_.other_full[b].wait(step_.phase());  // Sync: the other CTA's dS has arrived.
    gemm_ss_mn_ab<kElement, Traits::kBlockN, Traits::kQuarter>(
        dq, at(Traits::kDsOffset + b * Traits::kDsBytes),
        at(Traits::kDqKOffset + warpgroup_ * Traits::kAtomBytes),
        at(Traits::kOtherDsOffset + b * Traits::kDsBytes),
        at(Traits::kOtherKOffset + warpgroup_ * Traits::kAtomBytes));
  }

  __device__ __forceinline__ void add_dq(const QueryGradient& dq) {
    add_half_of_dq<true>(dq);
    add_half_of_dq<false>(dq);
  }
  template <bool kFirst>
  __device__ __forceinline__ void add_half_of_dq(const QueryGradient& dq) {
    adder_.template add<kFirst>(dq);
  }

  // All GEMMs of the step at step_ are complete. finished: a copy of dq outside of WGMMA's
  // accumulators, or ptxas would serialize the GEMMs of the step that reads it.
  __device__ __forceinline__ void end_step(QueryGradient& finished, QueryGradient& dq) {
    warpgroup_fence_operand(dq);
#pragma unroll
    for (int i = 0; i < Traits::kQuarter / 2; ++i) finished[i] = dq[i];
    warpgroup_fence_operand(finished);
    // Sync: this warp has read the dS of both CTAs.
    storage_.ds_empty[step_.index()].arrive_warp();
    arrive_warp_at(storage_.ds_empty[step_.index()], 1 - rank_);
    step_.advance();
  }

  // This warp's 16 keys in the P or dS buffer b.
  __device__ __forceinline__ uint8_t* rows_of_warp(int offset, uint32_t b) const {
    return shared_ + offset + b * Traits::kDsBytes + threadIdx.x % 128 / 32 * kRowsOfWarp * 128;
  }

  // Zero fill past the end of the sequence in a tile of Q or dO, which only this warpgroup reads:
  // those tokens may belong to another sequence or to none and hold NaN, and 0 * NaN is NaN. Rows
  // past the end have lse +inf and delta 0.
  template <int kAtoms>
  __device__ __forceinline__ void zero_fill_queries(int offset, int block) {
    if (args_.seqlens_q.cu_seqlens == nullptr && args_.seqlens_q.seqused == nullptr) return;
    const int used = tile_.num_rows - block * kBlockM;
    if (used >= kBlockM) return;
    zero_fill_rows<kBlockM, kAtoms>(shared_ + offset, used, threadIdx.x % 128, 128);
    fence_async_proxy();
    named_barrier_sync(1 + warpgroup_, 128);  // Sync: the warpgroup has filled.
  }

  // Smem matrix descriptor of a tile.
  __device__ __forceinline__ uint32_t at(int offset) const {
    uint32_t low = low_;
    make_opaque(low);  // or ptxas would keep all tiles' descriptors, and spill
    return low + offset / 16;
  }
  __device__ __forceinline__ Mask mask() const {
    // A copy of the window: with a reference ptxas adds in another order.
    return Mask::of(uniform(tile_.num_rows), uniform(tile_.num_keys),
                    {args_.window.left, args_.window.right});
  }
  __device__ __forceinline__ int warp_first_key() const {
    return first_key_ + threadIdx.x % 128 / 32 * kRowsOfWarp;
  }

  const Arguments& args_;
  const WorkTile& tile_;
  Storage& storage_;
  uint8_t* shared_;
  int warpgroup_, rank_;
  int first_key_;  // of the CTA
  BlockOrder order_;
  uint32_t low_;  // descriptor of the start of shared memory
  cluster2::DqAdder<Traits> adder_;
  PipelineState<2> step_{0};
};

}  // namespace flashattn3::backward::specialized
