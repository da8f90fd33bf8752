// A step of a consumer warpgroup with more than 128 columns of Q and K and up to 128 of V, where dK
// and dV leave registers for only one of S, dP and a part of dQ:
//   start S = K Q^T, wait, P = 2^(S - lse); the warpgroup whose turn it is computes the last part
//   of dQ of the previous step; start dP - delta = V dO^T - delta and dV += P dO, wait for both, dS
//   = P (dP - delta), which replaces P, store dS to shared memory, start dK += dS Q and the
//   warpgroup's own part of dQ of the previous step.
// The two parts of dQ are half a step apart, so that the first has been read from the buffer that
// both are handed over in.
#pragma once

#include "backward/consumer_state.cuh"
#include "tile/load_staged.cuh"

namespace flashattn3::backward {

template <Config kConfig>
class WideStep : protected ConsumerState<kConfig> {
 protected:
  using Base = ConsumerState<kConfig>;
  using Base::Base;
  using Base::kElement, Base::kHeadDim, Base::kHeadDimV;
  using typename Base::KeyGradient;
  using typename Base::Operand;
  using typename Base::QueryGradient;
  using typename Base::Scores;
  using typename Base::Traits;
  using typename Base::ValueGradient;

  // position: of the m_block (kBlockM queries) in the tile's list. full_blocks: positions of those
  // that see all keys of this warpgroup.
  // others: the tile had an earlier step.
  __device__ __forceinline__ void step(KeyGradient& dk, ValueGradient& dv, int position,
                                       BlockRange full_blocks, bool others) {
    auto& storage = this->storage_;
    const uint32_t stage = this->q_dout().index();
    Scores s, dp, lse;
    Operand p;
    load_per_column(lse, storage.lse[stage], this->column());
    start_s(s, stage);
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    exponentiate(s, lse, this->args_.score_scale, NoTerm());
    this->mask_unless_full(s, position, full_blocks);
    pack_probabilities<kElement, kBlockM>(p, s);
    const bool caps = this->args_.score_scale.caps();
    if (caps) stage_capped(s, stage);
    if (this->takes_turn()) this->template gemm_dq<false>(Base::kLastPart);
    load_per_column(dp, storage.minus_delta[stage], this->column());
    start_dp(dp, stage);
    this->template start_gradient<kHeadDimV>(dv, p, Base::dout_low(stage));
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    warpgroup_fence_operand(dv);
    if (caps) load_capped(p);
    multiply(p, dp);
    this->store_ds(p);
    this->template start_gradient<kHeadDim>(dk, p, Base::q_low(stage));
    if (others) {
      QueryGradient dq;
      this->start_dq(dq, this->warpgroup_);
      warpgroup_wait<1>();
      this->arrive_warp(storage.q_dout_empty[stage]);  // Sync: this warp is done with Q and dO.
      warpgroup_wait<0>();
      warpgroup_fence_operand(dq);
      this->release_previous_ds();
      this->hand_over(dq, this->warpgroup_);
    } else {
      warpgroup_wait<0>();
      this->arrive_warp(storage.q_dout_empty[stage]);  // Sync: as above.
    }
    warpgroup_fence_operand(dk);
  }

  // Computes this warpgroup's parts of dQ of the previous step.
  __device__ __forceinline__ void end_dq() {
    if (this->takes_turn()) this->template gemm_dq<false>(Base::kLastPart);
    this->template gemm_dq<true>(this->warpgroup_);
  }

 private:
  __device__ __forceinline__ void start_s(Scores& s, uint32_t stage) {
    gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDim>(s, this->low() + keys() + Traits::kKLow,
                                                          this->low() + Base::q_low(stage));
  }

  // dp: -delta.
  __device__ __forceinline__ void start_dp(Scores& dp, uint32_t stage) {
    const uint32_t ones = opaque_ones();
    gemm_ss<kElement, Traits::kBlockN, kBlockM, kHeadDimV, true>(
        dp, SmemOperand{this->low() + keys() + Traits::kVLow, opaque_desc_high<2>(ones)},
        SmemOperand{this->low() + Base::dout_low(stage), opaque_desc_high<3>(ones)});
  }
  // Offset of this warpgroup's keys.
  __device__ __forceinline__ uint32_t keys() const { return this->warpgroup_ * (64 * 128 / 16); }

  // P times the cap's derivative waits in the dS buffer: there are registers for it or for P, and
  // tanh cannot be recovered from 16 bits of P.
  __device__ __forceinline__ void stage_capped(Scores& p, uint32_t stage) {
    differentiate_cap<true>(p, this->storage_.lse[stage], this->args_.score_scale, NoTerm(),
                            this->column());
    Operand capped;
    pack_probabilities<kElement, kBlockM>(capped, p);
    this->stage_in_ds(capped);
  }
  __device__ __forceinline__ void load_capped(Operand& capped) {
    __syncwarp();  // a lane reads what others have written
    uint32_t word[16];
    load_staged_rows(word, this->shared_ + Traits::kDsOffset +
                               this->ds_buffer().index() * Traits::kDsBytes +
                               threadIdx.x / 32 * kRowsOfWarp * 128);
#pragma unroll
    for (int i = 0; i < 16; ++i) capped[i / 4][i % 4] = word[i];
    __syncwarp();  // all have read before dS is written
  }

  // P becomes dS.
  __device__ __forceinline__ static void multiply(Operand& p, const Scores& dp) {
    constexpr float kUnit = unit_of_probabilities(kConfig);
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) {
      const float2 pair = unpack<kElement>(p[i / 4][i % 4]);
      p[i / 4][i % 4] = pack<kElement>(pair.x * kUnit * dp[2 * i], pair.y * kUnit * dp[2 * i + 1]);
    }
  }
};

}  // namespace flashattn3::backward
