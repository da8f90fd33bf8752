// Backward consumer warpgroup: computes dK and dV of 64 keys, and dQ in turn with the others.
//
// S and P are transposed (keys x queries): the accumulators of P^T and dS^T then have the register
// layout of WGMMA's A operand in the dV and dK GEMMs. Step t of a warpgroup:
//   start S = K Q^T and dP - delta = V dO^T - delta (accumulator bias -delta), wait for S,
//   P = 2^(S - lse), start dV += P dO, wait for dP, dS = P (dP - delta), store dS to shared
//   memory, start dK += dS Q; one warpgroup in turn also computes dQ of the previous step, which
//   needs dS of all warpgroups.
// The warpgroups share the stages of Q and dO but are not in lockstep: they may be one step apart,
// so that the tensor cores work for one warpgroup while another computes P and dS.
#pragma once

#include <type_traits>

#include "attention/mask.cuh"
#include "backward/arguments.h"
#include "backward/epilogue.cuh"
#include "backward/probabilities.cuh"
#include "backward/traits.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"
#include "tile/gemm_mn.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::backward {

template <Config kConfig>
class Consumer {
  using Traits = KernelTraits<kConfig>;
  static constexpr ElementType kElement = Traits::kElement;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kThreads = 128 * Traits::kConsumers;
  using Scores = float[kBlockM / 2];
  using Gradient = float[kHeadDim / 2];
  using Operand = Probabilities<kElement, kBlockM>;

