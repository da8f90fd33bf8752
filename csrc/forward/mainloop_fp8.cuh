// The main loop for 8-bit inputs and 64 query rows. It differs from mainloop.cuh in three ways: P
// is computed by bit-pattern exp2 (softmax_e4m3.cuh), row sums are moved out of the accumulators
// after each block (row_sum_columns.cuh), O is promoted every kPromotionBlocks blocks
// (promotion.cuh).
//
// Each warp decides by itself whether it rescales, but all warps of a warpgroup wait for a GEMM at
// the same instruction, as WGMMA demands (PTX ISA, wgmma.wait_group): the two paths join first.
// compute-sanitizer's synccheck reports kernels that do not.
#pragma once

#include "attention/block_scale.cuh"
#include "attention/softmax_e4m3.cuh"
#include "forward/arguments.h"
#include "forward/consumer_pipeline.cuh"
#include "forward/promotion.cuh"
#include "forward/traits_fp8.cuh"
#include "tile/gemm_int8.cuh"
#include "tile/row_sum_columns.cuh"

namespace flashattn3::forward {

template <Config kConfig>
class MainloopFp8 : protected ConsumerPipeline<kConfig, QuantizedStorageOf<kConfig>> {
 protected:
  using Base = ConsumerPipeline<kConfig, QuantizedStorageOf<kConfig>>;
  using Base::args_, Base::kBlockN, Base::kElement, Base::kHeadDim, Base::kStages, Base::kv_,
      Base::storage_, Base::warpgroup_;
  using typename Base::Out, typename Base::Probabilities, typename Base::Work;
  using Traits = QuantizedTraits<kConfig>;
  static constexpr bool kInteger = Traits::kInteger;

  using Scores = ScoreAccumulator<kElement>[kBlockN / 2];
  using Scale =
      BlockScale<Traits::kDescaleGroups, Traits::kKeysPerDescale, Traits::kAccumulatorBias>;

  using Softmax = SoftmaxE4m3<kBlockN, Traits::kMasked, Traits::kLowest, kInteger>;

  __device__ __forceinline__ MainloopFp8(const Arguments& args, uint8_t* shared, int warpgroup)
      : Base(args, shared, warpgroup),
        bias_tile_(cute::cast_smem_ptr_to_uint(storage_.bias_tile)) {}

  // Called before the first QK GEMM of a work tile; loads Q's descale from device memory.
  __device__ __forceinline__ void begin_tile(const WorkTile& tile) { q_factor_ = q_factor(tile); }

  // Factor of out for the tile at tile_; written before the last V is loaded.
  __device__ __forceinline__ float out_scale() const {
    return storage_.out_scale[this->tile_.index()];
  }

  // Starts S = Q K^T with the K at this stage.
  __device__ __forceinline__ void gemm_qk(Scores& s, PipelineState<kStages> at) {
    if constexpr (kInteger) {
      gemm_ss_int8<Traits::kBlockM, kBlockN, kHeadDim>(s, this->q_desc(), this->k_desc(at),
                                                       bias_tile_);
    } else {
      Base::gemm_qk(s, at);
    }
  }

  // Starts O += P V with the V at this stage.
  __device__ __forceinline__ void gemm_pv(Out& o, const Probabilities& p,
                                          PipelineState<kStages> at) {
    gemm_rs_with_row_sum<kBlockN, kHeadDim, Traits::kBoxKeys>(o, p, this->v_desc(at));
  }

  // Takes S of the first block; returns while the last PV GEMM is in flight.
  __device__ __forceinline__ void attend(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                         const Work& work) {
    this->skip_v(work.above);
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] = 0.f;
    softmax.reset();
    const bool transformed = args_.variant.transforms();
    num_promotions_ = 0;
    BlockWalk at = this->walk(work.visited);
    Scale scale = scale_of(kv_);
    scale.complete(q_factor_);
    int highest[2];
    float factor[2];  // of out
    exponents(s, softmax, scale, highest, at, kv_);
    update_row_max(s, softmax, factor, scale, kv_, highest, at.is_full());
    this->release_k(kv_);
    Softmax::pack(p, s);

