// Emulation of csrc/ptx/bulk_copy.cuh. Bulk copies of floats read shared memory when their thread
// waits for that, and write global memory when it waits until they are stored. TMA stores
// (tile/tma_store.cuh) are complete at once.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "emulation.h"

namespace flashattn3 {

inline void copy_floats_out(float* to, uint32_t from, uint32_t bytes, bool add) {
  emulation::self().reads.push_back([=] {
    std::vector<float> values(bytes / sizeof(float));
    std::memcpy(values.data(), emulation::shared_memory + from, bytes);
    emulation::self().writes.push_back([=, values = std::move(values)] {
      for (size_t i = 0; i < values.size(); ++i) to[i] = add ? to[i] + values[i] : values[i];
    });
  });
}
inline void store_floats(float* to, uint32_t from, uint32_t bytes) {
  copy_floats_out(to, from, bytes, false);
}
inline void add_floats(float* to, uint32_t from, uint32_t bytes) {
  copy_floats_out(to, from, bytes, true);
}
inline void commit_stores() {}
inline void wait_for_stores() {
  for (const auto& read : emulation::self().reads) read();
  emulation::self().reads.clear();
}
inline void wait_until_stored() {
  wait_for_stores();
  for (const auto& write : emulation::self().writes) write();
  emulation::self().writes.clear();
}

}  // namespace flashattn3
