// Emulation of the groups of WGMMA.
#pragma once

#include <algorithm>
#include <cstddef>

#include "emulation.h"

namespace cute {

template <class Register>
void warpgroup_fence_operand(Register&) {}
inline void warpgroup_arrive() {}

inline void warpgroup_commit_batch() { ++emulation::self().num_groups; }

template <int kPending>
void warpgroup_wait() {
  emulation::linger();
  emulation::meet_warp(emulation::self(), [](auto fiber_of) {
    emulation::Fiber* const lanes = &fiber_of(0);
    const auto is_due = [&](const emulation::Wgmma& wgmma) {
      return wgmma.group + kPending < lanes->num_groups;
    };
    const auto& started = lanes->wgmmas;
    const auto end = std::find_if_not(started.begin(), started.end(), is_due);
    const size_t count = end - started.begin();
    for (size_t i = 0; i < count; ++i) started[i].run(lanes, i);
    for (int lane = 0; lane < 32; ++lane) {
      auto& wgmmas = lanes[lane].wgmmas;
      wgmmas.erase(wgmmas.begin(), wgmmas.begin() + count);
    }
  });
}

}  // namespace cute
