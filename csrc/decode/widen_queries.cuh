// Q beside a cache of 8 bits: consumers load it themselves, as fp16 with a power of 2 taken out of
// each row. A part begins later by this load, which the tiles that the producer is ahead cover.
#pragma once

#include <cstdint>

#include "decode/load.cuh"
#include "decode/packed_tile.cuh"
#include "decode/traits.cuh"
#include "ptx/convert_16bit.cuh"
#include "ptx/mbarrier.cuh"

namespace flashattn3::decode {

constexpr int kQueryBarrier = 2;  // named; Combine has 1

// Brings a bf16 row to numbers below 2^15: fp16 holds them exactly down to 2^-29 of the largest.
// x: elements of a row, of which kLanes neighbouring lanes have as many each. Returns the factor
// that is left.
template <int kLanes, int kCount>
__device__ __forceinline__ float take_power_out(uint4 (&x)[kCount]) {
  uint32_t* words = &x[0].x;
  int largest = 0;  // magnitudes are ordered as their bits, with inf and NaN above all others
#pragma unroll
  for (int i = 0; i < 4 * kCount; ++i) {
    const float2 p = unpack<ElementType::kBFloat16>(words[i]);
    largest = max(largest, max(__float_as_int(fabsf(p.x)), __float_as_int(fabsf(p.y))));
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, distance));
  }
  const int exponent = max(largest >> 23, 20);  // both factors are normal numbers
  const float factor = __int_as_float((268 - exponent) << 23);
#pragma unroll
  for (int i = 0; i < 4 * kCount; ++i) {
    const float2 p = unpack<ElementType::kBFloat16>(words[i]);
    words[i] = pack<ElementType::kFloat16>(p.x * factor, p.y * factor);
  }
  return __int_as_float((exponent - 14) << 23);
}

// Writes a part's Q, and the factors of its rows. All consumer threads call it.
template <class Traits>
__device__ __forceinline__ void widen_queries(const Arguments& args, uint8_t* shared,
                                              const PackedTile& tile,
                                              const CachedSequence& sequence, const Part& part) {
  constexpr int kVecs = Traits::kVecs, kThreads = 128 * Traits::kConsumers;
  constexpr int kStep = kThreads / kVecs;
  const int thread = threadIdx.x, first = thread / kVecs, vec = thread % kVecs;
  const uint16_t* q = args.q + part.batch_idx * args.q_batch + vec * 8;
  auto* factors = reinterpret_cast<float*>(shared + Traits::kRowFactorOffset);
  named_barrier_sync(kQueryBarrier, kThreads);  // Sync: the last part's QK GEMMs are complete.
#pragma unroll 2
  for (int i = 0; i < kBlockM / kStep; ++i) {
    const int row = first + i * kStep;
    uint4 x[1] = {};
    float factor = 1.f;
    if (i * kStep < tile.num_rows()) {  // the same in all threads
      if (tile.has(row) && vec * 8 < args.head_dim) {
        x[0] = *reinterpret_cast<const uint4*>(
            q + (sequence.first_query + tile.query_of(row)) * args.q_seq +
            tile.head_of(row) * args.q_head);
      }
      if constexpr (Traits::kElement == ElementType::kBFloat16) {
        factor = take_power_out<kVecs>(x);
      }
    }
    *reinterpret_cast<uint4*>(shared + swizzled<kBlockM>(Traits::kQOffset, row, vec)) = x[0];
    if (vec == 0) factors[row] = factor;
  }
  fence_async_proxy();
  named_barrier_sync(kQueryBarrier, kThreads);  // Sync: Q is written.
}

}  // namespace flashattn3::decode
