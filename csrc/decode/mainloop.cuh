// The main loop of a consumer warpgroup: from S = Q K^T to O for every other KV block of a part.
//
// Each step is in order: wait for K, S = Q K^T, release K, softmax, wait for V, O += P V, release
// V. The other warpgroup's steps overlap it. A pair of steps computes for about a quarter of the
// time that its loads take (d128), so nothing overlaps within a warpgroup.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/span_softmax.cuh"
#include "attention/tree_mask.cuh"
#include "attention/variant.cuh"
#include "decode/packed_tile.cuh"
#include "decode/scale_columns.cuh"
#include "decode/softmax.cuh"
#include "decode/traits.cuh"
#include "decode/widen_queries.cuh"
#include "tile/fragment.h"
#include "tile/gemm.cuh"

namespace flashattn3::decode {

template <Config kConfig>
class Mainloop {
 public:
  using Traits = KernelTraits<kConfig>;
  static constexpr ElementType kElement = Traits::kOperand;
  static constexpr int kBlockN = Traits::kBlockN;
  using Out = float[Traits::kOutRegisters];
  using Softmax =
      std::conditional_t<kConfig.spans, SpanSoftmax<kElement, kBlockN>, RowSoftmax<kBlockN>>;

  // Keys that this thread's two rows see, and the keys that all rows of the work tile see.
  struct RowMask {
    KeyRange row[2];
    KeyRange all;
    bool has_rows;  // whether a row of the warp exists
    // With a tree, the new tokens that the rows see, and the key of the first one.
    std::conditional_t<kConfig.tree, TreeRows, NoTree> tree;
    int first_new;

    __device__ __forceinline__ RowMask(const Arguments& args, const PackedTile& tile,
                                       const CachedSequence& sequence, const Part& part) {
      const int first = thread_row(static_cast<int>(threadIdx.x % 128));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query =
            min(tile.query_of(first + kRowStride * r), tile.first_query + tile.num_queries - 1);
        row[r] = keys_of(args, sequence, part, query);
        if constexpr (kConfig.tree) {
          const TreeMask& words = static_cast<const TreeArguments&>(args).tree;
          tree.bits[r] = words.bits_of(part.batch_idx, sequence.first_query + query);
        }
      }
      all = {keys_of(args, sequence, part, tile.first_query + tile.num_queries - 1).begin,
             keys_of(args, sequence, part, tile.first_query).end};
      if constexpr (kConfig.tree) {
        first_new = sequence.position(0);
        all.end = min(all.end, first_new);
      }
      has_rows = uniform(threadIdx.x % 128 / 32) * kRowsOfWarp < tile.num_rows();
    }

    // Keys that a query of a part's sequence sees.
    static __device__ __forceinline__ KeyRange keys_of(const Arguments& args,
                                                       const CachedSequence& sequence,
                                                       const Part& part, int query) {
      if constexpr (kConfig.prefix) {
        const bool is_prefix = static_cast<const PrefixArguments&>(args).is_prefix(part.batch_idx);
        // No window hides keys. With bytes a begin for each row would be spilled.
        if constexpr (Traits::kHasBytes) {
          const int end = visible_keys(args, sequence, query).end;
          return {sequence.first_key, is_prefix ? sequence.num_keys : end};
        }
        if (is_prefix) return {0, sequence.num_keys};
      }
      return visible_keys(args, sequence, query);
    }

    // Whether all rows of the work tile see all keys of a KV block.
    __device__ __forceinline__ bool sees_all(int block) const {
      const int first_key = block * kBlockN;
      return first_key >= all.begin && first_key + kBlockN <= all.end;
    }
  };

  // warpgroup: the same in all lanes of a warp.
  __device__ __forceinline__ Mainloop(const Arguments& args, uint8_t* shared, int warpgroup)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        turn_(Traits::kConsumers == 1 ? 0 : warpgroup),
        kv_(args.log2_stages, 0),
        columns_(args, shared, turn_),
        shared_(shared) {
    const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
    const uint32_t stages =
        base + Traits::kKvOffset + turn_ * (Traits::kStages * 2 * Traits::kKvBytes);
    q_base_ = smem_desc_low(base + Traits::kQOffset, 16);
    k_base_ = smem_desc_low(stages, 16);
    v_base_ = smem_desc_low(stages + Traits::kKvBytes, kBlockN * 128);
  }

  // Computes O of this warpgroup's KV blocks of the part and its row statistics.
  __device__ __forceinline__ void attend(Out& o, Softmax& softmax, const PackedTile& tile,
                                         const CachedSequence& sequence, const Part& part) {
    start(o, softmax);
    const RowMask mask(args_, tile, sequence, part);
    const ScoreScale scale = scale_of(args_, part);
    if constexpr (Traits::kHasBytes) {
      widen_queries<Traits>(args_, shared_, tile, sequence, part);
      columns_.begin_part();
      attend_blocks(o, softmax, mask, scale, part.n_blocks);
      columns_.end_part(o);
    } else {
      wait_for_q();
      attend_blocks(o, softmax, mask, scale, part.n_blocks);
      release_q();
    }
    softmax.complete();
  }

