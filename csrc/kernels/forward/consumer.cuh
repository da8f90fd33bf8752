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

#include "blocks/code_softmax.cuh"
#include "blocks/int8_scores.cuh"
#include "blocks/online_softmax.cuh"
#include "blocks/row_sums.cuh"
#include "blocks/score_scale.cuh"
#include "blocks/scores_again.cuh"
#include "blocks/tile_product.cuh"
#include "blocks/visible_range.cuh"
#include "kernels/forward/arguments.h"
#include "kernels/forward/config.cuh"
#include "kernels/forward/epilogue.cuh"
#include "kernels/forward/promotion.cuh"

namespace flashattn3 {

template <ForwardRow kRow>
class ForwardConsumer {
  using Config = ForwardConfig<kRow>;
  static constexpr ElementType kElement = Config::kElement;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kStages = Config::kStages;
  using Scores = ScoreRegister<kElement>[kBlockN / 2];
  using Out = float[Config::kOutRegisters];
  using Probabilities = flashattn3::Probabilities<value_type(kElement), kBlockN>;
  static constexpr bool kInteger = Config::kInteger;
  using Scale =
      std::conditional_t<Config::kQuantized,
                         BlockScale<Config::kScaleGroups, Config::kScaleKeys, Config::kScoreZero>,
                         UniformScale>;
  using Softmax =
      std::conditional_t<Config::kQuantized,
                         CodeSoftmax<kBlockN, Config::kWindowed, Config::kLowest, kInteger>,
                         OnlineSoftmax<kElement, kBlockN, Config::kWindowed>>;

 public:
  // warpgroup: 0 to kConsumers - 1, the same in all lanes of a warp.
  __device__ __forceinline__ ForwardConsumer(const ForwardArguments& args, uint8_t* shared,
                                             int warpgroup)
      : args_(args),
        control_(*reinterpret_cast<ForwardControlOf<kRow>*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup) {
    constexpr int kValueChunk = Config::kQuantized ? kCoreBytes : kBlockN * 128;
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
    q_base_ = descriptor_low(base, 16) + (Config::kQOffset + warpgroup * 64 * 128) / 16;
    k_base_ = descriptor_low(base, 16) + Config::kKOffset / 16;
    v_base_ = descriptor_low(base, kValueChunk) + Config::kVOffset / 16;
    start_ = cute::cast_smem_ptr_to_uint(control_.start);
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
        work = find_work();
        if (!work.any()) return;
        if constexpr (Config::kQuantized) q_factor_ = q_factor(tile());
        start_first_scores(s, work, kv_);
        wait_products<0>();
        pin_registers(s);
      }
      pass_values(work.above);
      attend(s, o, p, softmax, work.blocks);

      control_.v_full[kv_.stage()].wait(kv_.parity());  // Sync: the last V is there.
      multiply_values(o, p, kv_);
      if constexpr (!Config::kOutOverQ) release_queries();
      q_.advance();
      Work next{};
      if (work.below == 0) {  // else the producer waits for those before it says what comes next
        // Sync: the next tile's description is there.
        control_.tile_full[tile_.next().stage()].wait(tile_.next().parity());
        next = work_of(control_.tile[tile_.next().stage()]);
      }
      // K tiles that are passed on the way come while V is still held: one for each stage at most.
      ahead = next.any() && next.above <= kStages;
      if (ahead) {
        if constexpr (Config::kQuantized) {
          q_factor_ = q_factor(control_.tile[tile_.next().stage()]);
        }
        start_first_scores(s, next, kv_.next());
        wait_products<1>();
        store_tile(o, softmax);
        wait_products<0>();
        pin_registers(s);
      } else {
        wait_products<0>();
        store_tile(o, softmax);
      }
      pass_blocks(work.below);
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

  __device__ __forceinline__ Work work_of(const RowTile& tile) const {
    const int first_row = uniform(tile.first_row) + warpgroup_ * 64;
    const int num_rows = uniform(tile.num_rows);
    const BlockRange all{uniform(tile.keys.begin), uniform(tile.keys.end)};
    const BlockRange mine =
        tile_visibility(num_rows, uniform(tile.num_keys))
            .template blocks<kBlockN>(first_row, min(first_row + 63, num_rows - 1));
    if (mine.begin == mine.end) return {mine, all.end - all.begin, 0};
    return {mine, all.end - mine.end, mine.begin - all.begin};
  }

