// A warpgroup that multiplies: 64 query rows against the keys they see, last block of keys first.
//
// Step j of a warpgroup, with two products in flight:
//   start scores S(j) = Q K(j)^T, start out += P(j-1) V(j-1), wait for S(j), softmax of S(j) while
//   out is still being multiplied, give K(j) back (until then the scores may be wanted again), wait
//   for out, give V(j-1) back, pack P(j).
// After the last block, the first scores of the next tile take the place of S(j): the tensor cores
// have them to work on while this tile is stored.
// The warpgroups of a CTA share the stages but not their pace: while one is in its softmax, the
// tensor cores work for the others.
#pragma once

#include <type_traits>

#include "attention/mask.cuh"
#include "attention/recompute_scores.cuh"
#include "attention/score_scale.cuh"
#include "attention/softmax.cuh"
#include "attention/softmax_e4m3.cuh"
#include "forward/arguments.h"
#include "forward/epilogue.cuh"
#include "forward/promotion.cuh"
#include "forward/traits.cuh"
#include "tile/gemm.cuh"
#include "tile/gemm_int8.cuh"
#include "tile/row_sum_columns.cuh"

namespace flashattn3::forward {

template <Config kConfig>
class Consumer {
  using Traits = KernelTraits<kConfig>;
  static constexpr ElementType kElement = Traits::kElement;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kStages = Traits::kStages;
  using Scores = ScoreAccumulator<kElement>[kBlockN / 2];
  using Out = float[Traits::kOutRegisters];
  using Probabilities = flashattn3::Probabilities<value_type(kElement), kBlockN>;
  static constexpr bool kInteger = Traits::kInteger;
  using Scale = std::conditional_t<
      Traits::kQuantized,
      BlockScale<Traits::kDescaleGroups, Traits::kKeysPerDescale, Traits::kAccumulatorBias>,
      UniformScale>;
  using Softmax =
      std::conditional_t<Traits::kQuantized,
                         SoftmaxE4m3<kBlockN, Traits::kMasked, Traits::kLowest, kInteger>,
                         OnlineSoftmax<kElement, kBlockN, Traits::kMasked>>;

 public:
  // warpgroup: 0 to kConsumers - 1, the same in all lanes of a warp.
  __device__ __forceinline__ Consumer(const Arguments& args, uint8_t* shared, int warpgroup)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup) {
    constexpr int kVAtomStride = Traits::kQuantized ? kCoreBytes : kBlockN * 128;
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
    q_base_ = smem_desc_low(base, 16) + (Traits::kQOffset + warpgroup * 64 * 128) / 16;
    k_base_ = smem_desc_low(base, 16) + Traits::kKOffset / 16;
    v_base_ = smem_desc_low(base, kVAtomStride) + Traits::kVOffset / 16;
    bias_tile_ = cute::cast_smem_ptr_to_uint(storage_.bias_tile);
  }

  __device__ __forceinline__ void run() {
    Scores s;
    Out o;
    Probabilities p;
    Softmax softmax;
    Work work;
    bool ahead = false;  // s holds the first scores of the tile
    while (true) {
      if (!ahead) {
        work = get_next_work();
        if (!work.any()) return;
        if constexpr (Traits::kQuantized) q_factor_ = q_factor(tile());
        start_first_qk(s, work, kv_);
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
      }
      skip_v(work.above);
      attend(s, o, p, softmax, work.blocks);

      storage_.v_full[kv_.index()].wait(kv_.phase());  // Sync: the last V is there.
      gemm_pv(o, p, kv_);
      if constexpr (!Traits::kOutOverQ) release_q();
      q_.advance();
      Work next{};
      if (work.below == 0) {  // else the producer waits for those before it says what comes next
        // Sync: the next tile's description is there.
        storage_.tile_full[tile_.next().index()].wait(tile_.next().phase());
        next = work_of(storage_.tile[tile_.next().index()]);
      }
      // K tiles that are passed on the way come while V is still held: one for each stage at most.
      ahead = next.any() && next.above <= kStages;
      if (ahead) {
        if constexpr (Traits::kQuantized) {
          q_factor_ = q_factor(storage_.tile[tile_.next().index()]);
        }
        start_first_qk(s, next, kv_.next());
        warpgroup_wait<1>();
        store_tile(o, softmax);
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
      } else {
        warpgroup_wait<0>();
        store_tile(o, softmax);
      }
      skip_n_blocks(work.below);
      work = next;
    }
  }

