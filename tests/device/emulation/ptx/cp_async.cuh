// Emulation of csrc/ptx/cp_async.cuh.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>

#include "emulation.h"
#include "ptx/mbarrier.cuh"

namespace flashattn3 {

inline void copy_async(uint32_t to, const void* from, bool exists) {
  uint8_t* at = emulation::shared_memory + to;
  std::memset(at, 0xff, 16);  // NaN until the copy is complete
  emulation::self().copies.push_back([=] {
    if (exists) {
      std::memcpy(at, from, 16);
    } else {
      std::memset(at, 0, 16);
    }
  });
}

inline void arrive_when_copied(Barrier& barrier) {
  auto copies = std::move(emulation::self().copies);
  emulation::self().copies.clear();
  const auto complete = [&barrier, copies = std::move(copies)] {
    for (const auto& copy : copies) copy();
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