 public:
  // warpgroup: 0 to kConsumers - 1, the same in all lanes of a warp.
  __device__ __forceinline__ Consumer(const Arguments& args, uint8_t* shared, int warpgroup)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup) {
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
    k_base_ = smem_desc_low(base + Traits::kKOffset, Traits::kBlockN * 128);
    v_base_ = smem_desc_low(base + Traits::kVOffset, Traits::kBlockN * 128);
    q_base_ = smem_desc_low(base + Traits::kQOffset, kBlockM * 128);
    dout_base_ = smem_desc_low(base + Traits::kDoutOffset, kBlockM * 128);
    ds_base_ = smem_desc_low(base + Traits::kDsOffset, 16);
    const int lane = threadIdx.x % 32;
    if constexpr (Traits::kKeepsDescriptors) low_ = opaque_uniform(base / 16);
    if constexpr (Traits::kTrimsStep) {
      const uint32_t first_row = base + Traits::kDsOffset + threadIdx.x / 32 * kRowsOfWarp * 128;
      ds_row_ = __shfl_sync(~0u, first_row + staged_row_of_lane(lane), lane);
    }
    turn_ = warpgroup + 1;
  }

  __device__ __forceinline__ void run() {
    while (true) {
      // Sync: the producer has written the tile, which stays valid until all arrive at tile_empty.
      storage_.tile_full[tile_.index()].wait(tile_.phase());
      if (uniform(tile().first_key) < 0) return;
      if (uniform(tile().m_blocks.begin) == uniform(tile().m_blocks.end)) {
        store_zeros(key_target(args_, tile(), warp_first_key()));
        store_zeros(value_target(args_, tile(), warp_first_key()));
      } else {
        attend();
      }
      storage_.tile_empty[tile_.index()].arrive();  // Sync: this thread no longer reads the tile.
      tile_.advance();
    }
  }

 private:
  __device__ __forceinline__ void attend() {
    using Steps = std::conditional_t<Traits::kTrimsStep, WorkTileBlocks, WorkTileSteps>;
    Steps steps(args_, {uniform(tile().m_blocks.begin), uniform(tile().m_blocks.end)},
                uniform(tile().start));
    const int first_key = uniform(tile().first_key) + 64 * warpgroup_;
    const int last_key = min(first_key + 63, uniform(tile().num_keys) - 1);
    const int num_rows = uniform(tile().num_rows);
    const BlockRange seen = m_block_range<kBlockM>(tile_mask(), num_rows, first_key, last_key);
    const BlockRange full_blocks = full_m_blocks<kBlockM>(tile_mask(), first_key, first_key + 63);
    Gradient dk, dv;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
    storage_.k_full.wait(kv_phase_);  // Sync: K and V are loaded.
    storage_.v_full.wait(kv_phase_);
    kv_phase_ ^= 1;
    zero_fill_kv();
    const bool varlen = args_.seqlens_q.cu_seqlens != nullptr || args_.seqlens_q.seqused != nullptr;
    const int count = steps.count();
    partial_block_ = varlen ? num_rows / kBlockM : -1;
    for (int i = 0; i < count; ++i, steps.advance()) {
      const int block = steps.block();
      wait_for_q_dout(block);
      if (!Traits::kSkipsSteps || contains(seen, block)) {
        step(dk, dv, block, full_blocks, i > 0);
      } else {
        skip_step(i > 0);
      }
      advance();
    }
    // dQ lags by one step: compute that of the last step.
    if (owns_previous_dq(true)) gemm_dq();
    __syncwarp();
    storage_.k_empty.arrive_warp();  // Sync: this warp is done with K.
    // Sync: all four warps have read their keys of V, which dV and dK are staged over.
    named_barrier_sync(1 + warpgroup_, 128);
    uint8_t* staged = shared_ + Traits::kVOffset + threadIdx.x / 32 * kRowsOfWarp * 128;
    store_gradient<kElement, kHeadDim>(value_target(args_, tile(), warp_first_key()), 0, dv, 1.f,
                                       staged, Traits::kBlockN * 128);
    store_gradient<kElement, kHeadDim>(key_target(args_, tile(), warp_first_key()), 0, dk,
                                       args_.softmax_scale, staged, Traits::kBlockN * 128);
    storage_.v_empty.arrive();  // Sync: this thread is done with V's buffer.
  }

  // Waits for Q, dO, lse and delta of a step. All warpgroups call it, also those that skip the step
  // and only release the stage.
  __device__ __forceinline__ void wait_for_q_dout(int block) {
    const uint32_t stage = rows_at().index();
    storage_.q_full[stage].wait(rows_at().phase());  // Sync: Q and lse are loaded.
    if constexpr (!Traits::kOneBarrier) {
      storage_.dout_full[stage].wait(rows_at().phase());  // Sync: dO and delta are loaded.
    }
    zero_fill_q_dout(stage, block);
  }

  // block: m_block (kBlockM queries). full_blocks: m_blocks that see all keys of this warpgroup.
  // others: this tile had an earlier step, whose dQ this warpgroup may own.
  __device__ __forceinline__ void step(Gradient& dk, Gradient& dv, int block,
                                       BlockRange full_blocks, bool others) {
    const uint32_t stage = rows_at().index();
    Scores s, dp, lse;
    Operand p, ds;
    load_per_column(dp, storage_.minus_delta[stage], column());
    load_per_column<0, Traits::kLseInRegisters>(lse, storage_.lse[stage], column());
    warpgroup_fence_operand(
        dp);  // before S's GEMM starts, or ptxas would wait for it before writing these
    start_s_dp(s, dp, stage);
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    load_per_column<Traits::kLseInRegisters, kBlockM / 2>(lse, storage_.lse[stage], column());
    exponentiate(s, lse, args_.score_scale);
    if (!contains(full_blocks, block)) {
      mask_probabilities<kBlockM>(s, tile_mask(), warp_first_key() + thread_row(threadIdx.x % 32),
                                  block * kBlockM);
    }
    pack_probabilities<kElement, kBlockM>(p, s);
    start_gradient(dv, p, Traits::kDoutLow, dout_base_, stage);
    warpgroup_wait<1>();
    warpgroup_fence_operand(dp);
    if (args_.score_scale.caps()) {
      differentiate_cap<Traits::kTrimsStep>(s, storage_.lse[stage], args_.score_scale, column());
    }
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) s[i] *= dp[i];
    pack_probabilities<kElement, kBlockM>(ds, s);
    if constexpr (!Traits::kDkFirst) store_ds(ds);
    start_gradient(dk, ds, Traits::kQLow, q_base_, stage);
    if constexpr (Traits::kDkFirst) store_ds(ds);
    warpgroup_wait<1>();
    if constexpr (!Traits::kOneBarrier) {
      arrive_warp(storage_.dout_empty[stage]);  // Sync: this warp is done with dO.
    }
    if (owns_previous_dq(others)) {
      Gradient dq;
      start_dq(dq);
      warpgroup_wait<1>();
      arrive_warp(storage_.q_empty[stage]);  // Sync: this warp is done with Q.
      warpgroup_wait<0>();
      warpgroup_fence_operand(dq);
      hand_over(dq);
    } else {
      warpgroup_wait<0>();
      arrive_warp(storage_.q_empty[stage]);  // Sync: as above.
    }
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
  }

  // Skips a step whose queries see none of this warpgroup's keys: dS is 0.
  __device__ __forceinline__ void skip_step(bool others) {
    const uint32_t stage = rows_at().index();
    const Operand ds = {};
    store_ds(ds);
    // Sync: this warp does not read dO and Q.
    if constexpr (!Traits::kOneBarrier) arrive_warp(storage_.dout_empty[stage]);
    arrive_warp(storage_.q_empty[stage]);
    if (owns_previous_dq(others)) gemm_dq();
  }

  // Starts S = K Q^T and dP = V dO^T - delta; dp: -delta.
  __device__ __forceinline__ void start_s_dp(Scores& s, Scores& dp, uint32_t stage) {
    const uint32_t rows = stage * (Traits::kMBlockBytes / 16), keys = warpgroup_ * (64 * 128 / 16);
    if constexpr (Traits::kKeepsDescriptors) {
      const uint32_t ones = opaque_ones();
      gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim>(
          s, SmemOperand{low_ + Traits::kKLow + keys, smem_desc_high<0>(ones)},
          SmemOperand{low_ + Traits::kQLow + rows, smem_desc_high<1>(ones)});
      constexpr int kOther = kHeadDim > 64 ? 2 : 0;  // no word for more than eight WGMMAs
      gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim, true>(
          dp, SmemOperand{low_ + Traits::kVLow + keys, smem_desc_high<kOther>(ones)},
          SmemOperand{low_ + Traits::kDoutLow + rows, smem_desc_high<kOther + 1>(ones)});
    } else {
      gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim>(s, k_base_ + keys, q_base_ + rows);
      gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim, true>(dp, v_base_ + keys,
                                                                  dout_base_ + rows);
    }
  }

  // Starts dV += P dO or dK += dS Q.
  __device__ __forceinline__ void start_gradient(Gradient& gradient, const Operand& operand,
                                                 uint32_t low, uint32_t base, uint32_t stage) {
    const uint32_t rows = stage * (Traits::kMBlockBytes / 16);
    if constexpr (Traits::kKeepsDescriptors) {
      gemm_rs<kElement, kBlockM, kHeadDim>(
          gradient, operand, SmemOperand{low_ + low + rows, smem_desc_high<1>(opaque_ones())});
    } else {
      gemm_rs<kElement, kBlockM, kHeadDim>(gradient, operand, base + rows);
    }
  }

  // Whether the range has the block.
  __device__ __forceinline__ static bool contains(BlockRange range, int block) {
    if constexpr (Traits::kTrimsStep) {
      return static_cast<uint32_t>(block - range.begin) <
             static_cast<uint32_t>(range.end - range.begin);
    }
    return block >= range.begin && block < range.end;
  }

  // Column of this thread's register 0, and whether its lane arrives for the warp.
  __device__ __forceinline__ uint32_t column() const {
    if constexpr (Traits::kTrimsStep) return ds_row_ / 128 % 4 * 2;
    return thread_column(threadIdx.x);
  }
  __device__ __forceinline__ void arrive_warp(Barrier& barrier) const {
    if constexpr (Traits::kTrimsStep) {
      if ((ds_row_ & (kRowsOfWarp * 128 - 1)) == 0) barrier.arrive();
    } else {
      barrier.arrive_warp();
    }
  }

  // Advances all pipeline states to the next step.
  __device__ __forceinline__ void advance() {
    if constexpr (Traits::kTrimsStep) {
      ++step_;
      --turn_;
      return;
    }
    rows_.advance();
    before_ = ds_;
    ds_.advance();
    dq_warpgroup_ = dq_warpgroup_ + 1 == Traits::kConsumers ? 0 : dq_warpgroup_ + 1;
  }

  // Stages of Q and dO, and the dS buffer of this step and of the previous one.
  __device__ __forceinline__ PipelineState<Traits::kStages> rows_at() const {
    if constexpr (Traits::kTrimsStep) return PipelineState<Traits::kStages>::after_steps(step_);
    return rows_;
  }
  __device__ __forceinline__ PipelineState<2> ds_at() const {
    if constexpr (Traits::kTrimsStep) return PipelineState<2>::after_steps(step_);
    return ds_;
  }
  __device__ __forceinline__ PipelineState<2> before_at() const {
    if constexpr (Traits::kTrimsStep) return PipelineState<2>::after_steps(step_ - 1);
    return before_;
  }

  // Whether this warpgroup computes dQ of the step before the one at ds_. others: as for step.
  __device__ __forceinline__ bool owns_previous_dq(bool others) {
    if constexpr (Traits::kTrimsStep) {
      if (turn_ != 0) return false;
      turn_ = Traits::kConsumers;  // also after a tile's last step, whose dQ then has an owner
      return true;
    }
    return others && dq_warpgroup_ == warpgroup_;
  }

  // Stores dS of this warp's 16 keys to shared memory.
  __device__ __forceinline__ void store_ds(const Operand& ds) {
    // Sync: the warpgroup that computed dQ of the step before last has read the buffer.
    storage_.ds_empty[ds_at().index()].wait(ds_at().phase() ^ 1);
    uint32_t word[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) word[i] = ds[i / 4][i % 4];
    const uint32_t offset = ds_at().index() * Traits::kDsBytes;
    if constexpr (Traits::kTrimsStep) {
      stage_rows_at(ds_row_ + offset, word);
    } else {
      stage_rows(shared_ + Traits::kDsOffset + offset + threadIdx.x / 32 * kRowsOfWarp * 128, word);
    }
    fence_async_proxy();
    __syncwarp();
    arrive_warp(storage_.ds_full[ds_at().index()]);  // Sync: this warp has written and fenced.
  }

  // Starts the dQ GEMM of the step before the one at ds_.
  __device__ __forceinline__ void start_dq(Gradient& dq) {
    const PipelineState<2> at = before_at();
    storage_.ds_full[at.index()].wait(at.phase());  // Sync: all consumer warps have written dS.
    const uint32_t offset = at.index() * (Traits::kDsBytes / 16);
    if constexpr (Traits::kKeepsDescriptors) {
      gemm_smem_operands_mn_ab<kElement, Traits::kBlockN, kHeadDim>(
          dq, low_ + Traits::kDsLow + offset, low_ + Traits::kKLow);
    } else {
      gemm_ss_mn_ab<kElement, Traits::kBlockN, kHeadDim>(dq, ds_base_ + offset, k_base_);
    }
  }

  // Passes dQ to the dQ writer through shared memory.
  __device__ __forceinline__ void hand_over(const Gradient& dq) {
    arrive_warp(storage_.ds_empty[before_at().index()]);  // Sync: this warp has read dS.
    // Sync: the dQ writer has read the previous dQ.
    storage_.dq_empty[warpgroup_].wait(dq_.phase() ^ 1);
    float4* dq_accum =
        reinterpret_cast<float4*>(shared_ + Traits::kDqOffset + warpgroup_ * Traits::kDqBytes) +
        threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      dq_accum[i * 128] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    fence_async_proxy();
    __syncwarp();
    arrive_warp(storage_.dq_full[warpgroup_]);  // Sync: this warp has written and fenced.
    dq_.advance();
  }

  __device__ __forceinline__ void gemm_dq() {
    Gradient dq;
    start_dq(dq);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dq);
    hand_over(dq);
  }

  // Zero fill past the end of the sequence of keys: those tokens may belong to another sequence or
  // to none and hold NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ void zero_fill_kv() {
    if (args_.seqlens_k.cu_seqlens == nullptr && args_.seqlens_k.seqused == nullptr) return;
    const int used = uniform(tile().num_keys) - uniform(tile().first_key);
    if (used >= Traits::kBlockN) return;
    for (const int offset : {Traits::kKOffset, Traits::kVOffset}) {
      zero_fill_rows<Traits::kBlockN, Traits::kAtoms>(shared_ + offset, used, threadIdx.x,
                                                      kThreads);
    }
    fence_async_proxy();
    named_barrier_sync(1 + Traits::kConsumers, kThreads);  // Sync: all warpgroups have filled.
  }

  // The same for queries; rows past the end have lse +inf and delta 0.
  __device__ __forceinline__ void zero_fill_q_dout(uint32_t stage, int block) {
    if constexpr (Traits::kTrimsStep) {
      if (block != partial_block_) return;
    } else if (args_.seqlens_q.cu_seqlens == nullptr && args_.seqlens_q.seqused == nullptr) {
      return;
    }
    const int used = uniform(tile().num_rows) - block * kBlockM;
    if (used >= kBlockM) return;
    for (const int offset : {Traits::kQOffset, Traits::kDoutOffset}) {
      zero_fill_rows<kBlockM, Traits::kAtoms>(shared_ + offset + stage * Traits::kMBlockBytes, used,
                                              threadIdx.x, kThreads);
    }
    fence_async_proxy();
    named_barrier_sync(1 + Traits::kConsumers, kThreads);  // Sync: as above.
  }

  __device__ __forceinline__ const WorkTile& tile() const { return storage_.tile[tile_.index()]; }
  __device__ __forceinline__ int warp_first_key() const {
    return tile().first_key + threadIdx.x / 32 * kRowsOfWarp;
  }
  __device__ __forceinline__ Mask tile_mask() const {
    return Mask::of(uniform(tile().num_rows), uniform(tile().num_keys), args_.window);
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  int warpgroup_;
  uint32_t k_base_, v_base_, q_base_, dout_base_, ds_base_;
  PipelineState<2> tile_{0};
  PipelineState<Traits::kStages> rows_{0};
  PipelineState<2> ds_{0};                     // dS buffer of this step
  PipelineState<2> before_{0};                 // dS buffer of the previous step
  int dq_warpgroup_ = Traits::kConsumers - 1;  // the warpgroup that computes that step's dQ
  PipelineState<1> dq_{0};                     // this warpgroup's dQ buffer
  uint32_t kv_phase_ = 0;
  uint32_t low_;         // kKeptDescriptors: address of shared memory / 16
  uint32_t ds_row_ = 0;  // kTrimmedStep: where this lane stores dS
  uint32_t step_ = 0;    // the same: steps since the start of the kernel
  int turn_;             // the same: steps until this warpgroup computes dQ of the previous step
  int partial_block_;    // the same: the m_block that needs zero fill; -1: none
};

}  // namespace flashattn3::backward
