// Emulation of csrc/ptx/cp_async_groups.cuh. A copy writes when its thread waits for its group.
#pragma once

#include <cstdint>
#include <utility>

#include "emulation.h"

namespace flashattn3 {

inline void copy_word_async(uint32_t to, const void* from, bool exists) {
  emulation::start_copy(to, exists ? from : nullptr, 4);
}

inline void copy_vec_async(uint32_t to, const void* from, bool exists) {
  emulation::start_copy(to, exists ? from : nullptr, 16);
}

inline void commit_copies() {
  auto& self = emulation::self();
  self.copy_groups.push_back(std::exchange(self.copies, {}));
}

template <int kCount>
void wait_for_groups() {
  auto& groups = emulation::self().copy_groups;
  while (groups.size() > kCount) {
    for (const emulation::Copy& copy : groups.front()) copy.complete();
    groups.erase(groups.begin());
  }
  emulation::linger();
}

}  // namespace flashattn3
