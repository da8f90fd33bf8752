// Backward consumer warpgroup: computes dK and dV of 64 keys, and dQ in turn with the others.
//
// S and P are transposed (keys x queries): the accumulators of P^T and dS^T then have the register
// layout of WGMMA's A operand in the dV and dK GEMMs. step.cuh and wide_step.cuh have what happens
// in a step. A step has few instructions, since they take issue slots from the GEMMs: one counter
// of steps gives all stages and buffers, and values that ptxas would compute anew in every step are
// hidden from it. The warpgroups share the stages of Q and dO but are not in lockstep: they may be
// one step apart, so that the tensor cores work for one warpgroup while another computes P and dS.
#pragma once

#include <type_traits>

#include "backward/epilogue.cuh"
#include "backward/reduce_parts.cuh"
#include "backward/step.cuh"
#include "backward/wide_step.cuh"

namespace flashattn3::backward {

template <Config kConfig>
using ConsumerStep = std::conditional_t<(kConfig.head_dim > 128), WideStep<kConfig>, Step<kConfig>>;

template <Config kConfig>
class Consumer : ConsumerStep<kConfig> {
  using Base = ConsumerStep<kConfig>;
  using Base::args_, Base::storage_, Base::shared_, Base::warpgroup_;
  using Base::kElement, Base::kHeadDim, Base::kHeadDimV;
  using Base::tile, Base::tile_mask, Base::warp_first_key;
  using Base::tile_, Base::kv_phase_, Base::partial_block_, Base::step_, Base::turn_;
  using typename Base::KeyGradient;
  using typename Base::Traits;
  using typename Base::ValueGradient;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    while (true) {
      // Sync: the producer has written the tile, which stays valid until all arrive at tile_empty.
      storage_.tile_full[tile_.index()].wait(tile_.phase());
      if (uniform(tile().first_key) < 0) break;
      if (uniform(tile().m_blocks.begin) == uniform(tile().m_blocks.end)) {
        if constexpr (Traits::kListed) {
          attend_nothing();
        } else {
          store_zeros(key_target(args_, tile(), warp_first_key()));
          store_zeros(value_target(args_, tile(), warp_first_key()));
        }
      } else {
        attend();
      }
      storage_.tile_empty[tile_.index()].arrive();  // Sync: this thread no longer reads the tile.
      tile_.advance();
    }
    // Shared memory must outlive the copies of the last step's gradient of the bias.
    if (Traits::kBias && threadIdx.x % 32 == 0) wait_for_stores();
  }

 private:
  __device__ __forceinline__ void attend() {
    WorkTileBlocks steps(args_, tile());
    const int first_key = uniform(tile().first_key) + 64 * warpgroup_;
    const int last_key = min(first_key + 63, uniform(tile().num_keys) - 1);
    const int num_rows = uniform(tile().num_rows);
    const BlockRange seen = m_blocks_of<kBlockM>(tile_mask(), num_rows, first_key, last_key);
    const BlockRange full_blocks = full_positions(first_key);
    KeyGradient dk;
    ValueGradient dv;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.f;
    storage_.k_full.wait(kv_phase_);  // Sync: K and V are loaded.
    storage_.v_full.wait(kv_phase_);
    kv_phase_ ^= 1;
    this->zero_fill_kv();
    // A dense batch has no rows to zero: TMA fills past the tensor with zeros.
    const bool varlen = args_.seqlens_q.cu_seqlens != nullptr || args_.seqlens_q.seqused != nullptr;
    const int count = steps.count();
    partial_block_ = varlen ? num_rows / kBlockM : -1;
    for (int i = 0; i < count; ++i, steps.advance()) {
      const int position = steps.position();
      this->wait_for_q_dout(position);
      if (!Traits::kSkipsSteps || contains(seen, position)) {
        this->step(dk, dv, position, full_blocks, i > 0);
      } else if constexpr (Traits::kSkipsSteps) {
        this->skip_step();
      }
      ++step_;
      --turn_;
    }
    this->end_dq();  // of the last step
    __syncwarp();
    storage_.k_empty.arrive_warp();  // Sync: this warp is done with K.
    // Sync: all four warps have read their keys of V, which dV and dK are staged over.
    named_barrier_sync(1 + warpgroup_, 128);
    if (reduce_parts<kConfig>(args_, tile(), threadIdx.x / 32, dk, dv)) store(dk, dv);
    storage_.v_empty.arrive();  // Sync: this thread is done with V's buffer.
  }

  // Positions of m_blocks that see all 64 keys of this warpgroup.
  __device__ __forceinline__ BlockRange full_positions(int first_key) const {
    if constexpr (Traits::kListed) {
      const bool whole = first_key + 63 < uniform(tile().num_keys);
      return {0, whole ? uniform(tile().blocks.num_full) : 0};
    } else {
      return full_m_blocks<kBlockM>(tile_mask(), first_key, first_key + 63);
    }
  }

  // For keys that no query sees, of this part of the heads if their lists differ: then it adds
  // zeros to the sums of the others. V's buffer belongs to the next tile.
  __device__ __forceinline__ void attend_nothing() {
    KeyGradient dk = {};
    ValueGradient dv = {};
    if (!reduce_parts<kConfig>(args_, tile(), threadIdx.x / 32, dk, dv)) return;
    store_unstaged<kElement>(value_target(args_, tile(), warp_first_key()), dv,
                             unit_of_probabilities(kConfig));
    store_unstaged<kElement>(key_target(args_, tile(), warp_first_key()), dk, args_.softmax_scale);
  }

  // Stores them over this warp's keys of V.
  __device__ __forceinline__ void store(const KeyGradient& dk, const ValueGradient& dv) {
    uint8_t* staged = shared_ + Traits::kVOffset + threadIdx.x / 32 * kRowsOfWarp * 128;
    constexpr int kOtherColumns = kHeadDim - kHeadDimV;
    store_gradient<kElement, kHeadDimV>(value_target(args_, tile(), warp_first_key()), 0, dv,
                                        unit_of_probabilities(kConfig), staged,
                                        Traits::kBlockN * 128);
    store_gradient<kElement, kHeadDimV>(key_target(args_, tile(), warp_first_key()), 0,
                                        reinterpret_cast<const ValueGradient&>(dk),
                                        args_.softmax_scale, staged, Traits::kBlockN * 128);
    if constexpr (kOtherColumns > 0) {
      store_gradient<kElement, kOtherColumns>(
          key_target(args_, tile(), warp_first_key()), kHeadDimV,
          reinterpret_cast<const float (&)[kOtherColumns / 2]>(dk[kHeadDimV / 2]),
          args_.softmax_scale, staged, Traits::kBlockN * 128);
    }
  }
};

}  // namespace flashattn3::backward
