// A thread's 64 values, from the load through the amax to the conversion: in 16 bits or in float.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "ptx/convert_fp8.cuh"
#include "ptx/element.h"
#include "quantize/tile.cuh"

namespace flashattn3::quantize {

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

using LoadedVecs = VecWords<uint16_t>[kVecsOfThread];

// 16-bit values take 32 registers instead of 64 as floats, so that more warps load concurrently.
template <ElementType kType>
struct LoadedValues {
  LoadedVecs vec;

  __device__ LoadedValues(const LoadedVecs& loaded, const QuantizedTensor&, const WorkTile&) {
    memcpy(vec, loaded, sizeof(vec));
  }

  // Returns the largest magnitude. kNan: NaN if any value is NaN; else NaN is ignored.
  template <bool kNan>
  __device__ float largest() const {
    typename Pair<kType>::Vector found = Pair<kType>::vector(0);
#pragma unroll
    for (const auto& words : vec) {
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
    for (auto& words : vec) {
#pragma unroll
      for (uint32_t& word : words) {
        const uint32_t magnitudes = word & Pair<kType>::kMagnitudes;
        if ((magnitudes & 0xffff) == Pair<kType>::kInfinity) word |= 0x7fff;
        if (magnitudes >> 16 == Pair<kType>::kInfinity) word |= 0x7fff0000;
      }
    }
  }

  __device__ float operator()(int u, int i) const {
    const float2 two = Pair<kType>::floats(vec[u][i / 2]);
    return i % 2 == 0 ? two.x : two.y;
  }
};

// Float values after smoothing, if the tensor has a mean (SageAttention), and after incoherent
// processing, if it has signs (QuIP, FlashAttention-3): signs, Walsh-Hadamard transform and scale
// of whole tokens. The additions follow the order of flashattn3/call/hadamard.py: columns 1 apart,
// 2, 4, ...
template <ElementType kType, int kColumns, class Partition = TokenPositions<kColumns>>
struct FloatValues {
  float x[kVecsOfThread][kVec];

  __device__ FloatValues(const LoadedVecs& loaded, const QuantizedTensor& tensor,
                         const WorkTile& tile) {
    apply_signs(loaded, tensor, tile);
    transform(tensor);
  }

  __device__ __forceinline__ void transform(const QuantizedTensor& tensor) {
    if (tensor.signs == nullptr) return;
    // With kColumns > 64, head_dim is always kColumns here. Stages that may be left out move
    // registers, half as many again as they add.
    if (kColumns > 64 || tensor.x.head_dim == kColumns) {
      transform(kColumns);
    } else {
      transform(tensor.x.head_dim);
    }
    multiply(tensor.rotation_scale);
  }

  template <bool kNan>
  __device__ float largest() const {
    float found = 0.f;
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        found = kNan ? max_or_nan(found, fabsf(x[u][i])) : fmaxf(found, fabsf(x[u][i]));
      }
    }
    return found;
  }

