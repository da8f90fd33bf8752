// The main loop for 16-bit inputs and 64 query rows: from S = Q K^T to O, n_blocks from the last to
// the first.
//
// Step j, with two GEMMs in flight: start S(j) = Q K(j)^T, start O += P(j-1) V(j-1), wait for S(j),
// softmax of S(j) overlapped with the PV GEMM, release K(j) (until then S may have to be
// recomputed), wait for O, release V(j-1), pack P(j). The warpgroups of a CTA share the stages but
// run unsynchronised: while one computes its softmax, the tensor cores run GEMMs of the others
// (as in FlashAttention-3's ping-pong).
#pragma once

#include "attention/score_scale.cuh"
#include "attention/softmax.cuh"
#include "forward/consumer_pipeline.cuh"

namespace flashattn3::forward {

template <Config kConfig, class Storage>
class Mainloop : protected ConsumerPipeline<kConfig, Storage> {
 protected:
  using Base = ConsumerPipeline<kConfig, Storage>;
  using Base::args_, Base::kBlockN, Base::kElement, Base::kHeadDim, Base::kStages, Base::kv_;
  using typename Base::Out, typename Base::Probabilities, typename Base::Traits;

  using Scores = float[kBlockN / 2];
  using Softmax = OnlineSoftmax<kElement, kBlockN, Traits::kMasked>;

  using Base::Base;

  // Called before the first QK GEMM of a work tile.
  __device__ __forceinline__ void begin_tile(const WorkTile&) {}

  // O is complete, in units of out.
  __device__ __forceinline__ void finish(Out&, Softmax&) {}
  static __device__ constexpr float out_scale() { return 1.f; }

  // Starts S = Q K^T with the K at this stage.
  __device__ __forceinline__ void gemm_qk(Scores& s, PipelineState<kStages> at) {
    gemm_ss<kElement, Traits::kBlockM, kBlockN, kHeadDim>(s, this->q_desc(), this->k_desc(at),
                                                          this->k_strides());
  }

  // Starts O += P V with the V at this stage.
  __device__ __forceinline__ void gemm_pv(Out& o, const Probabilities& p,
                                          PipelineState<kStages> at) {
    gemm_rs<kElement, kBlockN, Traits::kHeadDimV>(o, p, this->v_desc(at), this->v_strides());
  }

  // Takes S of the last block; returns P of the first block and O of all blocks after it.
  __device__ __forceinline__ void attend(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                         BlockRange mine) {
    const BlockRange full_blocks = this->full_n_blocks();  // every row sees every key of these
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] = 0.f;
    softmax.reset();
    int block = mine.end - 1;
    const UniformScale scale{args_.score_scale.factor};
    this->release_k(kv_);
    cap(s);
    int highest[2];
    softmax.subtract_row_max(s, scale, highest);
    if (!full_blocks.has(block)) this->apply_mask(s, block);
    float unused[2];
    softmax.rescale(s, unused);
    softmax.exponentiate(s);
    pack_probabilities<kElement, kBlockN>(p, s);
    if constexpr (Traits::kOutOverQ) this->release_staged_q();

    // kv_ is one block behind kv: it is at the stage whose V has yet to be multiplied.
    PipelineState<kStages> kv = kv_.next();
    if (block > mine.begin) this->wait_for_k(kv);
    --block;
    for (; block >= mine.begin; --block) {
      gemm_qk(s, kv);
      this->wait_for_v(kv_);
      gemm_pv(o, p, kv_);
      warpgroup_wait<1>();
      warpgroup_fence_operand(s);
      float factor[2];  // rescales O; set only if change.rescaled
      const Change change = softmax_step(s, softmax, factor, scale, kv, block, full_blocks);
      const PipelineState<kStages> next = kv.next();
      // A branch that depends on the sums of the exponentials keeps the whole softmax before the
      // wait for O: ptxas would move the wait up or the exponentials down, and nothing would
      // overlap the PV GEMM. (Those sums are never negative.)
      if (block > mine.begin || softmax.impossible()) this->wait_for_k(next);
      warpgroup_wait<0>();
      warpgroup_fence_operand(o);
      this->release_v(kv_);
      if (change.rescaled) this->rescale(o, factor);
      pack_probabilities<kElement, kBlockN>(p, s);
      kv_ = kv;
      kv = next;
    }
  }

 private:
  // Whether a step changed row_max of one of the warp's rows. A struct, not a bool: with a bool
  // ptxas allocates registers of the masked configs differently, and d64 loses 1.6 %.
  struct Change {
    bool rescaled;
  };

  // Converts scores to probabilities and releases K. Returns whether the warp must rescale O.
  __device__ __forceinline__ Change softmax_step(Scores& s, Softmax& softmax, float (&factor)[2],
                                                 UniformScale scale, PipelineState<kStages> kv,
                                                 int block, BlockRange full_blocks) {
    Change change{false};
    bool exact = args_.score_scale.caps();
    if constexpr (Traits::kMasked) {
      exact = exact || !full_blocks.has(block) || softmax.warp_has_unseen();
    }
    if (exact || softmax.exponentiate_at_once(s, scale)) {
      warpgroup_fence_operand(s);
      if (!exact) {  // exponentiate_at_once has overwritten S
        recompute_scores<kElement, Traits::kBlockM, kBlockN, kHeadDim>(
            s, this->q_address(), this->k_address(kv), threadIdx.x / 32 * kRowsOfWarp,
            this->k_strides());
      }
      // If the sums overflowed, row_max rises even if no single score passed the threshold: else
      // the sums of the next block would overflow again.
      change = exact_softmax(s, softmax, factor, scale, block, full_blocks, !exact);
      softmax.exponentiate(s);
    }
    this->release_k(kv);
    return change;
  }

  // Converts scores to exponents: cap, row maxima, mask, and rescale if needed.
  __device__ __forceinline__ Change exact_softmax(Scores& s, Softmax& softmax, float (&factor)[2],
                                                  UniformScale scale, int block,
                                                  BlockRange full_blocks, bool sum_overflow) {
    cap(s);
    int highest[2];
    softmax.subtract_row_max(s, scale, highest);
    const bool rescales =
        softmax.needs_rescale(highest, Softmax::kRescaleThreshold) || sum_overflow;
    if constexpr (Traits::kMasked) {
      if (!full_blocks.has(block)) this->apply_mask(s, block);
    }
    Change change{__any_sync(~0u, rescales) != 0};
    warpgroup_fence_operand(s);
    if (change.rescaled) {
      softmax.rescale(s, factor);
      warpgroup_fence_operand(s);
    }
    return change;
  }

  __device__ __forceinline__ void cap(Scores& s) const {
    if (args_.score_scale.caps()) cap_scores(s, args_.score_scale);
  }
};

}  // namespace flashattn3::forward
