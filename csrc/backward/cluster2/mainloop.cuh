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

#include "attention/mask.cuh"
#include "backward/arguments.h"
#include "backward/cluster2/traits.cuh"
#include "backward/dq_semaphore.cuh"
#include "backward/epilogue.cuh"
#include "backward/probabilities.cuh"
#include "backward/work_tile.cuh"
#include "ptx/cluster.cuh"
#include "tile/gemm.cuh"
#include "tile/zero_fill.cuh"

namespace flashattn3::backward::cluster2 {

template <Config kConfig>
class Consumer {
  using Traits = KernelTraits<kConfig>;
  static constexpr ElementType kElement = Traits::kElement;
  static constexpr int kThreads = 128 * Traits::kConsumers;
  static constexpr int kAtomStride = 64 * 128;
  static constexpr int kQueries = kBlockM / Traits::kConsumers;
  using Scores = float[kQueries / 2];
  using KeyGradient = float[Traits::kHalf / 2];
  using QueryGradient = float[Traits::kQuarter / 2];

 public:
  // warpgroup: 0 or 1, the same in all lanes of a warp.
  __device__ __forceinline__ Consumer(const Arguments& args, const WorkTile& tile, uint8_t* shared,
                                      int warpgroup, int rank)
      : args_(args),
        tile_(tile),
        storage_(*reinterpret_cast<SharedStorage*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup),
        rank_(rank),
        first_key_(tile.first_key + rank * Traits::kBlockN) {
    low_ = smem_desc_low(cute::cast_smem_ptr_to_uint(shared), 64 * 128);
  }

  __device__ __forceinline__ void run() {
    rows_ = {uniform(tile_.m_blocks.begin), uniform(tile_.m_blocks.end)};
    if (rows_.begin == rows_.end) {
      if (warpgroup_ == 0) {
        store_zeros(key_target(args_, tile_, warp_first_key()));
      } else {
        store_zeros(value_target(args_, tile_, warp_first_key()));
      }
      return;
    }
    const int num_steps = (rows_.end - rows_.begin) * args_.qhead_per_kvhead;
    full_blocks_ =
        mask().template full_m_blocks<kBlockM>(first_key_, first_key_ + Traits::kBlockN - 1);
    scores_block_ = ds_block_ = dq_block_ = start_ = uniform(tile_.start);
    dq_accum_of_head_ = uniform(static_cast<int>(
        args_.workspace.first(args_.seqlens_q, tile_.batch_idx, tile_.head * args_.qhead_per_kvhead,
                              args_.num_heads_q, tile_.row_offset) /
        kBlockM));
    KeyGradient dk, dv;
    // dQ of the step before, out of the way of WGMMA: ptxas would serialize the products of a step
    // in which accumulators are read.
    QueryGradient finished;
    Scores s;
#pragma unroll
    for (int i = 0; i < Traits::kHalf / 2; ++i) dk[i] = dv[i] = 0.f;
    storage_.keys_full.wait(0);  // Sync: K, V and the other K are there.
    zero_fill_kv();
    begin(s, num_steps > 1);
    for (int i = 0; i + 2 < num_steps; ++i) step<2>(dk, dv, finished, s, i > 0);
    if (num_steps > 1) step<1>(dk, dv, finished, s, num_steps > 2);
    step<0>(dk, dv, finished, s, num_steps > 1);
    add_dq<true>(finished);
    add_dq<false>(finished);
    release_dq_semaphore();
    store(dk, dv);
  }

 private:
  // P and dS of the first step, and the scores of the second if there is one.
  __device__ __forceinline__ void begin(Scores& s, bool more) {
    Scores dp;
    uint32_t p[kQueries / 4];
    start_next_qk(s);
    Scores lse;
    load_lse(lse);
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    make_probabilities(s, lse, p);
    start_dp(dp);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    store_ds(p, dp);
    if (!more) return;
    start_next_qk(s);
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
  }

