// Emulation of csrc/ptx/opaque.cuh.
#pragma once

namespace flashattn3 {

template <class Value>
void make_opaque(Value&) {}

}  // namespace flashattn3