  // The next tile with work, after those without; none if no tile is left.
  __device__ __forceinline__ Work find_work() {
    release_staged();
    while (true) {
      // Sync: the producer has written the tile's description, which stays until this warp has
      // stored the tile: read where it is needed, it takes no registers in the main loop.
      control_.tile_full[tile_.stage()].wait(tile_.parity());
      const Work work = work_of(tile());
      if (work.any() || uniform(tile().first_row) < 0) return work;
      if (work.above > 0) {  // else the producer loads nothing for it, not even Q
        // Sync: waited for even without a key, or this warp could arrive twice in one phase.
        control_.q_full[q_.stage()].wait(q_.parity());
        release_queries();
        q_.advance();
        pass_blocks(work.above);
      }
      store_nothing(args_, tile(), warp_first_row());
      leave_tile();
    }
  }

  // Out is complete; q_ is at the next tile's Q.
  __device__ __forceinline__ void store_tile(Out& o, Softmax& softmax) {
    pin_registers(o);
    if constexpr (Config::kQuantized) {
      take_sums(softmax.sum, o);
      promotion().add_to(o, softmax, num_chunks_);
    }
    control_.v_empty[kv_.stage()].arrive_warp();  // Sync: this warp is done with V.
    kv_.advance();
    if constexpr (Config::kOutOverQ) {
      const int warp = threadIdx.x / 32;
      // Sync: the four warps are all done with their 64 rows of Q.
      named_barrier_sync(1 + warpgroup_, 128);
      uint8_t* rows = shared_ + Config::kQOffset + q_.next().stage() * Config::kQBytes +
                      warp * kRowsOfWarp * 128;
      store_rows<Config>(args_, tile(), warp_first_row(), o, softmax, 1.f, rows,
                         Config::kBlockM * 128);
      staged_ = true;
    } else {
      if (threadIdx.x % 32 == 0) wait_for_stores();
      __syncwarp();
      constexpr int kChunkBytes = kRowsOfWarp * 128;
      const float scale = Config::kQuantized ? control_.v_scale[tile_.stage()] : 1.f;
      store_rows<Config>(args_, tile(), warp_first_row(), o, softmax, scale, staged_out(),
                         kChunkBytes);
    }
    leave_tile();
  }

  // Where this warp lays its rows of out down, where they do not go over Q.
  __device__ __forceinline__ uint8_t* staged_out() const {
    return shared_ + Config::kOutOffset +
           threadIdx.x / 32 * (Config::kOutChunks * kRowsOfWarp * 128);
  }

  // Whether out is promoted: not where there are few keys, nor where its caller wants it fast.
  __device__ __forceinline__ bool promotes() const { return args_.quantized.promoted != nullptr; }

  __device__ __forceinline__ Promotion<kRow> promotion() const {
    return Promotion<kRow>(args_, control_, staged_out());
  }

  // This warp needs the Q at q_ no more.
  __device__ __forceinline__ void release_queries() {
    __syncwarp();
    control_.q_empty[q_.stage()].arrive_warp();  // Sync: this warp's scores are all done.
  }

  // Gives the Q under the rows stored last back, when they have left it; q_ is at the next tile's.
  __device__ __forceinline__ void release_staged() {
    if constexpr (Config::kOutOverQ) {
      if (staged_ && threadIdx.x % 32 == 0) {
        wait_for_stores();
        control_.q_empty[q_.next().stage()].arrive();
      }
      staged_ = false;
    } else if (threadIdx.x % 32 == 0) {
      wait_for_stores();
    }
  }

  __device__ __forceinline__ int warp_first_row() const {
    return tile().first_row + threadIdx.x / 32 * kRowsOfWarp;
  }

  __device__ __forceinline__ void leave_tile() {
    control_.tile_empty[tile_.stage()].arrive();  // Sync: this thread is done with the description.
    tile_.advance();
  }

