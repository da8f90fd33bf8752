// Emulation of the function of csrc/ptx/convert_fp8.cuh that the softmax names; no kernel here
// calls it.
#pragma once

namespace flashattn3 {

float max_or_nan(float a, float b);

}  // namespace flashattn3
