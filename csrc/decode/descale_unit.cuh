// The unit of a part's columns of P where keys have descales of V. P is fp16, so its columns are
// multiplied by descales in units of a power of 2, of which no descale of V so far is 2^15. It
// rises with them, and O is rescaled where the running maximum rescales it too. The largest descale
// is 2^14 units or more: weights down to 2^-28 of it are normal numbers.
#pragma once

#include <cstdint>

#include "ptx/approximations.cuh"

namespace flashattn3::decode {

class DescaleUnit {
  static constexpr int kBias = 127;  // of a float's exponent
  static constexpr int kLift = 14;   // log2 of the units of the largest descale

 public:
  __device__ __forceinline__ void reset() { largest_ = kLift + 1; }

  // descale: the largest magnitude of a KV block. Returns the factor of O.
  __device__ __forceinline__ float raise(float descale) {
    const int exponent = min(__float_as_int(descale) >> 23, 2 * kBias - 1);
    if (exponent <= largest_) return 1.f;
    const float change = exp2_approx(static_cast<float>(largest_ - exponent));
    largest_ = exponent;
    return change;
  }
  __device__ __forceinline__ float value() const { return power_of_2(largest_ - kLift); }
  __device__ __forceinline__ float inverse() const {
    return power_of_2(2 * kBias + kLift - largest_);
  }

 private:
  static __device__ __forceinline__ float power_of_2(int biased) {
    return __int_as_float(biased << 23);
  }

  int largest_;  // biased exponent of the largest descale
};

}  // namespace flashattn3::decode
