// The options of the main loop for 16-bit inputs that cost every score: slopes, a bias, listed
// masks, a tree of new tokens and the largest score. mainloop.cuh calls a hook for each step that
// one of them changes; in a kernel config without options the hooks leave the scores alone.
#pragma once

#include <type_traits>

#include "attention/alibi.cuh"
#include "attention/bias.cuh"
#include "attention/softmax.cuh"
#include "attention/tree_mask.cuh"
#include "attention/variant.cuh"
#include "forward/block_rotation.cuh"
#include "forward/consumer_pipeline.cuh"

namespace flashattn3::forward {

template <Config kConfig, class Storage>
class ScoreOptions : protected ConsumerPipeline<kConfig, Storage> {
 protected:
  using Base = ConsumerPipeline<kConfig, Storage>;
  using Base::args_, Base::kBlockN, Base::kElement, Base::kStages;
  using typename Base::Tile, typename Base::Traits;

  static constexpr int kStageBlocks = kBlockN / kListColumns;  // with lists
  static constexpr bool kHasSlopes = has_slopes(Traits::kConfig.term);
  static constexpr bool kLooks = Traits::kConfig.term == ScoreTerm::kLargest;
  using Scores = float[kBlockN / 2];
  using Walk = std::conditional_t<kHasSlopes, RotatedWalk,
                                  std::conditional_t<Traits::kJoined, JoinedWalk, BlockWalk>>;
  using Largest = std::conditional_t<kLooks, LargestScore, NoScore>;
  using Softmax = OnlineSoftmax<kElement, kBlockN, Traits::kMasked, Largest>;

  __device__ __forceinline__ ScoreOptions(const Arguments& args, uint8_t* shared, int warpgroup)
      : Base(args, shared, warpgroup) {
    if constexpr (Traits::kBias) {
      bias_row_ = cute::cast_smem_ptr_to_uint(shared) + Traits::kBesideKOffset +
                  threadIdx.x / 32 * kRowsOfWarp * 128 + staged_row_of_lane(threadIdx.x % 32);
    }
  }

  // Called before the first QK GEMM of a work tile, for what it reads from device memory.
  __device__ __forceinline__ void begin_tile(const Tile& tile) {
    if constexpr (Traits::kTree) {
      const int row = tile.row_origin(this->warpgroup_) + thread_row(static_cast<int>(threadIdx.x));
#pragma unroll
      for (int r = 0; r < 2; ++r) tree_.bits[r] = tile.tree_bits(args_, row + kRowStride * r);
    }
    if constexpr (kHasSlopes) {
      const int head = tile.head_of(this->warpgroup_);
      term_.set_slope(args_.slopes.any() ? args_.slopes.at(tile.batch_idx, head) : 0.f);
    }
    if constexpr (kLooks) {
      const float* const of_head = largest_of(tile);
      known_ = of_head == nullptr ? INFINITY : __ldcg(of_head);
    }
  }

  // Returns the walk of the base, in which no block of new tokens is full if there is a tree, or
  // that of joined lists.
  __device__ __forceinline__ auto walk(BlockRange visited) const {
    if constexpr (Traits::kJoined) {
      return this->tile().walk(this->warpgroup_);
    } else {
      BlockWalk at = Base::walk(visited);
      if constexpr (Traits::kTree) {
        const int first_new = uniform(this->tile().num_keys) - uniform(this->tile().num_rows);
        at.full.end = max(at.full.begin, min(at.full.end, first_new / kBlockN));
      }
      return at;
    }
  }

  // Joined lists: reads the kinds of a stage's blocks. Early, since the softmax branches on them.
  __device__ __forceinline__ void read_kinds(const PipelineState<kStages>& kv, Walk& at) const {
    if constexpr (Traits::kJoined) {
      at.kinds = uniform(this->storage_.kinds[kv.index()] >> at.shift & 0xff);
    }
  }
  // Past all stages before the first one of a work tile, if there are so many that K of later ones
  // would wait for their V.
  __device__ __forceinline__ void pass_above(int& above) {
    if (above <= kStages) return;
    for (; above > 0; --above) {
      this->wait_for_k(this->kv_);
      this->release_k(this->kv_);
      this->skip_v(1);
    }
  }
  // Past the K stage that the walk passes. kv: the stage after this block's, where K is loaded.
  __device__ __forceinline__ void pass_k(PipelineState<kStages>& kv, const Walk& at) {
    if constexpr (Traits::kJoined) {
      if (!at.passes_next()) return;
      this->release_k(kv);
      kv.advance();
      this->wait_for_k(kv);
    }
  }
  // Past the V stage that the walk passed before this block. kv_: at the stage before it.
  __device__ __forceinline__ void pass_v(const Walk& at) {
    if constexpr (Traits::kJoined) {
      if (!at.has_passed) return;
      this->kv_.advance();
      this->skip_v(1);
    }
  }

