// The element types of q, k and v.
#pragma once

namespace flashattn3 {

enum class ElementType { kFloat16, kBFloat16, kE4m3 };

constexpr int element_bytes(ElementType type) { return type == ElementType::kE4m3 ? 1 : 2; }

}  // namespace flashattn3