    // kv_ is one block behind kv: it is at the stage whose V has yet to be multiplied.
    PipelineState<kStages> kv = kv_.next();
    scale = wait_for_next_k(kv_, at.has_next());
    at.advance();
    while (at.has_this()) {
      int stop = end_of_chunk(at);
      for (; at.position >= stop; at.advance()) {
        const int position = at.position;
        gemm_qk(s, kv);
        this->wait_for_v(kv_);
        gemm_pv(o, p, kv_);
        scale.complete(q_factor_);
        warpgroup_wait<1>();
        warpgroup_fence_operand(s);
        const bool common = !transformed && at.is_full();
        bool rescales = false, fell = false;
        if (common) {
          softmax.subtract_row_max(s, scale, highest);
          rescales = __any_sync(~0u, softmax.may_rescale(highest) || scale.is_special());
        }
        if (__builtin_expect(!common || rescales, false)) {
          warpgroup_fence_operand(s);
          if (!common) {
            exponents(s, softmax, scale, highest, at, kv);
            rescales = __any_sync(~0u, softmax.may_rescale(highest) || scale.is_special());
          }
          if (rescales) {
            fell = update_row_max(s, softmax, factor, scale, kv, highest, at.is_full());
          }
          warpgroup_fence_operand(s);
        }
        this->release_k(kv);
        scale = wait_for_next_k(kv, at.has_next());
        // Every warp of the warpgroup waits at this one instruction, as WGMMA demands: the paths of
        // warps that rescale and of those that do not have joined.
        wait_for_pv(o);
        if (__builtin_expect(rescales, false)) {
          this->rescale(o, factor);
          // WGMMA would truncate small products when it adds them to the large sums in O.
          if (fell && promotes()) stop = position;
        }
        take_row_sums(softmax.sum, o);
        Softmax::pack(p, s);
        kv_ = kv;
        kv = kv.next();
      }
      if (at.has_this()) num_promotions_ = promotion().take(o, softmax, num_promotions_);
    }
    this->wait_for_v(kv_);
    gemm_pv(o, p, kv_);
  }

  // Adds the promoted sums of O to its accumulators.
  __device__ __forceinline__ void finish(Out& o, Softmax& softmax) {
    take_row_sums(softmax.sum, o);
    promotion().add_to(o, softmax, num_promotions_);
  }

 private:
  // Whether O is promoted. The host disables it for few keys, or if the caller asks for speed.
  __device__ __forceinline__ bool promotes() const { return args_.quantized.promoted != nullptr; }

  __device__ __forceinline__ Promotion<kConfig> promotion() {
    return Promotion<kConfig>(args_.quantized, storage_, this->staged_out(), sums_);
  }

  // Last position of the chunk that starts at `at`; O is promoted after it, if at all.
  __device__ __forceinline__ int end_of_chunk(const BlockWalk& at) const {
    const int last = at.visited.begin;
    return promotes() ? max(last, at.position + 1 - Traits::kPromotionBlocks) : last;
  }

  // Waits for the K behind kv, if there is `more`, and returns its scale; else the scale is unused.
  __device__ __forceinline__ Scale wait_for_next_k(PipelineState<kStages> kv, bool more) const {
    const PipelineState<kStages> next = kv.next();
    if (more) this->wait_for_k(next);
    return Scale(storage_.kv_descales[more ? next.index() : kStages]);
  }

