// The main loop of 16-bit inputs for 64 query rows: from S = Q K^T to O, n_blocks from the last to
// the first.
//
// Step j, with two GEMMs in flight: start S(j) = Q K(j)^T, start O += P(j-1) V(j-1), wait for S(j),
// softmax of S(j) beside the PV GEMM, release K(j) (until then S may have to be recomputed), wait
// for O, release V(j-1), pack P(j). The warpgroups of a CTA share the stages but not their pace:
// while one is in its softmax, the tensor cores work for the others (FlashAttention-3's ping-pong).
#pragma once

#include "attention/recompute_scores.cuh"
#include "forward/consumer_pipeline.cuh"

namespace flashattn3::forward {

template <Config kConfig>
class Mainloop : protected ConsumerPipeline<kConfig> {
 protected:
  using Base = ConsumerPipeline<kConfig>;
  using Base::args_, Base::kBlockN, Base::kElement, Base::kHeadDim, Base::kStages, Base::kv_,
      Base::q_, Base::shared_, Base::storage_;
  using typename Base::Out, typename Base::Probabilities, typename Base::Scores;
  using typename Base::Traits;

  using Softmax = OnlineSoftmax<kElement, kBlockN, Traits::kMasked>;
  using Base::Base;

  // Before S of a work tile's first block is started.
  __device__ __forceinline__ void begin_tile(const WorkTile&) {}

  // From S of the last block to P of the first; O of all between.
  __device__ __forceinline__ void attend(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                         BlockRange mine) {
    const BlockRange full_blocks = this->full_n_blocks();  // in which every row sees every key
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] = 0.f;
    softmax.reset();
    int block = mine.end - 1;
    UniformScale scale{{args_.score_scale}};
    this->release_k(kv_);
    cap(s, scale);
    int highest[2];
    softmax.subtract_row_max(s, scale, highest);
    if (!full_blocks.has(block)) this->apply_mask(s, block);
    float unused[2];
    softmax.rescale(s, unused);
    softmax.exponentiate(s);
    Softmax::pack(p, s);
    if constexpr (Traits::kOutOverQ) this->release_staged_q();

    // kv_ is one block behind: at the stages of the block whose V is still to be used.
    PipelineState<kStages> kv = kv_.next();
    if (block > mine.begin) storage_.k_full[kv.index()].wait(kv.phase());  // Sync: the next K is.
    scale = UniformScale{{args_.score_scale}};
    --block;
    for (; block >= mine.begin; --block) {
      this->start_gemms(s, o, p, kv);
      warpgroup_wait<1>();
      warpgroup_fence_operand(s);
      float factor[2];  // of out; set where a reference was raised
      const Change change = softmax_step(s, softmax, factor, scale, kv, block, full_blocks);
      const PipelineState<kStages> next = kv.next();
      // Sync: the next K is there. A branch that follows from the exponentials' sums keeps the
      // whole softmax before the wait for out: ptxas would move the wait up or the exponentials
      // down, and the product would run beside nothing. (Those sums are never negative.)
      if (block > mine.begin || softmax.impossible()) {
        storage_.k_full[next.index()].wait(next.phase());
      }
      warpgroup_wait<0>();
      warpgroup_fence_operand(o);
      storage_.v_empty[kv_.index()].arrive_warp();  // Sync: this warp is done with V.
      if (change.rescaled) this->rescale(o, factor);
      Softmax::pack(p, s);
      kv_ = kv;
      kv = next;
    }
  }

 private:
  // What a step did to the references of the warp's rows. A struct and not a bool: ptxas would give
  // the masked configs other registers, and d64 loses 1.6 % with those.
  struct Change {
    bool rescaled;
  };

  // From scores to probabilities; gives K back. Returns whether a reference of the warp was raised.
  __device__ __forceinline__ Change softmax_step(Scores& s, Softmax& softmax, float (&factor)[2],
                                                 UniformScale scale, PipelineState<kStages> kv,
                                                 int block, BlockRange full_blocks) {
    Change change{false};
    bool exact = args_.tanh_scale != 0.f;
    if constexpr (Traits::kMasked) {
      exact = exact || !full_blocks.has(block) || softmax.warp_has_unseen();
    }
    if (exact || softmax.exponentiate_at_once(s, scale)) {
      warpgroup_fence_operand(s);
      if (!exact) recompute_lost_scores(s, kv);
      // Sums that were too large raise the references, though no score alone may have: else those
      // of the next block would be too large again.
      change = exact_softmax(s, softmax, factor, scale, block, full_blocks, !exact);
      softmax.exponentiate(s);
    }
    this->release_k(kv);
    return change;
  }

  // From scores to exponents, with the rows' maxima.
  __device__ __forceinline__ Change exact_softmax(Scores& s, Softmax& softmax, float (&factor)[2],
                                                  UniformScale& scale, int block,
                                                  BlockRange full_blocks, bool sum_overflow) {
    cap(s, scale);
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

  __device__ __forceinline__ void cap(Scores& s, UniformScale& scale) const {
    if (args_.tanh_scale == 0.f) return;
    cap_scores(s, args_.tanh_scale);
    scale.restart(args_.score_scale);
  }

  // Of K at this stage, whose scores were lost.
  __device__ __forceinline__ void recompute_lost_scores(Scores& s,
                                                        PipelineState<kStages> at) const {
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared_);
    recompute_scores<kElement, Traits::kBlockM, kBlockN, kHeadDim>(
        s, base + Traits::kQOffset + q_.index() * Traits::kQBytes,
        base + Traits::kKOffset + at.index() * Traits::kKBytes, threadIdx.x / 32 * kRowsOfWarp);
  }
};

}  // namespace flashattn3::forward
