// The main loop with spans of keys (split_tokens), from the first KV block to the last: as that of
// mainloop.cuh, but a span's O and statistics begin at 0, and behind its last block they join a
// total in memory (span_total.cuh). A row has the bits that the decode kernel with spans
// gives it (decode/mainloop.cuh): the same blocks of keys in the same order, the same softmax
// (attention/span_softmax.cuh) and the same joins.
#pragma once

#include "attention/span_softmax.cuh"
#include "attention/variant.cuh"
#include "forward/consumer_pipeline.cuh"
#include "forward/span_total.cuh"
#include "forward/traits_cached.cuh"

namespace flashattn3::forward {

template <Config kConfig, class Storage>
class SpanMainloop : protected ConsumerPipeline<kConfig, Storage> {
 protected:
  using Base = ConsumerPipeline<kConfig, Storage>;
  using Base::args_, Base::kBlockN, Base::kElement, Base::kHeadDim, Base::kStages, Base::kv_;
  using typename Base::Out, typename Base::Probabilities, typename Base::Traits;
  using typename Base::Tile, typename Base::Work;

  using Scores = float[kBlockN / 2];
  using Softmax = SpanSoftmax<kElement, kBlockN>;

  using Base::Base;

  __device__ __forceinline__ void begin_tile(const Tile&) {}

  // Takes S of the first block; returns while the last PV GEMM is in flight.
  __device__ __forceinline__ void attend(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                         const Work& work) {
    this->skip_v(work.above);
    BlockWalk at = this->walk(work.visited);
    at.position = work.visited.begin;
    const int span_blocks = static_cast<const CachedArguments&>(args_).span_blocks;
    int span_end = uniform((at.position / span_blocks + 1) * span_blocks);
    has_total_ = false;
    start_span(o, softmax);
    this->release_k(kv_);
    float unused[2];
    softmax_step(s, softmax, unused, at);
    pack_probabilities<kElement, kBlockN>(p, s);

    // kv_ is one block behind kv: it is at the stage whose V has yet to be multiplied.
    PipelineState<kStages> kv = kv_.next();
    if (at.position + 1 < at.visited.end) this->wait_for_k(kv);
    for (++at.position; at.position < at.visited.end; ++at.position) {
      this->gemm_qk(s, kv);
      this->wait_for_v(kv_);
      this->gemm_pv(o, p, kv_);
      warpgroup_wait<1>();
      warpgroup_fence_operand(s);
      this->release_k(kv);
      const bool begins = at.position == span_end;
      if (begins) {
        softmax.complete();
        total().put_stats(softmax.row);
        softmax.reset();
      }
      float factor[2];
      const bool rescales = softmax_step(s, softmax, factor, at);
      const PipelineState<kStages> next = kv.next();
      // The branch keeps the softmax before the wait for O (mainloop.cuh).
      if (at.position + 1 < at.visited.end || softmax.impossible()) this->wait_for_k(next);
      warpgroup_wait<0>();
      warpgroup_fence_operand(o);
      this->release_v(kv_);
      if (begins) {
        join(o);
        span_end += span_blocks;
      } else if (rescales) {
        this->rescale(o, factor);
      }
      pack_probabilities<kElement, kBlockN>(p, s);
      kv_ = kv;
      kv = next;
    }
    this->wait_for_v(kv_);
    this->gemm_pv(o, p, kv_);
  }

  // O of the last span is complete; o and the statistics become those of all spans.
  __device__ __forceinline__ void finish(Out& o, Softmax& softmax) {
    softmax.complete();
    if (has_total_) total().finish(o, softmax.row);
  }
  static __device__ constexpr float out_scale() { return 1.f; }

 private:
  static __device__ __forceinline__ void start_span(Out& o, Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] = 0.f;
    softmax.reset();
  }

  // Joins a span to the total; o is that of the next one afterwards.
  __device__ __forceinline__ void join(Out& o) {
    if (has_total_) {
      total().add(o);
    } else {
      total().set(o);
    }
    has_total_ = true;
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] = 0.f;
  }

  // Converts scores to probabilities. Returns whether the warp must rescale O.
  __device__ __forceinline__ bool softmax_step(Scores& s, Softmax& softmax, float (&factor)[2],
                                               const BlockWalk& at) const {
    args_.variant.transform(s);
    return softmax.update(s, args_.variant.exponents(), factor, !at.is_full(),
                          [&](Scores& s) { this->mask(s, at, kv_); });
  }

  __device__ __forceinline__ SpanTotal<Traits> total() const {
    return {static_cast<const CachedArguments&>(args_), this->staged_out()};
  }

  bool has_total_;  // of the work tile: a span has joined it
};

}  // namespace flashattn3::forward
