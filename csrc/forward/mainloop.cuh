// The main loop for 16-bit inputs and 64 query rows: from S = Q K^T to O, over the blocks of a
// BlockWalk. Phases of a block:
//   load      wait_for_k(), wait_for_v(): load.cuh has filled the stage
//   QK^T      gemm_qk() starts S
//   softmax   Variant::transform(), the bias of a config that has one, then exponents relative to
//             row_max, with the slopes of a config that has them, and their sums
//   mask      mask() of the exponents, unless the block is full
//   PV        gemm_pv() starts O += P V
//   epilogue  store_rows() stores O over the row sums, and lse (epilogue.cuh)
// kernel.cuh starts S of a work tile's first block and calls attend() and the epilogue. Step j,
// with two GEMMs in flight: QK^T of j, PV of j - 1, wait for S, softmax and mask, which overlap the
// PV GEMM, release K (until then S may have to be recomputed), wait for O, release V of j - 1, pack
// P. The warpgroups of a CTA share the stages but run unsynchronised: while one computes its
// softmax, the tensor cores run GEMMs of the others (as in FlashAttention-3's ping-pong).
#pragma once

#include "attention/softmax.cuh"
#include "attention/variant.cuh"
#include "forward/consumer_pipeline.cuh"
#include "forward/score_options.cuh"

namespace flashattn3::forward {

template <Config kConfig, class Storage>
class Mainloop : protected ScoreOptions<kConfig, Storage> {
 protected:
  using Base = ScoreOptions<kConfig, Storage>;
  using Base::args_, Base::kBlockN, Base::kElement, Base::kHeadDim, Base::kStages, Base::kv_;
  using typename Base::Out, typename Base::Probabilities, typename Base::Traits;
  using typename Base::Scores, typename Base::Softmax, typename Base::Walk, typename Base::Work;

  using Base::Base;

  // Takes S of the first block; returns while the last PV GEMM is in flight.
  __device__ __forceinline__ void attend(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                         const Work& work) {
    this->skip_v(work.above);
    Walk at{this->walk(work.visited)};
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] = 0.f;
    softmax.reset();
    const UniformScale scale = this->exponent_scale();
    this->begin_walk(at, softmax);
    if constexpr (!Traits::kBias && !Traits::kListed) this->release_k(kv_);
    int highest[2];
    float unused[2];
    exponents(s, softmax, this->exact(scale, at), kv_, highest);
    if constexpr (Traits::kBias) this->release_k(kv_);  // the tile of the bias is released with it
    this->mask(s, at, kv_);
    if constexpr (Traits::kListed) this->release_k(kv_);  // so are the tiles of bits
    softmax.rescale(s, unused);
    const bool above = softmax.exponentiate(s);
    if constexpr (Softmax::kTracks) warpgroup_fence_operand(s);
    if (above) this->take_largest(s, softmax);
    pack_probabilities<kElement, kBlockN>(p, s);
    if constexpr (Traits::kOutOverQ) this->release_staged_q();

    // kv_ is one block behind kv: it is at the stage whose V has yet to be multiplied.
    PipelineState<kStages> kv = kv_.next();
    if (at.has_next()) this->wait_for_k(kv);
    this->pass_k(kv, at);
    for (at.advance(); at.has_this(); at.advance()) {
      this->gemm_qk(s, kv);
      this->wait_for_v(kv_);
      this->gemm_pv(o, p, kv_);
      this->read_kinds(kv, at);
      warpgroup_wait<1>();
      warpgroup_fence_operand(s);
      float factor[2];  // rescales O; set only if change.rescaled
      const Change change = softmax_step(s, softmax, factor, scale, kv, at);
      PipelineState<kStages> next = kv.next();
      // A branch that depends on the sums of the exponentials keeps the whole softmax before the
      // wait for O: ptxas would move the wait up or the exponentials down, and nothing would
      // overlap the PV GEMM. (Those sums are never negative.)
      if (at.has_next() || softmax.impossible()) this->wait_for_k(next);
      warpgroup_wait<0>();
      warpgroup_fence_operand(o);
      this->release_v(kv_);
      this->pass_v(at);
      if (change.rescaled) this->rescale(o, factor);
      pack_probabilities<kElement, kBlockN>(p, s);
      this->pass_k(next, at);
      kv_ = kv;
      kv = next;
    }
    this->wait_for_v(kv_);
    this->gemm_pv(o, p, kv_);
  }

