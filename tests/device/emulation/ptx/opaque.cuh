// Emulation of csrc/ptx/opaque.cuh.
#pragma once

#include <cstdint>

namespace flashattn3 {

template <class Value>
void make_opaque(Value&) {}

inline uint32_t opaque_ones() { return ~0u; }

}  // namespace flashattn3
