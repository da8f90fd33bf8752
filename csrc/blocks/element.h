// The element types of the 16-bit kernels.
#pragma once

namespace flashattn3 {

enum class ElementType { kFloat16, kBFloat16 };

}  // namespace flashattn3