  // at: of the first K tile that comes for the row tile.
  __device__ __forceinline__ void start_first_scores(Scores& s, const Work& work,
                                                     RingPosition<kStages> at) {
    control_.q_full[q_.stage()].wait(q_.parity());  // Sync: Q is there.
    for (int i = 0; i < work.above; ++i) {
      control_.k_full[at.stage()].wait(at.parity());
      __syncwarp();
      control_.k_empty[at.stage()].arrive_lanes();
      at.advance();
    }
    control_.k_full[at.stage()].wait(at.parity());  // Sync: the first K is there.
    multiply_scores(s, at);
  }

  // Of this warpgroup's scores; asked for early, as the descale comes from memory.
  __device__ __forceinline__ float q_factor(const RowTile& tile) const {
    const int row = uniform(tile.first_row) + warpgroup_ * 64;
    const Descale& q = args_.quantized.q;
    return q.at(q.of(tile.sequence, tile.head), row) * args_.score_scale *
           (Config::kUnits * Config::kShiftUnit);
  }

  // From the scores of the last block to the probabilities of the first; out of all between.
  __device__ __forceinline__ void attend(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                         BlockRange mine) {
    const BlockRange clear = clear_blocks();  // in which every row sees every key
#pragma unroll
    for (int i = 0; i < Config::kOutRegisters; ++i) o[i] = 0.f;
    softmax.reset();
    if constexpr (Config::kQuantized) {
      attend_8_bit(s, o, p, softmax, mine, clear);
    } else {
      attend_16_bit(s, o, p, softmax, mine, clear);
    }
  }

  __device__ __forceinline__ void attend_16_bit(Scores& s, Out& o, Probabilities& p,
                                                Softmax& softmax, BlockRange mine,
                                                BlockRange clear) {
    int block = mine.end - 1;
    Scale scale = scale_of(kv_);
    release_keys(kv_);
    cap(s, scale);
    int highest[2];
    softmax.subtract_reference(s, scale, highest);
    if (!clear.has(block)) hide(s, block);
    float unused[2];
    softmax.raise_reference(s, unused);
    softmax.exponentiate(s);
    Softmax::pack(p, s);
    if constexpr (Config::kOutOverQ) release_staged();

    // kv_ is one block behind: at the stages of the block whose V is still to be used.
    RingPosition<kStages> kv = kv_.next();
    if (block > mine.begin) control_.k_full[kv.stage()].wait(kv.parity());  // Sync: the next K is.
    --block;
    for (; block >= mine.begin; --block) {
      start_products(s, o, p, kv);
      wait_products<1>();
      pin_registers(s);
      float factor[2];  // of out; set where a reference was raised
      const bool raised = softmax_step(s, softmax, factor, kv, block, clear);
      const RingPosition<kStages> next = kv.next();
      // Sync: the next K is there. A branch that follows from the exponentials' sums keeps the
      // whole softmax before the wait for out: ptxas would move the wait up or the exponentials
      // down, and the product would run beside nothing. (Those sums are never negative.)
      if (block > mine.begin || softmax.impossible()) {
        control_.k_full[next.stage()].wait(next.parity());
      }
      wait_products<0>();
      pin_registers(o);
      control_.v_empty[kv_.stage()].arrive_warp();  // Sync: this warp is done with V.
      if (raised) rescale(o, factor);
      Softmax::pack(p, s);
      kv_ = kv;
      kv = next;
    }
  }

  // Starts the scores of K at kv, which was waited for, and out += P V of the block before.
  __device__ __forceinline__ void start_products(Scores& s, Out& o, const Probabilities& p,
                                                 RingPosition<kStages> kv) {
    multiply_scores(s, kv);
    control_.v_full[kv_.stage()].wait(kv_.parity());  // Sync: V of the block before is there.
    multiply_values(o, p, kv_);
  }

  static __device__ __forceinline__ void rescale(Out& o, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Config::kOutRegisters; ++i) o[i] *= factor[row_of(i)];
  }

  // From scores to probabilities; gives K back. Returns whether a reference of the warp was raised.
  __device__ __forceinline__ bool softmax_step(Scores& s, Softmax& softmax, float (&factor)[2],
                                               RingPosition<kStages> kv, int block,
                                               BlockRange clear) {
    Scale scale = scale_of(kv);
    bool exact = args_.tanh_scale != 0.f, raised = false;
    if constexpr (Config::kWindowed) {
      exact = exact || !clear.has(block) || softmax.warp_has_unseen();
    }
    if (exact || softmax.exponentiate_at_once(s, scale)) {
      pin_registers(s);
      if (!exact) multiply_scores_again(s, kv);
      // Sums that were too large raise the references, though no score alone may have: else those
      // of the next block would be too large again.
      raised = exact_softmax(s, softmax, factor, scale, block, clear, !exact);
      softmax.exponentiate(s);
    }
    release_keys(kv);
    return raised;
  }

