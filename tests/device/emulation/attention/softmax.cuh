// Emulation of the functions of csrc/attention/softmax.cuh that decode uses.
#pragma once

#include <cmath>

#include "emulation.h"

namespace flashattn3 {

inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
inline float quad_max(float x) {
  x = std::fmax(x, __shfl_xor_sync(~0u, x, 1));
  return std::fmax(x, __shfl_xor_sync(~0u, x, 2));
}

}  // namespace flashattn3
