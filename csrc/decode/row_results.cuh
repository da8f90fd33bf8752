// The two results of each row of a call with a prefix, which the decode kernel leaves in memory as
// float32: sums of 2^(score - max) v, and (max, sum). join_prefix.cuh joins them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "decode/epilogue.cuh"
#include "decode/packed_tile.cuh"
#include "decode/softmax.cuh"
#include "tile/fragment.h"

namespace flashattn3::decode {

// In place of RowStore in a kernel with a prefix.
class RowResults {
 public:
  __device__ __forceinline__ RowResults(const Arguments& args, const PackedTile& tile,
                                        const CachedSequence& sequence, const Part& part)
      : args_(static_cast<const PrefixArguments&>(args)), tile_(tile) {
    const SequenceTable& queries = args_.seqlens_q;
    const int of_batch = queries.cu_seqlens == nullptr ? part.batch_idx * queries.longest : 0;
    first_token_ =
        args_.is_prefix(part.batch_idx) ? args_.total_q : of_batch + sequence.first_query;
  }

  // Stores four elements of a row, if the row exists, and its statistics with the first of them.
  template <ElementType>
  __device__ __forceinline__ void store(int row, int column, float4 sum, RowStats stats) const {
    if (!tile_.has(row)) return;
    const int64_t at = index(row);
    *reinterpret_cast<float4*>(out_at(at) + column) = sum;
    if (column == 0) store_stats(at, stats);
  }

  __device__ __forceinline__ int64_t index(int row) const {
    const int heads = args_.num_heads_kv * args_.qhead_per_kvhead;
    return int64_t{first_token_ + tile_.query_of(row)} * heads + tile_.head_of(row);
  }
  __device__ __forceinline__ float* out_at(int64_t index) const {
    return args_.row_out + index * args_.head_dim_v;
  }
  __device__ __forceinline__ void store_stats(int64_t index, RowStats stats) const {
    args_.row_stats[index] = make_float2(stats.max, stats.sum);
  }

 private:
  const PrefixArguments& args_;
  const PackedTile& tile_;
  int first_token_;
};

template <class Traits>
using StoreOf = std::conditional_t<Traits::kConfig.prefix, RowResults, RowStore>;

// Stores a work tile as store_out of RowStore does.
template <class Traits>
__device__ __forceinline__ void store_out(const Arguments& args, const PackedTile& tile,
                                          const RowResults& store,
                                          const float (&o)[Traits::kOutRegisters],
                                          const RowStats (&stats)[2]) {
  const int thread = threadIdx.x % 128, column = thread_column(thread);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread_row(thread) + kRowStride * r;
    if (!tile.has(row)) continue;
    const int64_t index = store.index(row);
    if (column == 0) store.store_stats(index, stats[r]);
    float* const out = store.out_at(index);
#pragma unroll
    for (int i = 2 * r; i < Traits::kOutRegisters; i += 4) {
      const int at = column + register_column(i);
      if (at < args.head_dim_v) *reinterpret_cast<float2*>(out + at) = make_float2(o[i], o[i + 1]);
    }
  }
}

}  // namespace flashattn3::decode
