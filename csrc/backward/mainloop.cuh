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
    WorkTileSteps steps(args_, {uniform(tile().m_blocks.begin), uniform(tile().m_blocks.end)},
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
    const int count = steps.count();
    for (int i = 0; i < count; ++i, steps.advance()) {
      const int block = steps.block();
      wait_for_q_dout(block);
      if (!Traits::kSkipsSteps || (block >= seen.begin && block < seen.end)) {
        step(dk, dv, block, full_blocks, i > 0);
      } else {
        skip_step(i > 0);
      }
      advance();
    }
    // dQ lags by one step: compute that of the last step.
    if (owns_previous_dq()) gemm_dq();
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
    const uint32_t stage = rows_.index();
    storage_.q_full[stage].wait(rows_.phase());     // Sync: Q and lse are loaded.
    storage_.dout_full[stage].wait(rows_.phase());  // Sync: dO and delta are loaded.
    zero_fill_q_dout(stage, block);
  }

  // block: m_block (kBlockM queries). full_blocks: m_blocks that see all keys of this warpgroup.
  // others: this tile had an earlier step, whose dQ this warpgroup may own.
  __device__ __forceinline__ void step(Gradient& dk, Gradient& dv, int block,
                                       BlockRange full_blocks, bool others) {
    const uint32_t stage = rows_.index();
    const uint32_t q = q_base_ + stage * (Traits::kMBlockBytes / 16);
    const uint32_t dout = dout_base_ + stage * (Traits::kMBlockBytes / 16);
    Scores s, dp, lse;
    Operand p, ds;
    load_per_column(dp, storage_.minus_delta[stage]);
    load_per_column<0, Traits::kLseInRegisters>(lse, storage_.lse[stage]);
    warpgroup_fence_operand(
        dp);  // before S's GEMM starts, or ptxas would wait for it before writing these
    gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim>(s, k_base_ + warpgroup_ * (64 * 128 / 16),
                                                          q);
    gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim, true>(
        dp, v_base_ + warpgroup_ * (64 * 128 / 16), dout);
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    load_per_column<Traits::kLseInRegisters, kBlockM / 2>(lse, storage_.lse[stage]);
    exponentiate(s, lse, args_.score_scale);
    if (block < full_blocks.begin || block >= full_blocks.end) {
      mask_probabilities<kBlockM>(s, tile_mask(), warp_first_key() + thread_row(threadIdx.x % 32),
                                  block * kBlockM);
    }
    pack_probabilities<kElement, kBlockM>(p, s);
    gemm_rs<kElement, kBlockM, kHeadDim>(dv, p, dout);
    warpgroup_wait<1>();
    warpgroup_fence_operand(dp);
    if (args_.score_scale.caps()) differentiate_cap(s, storage_.lse[stage], args_.score_scale);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) s[i] *= dp[i];
    pack_probabilities<kElement, kBlockM>(ds, s);
    store_ds(ds);
    gemm_rs<kElement, kBlockM, kHeadDim>(dk, ds, q);
    warpgroup_wait<1>();
    storage_.dout_empty[stage].arrive_warp();  // Sync: this warp is done with dO.
    if (others && owns_previous_dq()) {
      Gradient dq;
      start_dq(dq);
      warpgroup_wait<1>();
      storage_.q_empty[stage].arrive_warp();  // Sync: this warp is done with Q.
      warpgroup_wait<0>();
      warpgroup_fence_operand(dq);
      hand_over(dq);
    } else {
      warpgroup_wait<0>();
      storage_.q_empty[stage].arrive_warp();  // Sync: as above.
    }
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
  }

  // Skips a step whose queries see none of this warpgroup's keys: dS is 0.
  __device__ __forceinline__ void skip_step(bool others) {
    const uint32_t stage = rows_.index();
    const Operand ds = {};
    store_ds(ds);
    storage_.dout_empty[stage].arrive_warp();  // Sync: this warp does not read dO and Q.
    storage_.q_empty[stage].arrive_warp();
    if (others && owns_previous_dq()) gemm_dq();
  }

  // Advances all pipeline states to the next step.
  __device__ __forceinline__ void advance() {
    rows_.advance();
    before_ = ds_;
    ds_.advance();
    dq_warpgroup_ = dq_warpgroup_ + 1 == Traits::kConsumers ? 0 : dq_warpgroup_ + 1;
  }

  // Whether this warpgroup computes dQ of the step before the one at ds_.
  __device__ __forceinline__ bool owns_previous_dq() const { return dq_warpgroup_ == warpgroup_; }

  // Stores dS of this warp's 16 keys to shared memory.
  __device__ __forceinline__ void store_ds(const Operand& ds) {
    // Sync: the warpgroup that computed dQ of the step before last has read the buffer.
    storage_.ds_empty[ds_.index()].wait(ds_.phase() ^ 1);
    uint32_t word[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) word[i] = ds[i / 4][i % 4];
    stage_rows(shared_ + Traits::kDsOffset + ds_.index() * Traits::kDsBytes +
                   threadIdx.x / 32 * kRowsOfWarp * 128,
               word);
    fence_async_proxy();
    __syncwarp();
    storage_.ds_full[ds_.index()].arrive_warp();  // Sync: this warp has written and fenced.
  }

  // Starts the dQ GEMM of the step before the one at ds_.
  __device__ __forceinline__ void start_dq(Gradient& dq) {
    const PipelineState<2> at = before_;
    storage_.ds_full[at.index()].wait(at.phase());  // Sync: all consumer warps have written dS.
    gemm_ss_mn_ab<kElement, Traits::kBlockN, kHeadDim>(
        dq, ds_base_ + at.index() * (Traits::kDsBytes / 16), k_base_);
  }

  // Passes dQ to the dQ writer through shared memory.
  __device__ __forceinline__ void hand_over(const Gradient& dq) {
    storage_.ds_empty[before_.index()].arrive_warp();  // Sync: this warp has read dS.
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
    storage_.dq_full[warpgroup_].arrive_warp();  // Sync: this warp has written and fenced.
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
    if (args_.seqlens_q.cu_seqlens == nullptr && args_.seqlens_q.seqused == nullptr) return;
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
};

}  // namespace flashattn3::backward
