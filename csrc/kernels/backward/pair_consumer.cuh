// A warpgroup that multiplies, in a cluster of two CTAs with 64 keys each, for more than 128
// columns. Of its CTA's 64 keys it makes the scores of 32 queries of each step, and accumulates
// half of the columns of dK and dV; of dQ, over the keys of both CTAs, a quarter.
//
// P and dS go through shared memory, keys x queries, to both warpgroups, and dS to the other CTA
// too. Step i:
//   start dV += P(i) dO(i) and dK += dS(i) Q(i), P(i+1), start dQ(i), which wants the other CTA's
//   dS(i), and dP(i+1), when dO(i+1) has taken the place of dO(i), add dQ(i-1) to the sums, start
//   S(i+2), with Q(i+2) in the place of Q(i); dS(i+1).
#pragma once

#include "blocks/clear_tail.cuh"
#include "blocks/cluster.cuh"
#include "blocks/tile_product.cuh"
#include "blocks/visible_range.cuh"
#include "kernels/backward/arguments.h"
#include "kernels/backward/arrivals.cuh"
#include "kernels/backward/epilogue.cuh"
#include "kernels/backward/key_tile.cuh"
#include "kernels/backward/pair_config.cuh"
#include "kernels/backward/scores.cuh"

namespace flashattn3 {

template <BackwardRow kRow>
class PairConsumer {
  using Config = PairConfig<kRow>;
  static constexpr ElementType kElement = Config::kElement;
  static constexpr int kThreads = 128 * Config::kConsumers;
  static constexpr int kChunkBytes = 64 * 128;
  static constexpr int kQueries = kBackwardRows / Config::kConsumers;
  using Scores = float[kQueries / 2];
  using KeyGradient = float[Config::kHalf / 2];
  using QueryGradient = float[Config::kQuarter / 2];

 public:
  // warpgroup: 0 or 1, the same in all lanes of a warp.
  __device__ __forceinline__ PairConsumer(const BackwardArguments& args, const KeyTile& tile,
                                          uint8_t* shared, int warpgroup, int rank)
      : args_(args),
        tile_(tile),
        control_(*reinterpret_cast<PairControl*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup),
        rank_(rank),
        first_key_(tile.first_key + rank * Config::kKeys) {
    low_ = descriptor_low(cute::cast_smem_ptr_to_uint(shared), 64 * 128);
  }

  __device__ __forceinline__ void run() {
    rows_ = {uniform(tile_.rows.begin), uniform(tile_.rows.end)};
    if (rows_.begin == rows_.end) {
      if (warpgroup_ == 0) {
        store_zeros(key_target(args_, tile_, warp_first_key()));
      } else {
        store_zeros(value_target(args_, tile_, warp_first_key()));
      }
      return;
    }
    const int num_steps = (rows_.end - rows_.begin) * args_.heads_per_kv;
    clear_ = visibility().template clear_row_blocks<kBackwardRows>(first_key_,
                                                                   first_key_ + Config::kKeys - 1);
    scores_block_ = ds_block_ = sum_block_ = start_ = uniform(tile_.start);
    sums_of_head_ = uniform(static_cast<int>(args_.room.first(args_.rows, tile_.sequence,
                                                              tile_.head * args_.heads_per_kv,
                                                              args_.num_heads_q, tile_.row_offset) /
                                             kBackwardRows));
    KeyGradient dk, dv;
    // dQ of the step before, out of the way of WGMMA: ptxas would serialize the products of a step
    // in which accumulators are read.
    QueryGradient finished;
    Scores s;
#pragma unroll
    for (int i = 0; i < Config::kHalf / 2; ++i) dk[i] = dv[i] = 0.f;
    control_.keys_full.wait(0);  // Sync: K, V and the other K are there.
    clear_keys();
    begin(s, num_steps > 1);
    for (int i = 0; i + 2 < num_steps; ++i) step<2>(dk, dv, finished, s, i > 0);
    if (num_steps > 1) step<1>(dk, dv, finished, s, num_steps > 2);
    step<0>(dk, dv, finished, s, num_steps > 1);
    add_queries<true>(finished);
    add_queries<false>(finished);
    tell_of_sums();
    store(dk, dv);
  }

 private:
  // P and dS of the first step, and the scores of the second if there is one.
  __device__ __forceinline__ void begin(Scores& s, bool more) {
    Scores dp;
    uint32_t p[kQueries / 4];
    start_scores_of_next(s);
    Scores lse;
    load_lse(lse);
    wait_products<0>();
    pin_registers(s);
    make_probabilities(s, lse, p);
    start_dp(dp);
    wait_products<0>();
    pin_registers(dp);
    lay_down(p, dp);
    if (!more) return;
    start_scores_of_next(s);
    wait_products<0>();
    pin_registers(s);
  }

