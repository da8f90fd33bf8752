// Emulation of csrc/ptx/cp_async.cuh.
#pragma once

#include <cstdint>
#include <random>
#include <utility>

#include "emulation.h"
#include "ptx/mbarrier.cuh"

namespace flashattn3 {

inline void copy_async(uint32_t to, const void* from, bool exists) {
  emulation::start_copy(to, exists ? from : nullptr, 16);
}

inline void copy_async(uint32_t to, const void* from, bool exists, bool) {
  copy_async(to, from, exists);
}

inline void arrive_when_copied(Barrier& barrier) {
  const auto complete = [&barrier, copies = std::exchange(emulation::self().copies, {})] {
    for (const emulation::Copy& copy : copies) copy.complete();
    barrier.arrive();
  };
  // The copies of all threads for one phase of the barrier are late together, or else the latest of
  // them would never overtake the copies for another barrier.
  std::minstd_rand random((emulation::running->seed * 31 + barrier.address()) * 4099 +
                          barrier.completed);
  random.discard(2);  // the first numbers of neighbouring seeds are alike
  emulation::running->in_flight.push_back(
      {complete, emulation::running->round + emulation::random_delay(random)});
}

inline void wait_for_copies() {}

}  // namespace flashattn3