  // Waits for the PV GEMM and releases its V.
  __device__ __forceinline__ void wait_for_pv(Out& o) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(o);
    this->release_v(kv_);
  }

  // Converts scores to codes relative to row_max; masked scores become -inf. kv: stage of K.
  __device__ __forceinline__ void exponents(Scores& s, Softmax& softmax, Scale& scale,
                                            int (&highest)[2], const BlockWalk& at,
                                            const PipelineState<kStages>& kv) const {
    transform(s, scale);
    softmax.subtract_row_max(s, scale, highest);
    this->mask(s, at, kv);
  }

  // Changes row_max where needed (softmax_e4m3.cuh); returns whether one fell. kv: stage of K.
  // full: every row sees every key of the block.
  __device__ __forceinline__ bool update_row_max(Scores& s, Softmax& softmax, float (&factor)[2],
                                                 const Scale& scale, PipelineState<kStages> kv,
                                                 const int (&highest)[2], bool full) {
    float least[2] = {INFINITY, INFINITY};
    float largest[2] = {__int_as_float(highest[0]), __int_as_float(highest[1])};
    if (!full) {  // a row may be light only because of the mask
      find_highest(largest, s);
    } else if (__any_sync(~0u, softmax.is_light(highest))) {
      find_highest(largest, s);
      softmax.find_least(least, this->tile().num_keys);
    }
    const auto rescaled = softmax.rescale(s, largest, least, factor, full);
    if constexpr (kInteger) {
      if (__any_sync(~0u, rescaled.dominated != 0)) {
        float excess[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float of_maximum = excess_of(s, softmax, scale, kv, largest[r], r);
          excess[r] = rescaled.dominated >> r & 1 ? of_maximum : 0.f;
        }
        softmax.set_excess(excess[0], excess[1], factor);
      }
    }
    softmax.complete_groups(s, scale);
    return rescaled.fell;
  }

  // Octaves by which the integer code of row r's maximum exceeds the exact exponent of its score,
  // which is recomputed. All lanes of the warp must call it.
  __device__ __forceinline__ float excess_of(const Scores& s, const Softmax& softmax,
                                             const Scale& scale, PipelineState<kStages> kv,
                                             float code, int r) const {
    int key = max(column_of(s, r, code), 0);
    key = max(key, __shfl_xor_sync(~0u, key, 1));
    key = max(key, __shfl_xor_sync(~0u, key, 2));
    const int row = thread_row(threadIdx.x) + kRowStride * r;
    float number = static_cast<float>(int8_score<Traits::kBlockM, kBlockN, kHeadDim>(
        this->q_address(), this->k_address(kv), row, key));
    if (args_.variant.transforms()) {
      const float ratio =
          scale.factor_of(key) * args_.variant.scale.one_over_cap / Traits::kExponentUnit;
      number = capped_number(number, ratio, inverse_or_0(ratio));
    }
    return softmax.octaves_above(code, number, scale, key, r);
  }

  // Factor of this warpgroup's scores without K's descale. int8: times the accumulator bias.
  __device__ __forceinline__ float q_factor(const WorkTile& tile) const {
    const int row = uniform(tile.first_row) + warpgroup_ * 64;
    const Descale& q = args_.quantized.q;
    return q.at(q.of(tile.batch_idx, tile.head), row) * args_.variant.scale.factor *
           (Traits::kExponentUnit * Traits::kShiftUnit);
  }

  // Scale of the K tile at this stage, whose k_full wait has passed.
  __device__ __forceinline__ Scale scale_of(PipelineState<kStages> at) const {
    return Scale(storage_.kv_descales[at.index()]);
  }

  // Variant::transform with the scale of the block.
  __device__ __forceinline__ void transform(Scores& s, const Scale& scale) const {
    if (!__builtin_expect(args_.variant.transforms(), false)) return;
    cap_scores(s, scale, args_.variant.scale.one_over_cap / Traits::kExponentUnit);
  }

  uint32_t bias_tile_;    // address
  float q_factor_ = 0.f;  // of this warpgroup's rows of the work tile
  PromotedSums<kConfig> sums_;
  int num_promotions_ = 0;  // promotions of O in this work tile, as Promotion::take counts them
};

}  // namespace flashattn3::forward
