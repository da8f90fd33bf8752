// Emulation of csrc/ptx/mbarrier.cuh.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cute/arch/util.hpp"
#include "emulation.h"
#include "ptx/pipeline_state.h"

namespace flashattn3 {

constexpr int kArrivalsPerWarp = 1;

struct Barrier {
  union {
    uint64_t word;
    uint32_t low_word;
    struct {
      uint32_t expected : 10, missing : 10;
      uint32_t completed : 12;  // phases
      int32_t missing_bytes;    // below 0: copied before they were expected
    };
  };

  uint32_t address() const { return cute::cast_smem_ptr_to_uint(&word); }
  void init(int count) {
    expected = missing = static_cast<uint32_t>(count);
    completed = 0, missing_bytes = 0;
    if (expected != static_cast<uint32_t>(count)) fail("counts too many arrivals");
  }
  void wait(uint32_t phase) const {
    static_assert(std::endian::native == std::endian::little);
    constexpr int kFirstBit = 20;  // of `completed`
    emulation::wait_for({&low_word, 1u << kFirstBit, phase << kFirstBit}, "mbarrier", address());
  }
  void arrive() {
    if (missing == 0) fail("has one arrival too many in a phase");
    --missing;
    complete();
  }
  void arrive_and_expect(uint32_t bytes) {
    missing_bytes += static_cast<int32_t>(bytes);
    arrive();
  }
  void arrive_warp(bool is_lane0 = threadIdx.x % 32 == 0) {
    if (is_lane0) arrive();
    emulation::linger();
  }
  void arrive_lanes() { arrive_warp(); }

  // Bytes of a bulk copy have arrived.
  void complete_bytes(uint32_t bytes) {
    missing_bytes -= static_cast<int32_t>(bytes);
    complete();
  }

 private:
  void complete() {
    ++emulation::progress;
    if (missing != 0 || missing_bytes != 0) return;
    missing = expected, ++completed;
  }
  void fail(const char* what) const {
    std::printf("the mbarrier at %u %s (thread %d)\n", address(), what, emulation::running->thread);
    std::abort();
  }
};

inline void fence_barrier_init() {}
inline void fence_async_proxy() {}
inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
inline void named_barrier_sync(int id, int num_threads) {
  emulation::meet(emulation::running->barriers[id], num_threads, "named barrier");
}

}  // namespace flashattn3