  // kMore: how many steps follow, of which 2 stands for all numbers above. s: scores of the step
  // that follows, then of the one behind it. others: a step came before, whose dQ is `finished`.
  // Afterwards that is this step's.
  template <int kMore>
  __device__ __forceinline__ void step(KeyGradient& dk, KeyGradient& dv, QueryGradient& finished,
                                       Scores& s, bool others) {
    const uint32_t b = step_.index();
    Scores lse;  // loaded before products, beside which these loads crawl
    if constexpr (kMore > 0) load_lse(lse);
    storage_.ds_full[b].wait(step_.phase());  // Sync: P and dS of all eight warps are there.
    gemm_ss_mn_b<kElement, Traits::kHalf>(dv, at(Traits::kPOffset + b * Traits::kDsBytes),
                                          at(Traits::kDoutOffset + half()));
    gemm_ss_mn_b<kElement, Traits::kHalf>(dk, at(Traits::kDsOffset + b * Traits::kDsBytes),
                                          at(Traits::kQOffset + b * Traits::kMBlockBytes + half()));
    warpgroup_wait<1>();
    storage_.dout_empty.arrive_warp();  // Sync: this warp is done with dO.
    uint32_t p[kQueries / 4];
    if constexpr (kMore > 0) make_probabilities(s, lse, p);
    QueryGradient dq;
    storage_.other_full[b].wait(step_.phase());  // Sync: the other CTA's dS is there.
    start_dq(dq, b);
    warpgroup_wait<1>();
    storage_.q_empty[b].arrive_warp();  // Sync: this warp is done with Q.
    if constexpr (kMore > 0) {
      Scores dp;
      if (others) add_dq<true>(finished);
      start_dp(dp);
      if (others) add_dq<false>(finished);
      if constexpr (kMore > 1) start_next_qk(s);
      warpgroup_wait<(kMore > 1)>();
      warpgroup_fence_operand(dp);
      store_ds(p, dp);
      if constexpr (kMore > 1) {
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
      }
    } else if (others) {
      add_dq<true>(finished);
      add_dq<false>(finished);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dq);
#pragma unroll
    for (int i = 0; i < Traits::kQuarter / 2; ++i) finished[i] = dq[i];
    warpgroup_fence_operand(finished);
    arrive_warp_at(storage_.other_empty[b], 1 - rank_);  // Sync: it has read what it was sent.
    step_.advance();
  }

  // S of the step whose Q is next.
  __device__ __forceinline__ void start_next_qk(Scores& s) {
    const uint32_t b = q_at_.index();
    storage_.q_full[b].wait(q_at_.phase());  // Sync: Q and lse are there.
    zero_fill_q_dout(Traits::kQOffset + b * Traits::kMBlockBytes, scores_block_);
    gemm_ss<kElement, Traits::kBlockN, kQueries, Traits::kHeadDim, false, kBlockM>(
        s, at(Traits::kKOffset),
        at(Traits::kQOffset + b * Traits::kMBlockBytes + warpgroup_ * (kQueries * 128)));
    q_at_.advance();
    scores_block_ = next_block(rows_, scores_block_);
  }

  // Of the step whose dS is next, and whose scores are there.
  __device__ __forceinline__ void load_lse(Scores& lse) const {
    load_per_column(lse, storage_.lse[ds_at_.index()] + warpgroup_ * kQueries);
  }

