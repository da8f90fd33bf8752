// The total of the spans of a work tile before the current one, of one warp, as the registers of
// the warp's threads hold it; a thread reads what it wrote itself. It is in shared memory, where
// out is staged at the work tile's end, or, beside tiles of 256 columns, in device memory.
#pragma once

#include <cstdint>

#include "attention/span_softmax.cuh"
#include "forward/traits_cached.cuh"
#include "ptx/opaque.cuh"
#include "tile/tma_store.cuh"

namespace flashattn3::forward {

template <class Traits>
class SpanTotal {
  static constexpr int kVectors = Traits::kOutRegisters / 4;
  static constexpr int kOfWarp = (kVectors + 2) * 32;
  static_assert(kOfWarp * 16 == kRowsOfWarp * Traits::kSpanRowBytes);

 public:
  // staged: the warp's staging buffer.
  __device__ __forceinline__ SpanTotal(const CachedArguments& args, uint8_t* staged) {
    if constexpr (Traits::kSpansInShared) {
      vectors_ = reinterpret_cast<float4*>(staged);
    } else {
      uint32_t warp = blockIdx.x * Traits::kConsumerWarps + threadIdx.x / 32;
      make_opaque(warp);  // else the address takes registers of the main loop
      vectors_ = args.span_totals + warp * kOfWarp;
    }
    vectors_ += threadIdx.x % 32;
  }

  // The statistics of a span, which add() or set() then takes with its O.
  __device__ __forceinline__ void put_stats(const RowStats (&row)[2]) const {
    vectors_[(kVectors + 1) * 32] = make_float4(row[0].max, row[0].sum, row[1].max, row[1].sum);
  }

  // Sets the total to a work tile's first span.
  __device__ __forceinline__ void set(const float (&o)[Traits::kOutRegisters]) const {
    if constexpr (Traits::kSpansInShared) {
      // Copies of the last work tile's out may still read the buffer.
      if (threadIdx.x % 32 == 0) wait_for_stores();
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors_[i * 32] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
    }
    vectors_[kVectors * 32] = vectors_[(kVectors + 1) * 32];
  }

  // Joins a span to the total.
  __device__ __forceinline__ void add(const float (&o)[Traits::kOutRegisters]) const {
    RowStats all[2], span[2];
    get_stats(kVectors, all), get_stats(kVectors + 1, span);
    const SpanJoin join[2] = {SpanJoin::of(all[0], span[0]), SpanJoin::of(all[1], span[1])};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 x = vectors_[i * 32];
      vectors_[i * 32] = make_float4(join[0](x.x, o[4 * i]), join[0](x.y, o[4 * i + 1]),
                                     join[1](x.z, o[4 * i + 2]), join[1](x.w, o[4 * i + 3]));
    }
    vectors_[kVectors * 32] = make_float4(all[0].max, all[0].sum, all[1].max, all[1].sum);
  }

  // o and row: of a work tile's last span; they become those of all.
  __device__ __forceinline__ void finish(float (&o)[Traits::kOutRegisters],
                                         RowStats (&row)[2]) const {
    RowStats all[2];
    get_stats(kVectors, all);
    const SpanJoin join[2] = {SpanJoin::of(all[0], row[0]), SpanJoin::of(all[1], row[1])};
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 x = vectors_[i * 32];
      o[4 * i] = join[0](x.x, o[4 * i]), o[4 * i + 1] = join[0](x.y, o[4 * i + 1]);
      o[4 * i + 2] = join[1](x.z, o[4 * i + 2]), o[4 * i + 3] = join[1](x.w, o[4 * i + 3]);
    }
    row[0] = all[0], row[1] = all[1];
  }

 private:
  __device__ __forceinline__ void get_stats(int at, RowStats (&row)[2]) const {
    const float4 x = vectors_[at * 32];
    row[0] = {x.x, x.y}, row[1] = {x.z, x.w};
  }

  float4* vectors_;
};

}  // namespace flashattn3::forward
