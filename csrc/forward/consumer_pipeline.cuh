// Base of both main loops: the consumer side of the Q, K, V and work tile pipelines. It waits for
// stages, starts the GEMMs on them and releases them. A warpgroup owns 64 query rows of each work
// tile. traits.cuh lists the barriers and their arrivals.
#pragma once

#include <type_traits>

#include "attention/mask.cuh"
#include "attention/score_scale.cuh"
#include "attention/softmax.cuh"
#include "attention/softmax_e4m3.cuh"
#include "forward/arguments.h"
#include "forward/epilogue.cuh"
#include "forward/traits.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"
#include "tile/gemm_int8.cuh"
#include "tile/row_sum_columns.cuh"

namespace flashattn3::forward {

template <Config kConfig>
class ConsumerPipeline {
 protected:
  using Traits = KernelTraits<kConfig>;
  static constexpr ElementType kElement = Traits::kElement;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kStages = Traits::kStages;
  static constexpr bool kInteger = Traits::kInteger;
  using Scores = ScoreAccumulator<kElement>[kBlockN / 2];
  using Out = float[Traits::kOutRegisters];
  using Probabilities = flashattn3::Probabilities<value_type(kElement), kBlockN>;

  // warpgroup: 0 to kConsumers - 1, the same in all lanes of a warp.
  __device__ __forceinline__ ConsumerPipeline(const Arguments& args, uint8_t* shared, int warpgroup)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup) {
    constexpr int kVAtomStride = Traits::kQuantized ? kCoreBytes : kBlockN * 128;
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
    q_base_ = smem_desc_low(base, 16) + (Traits::kQOffset + warpgroup * 64 * 128) / 16;
    k_base_ = smem_desc_low(base, 16) + Traits::kKOffset / 16;
    v_base_ = smem_desc_low(base, kVAtomStride) + Traits::kVOffset / 16;
    start_ = cute::cast_smem_ptr_to_uint(storage_.bias_tile);
  }

  // This warpgroup's share of a work tile.
  struct Work {
    BlockRange blocks;  // blocks with a visible key for one of its rows; the last one comes first
    int above, below;   // blocks loaded before and after them, for other warpgroups only
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

  // Returns the next work with keys and stores zeros for work tiles without; empty: none is left.
  __device__ __forceinline__ Work get_next_work() {
    release_staged_q();
    while (true) {
      // Sync: the producer has written the WorkTile. It stays valid until this warp has stored the
      // tile; reading it from shared memory where needed costs no registers in the main loop.
      storage_.tile_full[tile_.index()].wait(tile_.phase());
      const Work work = work_of(tile());
      if (work.any() || uniform(tile().first_row) < 0) return work;
      if (work.above > 0) {  // else the producer loads nothing for this tile, not even Q
        // Sync: Q is loaded. Without this wait the warp could arrive twice in one phase of q_empty.
        storage_.q_full[q_.index()].wait(q_.phase());
        release_q();
        q_.advance();
        skip_n_blocks(work.above);
      }
      store_nothing(args_, tile(), warp_first_row());
      release_tile();
    }
  }

  // This warp's staging buffer for rows of out, in kernel configs that do not stage them over Q.
  __device__ __forceinline__ uint8_t* staged_out() const {
    return shared_ + Traits::kOutOffset +
           threadIdx.x / 32 * (Traits::kOutAtoms * kRowsOfWarp * 128);
  }

  // Releases the Q buffer at q_.
  __device__ __forceinline__ void release_q() {
    __syncwarp();
    storage_.q_empty[q_.index()].arrive_warp();  // Sync: this warp's QK GEMMs are all complete.
  }

  // Waits until the copies of the rows stored last have read shared memory, and releases the Q
  // buffer under them, if any; q_ is already at the next tile's Q.
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
    storage_.tile_empty[tile_.index()].arrive();  // Sync: this thread has finished reading it.
    tile_.advance();
  }

  // Skips work.above K tiles and starts the first QK GEMM. at: stage of the work tile's first K.
  __device__ __forceinline__ void start_first_qk(Scores& s, const Work& work,
                                                 PipelineState<kStages> at) {
    storage_.q_full[q_.index()].wait(q_.phase());  // Sync: Q is loaded.
    for (int i = 0; i < work.above; ++i) {
      storage_.k_full[at.index()].wait(at.phase());
      __syncwarp();
      storage_.k_empty[at.index()].arrive_lanes();
      at.advance();
    }
    storage_.k_full[at.index()].wait(at.phase());  // Sync: the first K is loaded.
    gemm_qk(s, at);
  }

  // Releases a K stage and its descales.
  __device__ __forceinline__ void release_k(PipelineState<kStages> at) {
    __syncwarp();
    storage_.k_empty[at.index()].arrive_lanes();  // Sync: every lane has read the descales.
  }

  // Starts S = Q K^T with the K at kv, which is loaded, and O += P V of the block before.
  __device__ __forceinline__ void start_gemms(Scores& s, Out& o, const Probabilities& p,
                                              PipelineState<kStages> kv) {
    gemm_qk(s, kv);
    storage_.v_full[kv_.index()].wait(kv_.phase());  // Sync: V of the block before is loaded.
    gemm_pv(o, p, kv_);
  }

  static __device__ __forceinline__ void rescale(Out& o, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] *= factor[row_of(i)];
  }

  __device__ __forceinline__ void gemm_qk(Scores& s, PipelineState<kStages> at) {
    const uint32_t q = q_base_ + q_.index() * (Traits::kQBytes / 16);
    const uint32_t k = k_base_ + at.index() * (Traits::kKBytes / 16);
    if constexpr (kInteger) {
      gemm_ss_int8<Traits::kBlockM, kBlockN, kHeadDim>(s, q, k, start_);
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

  // Skips V tiles that only other warpgroups need; their K tiles are already skipped.
  __device__ __forceinline__ void skip_v(int count) {
    for (int i = 0; i < count; ++i) {
      storage_.v_full[kv_.index()].wait(kv_.phase());
      __syncwarp();
      storage_.v_empty[kv_.index()].arrive_warp();
      kv_.advance();
    }
  }

  // Skips K and V tiles that only other warpgroups need.
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
    const int row = warp_first_row() + thread_row(threadIdx.x % 32);
    mask_scores<kBlockN, Traits::kMasked>(s, tile_mask(tile().num_rows, tile().num_keys), row,
                                          block * kBlockN);
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  int warpgroup_;
  uint32_t q_base_, k_base_, v_base_, start_;
  bool staged_ = false;  // rows of out are staged over the Q buffer before q_
  PipelineState<2> tile_{0};
  PipelineState<Traits::kQBuffers> q_{0};
  PipelineState<kStages> kv_{0};  // K and V share one PipelineState
};

}  // namespace flashattn3::forward
