// The element types of q, k and v. Tensors of the 8-bit types have descales.
#pragma once

namespace flashattn3 {

enum class ElementType { kFloat16, kBFloat16, kE4m3, kInt8 };

constexpr bool is_quantized(ElementType type) {
  return type == ElementType::kE4m3 || type == ElementType::kInt8;
}

constexpr int element_bytes(ElementType type) { return is_quantized(type) ? 1 : 2; }

// Element type of v and of the probabilities if q and k have this type.
constexpr ElementType value_type(ElementType type) {
  return type == ElementType::kInt8 ? ElementType::kE4m3 : type;
}

}  // namespace flashattn3
