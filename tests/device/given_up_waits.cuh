// Prints the waits that a kernel built with -DFLASHATTN3_WAIT_LIMIT_NS=<nanoseconds> has given up.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "ptx/mbarrier.cuh"

namespace flashattn3 {

// A member of SharedStorage: name and offset.
struct NamedOffset {
  const char* name;
  size_t offset;
};
#define FLASHATTN3_OFFSET(Storage, member) {#member, offsetof(Storage, member)}

// Waits for the kernel, prints its records and clears them. barriers: of its SharedStorage.
inline void print_given_up_waits(std::initializer_list<NamedOffset> barriers) {
#ifdef FLASHATTN3_WAIT_LIMIT_NS
  constexpr uint32_t kSystemBytes = 1024;  // of shared memory, before a kernel's own
  cudaDeviceSynchronize();
  static GivenUpWaits waits;
  cudaMemcpyFromSymbol(&waits, given_up_waits, sizeof(waits));
  if (waits.count == 0) return;
  std::printf("%u waits given up; offsets:", waits.count);
  for (const NamedOffset& barrier : barriers) std::printf(" %s %zu", barrier.name, barrier.offset);
  std::printf("\n");
  for (uint32_t i = 0; i < waits.count && i < 64; ++i) {
    const GivenUpWait& w = waits.first[i];
    std::printf("  CTA %u thread %u: offset %u phase %u\n", w.block, w.thread,
                w.barrier - kSystemBytes, w.phase);
  }
  waits = {};
  cudaMemcpyToSymbol(given_up_waits, &waits, sizeof(waits));
#endif
}

}  // namespace flashattn3
