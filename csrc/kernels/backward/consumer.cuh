// A warpgroup that multiplies: 64 keys against the queries that see them.
//
// All scores are kept transposed, keys x queries: what is multiplied into dV and dK, P^T and dS^T,
// then lies in the accumulators as WGMMA wants its operand. Step t of a warpgroup:
//   start S = K Q^T and dP - delta = V dO^T - delta (delta is in the accumulators beforehand), wait
//   for S, P = 2^(S - lse), start dV += P dO, wait for dP, dS = P (dP - delta), lay dS down in
//   shared memory, start dK += dS Q, and, one warpgroup in turn, dQ of the step before, which wants
//   the keys of all.
// The warpgroups share the stages of Q and dO but not their pace: they may be a step apart, and
// while one makes P and dS, the tensor cores work for the other.
#pragma once

#include "blocks/clear_tail.cuh"
#include "blocks/tile_product.cuh"
#include "blocks/visible_range.cuh"
#include "kernels/backward/arguments.h"
#include "kernels/backward/config.cuh"
#include "kernels/backward/epilogue.cuh"
#include "kernels/backward/scores.cuh"

namespace flashattn3 {

template <BackwardRow kRow>
class BackwardConsumer {
  using Config = BackwardConfig<kRow>;
  static constexpr ElementType kElement = Config::kElement;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kThreads = 128 * Config::kConsumers;
  using Scores = float[kBackwardRows / 2];
  using Gradient = float[kHeadDim / 2];
  using Operand = Probabilities<kElement, kBackwardRows>;

 public:
  // warpgroup: 0 to kConsumers - 1, the same in all lanes of a warp.
  __device__ __forceinline__ BackwardConsumer(const BackwardArguments& args, uint8_t* shared,
                                              int warpgroup)
      : args_(args),
        control_(*reinterpret_cast<BackwardControlOf<kRow>*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup) {
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
    k_base_ = descriptor_low(base + Config::kKOffset, Config::kKeys * 128);
    v_base_ = descriptor_low(base + Config::kVOffset, Config::kKeys * 128);
    q_base_ = descriptor_low(base + Config::kQOffset, kBackwardRows * 128);
    dout_base_ = descriptor_low(base + Config::kDoutOffset, kBackwardRows * 128);
    ds_base_ = descriptor_low(base + Config::kScoreOffset, 16);
  }

  __device__ __forceinline__ void run() {
    while (true) {
      // Sync: the producer has written the tile's description, which stays until all have left it.
      control_.tile_full[tile_.stage()].wait(tile_.parity());
      if (uniform(tile().first_key) < 0) return;
      if (uniform(tile().rows.begin) == uniform(tile().rows.end)) {
        store_zeros(key_target(args_, tile(), warp_first_key()));
        store_zeros(value_target(args_, tile(), warp_first_key()));
      } else {
        attend();
      }
      control_.tile_empty[tile_.stage()].arrive();  // Sync: this thread is done with it.
      tile_.advance();
    }
  }

 private:
  __device__ __forceinline__ void attend() {
    TileSteps steps(args_, {uniform(tile().rows.begin), uniform(tile().rows.end)},
                    uniform(tile().start));
    const int first_key = uniform(tile().first_key) + 64 * warpgroup_;
    const int last_key = min(first_key + 63, uniform(tile().num_keys) - 1);
    const BlockRange seen = tile_visibility().template row_blocks<kBackwardRows>(
        uniform(tile().num_rows), first_key, last_key);
    const BlockRange clear =
        tile_visibility().template clear_row_blocks<kBackwardRows>(first_key, first_key + 63);
    Gradient dk, dv;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0.f;
    control_.k_full.wait(keys_parity_);  // Sync: K and V are there.
    control_.v_full.wait(keys_parity_);
    keys_parity_ ^= 1;
    clear_keys();
    const int count = steps.count();
    for (int i = 0; i < count; ++i, steps.advance()) {
      const int block = steps.block();
      await_rows(block);
      if (!Config::kPassesBy || (block >= seen.begin && block < seen.end)) {
        step(dk, dv, block, clear, i > 0);
      } else {
        pass_by(i > 0);
      }
      advance();
    }
    // The last step's dQ is still to come.
    if (multiplies_before()) multiply_queries();
    __syncwarp();
    control_.k_empty.arrive_warp();  // Sync: this warp is done with K.
    // Sync: all four warps are done with their keys of V, which dV and dK go over.
    named_barrier_sync(1 + warpgroup_, 128);
    uint8_t* staged = shared_ + Config::kVOffset + threadIdx.x / 32 * kRowsOfWarp * 128;
    store_gradient<kElement, kHeadDim>(value_target(args_, tile(), warp_first_key()), 0, dv, 1.f,
                                       staged, Config::kKeys * 128);
    store_gradient<kElement, kHeadDim>(key_target(args_, tile(), warp_first_key()), 0, dk,
                                       args_.softmax_scale, staged, Config::kKeys * 128);
    control_.v_empty.arrive();  // Sync: this thread has left V's place.
  }