  // The steps of attend, of which a kernel with spans takes some for each span.
  __device__ __forceinline__ void start(Out& o, Softmax& softmax) const {
#pragma unroll
    for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] = 0.f;
    softmax.reset();
  }
  __device__ __forceinline__ void wait_for_q() const {
    storage_.q_full[q_.index()].wait(q_.phase());  // Sync: Q is loaded.
    fence_async_proxy();
  }
  __device__ __forceinline__ void release_q() {
    __syncwarp();
    storage_.q_empty[q_.index()].arrive_warp();  // Sync: this warp's QK GEMMs are complete.
    q_.advance();
  }
  __device__ __forceinline__ void attend_blocks(Out& o, Softmax& softmax, const RowMask& mask,
                                                const ScoreScale& scale, const BlockRange& blocks) {
    for (int block = blocks.begin + turn_; block < blocks.end; block += Traits::kConsumers) {
      step(o, softmax, mask, scale, block);
    }
  }

 private:
  __device__ __forceinline__ void step(Out& o, Softmax& softmax, const RowMask& mask,
                                       const ScoreScale& scale, int block) {
    float s[kBlockN / 2];
    Probabilities<kElement, kBlockN> p;
    storage_.k_full[turn_][kv_.index()].wait(kv_.phase());  // Sync: K is loaded.
    fence_async_proxy();
    gemm_ss<kElement, kBlockM, kBlockN, Traits::kHeadDim>(
        s, q_base_ + q_.index() * (Traits::kQBytes / 16), stage(k_base_));
    warpgroup_wait<0>();
    warpgroup_fence_operand(s);
    if constexpr (Traits::kHasBytes) columns_.scale_scores(s, kv_.index());
    storage_.k_empty[turn_][kv_.index()].arrive_warp();  // Sync: this warp has read K.

    if (mask.has_rows) {
      float factor[2];
      bool rescales = true;
      if (args_.score_scale.caps()) cap_scores(s, scale.tanh_scale);
      if constexpr (kConfig.spans) {
        const auto hide = [&](float (&s)[kBlockN / 2]) { hide_scores(s, mask, block); };
        rescales = softmax.update(s, {scale.factor}, factor, !mask.sees_all(block), hide);
      } else {
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) s[i] *= scale.factor;
        if (!mask.sees_all(block)) hide_scores(s, mask, block);
        softmax.update(s, factor);
      }
      if constexpr (Traits::kHasBytes) {
        if (args_.has_key_descales) {
          storage_.v_full[turn_][kv_.index()].wait(kv_.phase());  // Sync: descales are there.
          columns_.scale_probabilities(s, factor, kv_.index());
        }
      }
      if (rescales) {
#pragma unroll
        for (int i = 0; i < Traits::kOutRegisters; ++i) o[i] *= factor[row_of(i)];
      }
    }
    pack_probabilities<kElement, kBlockN>(p, s);

    storage_.v_full[turn_][kv_.index()].wait(kv_.phase());  // Sync: V is loaded.
    fence_async_proxy();
    gemm_rs<kElement, kBlockN, Traits::kHeadDim>(o, p, stage(v_base_));
    warpgroup_wait<0>();
    warpgroup_fence_operand(o);
    storage_.v_empty[turn_][kv_.index()].arrive_warp();  // Sync: this warp has read V.
    kv_.advance();
  }

  // Sets the scores of a KV block that a row does not see to -inf.
  static __device__ __forceinline__ void hide_scores(float (&s)[kBlockN / 2], const RowMask& mask,
                                                     int block) {
    const int key = block * kBlockN + thread_column(static_cast<int>(threadIdx.x % 32));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int begin = mask.row[r].begin - key, end = mask.row[r].end - key;
#pragma unroll
      for (int i = 0; i < kBlockN / 2; ++i) {
        const int column = register_column(i);
        if (row_of(i) == r && (column < begin || column >= end)) s[i] = -INFINITY;
      }
    }
    if constexpr (kConfig.tree) {
      mask.tree.template hide<kBlockN>(s, block * kBlockN - mask.first_new);
    }
  }

  // Descriptor of this stage's K or V tile.
  __device__ __forceinline__ uint32_t stage(uint32_t base) const {
    return base + kv_.index() * (2 * Traits::kKvBytes / 16);
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  const int turn_;  // in which this warpgroup takes KV blocks
  uint32_t q_base_, k_base_, v_base_;
  PipelineState<Traits::kQBuffers> q_{0};
  StageState kv_;
  ScaledColumns<Traits> columns_;
  uint8_t* shared_;  // with bytes
};

}  // namespace flashattn3::decode
