// Emulation of csrc/ptx/bulk_copy.cuh: stores are complete at once.
#pragma once

namespace flashattn3 {

inline void commit_stores() {}
inline void wait_for_stores() {}

}  // namespace flashattn3
