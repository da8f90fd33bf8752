// The main loop of 8-bit inputs for 64 query rows, as that of mainloop.cuh, with three differences:
// P is made by bit pattern (softmax_e4m3.cuh), row sums leave the accumulators after each block
// (row_sum_columns.cuh), and O leaves them every kPromotionBlocks blocks (promotion.cuh).
//
// The inner loop holds the common step alone. Masks, softcap, a change of row_max and promotion
// stand between two runs of it: inside, their code would lie between the instructions of every
// step, and the instruction cache would make each step 5 to 10 % slower.
#pragma once

#include "forward/consumer_pipeline.cuh"
#include "forward/promotion.cuh"

namespace flashattn3::forward {

template <Config kConfig>
class MainloopFp8 : protected ConsumerPipeline<kConfig> {
 protected:
  using Base = ConsumerPipeline<kConfig>;
  using Base::args_, Base::kBlockN, Base::kHeadDim, Base::kInteger, Base::kStages, Base::kv_,
      Base::q_, Base::shared_, Base::storage_, Base::warpgroup_;
  using typename Base::Out, typename Base::Probabilities, typename Base::Scores;
  using typename Base::Traits;

  using Scale =
      BlockScale<Traits::kDescaleGroups, Traits::kKeysPerDescale, Traits::kAccumulatorBias>;

  using Softmax = SoftmaxE4m3<kBlockN, Traits::kMasked, Traits::kLowest, kInteger>;
  using Base::Base;

  // Before S of a work tile's first block is started: its descale comes from device memory.
  __device__ __forceinline__ void begin_tile(const WorkTile& tile) { q_factor_ = q_factor(tile); }

  // From S of the last block to P of the first; O of all between.
  __device__ __forceinline__ void attend(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                         BlockRange mine) {
    const BlockRange full_blocks = this->full_n_blocks();  // in which every row sees every key
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] = 0.f;
    softmax.reset();
    const bool capped = args_.tanh_scale != 0.f;
    num_promotions_ = 0;
    int block = mine.end - 1;
    Scale scale = scale_of(kv_);
    scale.complete(q_factor_);
    int highest[2];
    float factor[2];  // of out
    exponents(s, softmax, scale, highest, block, full_blocks);
    move_references(s, softmax, factor, scale, kv_, highest, block, {0, 0});
    this->release_k(kv_);
    Softmax::pack(p, s);

    // kv_ is one block behind: at the stages of the block whose V is still to be used.
    PipelineState<kStages> kv = kv_.next();
    if (block > mine.begin) storage_.k_full[kv.index()].wait(kv.phase());  // Sync: the next K is.
    scale = scale_of(kv);
    --block;
    int stop = end_of_chunk(block, mine);
    while (true) {
      bool rescales = false, common = true;
      for (; block >= stop; --block) {
        this->start_gemms(s, o, p, kv);
        scale.complete(q_factor_);
        warpgroup_wait<1>();
        warpgroup_fence_operand(s);
        common = !capped && full_blocks.has(block);
        if (!common) break;
        softmax.subtract_row_max(s, scale, highest);
        rescales = __any_sync(~0u, softmax.may_rescale(highest) || scale.is_special());
        if (rescales) break;
        finish_step(s, o, p, softmax, scale, kv, block > mine.begin);
      }
      bool promote = block < stop;
      if (!promote) {
        warpgroup_fence_operand(s);
        if (!common) {
          exponents(s, softmax, scale, highest, block, full_blocks);
          rescales = __any_sync(~0u, softmax.may_rescale(highest) || scale.is_special());
        }
        bool fell = false;
        factor[0] = factor[1] = 1.f;
        if (rescales) {
          fell = move_references(s, softmax, factor, scale, kv, highest, block, full_blocks);
        }
        warpgroup_fence_operand(s);
        // Beside the heavy keys in out the light ones' products would be cut off.
        promote = fell || block == stop;
        finish_step(s, o, p, softmax, scale, kv, block > mine.begin, factor);
        --block;
      }
      if (block < mine.begin) return;
      if (promote && promotes()) {
        num_promotions_ = promotion().take(o, softmax, num_promotions_);
        stop = end_of_chunk(block, mine);
      }
    }
  }

  // All sums of O, in its accumulators.
  __device__ __forceinline__ void finish(Out& o, Softmax& softmax) const {
    take_row_sums(softmax.sum, o);
    promotion().add_to(o, softmax, num_promotions_);
  }

 private:
  // Whether out is promoted: not where there are few keys, nor where its caller wants it fast.
  __device__ __forceinline__ bool promotes() const { return args_.quantized.promoted != nullptr; }

  __device__ __forceinline__ Promotion<kConfig> promotion() const {
    return Promotion<kConfig>(args_, storage_, this->staged_out());
  }

