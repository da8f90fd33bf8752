// Emulation of csrc/ptx/convert_16bit.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cstdint>
#include <vector>

#include "ptx/element.h"

namespace flashattn3 {

template <ElementType kElement>
uint32_t pack(float low, float high) {
  const auto bits = [](float x) -> uint32_t {
    if constexpr (kElement == ElementType::kBFloat16) {
      return std::bit_cast<uint16_t>(__float2bfloat16_rn(x));
    } else {
      return std::bit_cast<uint16_t>(__float2half_rn(x));
    }
  };
  return bits(low) | bits(high) << 16;
}

// A conversion in software takes longer than all else of an emulated GEMM.
inline const std::vector<float> half_values = [] {
  std::vector<float> values(1 << 16);
  for (int i = 0; i < 1 << 16; ++i) {
    values[i] = __half2float(std::bit_cast<__half>(static_cast<uint16_t>(i)));
  }
  return values;
}();

template <ElementType kElement>
float element_of(uint16_t bits) {
  if constexpr (kElement == ElementType::kBFloat16) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  } else {
    return half_values[bits];
  }
}

template <ElementType kElement>
float2 unpack(uint32_t pair) {
  return make_float2(element_of<kElement>(static_cast<uint16_t>(pair)),
                     element_of<kElement>(static_cast<uint16_t>(pair >> 16)));
}

}  // namespace flashattn3
