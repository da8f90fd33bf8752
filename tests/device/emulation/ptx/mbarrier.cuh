// Emulation of csrc/ptx/mbarrier.cuh.
#pragma once

#include <cstdint>

#include "cute/arch/util.hpp"
#include "emulation.h"
#include "ptx/pipeline_state.h"

namespace flashattn3 {

constexpr int kArrivalsPerWarp = 1;

struct Barrier {
  uint16_t expected, missing;
  uint32_t completed;  // phases

  uint32_t address() const { return cute::cast_smem_ptr_to_uint(this); }
  void init(int count) {
    expected = missing = static_cast<uint16_t>(count);
    completed = 0;
  }
  void wait(uint32_t phase) const {
    emulation::wait_until([&] { return completed % 2 != phase; }, "mbarrier");
  }
  void arrive() {
    ++emulation::cta.progress;
    if (--missing != 0) return;
    missing = expected, ++completed;
  }
  void arrive_warp() {
    if (threadIdx.x % 32 == 0) arrive();
  }
  void arrive_lanes() { arrive_warp(); }
};

inline void fence_async_proxy() {}
inline int uniform(int x) { return x; }
inline void named_barrier_sync(int id, int num_threads) {
  emulation::meet(emulation::cta.barriers[id], num_threads, "named barrier");
}

}  // namespace flashattn3
