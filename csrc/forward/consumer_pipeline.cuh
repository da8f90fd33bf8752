// Base of all main loops: the consumer side of the Q, K, V and work tile pipelines. It waits for
// stages, releases them and skips those of other warpgroups, starts the GEMMs of a stage, and clips
// work tiles and the mask to the 64 query rows of its warpgroup. traits.cuh lists the barriers and
// their arrivals.
#pragma once

#include "attention/block_list.cuh"
#include "forward/arguments.h"
#include "forward/traits.cuh"
#include "ptx/bulk_copy.cuh"
#include "ptx/store_shared.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"

namespace flashattn3::forward {

// Storage: SharedStorageOf the config, or what 8-bit or cached kernel configs have in its place.
template <Config kConfig, class Storage>
class ConsumerPipeline {
 protected:
  using Traits = KernelTraits<kConfig>;
  static constexpr ElementType kElement = Traits::kElement;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kStages = Traits::kStages;
  using Out = float[Traits::kOutRegisters];
  using Probabilities = flashattn3::Probabilities<value_type(kElement), kBlockN>;
  using Tile = typename Storage::Tile;

  // warpgroup: 0 to kConsumers - 1, the same in all lanes of a warp.
  __device__ __forceinline__ ConsumerPipeline(const Arguments& args, uint8_t* shared, int warpgroup)
      : args_(args),
        storage_(*reinterpret_cast<Storage*>(shared)),
        shared_(shared),
        warpgroup_(warpgroup) {
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
    q_base_ = smem_desc_low(base, 16) + (Traits::kQOffset + warpgroup * 64 * 128) / 16;
    k_base_ = smem_desc_low(base, 16) + Traits::kKOffset / 16;
    const int v_atom_stride = Traits::kQuantized ? kCoreBytes : v_strides().atom * 16;
    v_base_ = smem_desc_low(base, v_atom_stride) + Traits::kVOffset / 16;
  }

  // This warpgroup's share of a work tile.
  struct Work {
    BlockRange visited;  // positions of blocks with a visible key for one of its rows
    int above, below;    // blocks loaded before and after them, for other warpgroups only
    __device__ __forceinline__ bool any() const { return visited.begin < visited.end; }
  };

  // This warp's staging buffer for rows of out, in kernel configs that do not stage them over Q.
  __device__ __forceinline__ uint8_t* staged_out() const {
    constexpr int kBytes = Traits::kStagedBytes / Traits::kConsumerWarps;
    return shared_ + Traits::kOutOffset + threadIdx.x / 32 * kBytes;
  }

  // Waits until the copies of the rows stored last have read shared memory, and releases the Q
  // buffer under them, if any; q_ is already at the next tile's Q.
  __device__ __forceinline__ void release_staged_q() {
    if constexpr (Traits::kOutOverQ) {
      if (staged_ && threadIdx.x % 32 == 0) {
        wait_for_stores();
        storage_.q_empty[q_.before(1).index()].arrive();
      }
      staged_ = false;
    } else if (threadIdx.x % 32 == 0) {
      wait_for_stores();
    }
  }

  __device__ __forceinline__ int warp_first_row() const {
    return tile().row_origin(warpgroup_) + threadIdx.x / 32 * kRowsOfWarp;
  }

  __device__ __forceinline__ void wait_for_q() const {
    storage_.q_full[q_.index()].wait(q_.phase());  // Sync: Q is loaded.
  }
  __device__ __forceinline__ void wait_for_k(const PipelineState<kStages>& at) const {
    storage_.k_full[at.index()].wait(at.phase());  // Sync: K is loaded.
  }
  __device__ __forceinline__ void wait_for_v(const PipelineState<kStages>& at) const {
    storage_.v_full[at.index()].wait(at.phase());  // Sync: V is loaded.
  }

  // Releases a K stage, and in 8-bit kernel configs its descales.
  __device__ __forceinline__ void release_k(PipelineState<kStages> at) {
    __syncwarp();
    storage_.k_empty[at.index()].arrive_lanes();  // Sync: every lane has read the descales.
  }
  __device__ __forceinline__ void release_v(const PipelineState<kStages>& at) const {
    storage_.v_empty[at.index()].arrive_warp();  // Sync: this warp has finished reading V.
  }