  // Of the step whose dS is next; laid down too, in a buffer that all have read: who wrote dS of
  // the step before had multiplied P of the one before that. p: with a cap times its derivative.
  __device__ __forceinline__ void make_probabilities(Scores& s, const Scores& lse,
                                                     uint32_t (&p)[kQueries / 4]) {
    exponentiate(s, lse, args_.score_scale, args_.tanh_scale);
    const int block = ds_block_;
    if (block < full_blocks_.begin || block >= full_blocks_.end) {
      mask_probabilities<kQueries>(s, mask(), warp_first_key() + threadIdx.x % 32 / 4,
                                   block * kBlockM + warpgroup_ * kQueries);
    }
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) p[i] = pack<kElement>(s[2 * i], s[2 * i + 1]);
    stage_rows(rows_of_warp(Traits::kPOffset), p, warpgroup_ * 2);
    if (args_.tanh_scale == 0.f) return;
    // P as dS wants it. From 16 bits of P, later, tanh could not be found again.
    differentiate_cap(s, storage_.lse[ds_at_.index()] + warpgroup_ * kQueries, args_.score_scale,
                      args_.tanh_scale);
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) p[i] = pack<kElement>(s[2 * i], s[2 * i + 1]);
  }

  // Of the step whose dS is next.
  __device__ __forceinline__ void start_dp(Scores& dp) {
    storage_.dout_full.wait(dout_at_.phase());  // Sync: dO and delta are there.
    zero_fill_q_dout(Traits::kDoutOffset, ds_block_);
    gemm_ss<kElement, Traits::kBlockN, kQueries, Traits::kHeadDim, false, kBlockM>(
        dp, at(Traits::kVOffset), at(Traits::kDoutOffset + warpgroup_ * (kQueries * 128)));
  }

  // This warp's 16 keys of the P or dS that comes next.
  __device__ __forceinline__ uint8_t* rows_of_warp(int offset) const {
    return shared_ + offset + ds_at_.index() * Traits::kDsBytes +
           threadIdx.x % 128 / 32 * kRowsOfWarp * 128;
  }

  // dS of the next step.
  __device__ __forceinline__ void store_ds(const uint32_t (&packed)[kQueries / 4],
                                           const Scores& dp) {
    Scores p;
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) {
      const float2 pair = unpack<kElement>(packed[i]);
      p[2 * i] = pair.x, p[2 * i + 1] = pair.y;
    }
    const uint32_t b = ds_at_.index();
    Scores minus_delta;
    load_per_column(minus_delta, storage_.minus_delta + warpgroup_ * kQueries);
    uint32_t ds[kQueries / 4];
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) {
      ds[i] = pack<kElement>(p[2 * i] * (dp[2 * i] + minus_delta[2 * i]),
                             p[2 * i + 1] * (dp[2 * i + 1] + minus_delta[2 * i + 1]));
    }
    // Sync: the other CTA has read, and so received, what was sent from this buffer.
    storage_.other_empty[b].wait(ds_at_.phase() ^ 1);
    stage_rows(rows_of_warp(Traits::kDsOffset), ds, warpgroup_ * 2);
    fence_async_proxy();
    __syncwarp();
    storage_.ds_full[b].arrive_warp();  // Sync: this warp has written and fenced.
    ds_at_.advance();
    dout_at_.advance();
    ds_block_ = next_block(rows_, ds_block_);
  }

  // Starts dq = this quarter of dS^T K, over the keys of both CTAs.
  __device__ __forceinline__ void start_dq(QueryGradient& dq, uint32_t b) {
    gemm_ss_mn_ab<kElement, Traits::kBlockN, Traits::kQuarter>(
        dq, at(Traits::kDsOffset + b * Traits::kDsBytes),
        at(Traits::kKOffset + (rank_ * 2 + warpgroup_) * kAtomStride),
        at(Traits::kOtherDsOffset + b * Traits::kDsBytes),
        at(Traits::kOtherKOffset + warpgroup_ * kAtomStride));
  }

  // Adds half of a step's quarter of dQ to the sums in memory, the first half first. Whatever the
  // warp then wants of memory, shared memory too, waits until these are on their way.
  template <bool kFirst>
  __device__ __forceinline__ void add_dq(const QueryGradient& dq) {
    const int64_t block = dq_accum_of_head_ + dq_block_;
    const int quarter = rank_ * 2 + warpgroup_;
    if (kFirst && args_.deterministic) {
      release_dq_semaphore();
      // Sync: all tiles before this one have added.
      storage_.dq_ready[dq_at_.index()].wait(dq_at_.phase());
      semaphore_ = args_.workspace.dq_semaphore + block * 4 + quarter;
    }
    float* dq_accum = args_.workspace.dq_accum + block * (kBlockM * Traits::kHeadDim) +
                      (quarter * (Traits::kQuarter / 8) * 128 + threadIdx.x % 128) * 4;
    constexpr int kHalfOfParts = Traits::kQuarter / 16;
    constexpr int kBegin = kFirst ? 0 : kHalfOfParts;
#pragma unroll
    for (int i = kBegin; i < kBegin + kHalfOfParts; ++i) {
      add_to_memory(dq_accum + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    }
    if (kFirst) return;
    dq_at_.advance();
    dq_block_ = next_block(rows_, dq_block_);
    if (dq_block_ == start_) {
      dq_accum_of_head_ += static_cast<int>(args_.workspace.num_rows / kBlockM);
    }
  }

  // In order: counts the sums that this warp added to last. That is left to the next step, when the
  // additions are through, or the fence would wait for them.
  __device__ __forceinline__ void release_dq_semaphore() {
    if (semaphore_ == nullptr) return;
    __syncwarp();
    // Sync: this warp has added. The release is for all its lanes, which have met.
    if (threadIdx.x % 32 == 0) add_release(semaphore_, 1);
  }

  __device__ __forceinline__ void store(const KeyGradient& dk, const KeyGradient& dv) {
    // V is used up: both warpgroups' last dP was complete before the last dS was.
    uint8_t* staged =
        shared_ + Traits::kVOffset + half() + threadIdx.x % 128 / 32 * kRowsOfWarp * 128;
    const int column = warpgroup_ * Traits::kHalf;
    store_gradient<kElement, Traits::kHalf>(value_target(args_, tile_, warp_first_key()), column,
                                            dv, 1.f, staged, 64 * 128);
    store_gradient<kElement, Traits::kHalf>(key_target(args_, tile_, warp_first_key()), column, dk,
                                            args_.softmax_scale, staged, 64 * 128);
  }

  // Keys past the sequence may belong to another one, or to nobody, and hold NaN, which
  // probability 0 does not stop.
  __device__ __forceinline__ void zero_fill_kv() {
    if (args_.seqlens_k.cu_seqlens == nullptr && args_.seqlens_k.seqused == nullptr) return;
    if (tile_.num_keys >= tile_.first_key + 2 * Traits::kBlockN) return;
    const int used = max(0, tile_.num_keys - first_key_);
    const int other = max(0, tile_.num_keys - tile_.first_key - (1 - rank_) * Traits::kBlockN);
    zero_fill_rows<Traits::kBlockN, Traits::kAtoms>(shared_ + Traits::kKOffset, used, threadIdx.x,
                                                    kThreads);
    zero_fill_rows<Traits::kBlockN, Traits::kAtoms>(shared_ + Traits::kVOffset, used, threadIdx.x,
                                                    kThreads);
    zero_fill_rows<Traits::kBlockN, Traits::kAtoms / 2>(shared_ + Traits::kOtherKOffset, other,
                                                        threadIdx.x, kThreads);
    fence_async_proxy();
    named_barrier_sync(1 + Traits::kConsumers, kThreads);  // Sync: both warpgroups are through.
  }

  // The same for queries; they have lse +inf and delta 0.
  __device__ __forceinline__ void zero_fill_q_dout(int offset, int block) {
    if (args_.seqlens_q.cu_seqlens == nullptr && args_.seqlens_q.seqused == nullptr) return;
    const int used = tile_.num_rows - block * kBlockM;
    if (used >= kBlockM) return;
    zero_fill_rows<kBlockM, Traits::kAtoms>(shared_ + offset, used, threadIdx.x, kThreads);
    fence_async_proxy();
    named_barrier_sync(1 + Traits::kConsumers, kThreads);  // Sync: as above.
  }

  // Descriptor of a tile, and the offset of this warpgroup's columns of a tile.
  __device__ __forceinline__ uint32_t at(int offset) const {
    uint32_t low = low_;
    asm volatile("" : "+r"(low));  // or descriptors of all tiles would be kept, and spilled
    return low + offset / 16;
  }
  __device__ __forceinline__ int half() const {
    return warpgroup_ * (Traits::kAtoms / 2) * kAtomStride;
  }
  __device__ __forceinline__ Mask mask() const {
    return Mask::of(uniform(tile_.num_rows), uniform(tile_.num_keys), args_.window_left,
                    args_.window_right);
  }
  __device__ __forceinline__ int warp_first_key() const {
    return first_key_ + threadIdx.x % 128 / 32 * kRowsOfWarp;
  }

  const Arguments& args_;
  const WorkTile& tile_;
  SharedStorage& storage_;
  uint8_t* shared_;
  int warpgroup_, rank_;
  int first_key_;           // of the CTA
  uint32_t low_;            // descriptor of the start of shared memory
  BlockRange full_blocks_;  // blocks of queries that see all of the keys
  BlockRange rows_;         // that see one of the keys
  int start_;               // the first of them
  // Blocks of queries: of the scores, the dS and the sums that come next.
  int scores_block_, ds_block_, dq_block_;
  int dq_accum_of_head_;          // where the blocks of that head begin in the room
  int32_t* semaphore_ = nullptr;  // in order: the count of those added to last
  PipelineState<2> step_{0};
  PipelineState<2> q_at_{0};     // Q of the scores that come next
  PipelineState<2> ds_at_{0};    // buffer of the dS that comes next
  PipelineState<1> dout_at_{0};  // dO of the same
  PipelineState<2> dq_at_{0};    // step of the sums that come next
};

}  // namespace flashattn3::backward::cluster2
