// Accumulator promotion of O (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). For e4m3, WGMMA's
// accumulators keep about 13 bits and truncate the rest of each product: a sum over n keys of one
// sign loses up to n * 2^-16 of itself, and a key of small weight loses its whole product beside a
// key of large weight. Every promote_keys keys, O is added to bf16 sums, in registers or in the
// staging buffer of the tile's rows; every kPromotionsToFp32 promotions, before the bf16 sums lose
// much themselves, they are added to fp32 sums in device memory.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "forward/arguments.h"
#include "forward/traits_fp8.cuh"
#include "ptx/approximations.cuh"
#include "ptx/bulk_copy.cuh"
#include "tile/fragment.h"

namespace flashattn3::forward {

// Promotion workspace of a thread in device memory (promotion.cuh), in units of 16 bytes: fp32
// sums of its accumulators, the row_max values, and bf16 sums of its accumulators.
constexpr int promoted_words(int head_dim) { return head_dim / 8 + 1 + head_dim / 16; }

// Promotion workspace of all CTAs in bytes; 0: there are too few keys to promote O.
constexpr int64_t promoted_bytes(const Config& config, int num_ctas, int seqlen_k) {
  if (config.promote_keys == 0 || seqlen_k <= 512) return 0;
  return int64_t{num_ctas} * promoted_words(config.head_dim) * 128 * config.num_mma_warpgroups * 16;
}

// Whether promotion keeps its bf16 sums in registers. int8 kernel configs would spill them, as
// three warpgroups at 128 columns would.
constexpr bool promotes_in_registers(const Config& config) {
  return config.dtype == ElementType::kE4m3 &&
         (config.head_dim == 64 || (config.head_dim == 128 && config.num_mma_warpgroups == 2));
}

// Pairs of bf16 in 32 bits; the first element is the low half.
__device__ __forceinline__ uint32_t to_bf16x2(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}
__device__ __forceinline__ float low_of_bf16x2(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float high_of_bf16x2(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// The bf16 sums of a thread where they are kept in registers, and the row_max that they are
// relative to.
template <Config kConfig>
struct PromotedSums {
  uint4 bf16[promotes_in_registers(kConfig) ? KernelTraits<kConfig>::kHeadDim / 16 : 1];
  float2 row_max;
};

// Each thread promotes its own O accumulators, 8 per step: two of its first row, two of its second
// row, and the same again. A step is 16 bytes in bf16 and two float4 in fp32.
template <Config kConfig>
class Promotion {
  using Traits = QuantizedTraits<kConfig>;
  static constexpr int kSteps = Traits::kHeadDim / 16;
  static constexpr int kThreads = 128 * Traits::kConsumers;
  // Where the bf16 sums are; if neither, in device memory (traits_options.cuh).
  static constexpr bool kInRegisters = promotes_in_registers(kConfig);
  static constexpr bool kInShared = Traits::kPromotesInSmem && !kInRegisters;
  static constexpr int kUnroll = kInRegisters ? kSteps : 4;
  static constexpr int kStride = kInShared ? 32 : kThreads;
  using Out = float[Traits::kOutRegisters];

 public:
  // staged: the warp's staging buffer for rows of out.
  __device__ __forceinline__ Promotion(const QuantizedArguments& args,
                                       QuantizedStorageOf<kConfig>& storage, uint8_t* staged,
                                       PromotedSums<kConfig>& sums)
      : args_(args), storage_(storage), staged_(staged), sums_(sums) {}

  // Adds O to the bf16 sums and sets it to 0, except its last columns, the row sums.
  // num_promotions: promotions in the bf16 sums, plus kMoved once there are fp32 sums. Returns it
  // updated.
  template <class Softmax>
  __device__ __forceinline__ int take(Out& o, const Softmax& softmax, int num_promotions) const {
    const bool any = num_promotions % kMoved != 0;
    if (kInShared && !any) {
      if (threadIdx.x % 32 == 0) wait_for_stores();  // an earlier tile's rows
      __syncwarp();
    }
    uint32_t factor[2] = {0, 0};
    if (any) {
      const float2 factors = to_present(softmax, row_maxes());
      factor[0] = to_bf16x2(factors.x, factors.x), factor[1] = to_bf16x2(factors.y, factors.y);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint4 sums = make_uint4(0, 0, 0, 0);
      if (any) sums = bf16(i);
      bf16(i) = make_uint4(fma_bf16x2(sums.x, factor[0], to_bf16x2(o[8 * i], o[8 * i + 1])),
                           fma_bf16x2(sums.y, factor[1], to_bf16x2(o[8 * i + 2], o[8 * i + 3])),
                           fma_bf16x2(sums.z, factor[0], to_bf16x2(o[8 * i + 4], o[8 * i + 5])),
                           fma_bf16x2(sums.w, factor[1], to_bf16x2(o[8 * i + 6], o[8 * i + 7])));
#pragma unroll
      for (int j = 0; j < 8; ++j) o[8 * i + j] = 0.f;
    }
    set_row_max(softmax);
    ++num_promotions;
    if (num_promotions % kMoved < Traits::kPromotionsToFp32) return num_promotions;
    move_to_fp32(softmax, num_promotions >= kMoved);
    return kMoved;
  }

  // Adds the bf16 and fp32 sums to O; the staging buffer is then free.
  template <class Softmax>
  __device__ __forceinline__ void add_to(Out& o, const Softmax& softmax, int num_promotions) const {
    if (num_promotions == 0) return;
    if (num_promotions >= kMoved) {
      if (num_promotions == kMoved) clear_bf16(softmax);
      add_fp32(softmax);
    }
    const float2 factor = to_present(softmax, row_maxes());
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint4 sums = bf16(i);
      const float4 low = plus(o + 8 * i, factor, sums.x, sums.y);
      const float4 high = plus(o + 8 * i + 4, factor, sums.z, sums.w);
      o[8 * i] = low.x, o[8 * i + 1] = low.y, o[8 * i + 2] = low.z, o[8 * i + 3] = low.w;
      o[8 * i + 4] = high.x, o[8 * i + 5] = high.y, o[8 * i + 6] = high.z, o[8 * i + 7] = high.w;
    }
  }

 private:
  static constexpr int kMoved = 1 << 16;

  // Adds the bf16 sums, which are relative to the current row_max, to the fp32 sums. any: fp32 sums
  // exist.
  template <class Softmax>
  __device__ __forceinline__ void move_to_fp32(const Softmax& softmax, bool any) const {
    float4* const at = in_fp32();
    const float2 factor = any ? to_present(softmax, of_fp32(at)) : make_float2(0.f, 0.f);
#pragma unroll kUnroll
    for (int i = 0; i < kSteps; ++i) {
      float before[8] = {};
      if (any) load(before, at, i);
      const uint4 sums = bf16(i);
      at[2 * i * kThreads] = widened(sums.x, sums.y, before, factor);
      at[(2 * i + 1) * kThreads] = widened(sums.z, sums.w, before + 4, factor);
    }
    reinterpret_cast<float2*>(at + 2 * kSteps * kThreads)[0] =
        make_float2(softmax.row_max_log2(0), softmax.row_max_log2(1));
  }

  template <class Softmax>
  __device__ __forceinline__ void clear_bf16(const Softmax& softmax) const {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) bf16(i) = make_uint4(0, 0, 0, 0);
    set_row_max(softmax);
  }

  // Adds the fp32 sums to the bf16 sums, rescaled to the row_max of these.
  template <class Softmax>
  __device__ __forceinline__ void add_fp32(const Softmax& softmax) const {
    const float4* const from = in_fp32();
    const float2 own = row_maxes(), other = of_fp32(from);
    const float2 factor = make_float2(exp2_approx(other.x - own.x), exp2_approx(other.y - own.y));
#pragma unroll kUnroll
    for (int i = 0; i < kSteps; ++i) {
      float before[8];
      load(before, from, i);
      const uint4 sums = bf16(i);
      const float4 low = widened(sums.x, sums.y, before, factor);
      const float4 high = widened(sums.z, sums.w, before + 4, factor);
      bf16(i) = make_uint4(to_bf16x2(low.x, low.y), to_bf16x2(low.z, low.w),
                           to_bf16x2(high.x, high.y), to_bf16x2(high.z, high.w));
    }
  }

  static __device__ __forceinline__ void load(float (&values)[8], const float4* from, int i) {
    const float4 low = from[2 * i * kThreads], high = from[(2 * i + 1) * kThreads];
    values[0] = low.x, values[1] = low.y, values[2] = low.z, values[3] = low.w;
    values[4] = high.x, values[5] = high.y, values[6] = high.z, values[7] = high.w;
  }

  // widened: four bf16 sums + others * factor of the row. plus: others + four bf16 sums * factor.
  static __device__ __forceinline__ float4 widened(uint32_t first, uint32_t second,
                                                   const float* others, float2 factor) {
    return make_float4(fmaf(others[0], factor.x, low_of_bf16x2(first)),
                       fmaf(others[1], factor.x, high_of_bf16x2(first)),
                       fmaf(others[2], factor.y, low_of_bf16x2(second)),
                       fmaf(others[3], factor.y, high_of_bf16x2(second)));
  }
  static __device__ __forceinline__ float4 plus(const float* others, float2 factor, uint32_t first,
                                                uint32_t second) {
    return make_float4(fmaf(low_of_bf16x2(first), factor.x, others[0]),
                       fmaf(high_of_bf16x2(first), factor.x, others[1]),
                       fmaf(low_of_bf16x2(second), factor.y, others[2]),
                       fmaf(high_of_bf16x2(second), factor.y, others[3]));
  }

  template <class Softmax>
  static __device__ __forceinline__ float2 to_present(const Softmax& softmax, float2 row_maxes) {
    return make_float2(exp2_approx(row_maxes.x - softmax.row_max_log2(0)),
                       exp2_approx(row_maxes.y - softmax.row_max_log2(1)));
  }

  // This thread's workspace in device memory: two float4 of fp32 sums per step; one float4 with the
  // row_max of the fp32 sums and of the bf16 sums; the bf16 sums if not in shared memory.
  __device__ __forceinline__ float4* in_fp32() const {
    constexpr int64_t kWords = promoted_words(Traits::kHeadDim);
    return args_.promoted + blockIdx.x * kWords * kThreads + threadIdx.x;
  }
  static __device__ __forceinline__ float2 of_fp32(const float4* at) {
    return reinterpret_cast<const float2*>(at + 2 * kSteps * kThreads)[0];
  }

  __device__ __forceinline__ uint4& bf16(int i) const {
    if constexpr (kInRegisters) return sums_.bf16[i];
    if constexpr (kInShared)
      return reinterpret_cast<uint4*>(staged_)[threadIdx.x % 32 + i * kStride];
    return reinterpret_cast<uint4*>(in_fp32() + (2 * kSteps + 1) * kThreads)[i * kStride];
  }

  // row_max of the bf16 sums, for this thread's two rows, in log2 units.
  __device__ __forceinline__ float2 row_maxes() const {
    if constexpr (kInRegisters) return sums_.row_max;
    if constexpr (kInShared) {
      __syncwarp();
      const float* of_row = storage_.promoted_row_max + thread_row(threadIdx.x);
      return make_float2(of_row[0], of_row[kRowStride]);
    }
    return reinterpret_cast<const float2*>(in_fp32() + 2 * kSteps * kThreads)[1];
  }
  template <class Softmax>
  __device__ __forceinline__ void set_row_max(const Softmax& softmax) const {
    const float2 now = make_float2(softmax.row_max_log2(0), softmax.row_max_log2(1));
    if constexpr (kInRegisters) {
      sums_.row_max = now;
    } else if constexpr (kInShared) {
      __syncwarp();
      float* of_row = storage_.promoted_row_max + thread_row(threadIdx.x);
      if (threadIdx.x % 4 == 0) of_row[0] = now.x, of_row[kRowStride] = now.y;
    } else {
      reinterpret_cast<float2*>(in_fp32() + 2 * kSteps * kThreads)[1] = now;
    }
  }

  const QuantizedArguments& args_;
  QuantizedStorageOf<kConfig>& storage_;
  uint8_t* staged_;
  PromotedSums<kConfig>& sums_;
};

}  // namespace flashattn3::forward