  // Descriptors of this warpgroup's rows of Q, and of the K or V tile at a stage.
  __device__ __forceinline__ uint32_t q_desc() const {
    return q_base_ + q_.index() * (Traits::kQBytes / 16);
  }
  __device__ __forceinline__ uint32_t k_desc(const PipelineState<kStages>& at) const {
    return k_base_ + at.index() * (Traits::kKBytes / 16);
  }
  __device__ __forceinline__ uint32_t v_desc(const PipelineState<kStages>& at) const {
    return v_base_ + at.index() * (Traits::kVBytes / 16);
  }
  // Strides of a 16-bit K or V tile.
  __device__ __forceinline__ auto k_strides() const { return Tile::k_strides(args_, Traits()); }
  __device__ __forceinline__ auto v_strides() const { return Tile::v_strides(args_, Traits()); }
  // Addresses of the Q tile and of the K tile at a stage, to recompute scores.
  __device__ __forceinline__ uint32_t q_address() const {
    return cute::cast_smem_ptr_to_uint(shared_) + Traits::kQOffset + q_.index() * Traits::kQBytes;
  }
  __device__ __forceinline__ uint32_t k_address(const PipelineState<kStages>& at) const {
    return cute::cast_smem_ptr_to_uint(shared_) + Traits::kKOffset + at.index() * Traits::kKBytes;
  }

  // Starts S = Q K^T with the 16-bit K at this stage.
  __device__ __forceinline__ void gemm_qk(float (&s)[kBlockN / 2],
                                          PipelineState<kStages> at) const {
    gemm_ss<kElement, Traits::kBlockM, kBlockN, kHeadDim>(s, q_desc(), k_desc(at), k_strides());
  }

  // Starts O += P V with the 16-bit V at this stage.
  __device__ __forceinline__ void gemm_pv(Out& o, const Probabilities& p,
                                          PipelineState<kStages> at) const {
    gemm_rs<kElement, kBlockN, Traits::kHeadDimV>(o, p, v_desc(at), v_strides());
  }

  static __device__ __forceinline__ void rescale(Out& o, const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] *= factor[row_of(i)];
  }

  // Skips K tiles that only other warpgroups need, then as many V tiles.
  __device__ __forceinline__ void skip_k(PipelineState<kStages>& at, int count) {
    for (int i = 0; i < count; ++i) {
      wait_for_k(at);
      release_k(at);
      at.advance();
    }
  }
  __device__ __forceinline__ void skip_v(int count) {
    for (int i = 0; i < count; ++i) {
      wait_for_v(kv_);
      __syncwarp();
      release_v(kv_);
      kv_.advance();
    }
  }

  __device__ __forceinline__ const Tile& tile() const { return storage_.tile[tile_.index()]; }

  // The walk over the visited blocks of the tile at tile_, at the first one.
  __device__ __forceinline__ BlockWalk walk(BlockRange visited) const {
    if constexpr (Traits::kListed) return tile().walk(visited);
    const int first_row = uniform(tile().row_origin(warpgroup_)) + warpgroup_ * 64;
    const int num_rows = uniform(tile().num_rows);
    const BlockRange full =
        tile()
            .mask(num_rows, uniform(tile().num_keys), args_.variant.window)
            .template full_n_blocks<kBlockN>(first_row, min(first_row + 63, num_rows - 1));
    return {visited, full, visited.end - 1};
  }

  template <class Walk>
  __device__ __forceinline__ int first_key(const Walk& at) const {
    return at.block() * kBlockN;
  }

  // Masks the scores of a block unless all are visible. kv: the stage of its K.
  template <class Scores, class Walk>
  __device__ __forceinline__ void mask(Scores& s, const Walk& at,
                                       const PipelineState<kStages>& kv) const {
    if (at.is_full()) return;
    if constexpr (Traits::kListed) return bits_of(at, kv).hide(s, -INFINITY);
    const int row = warp_first_row() + thread_row(threadIdx.x % 32);
    const Mask mask = tile().mask(tile().num_rows, tile().num_keys, args_.variant.window);
    mask_scores<kBlockN, Traits::kMasked>(s, mask, row, first_key(at));
  }

  // The bits of listed blocks, whose tiles lie beside K.
  __device__ __forceinline__ auto bits_of(const BlockWalk& at,
                                          const PipelineState<kStages>& kv) const {
    return tile().bits(at, shared_ + Traits::beside_k_offset(kv.index()));
  }

  const Arguments& args_;
  Storage& storage_;
  uint8_t* shared_;
  int warpgroup_;
  uint32_t q_base_, k_base_, v_base_;
  PipelineState<Storage::kTileBuffers> tile_{0};
  PipelineState<Traits::kQBuffers> q_{0};
  PipelineState<kStages> kv_{0};  // K and V share one PipelineState
  bool staged_ = false;           // rows of out are staged over the Q buffer before q_
};

}  // namespace flashattn3::forward
