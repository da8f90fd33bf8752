// Emulation of csrc/ptx/approximations.cuh.
#pragma once

#include <cmath>

namespace flashattn3 {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
inline float divide(float x, float y) { return x / y; }

}  // namespace flashattn3