 private:
  // What a tile asks of this warpgroup.
  struct Work {
    BlockRange blocks;  // with a key for one of its rows; keys of the last one are taken first
    int above, below;   // blocks before and after them that only other warpgroups need
    __device__ __forceinline__ bool any() const { return blocks.begin < blocks.end; }
  };

  __device__ __forceinline__ Work work_of(const WorkTile& tile) const {
    const int first_row = uniform(tile.first_row) + warpgroup_ * 64;
    const int num_rows = uniform(tile.num_rows);
    const BlockRange all{uniform(tile.n_blocks.begin), uniform(tile.n_blocks.end)};
    const BlockRange mine =
        tile_mask(num_rows, uniform(tile.num_keys))
            .template n_block_range<kBlockN>(first_row, min(first_row + 63, num_rows - 1));
    if (mine.begin == mine.end) return {mine, all.end - all.begin, 0};
    return {mine, all.end - mine.end, mine.begin - all.begin};
  }

  // The next tile with work, after those without; none if no tile is left.
  __device__ __forceinline__ Work get_next_work() {
    release_staged_q();
    while (true) {
      // Sync: the producer has written the tile's description, which stays until this warp has
      // stored the tile: read where it is needed, it takes no registers in the main loop.
      storage_.tile_full[tile_.index()].wait(tile_.phase());
      const Work work = work_of(tile());
      if (work.any() || uniform(tile().first_row) < 0) return work;
      if (work.above > 0) {  // else the producer loads nothing for it, not even Q
        // Sync: waited for even without a key, or this warp could arrive twice in one phase.
        storage_.q_full[q_.index()].wait(q_.phase());
        release_q();
        q_.advance();
        skip_n_blocks(work.above);
      }
      store_nothing(args_, tile(), warp_first_row());
      release_tile();
    }
  }

  // Out is complete; q_ is at the next tile's Q.
  __device__ __forceinline__ void store_tile(Out& o, Softmax& softmax) {
    warpgroup_fence_operand(o);
    if constexpr (Traits::kQuantized) {
      take_row_sums(softmax.sum, o);
      promotion().add_to(o, softmax, num_promotions_);
    }
    storage_.v_empty[kv_.index()].arrive_warp();  // Sync: this warp is done with V.
    kv_.advance();
    if constexpr (Traits::kOutOverQ) {
      const int warp = threadIdx.x / 32;
      // Sync: the four warps are all done with their 64 rows of Q.
      named_barrier_sync(1 + warpgroup_, 128);
      uint8_t* rows = shared_ + Traits::kQOffset + q_.next().index() * Traits::kQBytes +
                      warp * kRowsOfWarp * 128;
      store_rows<Traits>(args_, tile(), warp_first_row(), o, softmax, 1.f, rows,
                         Traits::kBlockM * 128);
      staged_ = true;
    } else {
      if (threadIdx.x % 32 == 0) wait_for_stores();
      __syncwarp();
      constexpr int kAtomStride = kRowsOfWarp * 128;
      const float scale = Traits::kQuantized ? storage_.out_scale[tile_.index()] : 1.f;
      store_rows<Traits>(args_, tile(), warp_first_row(), o, softmax, scale, staged_out(),
                         kAtomStride);
    }
    release_tile();
  }

  // Where this warp lays its rows of out down, where they do not go over Q.
  __device__ __forceinline__ uint8_t* staged_out() const {
    return shared_ + Traits::kOutOffset +
           threadIdx.x / 32 * (Traits::kOutAtoms * kRowsOfWarp * 128);
  }

  // Whether out is promoted: not where there are few keys, nor where its caller wants it fast.
  __device__ __forceinline__ bool promotes() const { return args_.quantized.promoted != nullptr; }

  __device__ __forceinline__ Promotion<kConfig> promotion() const {
    return Promotion<kConfig>(args_, storage_, staged_out());
  }