  // kMore: how many steps follow, of which 2 stands for all numbers above. s: scores of the step
  // that follows, then of the one behind it. others: a step came before, whose dQ is `finished`.
  // Afterwards that is this step's.
  template <int kMore>
  __device__ __forceinline__ void step(KeyGradient& dk, KeyGradient& dv, QueryGradient& finished,
                                       Scores& s, bool others) {
    const uint32_t b = step_.stage();
    Scores lse;  // loaded before products, beside which these loads crawl
    if constexpr (kMore > 0) load_lse(lse);
    control_.ds_full[b].wait(step_.parity());  // Sync: P and dS of all eight warps are there.
    start_shared_values<kElement, Config::kHalf>(dv, at(Config::kPOffset + b * Config::kScoreBytes),
                                                 at(Config::kDoutOffset + half()));
    start_shared_values<kElement, Config::kHalf>(
        dk, at(Config::kDsOffset + b * Config::kScoreBytes),
        at(Config::kQOffset + b * Config::kRowBytes + half()));
    wait_products<1>();
    control_.dout_empty.arrive_warp();  // Sync: this warp is done with dO.
    uint32_t p[kQueries / 4];
    if constexpr (kMore > 0) make_probabilities(s, lse, p);
    QueryGradient dq;
    control_.other_full[b].wait(step_.parity());  // Sync: the other CTA's dS is there.
    start_queries(dq, b);
    wait_products<1>();
    control_.q_empty[b].arrive_warp();  // Sync: this warp is done with Q.
    if constexpr (kMore > 0) {
      Scores dp;
      if (others) add_queries<true>(finished);
      start_dp(dp);
      if (others) add_queries<false>(finished);
      if constexpr (kMore > 1) start_scores_of_next(s);
      wait_products<(kMore > 1)>();
      pin_registers(dp);
      lay_down(p, dp);
      if constexpr (kMore > 1) {
        wait_products<0>();
        pin_registers(s);
      }
    } else if (others) {
      add_queries<true>(finished);
      add_queries<false>(finished);
    }
    wait_products<0>();
    pin_registers(dv);
    pin_registers(dk);
    pin_registers(dq);
#pragma unroll
    for (int i = 0; i < Config::kQuarter / 2; ++i) finished[i] = dq[i];
    pin_registers(finished);
    arrive_warp_at(control_.other_empty[b], 1 - rank_);  // Sync: it has read what it was sent.
    step_.advance();
  }

  // S of the step whose Q is next.
  __device__ __forceinline__ void start_scores_of_next(Scores& s) {
    const uint32_t b = q_at_.stage();
    control_.q_full[b].wait(q_at_.parity());  // Sync: Q and lse are there.
    clear_rows_behind(Config::kQOffset + b * Config::kRowBytes, scores_block_);
    start_scores<kElement, Config::kKeys, kQueries, Config::kHeadDim, false, kBackwardRows>(
        s, at(Config::kKOffset),
        at(Config::kQOffset + b * Config::kRowBytes + warpgroup_ * (kQueries * 128)));
    q_at_.advance();
    scores_block_ = next_block(rows_, scores_block_);
  }

  // Of the step whose dS is next, and whose scores are there.
  __device__ __forceinline__ void load_lse(Scores& lse) const {
    load_statistic(lse, control_.lse[ds_at_.stage()] + warpgroup_ * kQueries);
  }

