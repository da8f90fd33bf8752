// A thread's 64 values between the search for the largest and the conversion: as they were loaded,
// or in float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "blocks/eight_bit.cuh"
#include "blocks/element.h"
#include "kernels/quantize/tile.cuh"

namespace flashattn3 {

// Two 16-bit elements in a word, the first in its low half.
template <ElementType kType>
struct Pair {
  static constexpr bool kIsBf16 = kType == ElementType::kBFloat16;
  using Vector = std::conditional_t<kIsBf16, __nv_bfloat162, __half2>;
  static constexpr uint32_t kMagnitudes = 0x7fff7fff;  // all bits but the signs
  static constexpr uint32_t kInfinity = kIsBf16 ? 0x7f80 : 0x7c00;

  __device__ static Vector vector(uint32_t word) {
    Vector pair;
    memcpy(&pair, &word, 4);
    return pair;
  }
  __device__ static float2 floats(uint32_t word) {
    if constexpr (kIsBf16) {
      return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
    } else {
      return __half22float2(vector(word));
    }
  }
  __device__ static float2 floats(Vector pair) {
    uint32_t word;
    memcpy(&word, &pair, 4);
    return floats(word);
  }
};

using LoadedUnits = UnitWords<uint16_t>[kUnitsOfThread];

// 32 registers, where as floats they would be 64: more warps can load at the same time.
template <ElementType kType>
struct LoadedValues {
  LoadedUnits unit;

  __device__ LoadedValues(const LoadedUnits& loaded, const QuantizeTensor&, const TilePlace&) {
    memcpy(unit, loaded, sizeof(unit));
  }

  // Largest magnitude; with kNan NaN if there is one, else without.
  template <bool kNan>
  __device__ float largest() const {
    typename Pair<kType>::Vector found = Pair<kType>::vector(0);
#pragma unroll
    for (const auto& words : unit) {
#pragma unroll
      for (const uint32_t word : words) {
        const auto pair = Pair<kType>::vector(word & Pair<kType>::kMagnitudes);
        found = kNan ? __hmax2_nan(found, pair) : __hmax2(found, pair);
      }
    }
    const float2 two = Pair<kType>::floats(found);
    return kNan ? max_or_nan(two.x, two.y) : fmaxf(two.x, two.y);
  }

  __device__ void make_infinities_nan() {
#pragma unroll
    for (auto& words : unit) {
#pragma unroll
      for (uint32_t& word : words) {
        const uint32_t magnitudes = word & Pair<kType>::kMagnitudes;
        if ((magnitudes & 0xffff) == Pair<kType>::kInfinity) word |= 0x7fff;
        if (magnitudes >> 16 == Pair<kType>::kInfinity) word |= 0x7fff0000;
      }
    }
  }

  __device__ float operator()(int u, int i) const {
    const float2 two = Pair<kType>::floats(unit[u][i / 2]);
    return i % 2 == 0 ? two.x : two.y;
  }
};

// Less the mean, where the tensor has one, and rotated, where it has signs: these, the
// Walsh-Hadamard transform and the scale, of whole tokens in RowPlaces<kColumns>. The additions
// come in the order of flashattn3/quantization/hadamard.py: columns 1 apart, 2, 4, ...
template <ElementType kType, int kColumns>
struct FloatValues {
  float x[kUnitsOfThread][kUnit];

  __device__ FloatValues(const LoadedUnits& loaded, const QuantizeTensor& tensor,
                         const TilePlace& place) {
    apply_signs(loaded, tensor, place);
    if (tensor.signs == nullptr) return;
    // Over 64 columns only one power of two comes here.
    transform(kColumns > 64 ? kColumns : tensor.x.head_dim);
#pragma unroll
    for (int u = 0; u < kUnitsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) x[u][i] *= tensor.rotation_scale;
    }
  }

