// Backward consumer warpgroup: computes dK and dV of 64 keys, and dQ in turn with the others.
//
// S and P are transposed (keys x queries): the accumulators of P^T and dS^T then have the register
// layout of WGMMA's A operand in the dV and dK GEMMs. Step t of a warpgroup:
//   start S = K Q^T and dP - delta = V dO^T - delta (accumulator bias -delta), wait for S,
//   P = 2^(S - lse), start dV += P dO, wait for dP, dS = P (dP - delta), store dS to shared
//   memory, start dK += dS Q; one warpgroup in turn also computes dQ of the previous step, which
//   needs dS of all warpgroups.
// A step has few instructions, since they take issue slots from the GEMMs: one counter of steps
// gives all stages and buffers, and values that ptxas would compute anew in every step are hidden
// from it. The warpgroups share the stages of Q and dO but are not in lockstep: they may be one
// step apart, so that the tensor cores work for one warpgroup while another computes P and dS.
#pragma once

#include "attention/mask.cuh"
#include "backward/arguments.h"
#include "backward/epilogue.cuh"
#include "backward/probabilities.cuh"
#include "backward/traits.cuh"
#include "ptx/opaque.cuh"
#include "ptx/smem_operand.cuh"
#include "ptx/store_shared.cuh"
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
    const int lane = threadIdx.x % 32;
    low_ = opaque_uniform(base / 16);
    const uint32_t first_row = base + Traits::kDsOffset + threadIdx.x / 32 * kRowsOfWarp * 128;
    // The shuffle hides the address from ptxas, which would compute it anew in every step.
    ds_row_ = __shfl_sync(~0u, first_row + staged_row_of_lane(lane), lane);
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
    WorkTileBlocks steps(args_, {uniform(tile().m_blocks.begin), uniform(tile().m_blocks.end)},
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
    // A dense batch has no rows to zero: TMA fills past the tensor with zeros.
    const bool varlen = args_.seqlens_q.cu_seqlens != nullptr || args_.seqlens_q.seqused != nullptr;
    const int count = steps.count();
    partial_block_ = varlen ? num_rows / kBlockM : -1;
    for (int i = 0; i < count; ++i, steps.advance()) {
      const int block = steps.block();
      wait_for_q_dout(block);
      if (!Traits::kSkipsSteps || contains(seen, block)) {
        step(dk, dv, block, full_blocks);
      } else {
        skip_step();
      }
      ++step_;
      --turn_;
    }
    // dQ lags by one step: compute that of the last step.
    if (takes_turn()) gemm_dq();
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
    const uint32_t stage = q_dout().index();
    storage_.q_dout_full[stage].wait(q_dout().phase());  // Sync: all four are loaded.
    zero_fill_q_dout(stage, block);
  }

  // block: m_block (kBlockM queries). full_blocks: m_blocks that see all keys of this warpgroup.
  __device__ __forceinline__ void step(Gradient& dk, Gradient& dv, int block,
                                       BlockRange full_blocks) {
    const uint32_t stage = q_dout().index();
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
    start_gradient(dv, p, Traits::kDoutLow, stage);
    warpgroup_wait<1>();
    warpgroup_fence_operand(dp);
    if (args_.score_scale.caps()) {
      differentiate_cap<true>(s, storage_.lse[stage], args_.score_scale, column());
    }
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) s[i] *= dp[i];
    pack_probabilities<kElement, kBlockM>(ds, s);
    store_ds(ds);
    start_gradient(dk, ds, Traits::kQLow, stage);
    warpgroup_wait<1>();
    if (takes_turn()) {
      Gradient dq;
      start_dq(dq);
      warpgroup_wait<1>();
      arrive_warp(storage_.q_dout_empty[stage]);  // Sync: this warp is done with Q and dO.
      warpgroup_wait<0>();
      warpgroup_fence_operand(dq);
      hand_over(dq);
    } else {
      warpgroup_wait<0>();
      arrive_warp(storage_.q_dout_empty[stage]);  // Sync: as above.
    }
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
  }

  // Skips a step whose queries see none of this warpgroup's keys: dS is 0.
  __device__ __forceinline__ void skip_step() {
    const Operand ds = {};
    store_ds(ds);
    arrive_warp(storage_.q_dout_empty[q_dout().index()]);  // Sync: this warp reads no Q and dO.
    if (takes_turn()) gemm_dq();
  }

  // Starts S = K Q^T and dP = V dO^T - delta; dp: -delta.
  __device__ __forceinline__ void start_s_dp(Scores& s, Scores& dp, uint32_t stage) {
    const uint32_t rows = stage * (Traits::kMBlockBytes / 16), keys = warpgroup_ * (64 * 128 / 16);
    const uint32_t ones = opaque_ones();
    gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim>(
        s, SmemOperand{low_ + Traits::kKLow + keys, opaque_desc_high<0>(ones)},
        SmemOperand{low_ + Traits::kQLow + rows, opaque_desc_high<1>(ones)});
    // At most eight WGMMAs use a high word (SmemOperand); each GEMM has kHeadDim / 16.
    constexpr int kOther = kHeadDim > 64 ? 2 : 0;
    gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim, true>(
        dp, SmemOperand{low_ + Traits::kVLow + keys, opaque_desc_high<kOther>(ones)},
        SmemOperand{low_ + Traits::kDoutLow + rows, opaque_desc_high<kOther + 1>(ones)});
  }

  // Starts dV += P dO or dK += dS Q. low: kDoutLow or kQLow.
  __device__ __forceinline__ void start_gradient(Gradient& gradient, const Operand& operand,
                                                 uint32_t low, uint32_t stage) {
    const uint32_t rows = stage * (Traits::kMBlockBytes / 16);
    gemm_rs<kElement, kBlockM, kHeadDim>(
        gradient, operand, SmemOperand{low_ + low + rows, opaque_desc_high<1>(opaque_ones())});
  }

  // Returns thread_column, the column of this thread's register 0, from ds_row_, which is in a
  // register anyway: row lane % 16 has 128 bytes, so bits 7 and 8 of its address are lane % 4.
  __device__ __forceinline__ uint32_t column() const { return ds_row_ / 128 % 4 * 2; }
  // Lane 0 arrives for the warp. ds_row_ tells lanes apart without threadIdx: only lane 0 stores at
  // the beginning of the warp's rows, a multiple of their 2048 bytes.
  __device__ __forceinline__ void arrive_warp(Barrier& barrier) const {
    barrier.arrive_warp((ds_row_ & (kRowsOfWarp * 128 - 1)) == 0);
  }

  // The stage of Q and dO of this step, and the dS buffers of this step and of the previous one.
  __device__ __forceinline__ PipelineState<Traits::kStages> q_dout() const {
    return PipelineState<Traits::kStages>::after_steps(step_);
  }
  __device__ __forceinline__ PipelineState<2> ds_buffer() const {
    return PipelineState<2>::after_steps(step_);
  }
  __device__ __forceinline__ PipelineState<2> previous_ds_buffer() const {
    return PipelineState<2>::after_steps(step_ - 1);
  }

  // Returns whether this warpgroup computes dQ of the previous step; if so its next turn is
  // kConsumers steps later. The turn for a tile's last dQ is taken after the tile's last step, so
  // no warpgroup has a turn in the next tile's first step.
  __device__ __forceinline__ bool takes_turn() {
    if (turn_ != 0) return false;
    turn_ = Traits::kConsumers;
    return true;
  }

  // Stores dS of this warp's 16 keys to shared memory.
  __device__ __forceinline__ void store_ds(const Operand& ds) {
    // Sync: the warpgroup that computed dQ of the step before last has read the buffer.
    storage_.ds_empty[ds_buffer().index()].wait(ds_buffer().phase() ^ 1);
    uint32_t word[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) word[i] = ds[i / 4][i % 4];
    stage_rows_at(ds_row_ + ds_buffer().index() * Traits::kDsBytes, word);
    fence_async_proxy();
    __syncwarp();
    arrive_warp(storage_.ds_full[ds_buffer().index()]);  // Sync: this warp has written and fenced.
  }

  // Starts the dQ GEMM of the previous step.
  __device__ __forceinline__ void start_dq(Gradient& dq) {
    const PipelineState<2> at = previous_ds_buffer();
    storage_.ds_full[at.index()].wait(at.phase());  // Sync: all consumer warps have written dS.
    gemm_ss_mn_ab_in_halves<kElement, Traits::kBlockN, kHeadDim>(
        dq, low_ + Traits::kDsLow + at.index() * (Traits::kDsBytes / 16), low_ + Traits::kKLow);
  }

  // Passes dQ to the dQ writer through shared memory.
  __device__ __forceinline__ void hand_over(const Gradient& dq) {
    arrive_warp(storage_.ds_empty[previous_ds_buffer().index()]);  // Sync: this warp has read dS.
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
    if (block != partial_block_) return;
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
  PipelineState<2> tile_{0};
  PipelineState<1> dq_{0};  // this warpgroup's dQ buffer
  uint32_t kv_phase_ = 0;
  uint32_t low_;       // address of shared memory / 16
  uint32_t ds_row_;    // where this lane stores dS in buffer 0 (staged_row_of_lane)
  uint32_t step_ = 0;  // steps since the start of the kernel
  int turn_;           // steps until this warpgroup computes dQ of the previous step
  int partial_block_;  // the m_block that needs zero fill; -1: none
};

}  // namespace flashattn3::backward
