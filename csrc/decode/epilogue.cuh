// The epilogue: normalises rows of O and stores out and lse.
#pragma once

#include <cstdint>

#include "decode/packed_tile.cuh"
#include "decode/softmax.cuh"
#include "decode/traits.cuh"
#include "ptx/convert_16bit.cuh"
#include "tile/fragment.h"

namespace flashattn3::decode {

constexpr float kLn2 = 0.693147180559945f;
constexpr float kLog2OfE = 1.44269504088896f;

// The natural log-sum-exp of a row.
__device__ __forceinline__ float lse_of(RowStats stats) {
  return stats.sum == 0.f ? -INFINITY : (reference_of(stats.max) + __log2f(stats.sum)) * kLn2;
}

// Where the results of a work tile go.
class RowStore {
 public:
  __device__ __forceinline__ RowStore(const Arguments& args, const PackedTile& tile,
                                      const CachedSequence& sequence, const Part& part)
      : args_(args),
        tile_(tile),
        first_query_(sequence.first_query),
        batch_idx_(part.batch_idx),
        v_descale_(args.v_descale.at(part.batch_idx, part.kv_head)) {}

  // Returns the factor of a row's O, with the sink in the sum, and stores lse if asked to.
  __device__ __forceinline__ float finish(int row, RowStats stats, bool stores_lse) const {
    float factor = v_descale_;
    if (args_.sinks != nullptr) {
      factor *= add_sink(stats, args_.sinks[tile_.head_of(row)] * kLog2OfE);
    }
    if (stores_lse && args_.lse != nullptr) {
      args_.lse[batch_idx_ * args_.lse_batch + token(row) * args_.lse_seq +
                tile_.head_of(row) * args_.lse_head] = lse_of(stats);
    }
    return stats.sum == 0.f ? 0.f : factor / stats.sum;
  }

  // Normalises and stores four elements of a row, if the row exists.
  template <ElementType kElement>
  __device__ __forceinline__ void store(int row, int column, float4 sum, RowStats stats) const {
    if (!tile_.has(row)) return;
    const float factor = finish(row, stats, column == 0);
    *reinterpret_cast<uint2*>(row_of_out(row) + column) =
        make_uint2(pack<kElement>(sum.x * factor, sum.y * factor),
                   pack<kElement>(sum.z * factor, sum.w * factor));
  }

  // The same for one element.
  template <ElementType kElement>
  __device__ __forceinline__ void store(int row, int column, float sum, RowStats stats) const {
    if (!tile_.has(row)) return;
    const float out = sum * finish(row, stats, column == 0);
    row_of_out(row)[column] = static_cast<uint16_t>(pack<kElement>(out, out));
  }

  __device__ __forceinline__ uint16_t* row_of_out(int row) const {
    return args_.out + batch_idx_ * args_.out_batch + token(row) * args_.out_seq +
           tile_.head_of(row) * args_.out_head;
  }

 private:
  __device__ __forceinline__ int64_t token(int row) const {
    return first_query_ + tile_.query_of(row);
  }

  const Arguments& args_;
  const PackedTile& tile_;
  int first_query_, batch_idx_;
  float v_descale_;
};

// Stores a work tile from the accumulators of one warpgroup. stats: of this thread's two rows.
template <class Traits>
__device__ __forceinline__ void store_out(const Arguments& args, const PackedTile& tile,
                                          const RowStore& store,
                                          const float (&o)[Traits::kOutRegisters],
                                          const RowStats (&stats)[2]) {
  const int thread = threadIdx.x % 128, column = thread_column(thread);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = thread_row(thread) + kRowStride * r;
    if (!tile.has(row)) continue;
    const float factor = store.finish(row, stats[r], column == 0);
    uint16_t* out = store.row_of_out(row);
#pragma unroll
    for (int i = 2 * r; i < Traits::kOutRegisters; i += 4) {
      const int at = column + register_column(i);
      if (at < args.head_dim_v) {
        *reinterpret_cast<uint32_t*>(out + at) =
            pack<Traits::kElement>(o[i] * factor, o[i + 1] * factor);
      }
    }
  }
}

}  // namespace flashattn3::decode