  template <bool kNan>
  __device__ float largest() const {
    float found = 0.f;
#pragma unroll
    for (int u = 0; u < kUnitsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        found = kNan ? max_or_nan(found, fabsf(x[u][i])) : fmaxf(found, fabsf(x[u][i]));
      }
    }
    return found;
  }

  __device__ void make_infinities_nan() {
#pragma unroll
    for (int u = 0; u < kUnitsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if (isinf(x[u][i])) x[u][i] = NAN;
      }
    }
  }

  __device__ float operator()(int u, int i) const { return x[u][i]; }

 private:
  using Places = RowPlaces<kColumns>;

  // The signs come by way of shared memory, as what they flip in elements of 16 bits, and so does
  // the mean with its signs: from device memory every unit of a token would wait for its own.
  __device__ __forceinline__ void apply_signs(const LoadedUnits& loaded,
                                              const QuantizeTensor& tensor,
                                              const TilePlace& place) {
    static_assert(quantize_threads(kColumns) == kColumns, "a thread for each column");
    __shared__ uint4 flips[kColumns / kUnit];
    __shared__ float4 means[kColumns / 4];
    // Columns that are not there are 0 and in no sum with others: their signs do not matter, and
    // their mean is 0.
    const int own = threadIdx.x, column = min(own, tensor.x.head_dim - 1);
    const float sign = tensor.signs != nullptr ? tensor.signs[column] : 1.f;
    reinterpret_cast<uint16_t*>(flips)[own] = __float_as_uint(sign) >> 16 & 0x8000;
    if (tensor.mean != nullptr) {
      const int64_t head = int64_t{place.entry} * tensor.x.by_heads.divisor + place.head;
      const float mean = tensor.mean[head * tensor.x.head_dim + column];
      reinterpret_cast<float*>(means)[own] = own == column ? sign * mean : 0.f;
    }
    __syncthreads();
#pragma unroll
    for (int part = 0; part < Places::kUnitsOfToken; ++part) {
      UnitWords<uint16_t> flip;
      load_unit<uint16_t>(flip,
                          reinterpret_cast<const uint16_t*>(&flips[Places::column(part) / kUnit]));
#pragma unroll
      for (int u = part; u < kUnitsOfThread; u += Places::kUnitsOfToken) {
#pragma unroll
        for (int i = 0; i < kUnit; i += 2) {
          const float2 two = Pair<kType>::floats(loaded[u][i / 2] ^ flip[i / 2]);
          x[u][i] = two.x;
          x[u][i + 1] = two.y;
        }
      }
    }
    if (tensor.mean != nullptr) subtract(means);
  }

  __device__ __forceinline__ void subtract(const float4 (&means)[kColumns / 4]) {
#pragma unroll
    for (int part = 0; part < Places::kUnitsOfToken; ++part) {
#pragma unroll
      for (int i = 0; i < kUnit; i += 4) {
        const float4 mean = means[(Places::column(part) + i) / 4];
#pragma unroll
        for (int u = part; u < kUnitsOfThread; u += Places::kUnitsOfToken) {
          x[u][i] -= mean.x;
          x[u][i + 1] -= mean.y;
          x[u][i + 2] -= mean.z;
          x[u][i + 3] -= mean.w;
        }
      }
    }
  }

  __device__ static void sum_and_difference(float& even, float& odd) {
    const float sum = even + odd;
    odd = even - odd;
    even = sum;
  }

  // Stages for head_dim columns; the others are 0.
  __device__ __forceinline__ void transform(int head_dim) {
    within_units<1>(head_dim);
    within_units<2>(head_dim);
    within_units<4>(head_dim);
    constexpr int kLanes = Places::kLanes;
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) {
      if (kUnit * lanes < head_dim) between_lanes(lanes);
    }
#pragma unroll
    for (int units = 1; units < Places::kUnitsOfToken; units *= 2) {
      if (kUnit * kLanes * units < head_dim) between_units(units);
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void within_units(int head_dim) {
    if (kWidth >= head_dim) return;
#pragma unroll
    for (int u = 0; u < kUnitsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if ((i & kWidth) == 0) sum_and_difference(x[u][i], x[u][i + kWidth]);
      }
    }
  }

  __device__ __forceinline__ void between_units(int distance) {
#pragma unroll
    for (int u = 0; u < kUnitsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        if ((u & distance) == 0) sum_and_difference(x[u][i], x[u + distance][i]);
      }
    }
  }

  __device__ __forceinline__ void between_lanes(int distance) {
    // The upper one of two lanes has the odd value, and keeps even - odd.
    const float own = threadIdx.x & distance ? -1.f : 1.f;
#pragma unroll
    for (int u = 0; u < kUnitsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        x[u][i] = fmaf(x[u][i], own, __shfl_xor_sync(0xffffffff, x[u][i], distance));
      }
    }
  }
};

}  // namespace flashattn3
