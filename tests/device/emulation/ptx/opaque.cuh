// Emulation of csrc/ptx/opaque.cuh.
#pragma once

#include <cstdint>

#include "emulation.h"

namespace flashattn3 {

template <class Value>
void make_opaque(Value&) {}

inline uint32_t opaque_ones() { return ~0u; }
inline int opaque_uniform(int x) { return __shfl_sync(~0u, x, 0); }

}  // namespace flashattn3
