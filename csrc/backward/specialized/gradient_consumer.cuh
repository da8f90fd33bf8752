// The gradient warpgroup of a CTA: computes dP = V dO^T and dS of the CTA's 64 keys and a step's 64
// queries, accumulates dV, and a quarter of dQ's columns.
//
// Step i: start dP(i+1) - delta (accumulator bias -delta), dV += P(i) dO(i) and, when all of dS(i)
// is there, dQ(i); add dQ(i-1) to dq_accum; compute dS(i+1) when the score warpgroup has stored
// P(i+1).
#pragma once

#include "backward/epilogue.cuh"
#include "backward/probabilities.cuh"
#include "backward/specialized/consumer.cuh"
#include "tile/load_staged.cuh"
#include "tile/tma_store.cuh"

namespace flashattn3::backward::specialized {

template <Config kConfig>
class GradientConsumer : Consumer<kConfig> {
  using Base = Consumer<kConfig>;
  using typename Base::QueryGradient;
  using typename Base::Scores;
  using typename Base::Traits;
  static constexpr ElementType kElement = Traits::kElement;
  using ValueGradient = float[Traits::kHeadDim / 2];

 public:
  __device__ __forceinline__ GradientConsumer(const Arguments& args, const WorkTile& tile,
                                              uint8_t* shared, int rank)
      : Base(args, tile, shared, 1, rank) {}

  __device__ __forceinline__ void run() {
    const int count = this->num_steps();
    if (count == 0) {
      store_zeros(value_target(this->args_, this->tile_, this->warp_first_key()));
      return;
    }
    position_ = uniform(this->tile_.start);
    this->adder_.begin(this->order_, position_);
    ValueGradient dv;
    QueryGradient finished;
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) dv[i] = 0.f;
    this->storage_.keys_full.wait(0);  // Sync: K and V are loaded.
    Scores dp;
    start_dp(dp);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    store_ds(dp);
    for (int i = 0; i + 1 < count; ++i) step<true>(dv, finished, i > 0);
    step<false>(dv, finished, count > 1);
    this->add_dq(finished);
    this->adder_.end();
    // Sync: all four warps have read their keys of V, which dV is staged over.
    named_barrier_sync(2, 128);
    if (!this->reduce(dv)) return;
    store_gradient<kElement, Traits::kHeadDim>(
        value_target(this->args_, this->tile_, this->warp_first_key()), 0, dv,
        unit_of_probabilities(kConfig),
        this->shared_ + Traits::kVOffset + threadIdx.x % 128 / 32 * kRowsOfWarp * 128,
        Traits::kAtomBytes);
  }

 private:
  // As ScoreConsumer::step.
  template <bool kMore>
  __device__ __forceinline__ void step(ValueGradient& dv, QueryGradient& finished, bool others) {
    const uint32_t b = this->step_.index();
    Scores dp;
    if constexpr (kMore) start_dp(dp);
    gemm_ss_mn_b<kElement, Traits::kHeadDim>(
        dv, this->at(Traits::kPOffset + b * Traits::kDsBytes),
        this->at(Traits::kDoutOffset + b * Traits::kTileBytes));
    if (others) this->add_dq(finished);
    // Sync: all gradient warps have written dS.
    this->storage_.ds_full[b].wait(this->step_.phase());
    QueryGradient dq;
    this->start_dq(dq);
    warpgroup_wait<1>();
    this->storage_.dout_empty[b].arrive_warp();  // Sync: this warp is done with dO and delta.
    if constexpr (kMore) {
      warpgroup_fence_operand(dp);
      store_ds(dp);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(dv);
    this->end_step(finished, dq);
  }

  // Starts dp = dP - delta of the step at ds_at_.
  __device__ __forceinline__ void start_dp(Scores& dp) {
    const uint32_t b = ds_at_.index();
    this->storage_.dout_full[b].wait(ds_at_.phase());  // Sync: dO and delta are loaded.
    this->template zero_fill_queries<Traits::kAtoms>(Traits::kDoutOffset + b * Traits::kTileBytes,
                                                     this->tile_.m_blocks.block(position_));
    load_per_column(dp, this->storage_.minus_delta[b]);
    gemm_ss<kElement, Traits::kBlockN, kBlockM, Traits::kHeadDim, true>(
        dp, this->at(Traits::kVOffset), this->at(Traits::kDoutOffset + b * Traits::kTileBytes));
  }

  // Computes dS of the step at ds_at_ and stores it. dp: dP - delta.
  __device__ __forceinline__ void store_ds(const Scores& dp) {
    const uint32_t b = ds_at_.index();
    // With a cap, P times the cap's derivative is in the dS buffer.
    const int from = this->args_.score_scale.caps() ? Traits::kDsOffset : Traits::kPOffset;
    constexpr float kUnit = unit_of_probabilities(kConfig);
    uint32_t packed[kBlockM / 4];
    // Sync: all score warps have written P.
    this->storage_.p_full[b].wait(ds_at_.phase());
    load_staged_rows(packed, this->rows_of_warp(from, b));
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) {
      const float2 p = unpack<kElement>(packed[i]);
      packed[i] = pack<kElement>(p.x * kUnit * dp[2 * i], p.y * kUnit * dp[2 * i + 1]);
    }
    // Sync: all warps of both CTAs have read dS of two steps before.
    this->storage_.ds_empty[b].wait(ds_at_.phase() ^ 1);
    stage_rows(this->rows_of_warp(Traits::kDsOffset, b), packed);
    fence_async_proxy();
    __syncwarp();
    this->storage_.ds_full[b].arrive_warp();  // Sync: this warp has written and fenced.
    ds_at_.advance();
    position_ = this->order_.next(position_);
  }

  int position_;               // of the m_block of the next dS
  PipelineState<2> ds_at_{0};  // step of the next dS
};

}  // namespace flashattn3::backward::specialized
