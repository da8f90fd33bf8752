// One kernel config of backward kernels as C++ sees it: everything that is fixed when one
// is compiled. A template argument, as forward::Config is.
#pragma once

#include <cstdint>

#include "ptx/element.h"

namespace flashattn3::backward {

struct Config {
  ElementType dtype;       // of q, k, v, out and their gradients: 16 bits
  int head_dim;            // 64, 96, 128 or 256; TMA fills smaller heads with zeros
  int num_stages;          // tiles of Q (and of dO) in shared memory, at least 2
  int num_mma_warpgroups;  // of a CTA, 64 keys each; in pairs 2
};

constexpr int kBlockM = 64;  // queries of a step

// Up to 128 columns a warpgroup keeps dK and dV of 64 keys in registers; beyond, half of the
// columns, and two CTAs work on a tile (cluster2/kernel.cuh).
constexpr bool uses_cluster2(const Config& config) { return config.head_dim > 128; }

// Keys of a tile.
constexpr int block_n(const Config& config) {
  return uses_cluster2(config) ? 128 : 64 * config.num_mma_warpgroups;
}

// Threads of a CTA: the warpgroups that multiply and the one that loads.
constexpr int num_threads(const Config& config) { return 128 * (config.num_mma_warpgroups + 1); }

// Room for the barriers, the tile descriptions and the rows' statistics, before the tiles, which
// want 1024-byte alignment.
constexpr int kSharedStorageBytes = 3072;

constexpr int head_dim_bytes(const Config& config) { return (config.head_dim + 63) / 64 * 128; }

// K, V; stages of Q and dO; two tiles of dS, keys x queries of a step; for each warpgroup 64 rows
// of dQ in fp32. In pairs: 64 keys of K, of V and of half of the other K; two Q, one dO; two tiles
// of P, of dS and of the other dS.
constexpr int smem_bytes(const Config& config) {
  const int bytes = head_dim_bytes(config), keys = block_n(config);
  if (uses_cluster2(config)) {
    return kSharedStorageBytes + 5 * 64 * bytes / 2 + 3 * kBlockM * bytes + 6 * 64 * kBlockM * 2;
  }
  return kSharedStorageBytes + 2 * keys * bytes + 2 * config.num_stages * kBlockM * bytes +
         2 * keys * kBlockM * 2 + config.num_mma_warpgroups * kBlockM * config.head_dim * 4;
}

// Counts of arrivals for each block of queries: parts of its sums that are added by themselves.
constexpr int num_dq_semaphores(const Config& config) { return uses_cluster2(config) ? 4 : 1; }

}  // namespace flashattn3::backward