  // From scores to exponents, with the rows' maxima.
  __device__ __forceinline__ bool exact_softmax(Scores& s, Softmax& softmax, float (&factor)[2],
                                                Scale& scale, int block, BlockRange clear,
                                                bool outgrown) {
    cap(s, scale);
    int highest[2];
    softmax.subtract_reference(s, scale, highest);
    const bool moves = softmax.reaches(highest, Softmax::kLimit) || outgrown;
    if constexpr (Config::kWindowed) {
      if (!clear.has(block)) hide(s, block);
    }
    const bool raised = __any_sync(~0u, moves) != 0;
    pin_registers(s);
    if (raised) {
      softmax.raise_reference(s, factor);
      pin_registers(s);
    }
    return raised;
  }

  // The loop of its own holds the common step alone. What only some steps need, keys hidden, scores
  // capped, references moved, out promoted, is done between two runs of it: inside it would be in
  // the way of the instruction cache, and cost all steps 5 to 10 %.
  __device__ __forceinline__ void attend_8_bit(Scores& s, Out& o, Probabilities& p,
                                               Softmax& softmax, BlockRange mine,
                                               BlockRange clear) {
    const bool capped = args_.tanh_scale != 0.f;
    num_chunks_ = 0;
    int block = mine.end - 1;
    Scale scale = scale_of(kv_);
    scale.complete(q_factor_);
    int highest[2];
    float factor[2];  // of out
    exponents(s, softmax, scale, highest, block, clear);
    move_references(s, softmax, factor, scale, kv_, highest, block, {0, 0});
    release_keys(kv_);
    Softmax::pack(p, s);

    // kv_ is one block behind: at the stages of the block whose V is still to be used.
    RingPosition<kStages> kv = kv_.next();
    if (block > mine.begin) control_.k_full[kv.stage()].wait(kv.parity());  // Sync: the next K is.
    scale = scale_of(kv);
    --block;
    int stop = end_of_chunk(block, mine);
    while (true) {
      bool moves = false, common = true;
      for (; block >= stop; --block) {
        start_products(s, o, p, kv);
        scale.complete(q_factor_);
        wait_products<1>();
        pin_registers(s);
        common = !capped && clear.has(block);
        if (!common) break;
        softmax.subtract_reference(s, scale, highest);
        moves = __any_sync(~0u, softmax.may_move(highest) || scale.is_special());
        if (moves) break;
        finish_step(s, o, p, softmax, scale, kv, block > mine.begin);
      }
      bool promote = block < stop;
      if (!promote) {
        pin_registers(s);
        if (!common) {
          exponents(s, softmax, scale, highest, block, clear);
          moves = __any_sync(~0u, softmax.may_move(highest) || scale.is_special());
        }
        bool fell = false;
        factor[0] = factor[1] = 1.f;
        if (moves) {
          fell = move_references(s, softmax, factor, scale, kv, highest, block, clear);
        }
        pin_registers(s);
        // Beside the heavy keys in out the light ones' products would be cut off.
        promote = fell || block == stop;
        finish_step(s, o, p, softmax, scale, kv, block > mine.begin, factor);
        --block;
      }
      if (block < mine.begin) return;
      if (promote && promotes()) {
        num_chunks_ = promotion().take(o, softmax, num_chunks_);
        stop = end_of_chunk(block, mine);
      }
    }
  }

  // The block before which out is promoted next, if any is, this one being the next.
  __device__ __forceinline__ int end_of_chunk(int block, BlockRange mine) const {
    return promotes() ? max(mine.begin, block + 1 - Config::kChunkBlocks) : mine.begin;
  }

