// Backward consumer warpgroup of a 2-CTA cluster, 64 keys per CTA, for more than 128 columns. It
// computes S of its CTA's 64 keys and 32 queries of each step, and accumulates half of the columns
// of dK and dV, and a quarter of dQ's columns over the keys of both CTAs.
//
// Both warpgroups read P and dS (keys x queries) from shared memory; dS is also copied to the other
// CTA. Step i:
//   start dV += P(i) dO(i) and dK += dS(i) Q(i), compute P(i+1), start dQ(i), which needs the other
//   CTA's dS(i), start dP(i+1) when dO(i+1) has replaced dO(i), add dQ(i-1) to dq_accum, start
//   S(i+2), with Q(i+2) in the buffer of Q(i), compute dS(i+1).
#pragma once

#include "attention/block_list.cuh"
#include "backward/arguments.h"
#include "backward/cluster2/dq_adder.cuh"
#include "backward/cluster2/traits.cuh"
#include "backward/epilogue.cuh"
#include "backward/probabilities.cuh"
#include "backward/reduce_parts.cuh"
#include "backward/work_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/opaque.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"
#include "tile/gemm_mn.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::backward::cluster2 {

template <Config kConfig>
class Consumer {
  using Traits = KernelTraits<kConfig>;
  using Tile = typename Traits::Tile;
  static constexpr ElementType kElement = Traits::kElement;
  static constexpr int kThreads = 128 * Traits::kConsumers;
  static constexpr int kAtomStride = 64 * 128;
  static constexpr int kQueries = kBlockM / Traits::kConsumers;
  using Scores = float[kQueries / 2];
  using KeyGradient = float[Traits::kHalf / 2];
  using QueryGradient = float[Traits::kQuarter / 2];

 public:
  // warpgroup: 0 or 1, the same in all lanes of a warp.
  __device__ __forceinline__ Consumer(const Arguments& args, const Tile& tile, uint8_t* shared,
                                      int warpgroup, int rank)
      : args_(args),
        tile_(tile),
        storage_(*reinterpret_cast<typename Traits::Storage*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup),
        rank_(rank),
        first_key_(tile.first_key + rank * Traits::kBlockN),
        adder_(args, tile, storage_, warpgroup, rank) {
    low_ = smem_desc_low(cute::cast_smem_ptr_to_uint(shared), 64 * 128);
  }

  __device__ __forceinline__ void run() {
    const int num_blocks = uniform(tile_.m_blocks.end) - uniform(tile_.m_blocks.begin);
    KeyGradient dk, dv;
    if (num_blocks == 0) {
      if constexpr (Traits::kListed) {  // other parts of the heads may see the keys
#pragma unroll
        for (int i = 0; i < Traits::kHalf / 2; ++i) dk[i] = dv[i] = 0.f;
        reduce_and_store(dk, dv);
      } else if (warpgroup_ == 0) {
        store_zeros(key_target(args_, tile_, warp_first_key()));
      } else {
        store_zeros(value_target(args_, tile_, warp_first_key()));
      }
      return;
    }
    const int num_steps = num_blocks * args_.qhead_per_kvhead;
    full_blocks_ = full_positions();
    order_ = BlockOrder::uniform_of(tile_);
    scores_position_ = ds_position_ = uniform(tile_.start);
    adder_.begin(order_, scores_position_);
    // dQ of the previous step, copied out of WGMMA's accumulators: ptxas would serialize the GEMMs
    // of a step in which accumulators are read.
    QueryGradient finished;
    Scores s;
#pragma unroll
    for (int i = 0; i < Traits::kHalf / 2; ++i) dk[i] = dv[i] = 0.f;
    storage_.keys_full.wait(0);  // Sync: K, V and the other CTA's K are loaded.
    zero_fill_kv();
    begin(s, num_steps > 1);
    for (int i = 0; i + 2 < num_steps; ++i) step<2>(dk, dv, finished, s, i > 0);
    if (num_steps > 1) step<1>(dk, dv, finished, s, num_steps > 2);
    step<0>(dk, dv, finished, s, num_steps > 1);
    adder_.template add<true>(finished);
    adder_.template add<false>(finished);
    adder_.end();
    reduce_and_store(dk, dv);
  }