  // This warp needs the Q at q_ no more.
  __device__ __forceinline__ void release_q() {
    __syncwarp();
    storage_.q_empty[q_.index()].arrive_warp();  // Sync: this warp's scores are all done.
  }

  // Gives the Q under the rows stored last back, when they have left it; q_ is at the next tile's.
  __device__ __forceinline__ void release_staged_q() {
    if constexpr (Traits::kOutOverQ) {
      if (staged_ && threadIdx.x % 32 == 0) {
        wait_for_stores();
        storage_.q_empty[q_.next().index()].arrive();
      }
      staged_ = false;
    } else if (threadIdx.x % 32 == 0) {
      wait_for_stores();
    }
  }

  __device__ __forceinline__ int warp_first_row() const {
    return tile().first_row + threadIdx.x / 32 * kRowsOfWarp;
  }

  __device__ __forceinline__ void release_tile() {
    storage_.tile_empty[tile_.index()].arrive();  // Sync: this thread is done with the description.
    tile_.advance();
  }

  // at: of the first K tile that comes for the work tile.
  __device__ __forceinline__ void start_first_qk(Scores& s, const Work& work,
                                                 PipelineState<kStages> at) {
    storage_.q_full[q_.index()].wait(q_.phase());  // Sync: Q is there.
    for (int i = 0; i < work.above; ++i) {
      storage_.k_full[at.index()].wait(at.phase());
      __syncwarp();
      storage_.k_empty[at.index()].arrive_lanes();
      at.advance();
    }
    storage_.k_full[at.index()].wait(at.phase());  // Sync: the first K is there.
    gemm_qk(s, at);
  }

  // Of this warpgroup's scores; asked for early, as the descale comes from memory.
  __device__ __forceinline__ float q_factor(const WorkTile& tile) const {
    const int row = uniform(tile.first_row) + warpgroup_ * 64;
    const Descale& q = args_.quantized.q;
    return q.at(q.of(tile.batch_idx, tile.head), row) * args_.score_scale *
           (Traits::kExponentUnit * Traits::kShiftUnit);
  }