  // The rest of a step, from codes to P: gives K back, and V as soon as out is there. factor: of
  // out, where a reference moved.
  template <class... Factor>
  __device__ __forceinline__ void finish_step(Scores& s, Out& o, Probabilities& p, Softmax& softmax,
                                              Scale& scale, RingPosition<kStages>& kv, bool more,
                                              const Factor&... factor) {
    release_keys(kv);
    const RingPosition<kStages> next = kv.next();
    if (more) control_.k_full[next.stage()].wait(next.parity());  // Sync: the next K is there.
    scale = scale_of(next);  // of no use, and not used, after the last block
    wait_products<0>();
    pin_registers(o);
    control_.v_empty[kv_.stage()].arrive_warp();  // Sync: this warp is done with V.
    (rescale(o, factor), ...);
    take_sums(softmax.sum, o);
    Softmax::pack(p, s);
    kv_ = kv;
    kv = next;
  }

  // From scores to codes over the rows' references, -inf where a key is hidden.
  __device__ __forceinline__ void exponents(Scores& s, Softmax& softmax, Scale& scale,
                                            int (&highest)[2], int block, BlockRange clear) const {
    cap(s, scale);
    softmax.subtract_reference(s, scale, highest);
    if (!clear.has(block)) hide(s, block);
  }

  // Moves the references that have to (code_softmax.cuh); returns whether one fell. kv: of K.
  __device__ __forceinline__ bool move_references(Scores& s, Softmax& softmax, float (&factor)[2],
                                                  const Scale& scale, RingPosition<kStages> kv,
                                                  const int (&highest)[2], int block,
                                                  BlockRange clear) {
    float least[2] = {INFINITY, INFINITY};
    float largest[2] = {__int_as_float(highest[0]), __int_as_float(highest[1])};
    if (!clear.has(block)) {  // a row may be light for this tile alone
      Softmax::find_highest(largest, s);
    } else if (__any_sync(~0u, softmax.is_light(highest))) {
      Softmax::find_highest(largest, s);
      softmax.find_least(least, tile().num_keys);
    }
    const auto moved = softmax.move_reference(s, largest, least, factor);
    if constexpr (kInteger) {
      if (__any_sync(~0u, moved.dominated != 0)) {
        float excess[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float of_maximum = excess_of(s, softmax, scale, kv, largest[r], r);
          excess[r] = moved.dominated >> r & 1 ? of_maximum : 0.f;
        }
        softmax.set_excess(excess[0], excess[1], factor);
      }
    }
    softmax.complete_groups(s, scale);
    return moved.fell;
  }