  // Until Q and dO of a step are there, with lse and delta. All warpgroups come by here, also those
  // that want nothing of them but to give them back.
  __device__ __forceinline__ void await_rows(int block) {
    const uint32_t stage = rows_.stage();
    control_.q_full[stage].wait(rows_.parity());     // Sync: Q and lse are there.
    control_.dout_full[stage].wait(rows_.parity());  // Sync: dO and delta are there.
    clear_rows_behind(stage, block);
  }

  // block: of kBackwardRows queries. clear: blocks of 64 that see all keys of this warpgroup.
  // others: a step of this tile came before, whose dQ may be this warpgroup's to multiply.
  __device__ __forceinline__ void step(Gradient& dk, Gradient& dv, int block, BlockRange clear,
                                       bool others) {
    const uint32_t stage = rows_.stage();
    const uint32_t q = q_base_ + stage * (Config::kRowBytes / 16);
    const uint32_t dout = dout_base_ + stage * (Config::kRowBytes / 16);
    Scores s, dp, lse;
    Operand p, ds;
    load_statistic(dp, control_.minus_delta[stage]);
    load_statistic<0, Config::kEarlyLse>(lse, control_.lse[stage]);
    pin_registers(dp);  // before S is on its way, or ptxas would wait for it to write these
    start_scores<kElement, Config::kKeys, kBackwardRows, kHeadDim>(
        s, k_base_ + warpgroup_ * (64 * 128 / 16), q);
    start_scores<kElement, Config::kKeys, kBackwardRows, kHeadDim, true>(
        dp, v_base_ + warpgroup_ * (64 * 128 / 16), dout);
    wait_products<1>();
    pin_registers(s);
    load_statistic<Config::kEarlyLse, kBackwardRows / 2>(lse, control_.lse[stage]);
    exponentiate(s, lse, args_.score_scale, args_.tanh_scale);
    if (block < clear.begin || block >= clear.end) {
      hide_rows<kBackwardRows>(s, tile_visibility(), warp_first_key() + threadIdx.x % 32 / 4,
                               block * kBackwardRows);
    }
    pack_probabilities<kElement, kBackwardRows>(p, s);
    start_values<kElement, kBackwardRows, kHeadDim>(dv, p, dout);
    wait_products<1>();
    pin_registers(dp);
    if (args_.tanh_scale != 0.f) {
      differentiate_cap(s, control_.lse[stage], args_.score_scale, args_.tanh_scale);
    }
#pragma unroll
    for (int i = 0; i < kBackwardRows / 2; ++i) s[i] *= dp[i];
    pack_probabilities<kElement, kBackwardRows>(ds, s);
    lay_down(ds);
    start_values<kElement, kBackwardRows, kHeadDim>(dk, ds, q);
    wait_products<1>();
    control_.dout_empty[stage].arrive_warp();  // Sync: this warp is done with dO.
    if (others && multiplies_before()) {
      Gradient dq;
      start_queries(dq);
      wait_products<1>();
      control_.q_empty[stage].arrive_warp();  // Sync: this warp is done with Q.
      wait_products<0>();
      pin_registers(dq);
      hand_over(dq);
    } else {
      wait_products<0>();
      control_.q_empty[stage].arrive_warp();  // Sync: as above.
    }
    pin_registers(dv);
    pin_registers(dk);
  }

  // A step whose queries see none of this warpgroup's keys.
  __device__ __forceinline__ void pass_by(bool others) {
    const uint32_t stage = rows_.stage();
    const Operand ds = {};
    lay_down(ds);
    control_.dout_empty[stage].arrive_warp();  // Sync: this warp wants nothing of them.
    control_.q_empty[stage].arrive_warp();
    if (others && multiplies_before()) multiply_queries();
  }

  // To the next step.
  __device__ __forceinline__ void advance() {
    rows_.advance();
    before_ = ds_;
    ds_.advance();
    turn_ = turn_ + 1 == Config::kConsumers ? 0 : turn_ + 1;
  }

  // Whether dQ of the step before that at ds_ is for this warpgroup to multiply.
  __device__ __forceinline__ bool multiplies_before() const { return turn_ == warpgroup_; }