  // From the scores of the last block to the probabilities of the first; out of all between.
  __device__ __forceinline__ void attend(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                         BlockRange mine) {
    const BlockRange full_blocks = full_n_blocks();  // in which every row sees every key
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] = 0.f;
    softmax.reset();
    if constexpr (Traits::kQuantized) {
      attend_8_bit(s, o, p, softmax, mine, full_blocks);
    } else {
      attend_16_bit(s, o, p, softmax, mine, full_blocks);
    }
  }

  __device__ __forceinline__ void attend_16_bit(Scores& s, Out& o, Probabilities& p,
                                                Softmax& softmax, BlockRange mine,
                                                BlockRange full_blocks) {
    int block = mine.end - 1;
    Scale scale = scale_of(kv_);
    release_k(kv_);
    cap(s, scale);
    int highest[2];
    softmax.subtract_row_max(s, scale, highest);
    if (!full_blocks.has(block)) apply_mask(s, block);
    float unused[2];
    softmax.rescale(s, unused);
    softmax.exponentiate(s);
    Softmax::pack(p, s);
    if constexpr (Traits::kOutOverQ) release_staged_q();

    // kv_ is one block behind: at the stages of the block whose V is still to be used.
    PipelineState<kStages> kv = kv_.next();
    if (block > mine.begin) storage_.k_full[kv.index()].wait(kv.phase());  // Sync: the next K is.
    --block;
    for (; block >= mine.begin; --block) {
      start_products(s, o, p, kv);
      warpgroup_wait<1>();
      warpgroup_fence_operand(s);
      float factor[2];  // of out; set where a reference was raised
      const bool raised = softmax_step(s, softmax, factor, kv, block, full_blocks);
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
      if (raised) rescale(o, factor);
      Softmax::pack(p, s);
      kv_ = kv;
      kv = next;
    }
  }

  // Starts the scores of K at kv, which was waited for, and out += P V of the block before.
  __device__ __forceinline__ void start_products(Scores& s, Out& o, const Probabilities& p,
                                                 PipelineState<kStages> kv) {
    gemm_qk(s, kv);
    storage_.v_full[kv_.index()].wait(kv_.phase());  // Sync: V of the block before is there.
    gemm_pv(o, p, kv_);
  }

  static __device__ __forceinline__ void rescale(Out& o, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] *= factor[row_of(i)];
  }

  // From scores to probabilities; gives K back. Returns whether a reference of the warp was raised.
  __device__ __forceinline__ bool softmax_step(Scores& s, Softmax& softmax, float (&factor)[2],
                                               PipelineState<kStages> kv, int block,
                                               BlockRange full_blocks) {
    Scale scale = scale_of(kv);
    bool exact = args_.tanh_scale != 0.f, raised = false;
    if constexpr (Traits::kMasked) {
      exact = exact || !full_blocks.has(block) || softmax.warp_has_unseen();
    }
    if (exact || softmax.exponentiate_at_once(s, scale)) {
      warpgroup_fence_operand(s);
      if (!exact) recompute_lost_scores(s, kv);
      // Sums that were too large raise the references, though no score alone may have: else those
      // of the next block would be too large again.
      raised = exact_softmax(s, softmax, factor, scale, block, full_blocks, !exact);
      softmax.exponentiate(s);
    }
    release_k(kv);
    return raised;
  }

  // From scores to exponents, with the rows' maxima.
  __device__ __forceinline__ bool exact_softmax(Scores& s, Softmax& softmax, float (&factor)[2],
                                                Scale& scale, int block, BlockRange full_blocks,
                                                bool sum_overflow) {
    cap(s, scale);
    int highest[2];
    softmax.subtract_row_max(s, scale, highest);
    const bool rescales =
        softmax.needs_rescale(highest, Softmax::kRescaleThreshold) || sum_overflow;
    if constexpr (Traits::kMasked) {
      if (!full_blocks.has(block)) apply_mask(s, block);
    }
    const bool raised = __any_sync(~0u, rescales) != 0;
    warpgroup_fence_operand(s);
    if (raised) {
      softmax.rescale(s, factor);
      warpgroup_fence_operand(s);
    }
    return raised;
  }

  // The loop of its own holds the common step alone. What only some steps need, keys hidden, scores
  // capped, references moved, out promoted, is done between two runs of it: inside it would be in
  // the way of the instruction cache, and cost all steps 5 to 10 %.
  __device__ __forceinline__ void attend_8_bit(Scores& s, Out& o, Probabilities& p,
                                               Softmax& softmax, BlockRange mine,
                                               BlockRange full_blocks) {
    const bool capped = args_.tanh_scale != 0.f;
    num_promotions_ = 0;
    int block = mine.end - 1;
    Scale scale = scale_of(kv_);
    scale.complete(q_factor_);
    int highest[2];
    float factor[2];  // of out
    exponents(s, softmax, scale, highest, block, full_blocks);
    move_references(s, softmax, factor, scale, kv_, highest, block, {0, 0});
    release_k(kv_);
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
        start_products(s, o, p, kv);
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
    release_k(kv);
    const PipelineState<kStages> next = kv.next();
    if (more) storage_.k_full[next.index()].wait(next.phase());  // Sync: the next K is there.
    scale = scale_of(next);  // of no use, and not used, after the last block
    warpgroup_wait<0>();
    warpgroup_fence_operand(o);
    storage_.v_empty[kv_.index()].arrive_warp();  // Sync: this warp is done with V.
    (rescale(o, factor), ...);
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
    if (!full_blocks.has(block)) apply_mask(s, block);
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
      softmax.find_least(least, tile().num_keys);
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

  // A branch whose code the compiler may lay aside. In 16 bits its order is as measured.
  static __device__ __forceinline__ bool rarely(bool condition) {
    return Traits::kQuantized ? __builtin_expect(condition, false) : condition;
  }

  __device__ __forceinline__ void cap(Scores& s, Scale& scale) const {
    if (!rarely(args_.tanh_scale != 0.f)) return;
    if constexpr (Traits::kQuantized) {
      cap_scores(s, scale, args_.one_over_cap / Traits::kExponentUnit);
    } else {
      cap_scores(s, args_.tanh_scale);
      scale.restart(args_.score_scale);
    }
  }

  // Of K at this stage, whose scores were lost.
  __device__ __forceinline__ void recompute_lost_scores(Scores& s,
                                                        PipelineState<kStages> at) const {
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared_);
    recompute_scores<kElement, Traits::kBlockM, kBlockN, kHeadDim>(
        s, base + Traits::kQOffset + q_.index() * Traits::kQBytes,
        base + Traits::kKOffset + at.index() * Traits::kKBytes, threadIdx.x / 32 * kRowsOfWarp);
  }

  // This warp is done with K and its descales.
  __device__ __forceinline__ void release_k(PipelineState<kStages> at) {
    __syncwarp();
    storage_.k_empty[at.index()].arrive_lanes();  // Sync: every lane has read the descales.
  }

  // Of the K tile at this position, which is there.
  __device__ __forceinline__ Scale scale_of(PipelineState<kStages> at) const {
    if constexpr (Traits::kQuantized) {
      return Scale(storage_.kv_descales[at.index()]);
    } else {
      return Scale{{args_.score_scale}};
    }
  }

  __device__ __forceinline__ void gemm_qk(Scores& s, PipelineState<kStages> at) {
    const uint32_t q = q_base_ + q_.index() * (Traits::kQBytes / 16);
    const uint32_t k = k_base_ + at.index() * (Traits::kKBytes / 16);
    if constexpr (kInteger) {
      gemm_ss_int8<Traits::kBlockM, kBlockN, kHeadDim>(s, q, k, bias_tile_);
    } else {
      gemm_ss<kElement, Traits::kBlockM, kBlockN, kHeadDim>(s, q, k);
    }
  }

  __device__ __forceinline__ void gemm_pv(Out& o, const Probabilities& p,
                                          PipelineState<kStages> at) {
    const uint32_t v = v_base_ + at.index() * (Traits::kVBytes / 16);
    if constexpr (Traits::kQuantized) {
      gemm_rs_with_row_sum<kBlockN, kHeadDim>(o, p, v);
    } else {
      gemm_rs<kElement, kBlockN, kHeadDim>(o, p, v);
    }
  }

  // V tiles that only other warpgroups need; their K tiles were passed before.
  __device__ __forceinline__ void skip_v(int count) {
    for (int i = 0; i < count; ++i) {
      storage_.v_full[kv_.index()].wait(kv_.phase());
      __syncwarp();
      storage_.v_empty[kv_.index()].arrive_warp();
      kv_.advance();
    }
  }

  // Blocks that only other warpgroups need.
  __device__ __forceinline__ void skip_n_blocks(int count) {
    for (int i = 0; i < count; ++i) {
      storage_.k_full[kv_.index()].wait(kv_.phase());
      __syncwarp();
      storage_.k_empty[kv_.index()].arrive_lanes();
      skip_v(1);
    }
  }

  __device__ __forceinline__ const WorkTile& tile() const { return storage_.tile[tile_.index()]; }

  // Blocks in which every row of the warpgroup sees every key.
  __device__ __forceinline__ BlockRange full_n_blocks() const {
    const int first_row = uniform(tile().first_row) + warpgroup_ * 64;
    const int num_rows = uniform(tile().num_rows);
    return tile_mask(num_rows, uniform(tile().num_keys))
        .template full_n_blocks<kBlockN>(first_row, min(first_row + 63, num_rows - 1));
  }

  __device__ __forceinline__ Mask tile_mask(int num_rows, int num_keys) const {
    return Mask::of(num_rows, num_keys, args_.window_left, args_.window_right);
  }

  __device__ __forceinline__ void apply_mask(Scores& s, int block) const {
    const int row = tile().first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    mask_scores<kBlockN, Traits::kMasked>(s, tile_mask(tile().num_rows, tile().num_keys), row,
                                          block * kBlockN);
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  int warpgroup_;
  uint32_t q_base_, k_base_, v_base_, bias_tile_;
  float q_factor_ = 0.f;    // scale of the scores times the descale of the tile's rows
  bool staged_ = false;     // rows of out lie over the Q before the one at q_
  int num_promotions_ = 0;  // of the tile's keys whose sums have left o
  PipelineState<2> tile_{0};
  PipelineState<Traits::kQBuffers> q_{0};
  PipelineState<kStages> kv_{0};  // K and V stages are used in step
};

}  // namespace flashattn3::forward