 private:
  // Positions of m_blocks that see all 64 keys of the CTA: of those past the end 2^(0 - lse) may be
  // infinite.
  __device__ __forceinline__ BlockRange full_positions() const {
    if constexpr (Traits::kListed) {
      const bool whole = first_key_ + Traits::kBlockN <= uniform(tile_.num_keys);
      return {0, whole ? uniform(tile_.blocks.num_full) : 0};
    } else {
      return full_m_blocks<kBlockM>(mask(), first_key_, first_key_ + Traits::kBlockN - 1);
    }
  }

  // Prologue: computes P and dS of the first step, and S of the second if there is one.
  __device__ __forceinline__ void begin(Scores& s, bool more) {
    Scores dp;
    uint32_t p[kQueries / 4];
    start_next_qk(s);
    Scores lse;
    load_lse(lse);
    const auto bits = load_bits();
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    make_probabilities(s, lse, bits, p);
    start_dp(dp);
    warpgroup_wait<0>();
    warpgroup_fence_operand(dp);
    store_ds(p, dp);
    if (!more) return;
    start_next_qk(s);
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
  }

  // kMore: number of steps that follow; 2: two or more. s: in: scores of the next step, out: of the
  // one after it. others: there was an earlier step. finished: in: dQ of the previous step, out: of
  // this step.
  template <int kMore>
  __device__ __forceinline__ void step(KeyGradient& dk, KeyGradient& dv, QueryGradient& finished,
                                       Scores& s, bool others) {
    const uint32_t b = step_.index();
    Scores lse;  // loaded before the GEMMs start: these loads are slow during WGMMA
    if constexpr (kMore > 0) load_lse(lse);
    const auto bits = load_bits<(kMore > 0)>();
    storage_.ds_full[b].wait(step_.phase());  // Sync: all eight warps have written P, dS.
    gemm_ss_mn_b<kElement, Traits::kHalf>(dv, at(Traits::kPOffset + b * Traits::kDsBytes),
                                          at(Traits::kDoutOffset + half()));
    gemm_ss_mn_b<kElement, Traits::kHalf>(dk, at(Traits::kDsOffset + b * Traits::kDsBytes),
                                          at(Traits::kQOffset + b * Traits::kMBlockBytes + half()));
    warpgroup_wait<1>();
    storage_.dout_empty.arrive_warp();  // Sync: this warp is done with dO.
    uint32_t p[kQueries / 4];
    if constexpr (kMore > 0) make_probabilities(s, lse, bits, p);
    QueryGradient dq;
    storage_.other_full[b].wait(step_.phase());  // Sync: the other CTA's dS has arrived.
    start_dq(dq, b);
    warpgroup_wait<1>();
    storage_.q_empty[b].arrive_warp();  // Sync: this warp is done with Q.
    if constexpr (kMore > 0) {
      Scores dp;
      if (others) adder_.template add<true>(finished);
      start_dp(dp);
      if (others) adder_.template add<false>(finished);
      if constexpr (kMore > 1) start_next_qk(s);
      warpgroup_wait<(kMore > 1)>();
      warpgroup_fence_operand(dp);
      store_ds(p, dp);
      if constexpr (kMore > 1) {
        warpgroup_wait<0>();
        warpgroup_fence_operand(s);
      }
    } else if (others) {
      adder_.template add<true>(finished);
      adder_.template add<false>(finished);
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(dv);
    warpgroup_fence_operand(dk);
    warpgroup_fence_operand(dq);
#pragma unroll
    for (int i = 0; i < Traits::kQuarter / 2; ++i) finished[i] = dq[i];
    warpgroup_fence_operand(finished);
    arrive_warp_at(storage_.other_empty[b], 1 - rank_);  // Sync: the peer's dS is read.
    step_.advance();
  }

  // Starts the QK GEMM of the step at q_at_.
  __device__ __forceinline__ void start_next_qk(Scores& s) {
    const uint32_t b = q_at_.index();
    storage_.q_full[b].wait(q_at_.phase());  // Sync: Q and lse are loaded.
    zero_fill_q_dout(Traits::kQOffset + b * Traits::kMBlockBytes,
                     tile_.m_blocks.block(scores_position_));
    gemm_ss<kElement, Traits::kBlockN, kQueries, Traits::kHeadDim, false, kBlockM>(
        s, at(Traits::kKOffset),
        at(Traits::kQOffset + b * Traits::kMBlockBytes + warpgroup_ * (kQueries * 128)));
    q_at_.advance();
    scores_position_ = order_.next(scores_position_);
  }

  // Loads lse of the step at ds_at_, whose S is complete.
  __device__ __forceinline__ void load_lse(Scores& lse) const {
    load_per_column(lse, storage_.lse[ds_at_.index()] + warpgroup_ * kQueries);
  }

  // The bits of the step at ds_at_ in this thread's rows; they are read unless full_blocks_ has it.
  template <bool kAny = true>
  __device__ __forceinline__ auto load_bits() const {
    if constexpr (kAny && Traits::kListed) {
      HalfBlockBits bits{};
      if (full_blocks_.has(ds_position_)) return bits;
      const int partial = ds_position_ - tile_.blocks.num_full;
      const int row = rank_ * 64 + thread_row(threadIdx.x % 128);
      if (partial >= 0) {
        const auto& lists = static_cast<const ListedArguments&>(args_).lists;
        bits.load(lists.tile(tile_.blocks.first_tile + partial), row, warpgroup_);
      } else {
        bits.fill_rows(tile_.num_keys - tile_.first_key - row);
      }
      return bits;
    } else {
      return NoBits{};
    }
  }

  // Computes P of the step at ds_at_ and stores it to a buffer that all warps have read: a warp
  // writes dS of the previous step after its GEMM with P of the step before that. p: P,
  // times the cap's derivative if there is a cap.
  template <class Bits>
  __device__ __forceinline__ void make_probabilities(Scores& s, const Scores& lse, const Bits& bits,
                                                     uint32_t (&p)[kQueries / 4]) {
    const int block = tile_.m_blocks.block(ds_position_);
    const auto term = term_of(block);
    exponentiate(s, lse, args_.score_scale, term);
    if (ds_position_ < full_blocks_.begin || ds_position_ >= full_blocks_.end) {
      if constexpr (Traits::kListed) {
        bits.hide(s, 0.f);
      } else {
        mask_probabilities<kQueries>(s, mask(), warp_first_key() + thread_row(threadIdx.x % 32),
                                     block * kBlockM + warpgroup_ * kQueries);
      }
    }
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) p[i] = pack<kElement>(s[2 * i], s[2 * i + 1]);
    stage_rows(rows_of_warp(Traits::kPOffset), p, warpgroup_ * 2);
    if (!args_.score_scale.caps()) return;
    // Apply the cap's derivative now: tanh cannot be recovered later from 16 bits of P.
    differentiate_cap(s, storage_.lse[ds_at_.index()] + warpgroup_ * kQueries, args_.score_scale,
                      term);
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) p[i] = pack<kElement>(s[2 * i], s[2 * i + 1]);
  }

  // The term of the step at ds_at_.
  __device__ __forceinline__ auto term_of(int block) const {
    if constexpr (kConfig.term == ScoreTerm::kSlopes) {
      const int row = block * kBlockM + warpgroup_ * kQueries;
      const int position = row + uniform(tile_.num_keys) - uniform(tile_.num_rows);
      return TransposedAlibi<kQueries>(storage_.slopes[ds_at_.index()], position, warp_first_key(),
                                       thread_column(threadIdx.x), args_.window.right > 0);
    } else {
      return NoTerm();
    }
  }

  // Starts the dP GEMM of the step at ds_at_.
  __device__ __forceinline__ void start_dp(Scores& dp) {
    storage_.dout_full.wait(dout_at_.phase());  // Sync: dO and delta are loaded.
    zero_fill_q_dout(Traits::kDoutOffset, tile_.m_blocks.block(ds_position_));
    gemm_ss<kElement, Traits::kBlockN, kQueries, Traits::kHeadDim, false, kBlockM>(
        dp, at(Traits::kVOffset), at(Traits::kDoutOffset + warpgroup_ * (kQueries * 128)));
  }

  // This warp's 16 keys in the P or dS buffer at ds_at_.
  __device__ __forceinline__ uint8_t* rows_of_warp(int offset) const {
    return shared_ + offset + ds_at_.index() * Traits::kDsBytes +
           threadIdx.x % 128 / 32 * kRowsOfWarp * 128;
  }

  // Computes dS of the step at ds_at_ and stores it to shared memory.
  __device__ __forceinline__ void store_ds(const uint32_t (&packed)[kQueries / 4],
                                           const Scores& dp) {
    constexpr float kUnit = unit_of_probabilities(kConfig);
    Scores p;
#pragma unroll
    for (int i = 0; i < kQueries / 4; ++i) {
      const float2 pair = unpack<kElement>(packed[i]);
      p[2 * i] = pair.x * kUnit, p[2 * i + 1] = pair.y * kUnit;
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
    // Sync: the other CTA has read, and so received, the dS sent from this buffer.
    storage_.other_empty[b].wait(ds_at_.phase() ^ 1);
    stage_rows(rows_of_warp(Traits::kDsOffset), ds, warpgroup_ * 2);
    fence_async_proxy();
    __syncwarp();
    storage_.ds_full[b].arrive_warp();  // Sync: this warp has written and fenced.
    ds_at_.advance();
    dout_at_.advance();
    ds_position_ = order_.next(ds_position_);
  }

  // Starts dq = this quarter of dS^T K, over the keys of both CTAs.
  __device__ __forceinline__ void start_dq(QueryGradient& dq, uint32_t b) {
    gemm_ss_mn_ab<kElement, Traits::kBlockN, Traits::kQuarter>(
        dq, at(Traits::kDsOffset + b * Traits::kDsBytes),
        at(Traits::kKOffset + (rank_ * 2 + warpgroup_) * kAtomStride),
        at(Traits::kOtherDsOffset + b * Traits::kDsBytes),
        at(Traits::kOtherKOffset + warpgroup_ * kAtomStride));
  }

  __device__ __forceinline__ void reduce_and_store(KeyGradient& dk, KeyGradient& dv) const {
    const int warp = rank_ * 4 * Traits::kConsumers + threadIdx.x / 32;
    if (!reduce_parts<kConfig>(args_, tile_, warp, dk, dv)) return;
    // V's buffer is free: both warpgroups' last dP was complete before the last dS was.
    uint8_t* staged =
        shared_ + Traits::kVOffset + half() + threadIdx.x % 128 / 32 * kRowsOfWarp * 128;
    const int column = warpgroup_ * Traits::kHalf;
    store_gradient<kElement, Traits::kHalf>(value_target(args_, tile_, warp_first_key()), column,
                                            dv, unit_of_probabilities(kConfig), staged, 64 * 128);
    store_gradient<kElement, Traits::kHalf>(key_target(args_, tile_, warp_first_key()), column, dk,
                                            args_.softmax_scale, staged, 64 * 128);
  }

  // Zero fill past the end of the sequence of keys: those tokens may belong to another sequence or
  // to none and hold NaN, and 0 * NaN is NaN.
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
    named_barrier_sync(1 + Traits::kConsumers, kThreads);  // Sync: both warpgroups have filled.
  }

  // The same for queries; rows past the end have lse +inf and delta 0.
  __device__ __forceinline__ void zero_fill_q_dout(int offset, int block) {
    if (args_.seqlens_q.cu_seqlens == nullptr && args_.seqlens_q.seqused == nullptr) return;
    const int used = tile_.num_rows - block * kBlockM;
    if (used >= kBlockM) return;
    zero_fill_rows<kBlockM, Traits::kAtoms>(shared_ + offset, used, threadIdx.x, kThreads);
    fence_async_proxy();
    named_barrier_sync(1 + Traits::kConsumers, kThreads);  // Sync: as above.
  }

  // at: smem matrix descriptor of a tile. half: byte offset of this warpgroup's columns of a tile.
  __device__ __forceinline__ uint32_t at(int offset) const {
    uint32_t low = low_;
    make_opaque(low);  // or ptxas would keep all tiles' descriptors, and spill
    return low + offset / 16;
  }
  __device__ __forceinline__ int half() const {
    return warpgroup_ * (Traits::kAtoms / 2) * kAtomStride;
  }
  __device__ __forceinline__ Mask mask() const {
    // A copy of the window: with a reference ptxas adds in another order.
    return Mask::of(uniform(tile_.num_rows), uniform(tile_.num_keys),
                    {args_.window.left, args_.window.right});
  }
  __device__ __forceinline__ int warp_first_key() const {
    return first_key_ + threadIdx.x % 128 / 32 * kRowsOfWarp;
  }

  const Arguments& args_;
  const Tile& tile_;
  typename Traits::Storage& storage_;
  uint8_t* shared_;
  int warpgroup_, rank_;
  int first_key_;           // of the CTA
  uint32_t low_;            // descriptor of the start of shared memory
  BlockRange full_blocks_;  // positions of m_blocks that see all of the CTA's keys
  BlockOrder order_;
  int scores_position_, ds_position_;  // of the m_blocks of the next S and of the next dS
  DqAdder<Traits> adder_;
  PipelineState<2> step_{0};
  PipelineState<2> q_at_{0};     // Q of the next S
  PipelineState<2> ds_at_{0};    // buffer of the next dS
  PipelineState<1> dout_at_{0};  // dO of the next dS
};

}  // namespace flashattn3::backward::cluster2