  // Lays this warp's 16 keys of dS down.
  __device__ __forceinline__ void lay_down(const Operand& ds) {
    // Sync: the warpgroup that multiplied dQ of the step before last has read the buffer.
    control_.ds_empty[ds_.stage()].wait(ds_.parity() ^ 1);
    uint32_t word[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) word[i] = ds[i / 4][i % 4];
    stage_rows(shared_ + Config::kScoreOffset + ds_.stage() * Config::kScoreBytes +
                   threadIdx.x / 32 * kRowsOfWarp * 128,
               word);
    fence_async_proxy();
    __syncwarp();
    control_.ds_full[ds_.stage()].arrive_warp();  // Sync: this warp has written and fenced.
  }

  // Starts dQ of the step before that at ds_.
  __device__ __forceinline__ void start_queries(Gradient& dq) {
    const RingPosition<2> at = before_;
    control_.ds_full[at.stage()].wait(at.parity());  // Sync: all consumer warps have written dS.
    start_across<kElement, Config::kKeys, kHeadDim>(
        dq, ds_base_ + at.stage() * (Config::kScoreBytes / 16), k_base_);
  }

  // dQ to who sends it to memory.
  __device__ __forceinline__ void hand_over(const Gradient& dq) {
    control_.ds_empty[before_.stage()].arrive_warp();  // Sync: this warp has read dS.
    // Sync: what lay there before has been sent.
    control_.sum_empty[warpgroup_].wait(sum_.parity() ^ 1);
    float4* sums =
        reinterpret_cast<float4*>(shared_ + Config::kSumOffset + warpgroup_ * Config::kSumBytes) +
        threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      sums[i * 128] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    fence_async_proxy();
    __syncwarp();
    control_.sum_full[warpgroup_].arrive_warp();  // Sync: this warp has written and fenced.
    sum_.advance();
  }

  __device__ __forceinline__ void multiply_queries() {
    Gradient dq;
    start_queries(dq);
    wait_products<0>();
    pin_registers(dq);
    hand_over(dq);
  }

  // Keys past the sequence may belong to another one, or to nobody, and hold NaN, which
  // probability 0 does not stop.
  __device__ __forceinline__ void clear_keys() {
    if (args_.keys.cu_seqlens == nullptr && args_.keys.seqused == nullptr) return;
    const int used = uniform(tile().num_keys) - uniform(tile().first_key);
    if (used >= Config::kKeys) return;
    for (const int offset : {Config::kKOffset, Config::kVOffset}) {
      clear_rows<Config::kKeys, Config::kChunks>(shared_ + offset, used, threadIdx.x, kThreads);
    }
    fence_async_proxy();
    named_barrier_sync(1 + Config::kConsumers, kThreads);  // Sync: all warpgroups are through.
  }

  // The same for queries; they have lse +inf and delta 0.
  __device__ __forceinline__ void clear_rows_behind(uint32_t stage, int block) {
    if (args_.rows.cu_seqlens == nullptr && args_.rows.seqused == nullptr) return;
    const int used = uniform(tile().num_rows) - block * kBackwardRows;
    if (used >= kBackwardRows) return;
    for (const int offset : {Config::kQOffset, Config::kDoutOffset}) {
      clear_rows<kBackwardRows, Config::kChunks>(shared_ + offset + stage * Config::kRowBytes, used,
                                                 threadIdx.x, kThreads);
    }
    fence_async_proxy();
    named_barrier_sync(1 + Config::kConsumers, kThreads);  // Sync: as above.
  }

  __device__ __forceinline__ const KeyTile& tile() const { return control_.tile[tile_.stage()]; }
  __device__ __forceinline__ int warp_first_key() const {
    return tile().first_key + threadIdx.x / 32 * kRowsOfWarp;
  }
  __device__ __forceinline__ Visibility tile_visibility() const {
    return Visibility::of(uniform(tile().num_rows), uniform(tile().num_keys), args_.window_left,
                          args_.window_right);
  }

  const BackwardArguments& args_;
  BackwardControlOf<kRow>& control_;
  uint8_t* shared_;
  int warpgroup_;
  uint32_t k_base_, v_base_, q_base_, dout_base_, ds_base_;
  RingPosition<2> tile_{0};
  RingPosition<Config::kStages> rows_{0};
  RingPosition<2> ds_{0};              // buffer of the step's dS
  RingPosition<2> before_{0};          // of the step before
  int turn_ = Config::kConsumers - 1;  // the warpgroup that multiplies its dQ
  RingPosition<1> sum_{0};             // this warpgroup's room for dQ
  uint32_t keys_parity_ = 0;
};

}  // namespace flashattn3