  __device__ void make_infinities_nan() {
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (isinf(x[u][i])) x[u][i] = NAN;
      }
    }
  }

  __device__ float operator()(int u, int i) const { return x[u][i]; }

 protected:
  using Positions = Partition;
  using Flips = uint4[kColumns / kVec];
  using Means = float4[kColumns / 4];

  __device__ FloatValues() {}

  // Stores the signs, as XOR masks of 16-bit elements, and the mean times the signs.
  __device__ __forceinline__ static void stage_columns(const QuantizedTensor& tensor,
                                                       const WorkTile& tile, Flips& flips,
                                                       Means& means) {
    static_assert(quantize_threads(kColumns) == kColumns, "a thread for each column");
    // Columns past head_dim are 0 and enter no sum with others: their signs do not matter, and
    // their mean is 0.
    const int own = threadIdx.x, column = min(own, tensor.x.head_dim - 1);
    const float sign = tensor.signs != nullptr ? tensor.signs[column] : 1.f;
    reinterpret_cast<uint16_t*>(flips)[own] = __float_as_uint(sign) >> 16 & 0x8000;
    if (tensor.mean != nullptr) {
      const int64_t head = int64_t{tile.batch_idx} * tensor.x.by_heads.divisor + tile.head;
      const float mean = tensor.mean[head * tensor.x.head_dim + column];
      reinterpret_cast<float*>(means)[own] = own == column ? sign * mean : 0.f;
    }
  }

  // Through shared memory: loads from device memory would make every vector of a token wait
  // separately.
  __device__ __forceinline__ void apply_signs(const LoadedVecs& loaded,
                                              const QuantizedTensor& tensor, const WorkTile& tile) {
    __shared__ Flips flips;
    __shared__ Means means;
    stage_columns(tensor, tile, flips, means);
    __syncthreads();
#pragma unroll
    for (int part = 0; part < Positions::kVecsOfToken; ++part) {
      VecWords<uint16_t> flip;
      load_vec<uint16_t>(flip,
                         reinterpret_cast<const uint16_t*>(&flips[Positions::column(part) / kVec]));
#pragma unroll
      for (int u = part; u < kVecsOfThread; u += Positions::kVecsOfToken) {
#pragma unroll
        for (int i = 0; i < kVec; i += 2) {
          const float2 two = Pair<kType>::floats(loaded[u][i / 2] ^ flip[i / 2]);
          x[u][i] = two.x;
          x[u][i + 1] = two.y;
        }
      }
    }
    if (tensor.mean != nullptr) subtract(means);
  }

  __device__ __forceinline__ void multiply(float scale) {
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) x[u][i] *= scale;
    }
  }

  __device__ __forceinline__ void subtract(const Means& means) {
#pragma unroll
    for (int part = 0; part < Positions::kVecsOfToken; ++part) {
#pragma unroll
      for (int i = 0; i < kVec; i += 4) {
        const float4 mean = means[(Positions::column(part) + i) / 4];
#pragma unroll
        for (int u = part; u < kVecsOfThread; u += Positions::kVecsOfToken) {
          x[u][i] -= mean.x;
          x[u][i + 1] -= mean.y;
          x[u][i + 2] -= mean.z;
          x[u][i + 3] -= mean.w;
        }
      }
    }
  }

 private:
  __device__ static void sum_and_difference(float& even, float& odd) {
    const float sum = even + odd;
    odd = even - odd;
    even = sum;
  }

  // Stages for head_dim columns; the others are 0.
  __device__ __forceinline__ void transform(int head_dim) {
    within_vecs<1>(head_dim);
    within_vecs<2>(head_dim);
    within_vecs<4>(head_dim);
#pragma unroll
    for (int columns = kVec; columns < kColumns; columns *= 2) {
      if (columns >= head_dim) continue;
      const int lanes = Positions::lanes_apart(columns);
      if (lanes > 0) {
        between_lanes(lanes);
      } else {
        between_vecs(Positions::vecs_apart(columns));
      }
    }
  }

  template <int kWidth>
  __device__ __forceinline__ void within_vecs(int head_dim) {
    if (kWidth >= head_dim) return;
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if ((i & kWidth) == 0) sum_and_difference(x[u][i], x[u][i + kWidth]);
      }
    }
  }

  __device__ __forceinline__ void between_vecs(int distance) {
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if ((u & distance) == 0) sum_and_difference(x[u][i], x[u + distance][i]);
      }
    }
  }

  __device__ __forceinline__ void between_lanes(int distance) {
    // The upper lane of a pair holds the odd value and computes even - odd.
    const float own = threadIdx.x & distance ? -1.f : 1.f;
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        x[u][i] = fmaf(x[u][i], own, __shfl_xor_sync(0xffffffff, x[u][i], distance));
      }
    }
  }
};

}  // namespace flashattn3::quantize