  // The block before which out is promoted next, if any is, this one being the next.
  __device__ __forceinline__ int end_of_chunk(int block, BlockRange mine) const {
    return promotes() ? max(mine.begin, block + 1 - Traits::kPromotionBlocks) : mine.begin;
  }

  // The rest of a step, from codes to P: gives K back, and V as soon as out is there. factor: of
  // out, where a reference moved.
  template <class... Factor>
  __device__ __forceinline__ void finish_step(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                              Scale& scale, PipelineState<kStages>& kv, bool more,
                                              const Factor&... factor) {
    this->release_k(kv);
    const PipelineState<kStages> next = kv.next();
    if (more) storage_.k_full[next.index()].wait(next.phase());  // Sync: the next K is there.
    scale = scale_of(next);  // of no use, and not used, after the last block
    warpgroup_wait<0>();
    warpgroup_fence_operand(o);
    storage_.v_empty[kv_.index()].arrive_warp();  // Sync: this warp is done with V.
    (this->rescale(o, factor), ...);
    take_row_sums(softmax.sum, o);
    Softmax::pack(p, s);
    kv_ = kv;
    kv = next;
  }

  // From scores to codes over the rows' references, -inf where a key is hidden.
  __device__ __forceinline__ void exponents(Scores& s, Softmax& softmax, Scale& scale,
                                            int (&highest)[2], int block,
                                            BlockRange full_blocks) const {
    cap(s, scale);
    softmax.subtract_row_max(s, scale, highest);
    if (!full_blocks.has(block)) this->apply_mask(s, block);
  }

  // Moves the references that have to (softmax_e4m3.cuh); returns whether one fell. kv: of K.
  __device__ __forceinline__ bool move_references(Scores& s, Softmax& softmax, float (&factor)[2],
                                                  const Scale& scale, PipelineState<kStages> kv,
                                                  const int (&highest)[2], int block,
                                                  BlockRange full_blocks) {
    float least[2] = {INFINITY, INFINITY};
    float largest[2] = {__int_as_float(highest[0]), __int_as_float(highest[1])};
    if (!full_blocks.has(block)) {  // a row may be light for this tile alone
      Softmax::find_highest(largest, s);
    } else if (__any_sync(~0u, softmax.is_light(highest))) {
      Softmax::find_highest(largest, s);
      softmax.find_least(least, this->tile().num_keys);
    }
    const auto rescaled = softmax.rescale(s, largest, least, factor);
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

  // By how many octaves the whole code of row r's maximum is above the score that it was made of,
  // which is multiplied out again. All lanes of the warp must call it.
  __device__ __forceinline__ float excess_of(const Scores& s, const Softmax& softmax,
                                             const Scale& scale, PipelineState<kStages> kv,
                                             float code, int r) const {
    int key = max(Softmax::column_of(s, r, code), 0);
    key = max(key, __shfl_xor_sync(~0u, key, 1));
    key = max(key, __shfl_xor_sync(~0u, key, 2));
    const int row = threadIdx.x / 32 * kRowsOfWarp + threadIdx.x % 32 / 4 + 8 * r;
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared_);
    float number = static_cast<float>(int8_score<Traits::kBlockM, kBlockN, kHeadDim>(
        base + Traits::kQOffset + q_.index() * Traits::kQBytes,
        base + Traits::kKOffset + kv.index() * Traits::kKBytes, row, key));
    if (args_.tanh_scale != 0.f) {
      const float ratio = scale.factor_of(key) * args_.one_over_cap / Traits::kExponentUnit;
      number = capped_number(number, ratio, inverse_or_0(ratio));
    }
    return softmax.octaves_above(code, number, scale, key, r);
  }

  // Factor of this warpgroup's scores.
  __device__ __forceinline__ float q_factor(const WorkTile& tile) const {
    const int row = uniform(tile.first_row) + warpgroup_ * 64;
    const Descale& q = args_.quantized.q;
    return q.at(q.of(tile.batch_idx, tile.head), row) * args_.score_scale *
           (Traits::kExponentUnit * Traits::kShiftUnit);
  }

  // Of the K tile at this position, which is there.
  __device__ __forceinline__ Scale scale_of(PipelineState<kStages> at) const {
    return Scale(storage_.kv_descales[at.index()]);
  }

  __device__ __forceinline__ void cap(Scores& s, const Scale& scale) const {
    if (!__builtin_expect(args_.tanh_scale != 0.f, false)) return;
    cap_scores(s, scale, args_.one_over_cap / Traits::kExponentUnit);
  }

  float q_factor_ = 0.f;    // scale of the scores times the descale of the tile's rows
  int num_promotions_ = 0;  // chunks of the tile's keys whose sums have left o
};

}  // namespace flashattn3::forward
