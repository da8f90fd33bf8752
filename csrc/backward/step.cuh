// A step of a consumer warpgroup up to 128 columns, where S and dP fit the registers beside dK and
// dV:
//   start S = K Q^T and dP - delta = V dO^T - delta (accumulator bias -delta), wait for S,
//   P = 2^(S - lse), start dV += P dO, wait for dP, dS = P (dP - delta), store dS to shared
//   memory, start dK += dS Q; one warpgroup in turn also computes dQ of the previous step.
#pragma once

#include "backward/consumer_state.cuh"

namespace flashattn3::backward {

template <Config kConfig>
class Step : protected ConsumerState<kConfig> {
 protected:
  using Base = ConsumerState<kConfig>;
  using Base::Base;
  using Base::kElement, Base::kHeadDim;
  using typename Base::KeyGradient;
  using typename Base::Operand;
  using typename Base::QueryGradient;
  using typename Base::Scores;
  using typename Base::Traits;
  using typename Base::ValueGradient;

  // position: of the m_block (kBlockM queries) in the tile's list. full_blocks: positions of those
  // that see all keys of this warpgroup.
  // The last argument tells WideStep whether there is a dQ to compute; here the turn tells it.
  __device__ __forceinline__ void step(KeyGradient& dk, ValueGradient& dv, int position,
                                       BlockRange full_blocks, bool) {
    auto& storage = this->storage_;
    const uint32_t stage = this->q_dout().index();
    Scores s, dp, lse;
    Operand p, ds;
    load_per_column(dp, storage.minus_delta[stage], this->column());
    load_per_column<0, Traits::kLseInRegisters>(lse, storage.lse[stage], this->column());
    warpgroup_fence_operand(
        dp);  // before S's GEMM starts, or ptxas would wait for it before writing these
    start_s_dp(s, dp, stage);
    warpgroup_wait<1>();
    warpgroup_fence_operand(s);
    load_per_column<Traits::kLseInRegisters, kBlockM / 2>(lse, storage.lse[stage], this->column());
    const auto term = this->term_of(position, stage);
    if constexpr (Traits::kBias) {
      exponentiate_with_bias<kElement>(s, lse, this->args_.score_scale.factor,
                                       this->bias_columns(stage));
    } else {
      exponentiate(s, lse, this->args_.score_scale, term);
    }
    this->mask_unless_full(s, position, full_blocks);
    pack_probabilities<kElement, kBlockM>(p, s);
    this->template start_gradient<kHeadDim>(dv, p, Base::dout_low(stage));
    if constexpr (Traits::kBias) this->release_previous_bias();
    warpgroup_wait<1>();
    warpgroup_fence_operand(dp);
    if (!Traits::kBias && this->args_.score_scale.caps()) {
      differentiate_cap<true>(s, storage.lse[stage], this->args_.score_scale, term, this->column());
    }
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) s[i] *= dp[i];
    pack_probabilities<kElement, kBlockM>(ds, s);
    if constexpr (Traits::kBias) this->stage_bias_gradient(ds, stage);
    this->store_ds(ds);
    this->template start_gradient<kHeadDim>(dk, ds, Base::q_low(stage));
    if constexpr (Traits::kBias) this->store_bias_gradient(stage);
    warpgroup_wait<1>();
    if (this->takes_turn()) {
      QueryGradient dq;
      this->start_dq(dq, Base::kLastPart);
      warpgroup_wait<1>();
      this->arrive_warp(storage.q_dout_empty[stage]);  // Sync: this warp is done with Q and dO.
      warpgroup_wait<0>();
      warpgroup_fence_operand(dq);
      this->release_previous_ds();
      this->hand_over(dq, Base::kLastPart);
    } else {
      warpgroup_wait<0>();
      this->arrive_warp(storage.q_dout_empty[stage]);  // Sync: as above.
    }
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
  }

  // Skips a step whose queries see none of this warpgroup's keys: dS is 0.
  __device__ __forceinline__ void skip_step() {
    const Operand ds = {};
    this->store_ds(ds);
    // Sync: this warp reads no Q and dO.
    this->arrive_warp(this->storage_.q_dout_empty[this->q_dout().index()]);
    if constexpr (Traits::kBias) this->release_previous_bias();
    end_dq();
  }

  // Computes dQ of the previous step if it is this warpgroup's turn.
  __device__ __forceinline__ void end_dq() {
    if (this->takes_turn()) this->template gemm_dq<true>(Base::kLastPart);
  }

 private:
  // Starts S = K Q^T and dP = V dO^T - delta; dp: -delta.
  __device__ __forceinline__ void start_s_dp(Scores& s, Scores& dp, uint32_t stage) {
    const uint32_t keys = this->warpgroup_ * (64 * 128 / 16);
    const uint32_t ones = opaque_ones();
    gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim>(
        s, SmemOperand{this->low() + Traits::kKLow + keys, opaque_desc_high<0>(ones)},
        SmemOperand{this->low() + Base::q_low(stage), opaque_desc_high<1>(ones)});
    // At most eight WGMMAs use a high word (SmemOperand); each GEMM has kHeadDim / 16.
    constexpr int kOther = kHeadDim > 64 ? 2 : 0;
    gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim, true>(
        dp, SmemOperand{this->low() + Traits::kVLow + keys, opaque_desc_high<kOther>(ones)},
        SmemOperand{this->low() + Base::dout_low(stage), opaque_desc_high<kOther + 1>(ones)});
  }
};

}  // namespace flashattn3::backward
