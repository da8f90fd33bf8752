// Emulation of csrc/ptx/pdl.cuh.
#pragma once

namespace flashattn3 {

inline void launch_dependents() {}
inline void griddepcontrol_wait() {}

}  // namespace flashattn3