  // By how many octaves the whole code of row r's maximum is above the score that it was made of,
  // which is multiplied out again. All lanes of the warp must call it.
  __device__ __forceinline__ float excess_of(const Scores& s, const Softmax& softmax,
                                             const Scale& scale, RingPosition<kStages> kv,
                                             float code, int r) const {
    int key = max(Softmax::column_of(s, r, code), 0);
    key = max(key, __shfl_xor_sync(~0u, key, 1));
    key = max(key, __shfl_xor_sync(~0u, key, 2));
    const int row = threadIdx.x / 32 * kRowsOfWarp + threadIdx.x % 32 / 4 + 8 * r;
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared_);
    float number = static_cast<float>(int8_score<Config::kBlockM, kBlockN, kHeadDim>(
        base + Config::kQOffset + q_.stage() * Config::kQBytes,
        base + Config::kKOffset + kv.stage() * Config::kKBytes, row, key));
    if (args_.tanh_scale != 0.f) {
      const float ratio = scale.factor_of(key) * args_.one_over_cap / Config::kUnits;
      number = capped_number(number, ratio, inverse_or_0(ratio));
    }
    return softmax.octaves_above(code, number, scale, key, r);
  }

  // A branch whose code the compiler may lay aside. In 16 bits its order is as measured.
  static __device__ __forceinline__ bool rarely(bool condition) {
    return Config::kQuantized ? __builtin_expect(condition, false) : condition;
  }

  __device__ __forceinline__ void cap(Scores& s, Scale& scale) const {
    if (!rarely(args_.tanh_scale != 0.f)) return;
    if constexpr (Config::kQuantized) {
      cap_scores(s, scale, args_.one_over_cap / Config::kUnits);
    } else {
      cap_scores(s, args_.tanh_scale);
      scale.restart(args_.score_scale);
    }
  }

  // Of K at this stage, whose scores were lost.
  __device__ __forceinline__ void multiply_scores_again(Scores& s, RingPosition<kStages> at) const {
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared_);
    scores_again<kElement, Config::kBlockM, kBlockN, kHeadDim>(
        s, base + Config::kQOffset + q_.stage() * Config::kQBytes,
        base + Config::kKOffset + at.stage() * Config::kKBytes, threadIdx.x / 32 * kRowsOfWarp);
  }

  // This warp is done with K and its descales.
  __device__ __forceinline__ void release_keys(RingPosition<kStages> at) {
    __syncwarp();
    control_.k_empty[at.stage()].arrive_lanes();  // Sync: every lane has read the descales.
  }

  // Of the K tile at this position, which is there.
  __device__ __forceinline__ Scale scale_of(RingPosition<kStages> at) const {
    if constexpr (Config::kQuantized) {
      return Scale(control_.key_scales[at.stage()]);
    } else {
      return Scale{{args_.score_scale}};
    }
  }

  __device__ __forceinline__ void multiply_scores(Scores& s, RingPosition<kStages> at) {
    const uint32_t q = q_base_ + q_.stage() * (Config::kQBytes / 16);
    const uint32_t k = k_base_ + at.stage() * (Config::kKBytes / 16);
    if constexpr (kInteger) {
      start_int8_scores<Config::kBlockM, kBlockN, kHeadDim>(s, q, k, start_);
    } else {
      start_scores<kElement, Config::kBlockM, kBlockN, kHeadDim>(s, q, k);
    }
  }

  __device__ __forceinline__ void multiply_values(Out& o, const Probabilities& p,
                                                  RingPosition<kStages> at) {
    const uint32_t v = v_base_ + at.stage() * (Config::kVBytes / 16);
    if constexpr (Config::kQuantized) {
      start_values_and_sums<kBlockN, kHeadDim>(o, p, v);
    } else {
      start_values<kElement, kBlockN, kHeadDim>(o, p, v);
    }
  }

  // V tiles that only other warpgroups need; their K tiles were passed before.
  __device__ __forceinline__ void pass_values(int count) {
    for (int i = 0; i < count; ++i) {
      control_.v_full[kv_.stage()].wait(kv_.parity());
      __syncwarp();
      control_.v_empty[kv_.stage()].arrive_warp();
      kv_.advance();
    }
  }

  // Blocks that only other warpgroups need.
  __device__ __forceinline__ void pass_blocks(int count) {
    for (int i = 0; i < count; ++i) {
      control_.k_full[kv_.stage()].wait(kv_.parity());
      __syncwarp();
      control_.k_empty[kv_.stage()].arrive_lanes();
      pass_values(1);
    }
  }

  __device__ __forceinline__ const RowTile& tile() const { return control_.tile[tile_.stage()]; }

  // Blocks in which every row of the warpgroup sees every key.
  __device__ __forceinline__ BlockRange clear_blocks() const {
    const int first_row = uniform(tile().first_row) + warpgroup_ * 64;
    const int num_rows = uniform(tile().num_rows);
    return tile_visibility(num_rows, uniform(tile().num_keys))
        .template clear_blocks<kBlockN>(first_row, min(first_row + 63, num_rows - 1));
  }

  __device__ __forceinline__ Visibility tile_visibility(int num_rows, int num_keys) const {
    return Visibility::of(num_rows, num_keys, args_.window_left, args_.window_right);
  }

  __device__ __forceinline__ void hide(Scores& s, int block) const {
    const int row = tile().first_row + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    hide_keys<kBlockN, Config::kWindowed>(s, tile_visibility(tile().num_rows, tile().num_keys), row,
                                          block * kBlockN);
  }

  const ForwardArguments& args_;
  ForwardControlOf<kRow>& control_;
  uint8_t* shared_;
  int warpgroup_;
  uint32_t q_base_, k_base_, v_base_, start_;
  float q_factor_ = 0.f;  // scale of the scores times the descale of the tile's rows
  bool staged_ = false;   // rows of out lie over the Q before the one at q_
  int num_chunks_ = 0;    // of the tile's keys whose sums have left o
  RingPosition<2> tile_{0};
  RingPosition<Config::kQBuffers> q_{0};
  RingPosition<kStages> kv_{0};  // K and V stages are used in step
};

}  // namespace flashattn3
