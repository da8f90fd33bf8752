// Emulation of the groups of WGMMA.
#pragma once

#include "emulation.h"

namespace cute {

template <class Register>
void warpgroup_fence_operand(Register&) {}
inline void warpgroup_arrive() {}

inline void warpgroup_commit_batch() {
  emulation::Fiber& fiber = emulation::self();
  fiber.gemms.push_back(std::move(fiber.wgmmas));
  fiber.wgmmas.clear();
}

template <int kPending>
void warpgroup_wait() {
  emulation::linger();
  auto& gemms = emulation::self().gemms;
  while (gemms.size() > kPending) {
    for (const auto& wgmma : gemms.front()) wgmma();
    gemms.erase(gemms.begin());
  }
  emulation::meet_warp();
}

}  // namespace cute