  // O is complete, in units of out.
  __device__ __forceinline__ void finish(Out&, Softmax&) {}
  static __device__ constexpr float out_scale() { return 1.f; }

 private:
  // Whether a step changed row_max of one of the warp's rows. A struct, not a bool: with a bool
  // ptxas allocates registers of the masked configs differently, and d64 loses 1.6 %.
  struct Change {
    bool rescaled;
  };

  // Converts scores to exponents relative to row_max.
  template <class Scale>
  __device__ __forceinline__ void exponents(Scores& s, const Softmax& softmax, const Scale& scale,
                                            PipelineState<kStages> kv, int (&highest)[2]) const {
    args_.variant.transform(s);
    this->add_bias(s, kv);
    softmax.subtract_row_max(s, scale, highest);
  }

  // Converts scores to probabilities and releases K. Returns whether the warp must rescale O.
  __device__ __forceinline__ Change softmax_step(Scores& s, Softmax& softmax, float (&factor)[2],
                                                 UniformScale scale, PipelineState<kStages> kv,
                                                 const Walk& at) {
    Change change{false};
    bool exact = args_.variant.transforms();
    if constexpr (Traits::kListed) {
      exact = exact || softmax.warp_has_unseen();
    } else if constexpr (Traits::kMasked) {
      exact = exact || !at.is_full() || softmax.warp_has_unseen();
    }
    exact = exact || this->needs_exact(at);
    typename Softmax::Outcome outcome{};
    if (!exact) outcome = this->exponentiate_at_once(s, softmax, scale, kv, at);
    // Without it ptxas keeps what the search reads in registers of its own: 100 moves a block.
    if constexpr (Softmax::kTracks) warpgroup_fence_operand(s);
    if (exact || outcome.overflow) {
      warpgroup_fence_operand(s);
      if (!exact) {  // exponentiate_at_once has overwritten S
        recompute_scores<kElement, Traits::kBlockM, kBlockN, kHeadDim>(
            s, this->q_address(), this->k_address(kv), threadIdx.x / 32 * kRowsOfWarp,
            this->k_strides());
      }
      // If the sums overflowed, row_max rises even if no single score passed the threshold: else
      // the sums of the next block would overflow again.
      change = exact_softmax(s, softmax, factor, scale, kv, at, !exact);
      outcome.above = softmax.exponentiate(s);
      if constexpr (Softmax::kTracks) warpgroup_fence_operand(s);
    }
    if (outcome.above) this->take_largest(s, softmax);
    this->release_k(kv);
    return change;
  }

  // Converts scores to exponents, masked, and rescales if needed.
  __device__ __forceinline__ Change exact_softmax(Scores& s, Softmax& softmax, float (&factor)[2],
                                                  UniformScale scale, PipelineState<kStages> kv,
                                                  const Walk& at, bool sum_overflow) {
    int highest[2];
    exponents(s, softmax, this->exact(scale, at), kv, highest);
    const bool rescales =
        softmax.needs_rescale(highest, Softmax::kRescaleThreshold) || sum_overflow;
    if constexpr (Traits::kMasked) this->mask(s, at, kv);
    Change change{__any_sync(~0u, rescales) != 0};
    warpgroup_fence_operand(s);
    if (change.rescaled) {
      softmax.rescale(s, factor);
      warpgroup_fence_operand(s);
    }
    return change;
  }
};

}  // namespace flashattn3::forward
