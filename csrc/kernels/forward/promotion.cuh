// Sums of out in fp32, in device memory. WGMMA's accumulators keep about 13 bits of a sum of e4m3
// products; so that the error does not grow with the keys, out moves from time to time to where
// every bit is kept.
#pragma once

#include <cstdint>

#include "blocks/row_references.cuh"
#include "kernels/forward/arguments.h"

namespace flashattn3 {

template <class Config>
class Promotion {
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kStep = 128 * Config::kConsumers;
  using Out = float[Config::kOutRegisters];

 public:
  // Of a new row tile.
  __device__ __forceinline__ void reset() { any_ = false; }

  // Moves out away; it is 0 then. While the scores' registers are free.
  template <class Softmax>
  __device__ __forceinline__ void move(Out& o, const Softmax& softmax,
                                       const ForwardArguments& args) {
    add_to<kHeadDim <= 128 ? Config::kBlockN / 16 : 2>(o, softmax, args);
    any_ = true;
    float4* at = room(args);
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      at[i * kStep] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
      o[4 * i] = o[4 * i + 1] = o[4 * i + 2] = o[4 * i + 3] = 0.f;
    }
    at[kHeadDim / 8 * kStep] =
        make_float4(softmax.exponent_reference(0), softmax.exponent_reference(1), 0.f, 0.f);
  }

  // Adds what was moved before, on the present references. kAtOnce: float4s for which registers are
  // free; ptxas would load all at once.
  template <int kAtOnce = 4, class Softmax>
  __device__ __forceinline__ void add_to(Out& o, const Softmax& softmax,
                                         const ForwardArguments& args) const {
    if (!any_) return;
    const float4* at = room(args);
    const float4 references = at[kHeadDim / 8 * kStep];
    const float factor[2] = {exp2_approx(references.x - softmax.exponent_reference(0)),
                             exp2_approx(references.y - softmax.exponent_reference(1))};
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      if (i % kAtOnce == 0) __syncwarp();
      const float4 before = at[i * kStep];
      o[4 * i] += before.x * factor[0];
      o[4 * i + 1] += before.y * factor[0];
      o[4 * i + 2] += before.z * factor[1];
      o[4 * i + 3] += before.w * factor[1];
    }
  }

 private:
  // This thread's: kHeadDim / 8 times four accumulators, then the references that they are on.
  static __device__ __forceinline__ float4* room(const ForwardArguments& args) {
    return args.quantized.promoted + static_cast<int64_t>(blockIdx.x) * (kHeadDim / 8 + 1) * kStep +
           threadIdx.x;
  }

  bool any_ = false;
};

}  // namespace flashattn3
