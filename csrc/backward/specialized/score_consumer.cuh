// The score warpgroup of a CTA: computes S = K Q^T and P of the CTA's 64 keys and a step's 64
// queries, accumulates dK, and a quarter of dQ's columns.
//
// Step i: start S(i+1), add dQ(i-1) to dq_accum, start dK += dS(i) Q(i) and dQ(i), compute P(i+1)
// during these two.
#pragma once

#include "backward/epilogue.cuh"
#include "backward/probabilities.cuh"
#include "backward/specialized/consumer.cuh"

namespace flashattn3::backward::specialized {

template <Config kConfig>
class ScoreConsumer : Consumer<kConfig> {
  using Base = Consumer<kConfig>;
  using typename Base::QueryGradient;
  using typename Base::Scores;
  using typename Base::Traits;
  static constexpr ElementType kElement = Traits::kElement;
  using KeyGradient = float[Traits::kHeadDim / 2];

 public:
  __device__ __forceinline__ ScoreConsumer(const Arguments& args, const WorkTile& tile,
                                           uint8_t* shared, int rank)
      : Base(args, tile, shared, 0, rank) {}

  __device__ __forceinline__ void run() {
    const int count = this->num_steps();
    if (count == 0) {
      store_zeros(key_target(this->args_, this->tile_, this->warp_first_key()));
      return;
    }
    full_blocks_ = full_m_blocks<kBlockM>(this->mask(), this->first_key_,
                                          this->first_key_ + Traits::kBlockN - 1);
    position_ = uniform(this->tile_.start);
    this->adder_.begin(this->order_, position_);
    KeyGradient dk;
    QueryGradient finished;
#pragma unroll
    for (int i = 0; i < Traits::kHeadDim / 2; ++i) dk[i] = 0.f;
    this->storage_.keys_full.wait(0);  // Sync: K and V are loaded.
    Scores s, lse;
    start_qk(s, lse);
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    make_probabilities(s, lse);
    store_p(s);
    for (int i = 0; i + 1 < count; ++i) step<true>(dk, finished, i > 0);
    step<false>(dk, finished, count > 1);
    this->add_dq(finished);
    this->adder_.end();
    // Sync: all four warps have read their keys of K, which dK is staged over.
    named_barrier_sync(1, 128);
    if (!this->reduce(dk)) return;
    store_gradient<kElement, Traits::kHeadDim>(
        key_target(this->args_, this->tile_, this->warp_first_key()), 0, dk,
        this->args_.softmax_scale,
        this->shared_ + Traits::kKOffset + threadIdx.x % 128 / 32 * kRowsOfWarp * 128,
        Traits::kAtomBytes);
  }

 private:
  // kMore: a step follows. others: there was an earlier step. finished: in: dQ of the previous
  // step, out: of this step.
  template <bool kMore>
  __device__ __forceinline__ void step(KeyGradient& dk, QueryGradient& finished, bool others) {
    const uint32_t b = this->step_.index();
    Scores s, lse;
    if constexpr (kMore) start_qk(s, lse);
    if (others) {
      this->template add_half_of_dq<true>(finished);
      this->template add_half_of_dq<false>(finished);
    }
    // Sync: all gradient warps have written dS.
    this->storage_.ds_full[b].wait(this->step_.phase());
    gemm_ss_mn_b<kElement, Traits::kHeadDim>(dk, this->at(Traits::kDsOffset + b * Traits::kDsBytes),
                                             this->at(Traits::kQOffset + b * Traits::kTileBytes));
    QueryGradient dq;
    this->start_dq(dq);
    if constexpr (kMore) {
      warpgroup_wait<2>();
      warpgroup_fence_operand(s);
      make_probabilities(s, lse);
    }
    warpgroup_wait<1>();
    this->storage_.q_empty[b].arrive_warp();  // Sync: this warp is done with Q and lse.
    if constexpr (kMore) store_p(s);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dk);
    this->end_step(finished, dq);
  }

  // Starts the QK GEMM of the step at scores_at_ and loads its lse.
  __device__ __forceinline__ void start_qk(Scores& s, Scores& lse) {
    const uint32_t b = scores_at_.index();
    this->storage_.q_full[b].wait(scores_at_.phase());  // Sync: Q and lse are loaded.
    this->template zero_fill_queries<Traits::kAtoms>(Traits::kQOffset + b * Traits::kTileBytes,
                                                     this->tile_.m_blocks.block(position_));
    // Before the GEMMs start: these loads are slow during WGMMA.
    load_per_column(lse, this->storage_.lse[b]);
    gemm_ss<kElement, Traits::kBlockN, kBlockM, Traits::kHeadDim>(
        s, this->at(Traits::kKOffset), this->at(Traits::kQOffset + b * Traits::kTileBytes));
  }

  // Computes P of the step at scores_at_. The mask's branch keeps ptxas from moving the wait for
  // dK, which follows, up before the exponentials.
  __device__ __forceinline__ void make_probabilities(Scores& s, const Scores& lse) {
    exponentiate(s, lse, this->args_.score_scale, NoTerm());
    if (position_ < full_blocks_.begin || position_ >= full_blocks_.end) {
      mask_probabilities<kBlockM>(s, this->mask(),
                                  this->warp_first_key() + thread_row(threadIdx.x % 32),
                                  this->tile_.m_blocks.block(position_) * kBlockM);
    }
  }

  // Stores P of the step at scores_at_ to a buffer that all gradient warps have read: they wrote dS
  // of the previous step after their GEMM with P of the step before that. With a cap, P times the
  // cap's derivative goes to the dS buffer, where the gradient warps replace it.
  __device__ __forceinline__ void store_p(Scores& p) {
    const uint32_t b = scores_at_.index();
    stage(p, Traits::kPOffset);
    if (this->args_.score_scale.caps()) {
      // tanh cannot be recovered later from 16 bits of P.
      differentiate_cap(p, this->storage_.lse[b], this->args_.score_scale, NoTerm());
      // Sync: all warps of both CTAs have read dS of two steps before.
      this->storage_.ds_empty[b].wait(scores_at_.phase() ^ 1);
      stage(p, Traits::kDsOffset);
    }
    fence_async_proxy();
    __syncwarp();
    this->storage_.p_full[b].arrive_warp();  // Sync: this warp has written and fenced.
    scores_at_.advance();
    position_ = this->order_.next(position_);
  }

  __device__ __forceinline__ void stage(const Scores& p, int offset) {
    uint32_t packed[kBlockM / 4];
#pragma unroll
    for (int i = 0; i < kBlockM / 4; ++i) packed[i] = pack<kElement>(p[2 * i], p[2 * i + 1]);
    stage_rows(this->rows_of_warp(offset, scores_at_.index()), packed);
  }

  BlockRange full_blocks_;         // positions of m_blocks that see all of the CTA's keys
  int position_;                   // of the m_block of the next P
  PipelineState<2> scores_at_{0};  // step of the next P
};

}  // namespace flashattn3::backward::specialized