  // Whether all rows see all keys of a block or, with joined lists, of each block of a stage.
  static __device__ __forceinline__ bool is_full(const Walk& at) {
    if constexpr (Traits::kJoined) {
      return at.kinds == kAllFull<kStageBlocks>;
    } else {
      return at.is_full();
    }
  }
  // The bits of the blocks of a stage.
  __device__ __forceinline__ auto bits_of(const Walk& at, const PipelineState<kStages>& kv) const {
    if constexpr (Traits::kJoined) {
      const uint8_t* tiles = this->shared_ + Traits::beside_k_offset(kv.index());
      return ThreadBits<kStageBlocks>::of_kinds(at.kinds, tiles, Traits::kBlockM * 8);
    } else {
      return Base::bits_of(at, kv);
    }
  }

  // Masks scores as the base does, and hides the new tokens that a tree does not show.
  __device__ __forceinline__ void mask(Scores& s, const Walk& at,
                                       const PipelineState<kStages>& kv) const {
    if constexpr (Traits::kJoined) {
      if (!is_full(at)) bits_of(at, kv).hide(s, -INFINITY);
    } else {
      Base::mask(s, at, kv);
    }
    if constexpr (Traits::kTree) {
      const int first_token = this->first_key(at) - (this->tile().num_keys - this->tile().num_rows);
      if (first_token > -kBlockN) tree_.template hide<kBlockN>(s, first_token);
    }
  }

  // Called before the first block of the walk over a work tile's blocks.
  __device__ __forceinline__ void begin_walk(Walk& at, Softmax& softmax) {
    if constexpr (kHasSlopes) {
      const Tile& tile = this->tile();
      term_.set_rows(uniform(this->warp_first_row() + tile.num_keys - tile.num_rows));
      at.rotation = uniform(rotation_of<kConfig>(args_, tile));
    }
    if constexpr (kLooks) softmax.largest.begin_tile(known_);
    read_kinds(this->kv_, at);
  }

  // Converts what transform() and add_bias() leave to exponents.
  __device__ __forceinline__ UniformScale exponent_scale() const {
    constexpr float kLog2e = 1.44269504088896f;
    if constexpr (Traits::kBias) return {kLog2e};
    return args_.variant.exponents();
  }

  // The same for one block, with the slopes.
  __device__ __forceinline__ auto exact(UniformScale scale, const Walk& at) const {
    return term_.exact(scale, this->first_key(at));
  }

  // Whether only exact() is right for a block.
  __device__ __forceinline__ bool needs_exact(const Walk& at) const {
    return term_.is_crossed(this->first_key(at));
  }

  // Scores become score * factor + bias, of the tile at a K stage.
  __device__ __forceinline__ void add_bias(Scores& s, const PipelineState<kStages>& at) const {
    if constexpr (Traits::kBias) {
      flashattn3::add_bias<kElement, kBlockN>(s, args_.variant.exponents().factor,
                                              bias_row_ + at.index() * Traits::kBesideKBytes,
                                              Traits::kBlockM * 128);
    }
  }

  // OnlineSoftmax::exponentiate_at_once, for a block that does not need exact().
  __device__ __forceinline__ auto exponentiate_at_once(Scores& s, Softmax& softmax,
                                                       UniformScale scale,
                                                       PipelineState<kStages> kv,
                                                       const Walk& at) const {
    add_bias(s, kv);
    if constexpr (Traits::kListed) {
      if (!is_full(at)) return softmax.exponentiate_at_once(s, scale, bits_of(at, kv));
    }
    if constexpr (kHasSlopes) {
      if (term_.any()) {
        return softmax.exponentiate_at_once(s, term_.linear(scale, this->first_key(at)));
      }
    }
    return softmax.exponentiate_at_once(s, scale);
  }

  // Takes the block's largest score from its probabilities.
  __device__ __forceinline__ void take_largest(const Scores& p, Softmax& softmax) const {
    if constexpr (kLooks) {
      const Tile& tile = this->tile();
      if (float* const of_head = largest_of(tile)) {
        softmax.largest.take(p, softmax.row_max, of_head, tile.num_rows - this->warp_first_row(),
                             Softmax::kLargestSum / 2);
      }
    }
  }

 private:
  // Where the largest score of the work tile's head is; null: none is looked for.
  __device__ __forceinline__ float* largest_of(const Tile& tile) const {
    return args_.max_logit == nullptr ? nullptr : args_.max_logit + tile.head_of(this->warpgroup_);
  }

  uint32_t bias_row_;  // of this lane in the tile at stage 0, with a bias
  std::conditional_t<kHasSlopes, Alibi<kBlockN>, NoTerm> term_;
  std::conditional_t<Traits::kTree, TreeRows, NoTree> tree_;  // of the work tile
  float known_;  // the head's largest score, read before the work tile began; with kLooks
};

}  // namespace flashattn3::forward