  // Of the step whose dS is next; laid down too, in a buffer that all have read: who wrote dS of
  // the step before had multiplied P of the one before that. p: with a cap times its derivative.
  __device__ __forceinline__ void make_probabilities(Scores& s, const Scores& lse,
                                                     uint32_t (&p)[kQueries / 4]) {
    exponentiate(s, lse, args_.score_scale, args_.tanh_scale);
    const int block = ds_block_;
    if (block < clear_.begin || block >= clear_.end) {
      hide_rows<kQueries>(s, visibility(), warp_first_key() + threadIdx.x % 32 / 4,
                          block * kBackwardRows + warpgroup_ * kQueries);
    }
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) p[i] = pack<kElement>(s[2 * i], s[2 * i + 1]);
    stage_rows(rows_of_warp(Config::kPOffset), p, warpgroup_ * 2);
    if (args_.tanh_scale == 0.f) return;
    // P as dS wants it. From 16 bits of P, later, tanh could not be found again.
    differentiate_cap(s, control_.lse[ds_at_.stage()] + warpgroup_ * kQueries, args_.score_scale,
                      args_.tanh_scale);
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) p[i] = pack<kElement>(s[2 * i], s[2 * i + 1]);
  }

  // Of the step whose dS is next.
  __device__ __forceinline__ void start_dp(Scores& dp) {
    control_.dout_full.wait(dout_at_.parity());  // Sync: dO and delta are there.
    clear_rows_behind(Config::kDoutOffset, ds_block_);
    start_scores<kElement, Config::kKeys, kQueries, Config::kHeadDim, false, kBackwardRows>(
        dp, at(Config::kVOffset), at(Config::kDoutOffset + warpgroup_ * (kQueries * 128)));
  }

  // This warp's 16 keys of the P or dS that comes next.
  __device__ __forceinline__ uint8_t* rows_of_warp(int offset) const {
    return shared_ + offset + ds_at_.stage() * Config::kScoreBytes +
           threadIdx.x % 128 / 32 * kRowsOfWarp * 128;
  }

  // dS of the next step.
  __device__ __forceinline__ void lay_down(const uint32_t (&packed)[kQueries / 4],
                                           const Scores& dp) {
    Scores p;
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) {
      const float2 pair = unpack<kElement>(packed[i]);
      p[2 * i] = pair.x, p[2 * i + 1] = pair.y;
    }
    const uint32_t b = ds_at_.stage();
    Scores minus_delta;
    load_statistic(minus_delta, control_.minus_delta + warpgroup_ * kQueries);
    uint32_t ds[kQueries / 4];
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) {
      ds[i] = pack<kElement>(p[2 * i] * (dp[2 * i] + minus_delta[2 * i]),
                             p[2 * i + 1] * (dp[2 * i + 1] + minus_delta[2 * i + 1]));
    }
    // Sync: the other CTA has read, and so received, what was sent from this buffer.
    control_.other_empty[b].wait(ds_at_.parity() ^ 1);
    stage_rows(rows_of_warp(Config::kDsOffset), ds, warpgroup_ * 2);
    fence_async_proxy();
    __syncwarp();
    control_.ds_full[b].arrive_warp();  // Sync: this warp has written and fenced.
    ds_at_.advance();
    dout_at_.advance();
    ds_block_ = next_block(rows_, ds_block_);
  }

  // Starts dq = this quarter of dS^T K, over the keys of both CTAs.
  __device__ __forceinline__ void start_queries(QueryGradient& dq, uint32_t b) {
    start_across<kElement, Config::kKeys, Config::kQuarter>(
        dq, at(Config::kDsOffset + b * Config::kScoreBytes),
        at(Config::kKOffset + (rank_ * 2 + warpgroup_) * kChunkBytes),
        at(Config::kOtherDsOffset + b * Config::kScoreBytes),
        at(Config::kOtherKOffset + warpgroup_ * kChunkBytes));
  }

  // Adds half of a step's quarter of dQ to the sums in memory, the first half first. Whatever the
  // warp then wants of memory, shared memory too, waits until these are on their way.
  template <bool kFirst>
  __device__ __forceinline__ void add_queries(const QueryGradient& dq) {
    const int64_t block = sums_of_head_ + sum_block_;
    const int quarter = rank_ * 2 + warpgroup_;
    if (kFirst && args_.ordered) {
      tell_of_sums();
      // Sync: all tiles before this one have added.
      control_.turn[sum_at_.stage()].wait(sum_at_.parity());
      added_ = args_.room.arrivals + block * 4 + quarter;
    }
    float* sums = args_.room.sums + block * (kBackwardRows * Config::kHeadDim) +
                  (quarter * (Config::kQuarter / 8) * 128 + threadIdx.x % 128) * 4;
    constexpr int kHalfOfParts = Config::kQuarter / 16;
    constexpr int kBegin = kFirst ? 0 : kHalfOfParts;
#pragma unroll
    for (int i = kBegin; i < kBegin + kHalfOfParts; ++i) {
      add_to_memory(sums + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    if (kFirst) return;
    sum_at_.advance();
    sum_block_ = next_block(rows_, sum_block_);
    if (sum_block_ == start_) {
      sums_of_head_ += static_cast<int>(args_.room.num_rows / kBackwardRows);
    }
  }

  // In order: counts the sums that this warp added to last. That is left to the next step, when the
  // additions are through, or the fence would wait for them.
  __device__ __forceinline__ void tell_of_sums() {
    if (added_ == nullptr) return;
    __syncwarp();
    // Sync: this warp has added. The release is for all its lanes, which have met.
    if (threadIdx.x % 32 == 0) add_release(added_, 1);
  }

  __device__ __forceinline__ void store(const KeyGradient& dk, const KeyGradient& dv) {
    // V is used up: both warpgroups' last dP was complete before the last dS was.
    uint8_t* staged =
        shared_ + Config::kVOffset + half() + threadIdx.x % 128 / 32 * kRowsOfWarp * 128;
    const int column = warpgroup_ * Config::kHalf;
    store_gradient<kElement, Config::kHalf>(value_target(args_, tile_, warp_first_key()), column,
                                            dv, 1.f, staged, 64 * 128);
    store_gradient<kElement, Config::kHalf>(key_target(args_, tile_, warp_first_key()), column, dk,
                                            args_.softmax_scale, staged, 64 * 128);
  }

  // Keys past the sequence may belong to another one, or to nobody, and hold NaN, which
  // probability 0 does not stop.
  __device__ __forceinline__ void clear_keys() {
    if (args_.keys.cu_seqlens == nullptr && args_.keys.seqused == nullptr) return;
    if (tile_.num_keys >= tile_.first_key + 2 * Config::kKeys) return;
    const int used = max(0, tile_.num_keys - first_key_);
    const int other = max(0, tile_.num_keys - tile_.first_key - (1 - rank_) * Config::kKeys);
    clear_rows<Config::kKeys, Config::kChunks>(shared_ + Config::kKOffset, used, threadIdx.x,
                                               kThreads);
    clear_rows<Config::kKeys, Config::kChunks>(shared_ + Config::kVOffset, used, threadIdx.x,
                                               kThreads);
    clear_rows<Config::kKeys, Config::kChunks / 2>(shared_ + Config::kOtherKOffset, other,
                                                   threadIdx.x, kThreads);
    fence_async_proxy();
    named_barrier_sync(1 + Config::kConsumers, kThreads);  // Sync: both warpgroups are through.
  }

  // The same for queries; they have lse +inf and delta 0.
  __device__ __forceinline__ void clear_rows_behind(int offset, int block) {
    if (args_.rows.cu_seqlens == nullptr && args_.rows.seqused == nullptr) return;
    const int used = tile_.num_rows - block * kBackwardRows;
    if (used >= kBackwardRows) return;
    clear_rows<kBackwardRows, Config::kChunks>(shared_ + offset, used, threadIdx.x, kThreads);
    fence_async_proxy();
    named_barrier_sync(1 + Config::kConsumers, kThreads);  // Sync: as above.
  }

  // Descriptor of a tile, and the offset of this warpgroup's columns of a tile.
  __device__ __forceinline__ uint32_t at(int offset) const {
    uint32_t low = low_;
    asm volatile("" : "+r"(low));  // or descriptors of all tiles would be kept, and spilled
    return low + offset / 16;
  }
  __device__ __forceinline__ int half() const {
    return warpgroup_ * (Config::kChunks / 2) * kChunkBytes;
  }
  __device__ __forceinline__ Visibility visibility() const {
    return Visibility::of(uniform(tile_.num_rows), uniform(tile_.num_keys), args_.window_left,
                          args_.window_right);
  }
  __device__ __forceinline__ int warp_first_key() const {
    return first_key_ + threadIdx.x % 128 / 32 * kRowsOfWarp;
  }

  const BackwardArguments& args_;
  const KeyTile& tile_;
  PairControl& control_;
  uint8_t* shared_;
  int warpgroup_, rank_;
  int first_key_;     // of the CTA
  uint32_t low_;      // descriptor of the start of shared memory
  BlockRange clear_;  // blocks of queries that see all of the keys
  BlockRange rows_;   // that see one of the keys
  int start_;         // the first of them
  // Blocks of queries: of the scores, the dS and the sums that come next.
  int scores_block_, ds_block_, sum_block_;
  int sums_of_head_;          // where the blocks of that head begin in the room
  int32_t* added_ = nullptr;  // in order: the count of those added to last
  RingPosition<2> step_{0};
  RingPosition<2> q_at_{0};     // Q of the scores that come next
  RingPosition<2> ds_at_{0};    // buffer of the dS that comes next
  RingPosition<1> dout_at_{0};  // dO of the same
  RingPosition<2> sum_at_{0};   // step of the sums that come next
};

}  // namespace flashattn3
