// Emulation of csrc/ptx/cluster.cuh, without ClusterMax.
#pragma once

#include <cstdint>
#include <cstring>

#include "cute/arch/util.hpp"
#include "emulation.h"
#include "ptx/mbarrier.cuh"

namespace flashattn3 {

inline uint32_t cluster_rank() { return emulation::running->rank; }
inline uint32_t cluster_index() {
  return blockIdx.x / static_cast<uint32_t>(emulation::running->cluster->ctas.size());
}

inline void cluster_arrive() {
  __syncwarp();
  emulation::arrive_at_cluster();
}
inline void cluster_wait() {
  __syncwarp();
  emulation::wait_for_cluster();
}
inline void cluster_arrive_release() { cluster_arrive(); }

inline int32_t load_from_cta(const int32_t& place, uint32_t cta) {
  int32_t value;
  std::memcpy(&value, emulation::memory_of(cta) + cute::cast_smem_ptr_to_uint(&place), 4);
  return value;
}

inline Barrier& barrier_of_cta(uint32_t address, uint32_t cta) {
  return *reinterpret_cast<Barrier*>(emulation::memory_of(cta) + address);
}

// The copy reads this CTA's memory as late as the bytes arrive in the other one.
inline void copy_to_peer(uint32_t to, uint32_t from, const Barrier& full, uint32_t bytes,
                         uint32_t cta) {
  emulation::Cta& peer = emulation::cta_of_rank(cta);
  std::memset(peer.memory.data() + to, 0xff, bytes);  // NaN until the copy is complete
  const uint32_t mine = emulation::running->rank, barrier = full.address();
  const auto complete = [=] {
    std::memcpy(emulation::shared_memory + to, emulation::memory_of(mine) + from, bytes);
    barrier_of_cta(barrier, emulation::running->rank).complete_bytes(bytes);
  };
  peer.in_flight.push_back({complete, peer.round + emulation::random_delay(peer.random)});
}

inline void arrive_warp_at(const Barrier& barrier, uint32_t cta) {
  if (threadIdx.x % 32 == 0) barrier_of_cta(barrier.address(), cta).arrive();
}

}  // namespace flashattn3
