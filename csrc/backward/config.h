// Kernel config of a backward kernel: its compile-time choices. A template argument, like
// forward::Config.
#pragma once

#include <cstdint>

#include "attention/score_term.h"
#include "ptx/element.h"

namespace flashattn3::backward {

struct Config {
  ElementType dtype;       // of q, k, v, out and their gradients: 16 bits
  int head_dim;            // 64, 96, 128, 192 or 256; TMA fills smaller heads with zeros
  int head_dim_v;          // of v, out and dout: head_dim; with head_dim 192 also 128
  int num_stages;          // tiles of Q and of dO in shared memory; cluster2: unused
  int num_mma_warpgroups;  // of a CTA, 64 keys each; with cluster2 2
  ScoreTerm term = ScoreTerm::kNone;
  bool listed = false;  // the mask is lists of blocks of queries (attention/mask_lists.cuh)
};

constexpr int kBlockM = 64;  // queries of a step

// Up to 128 columns of V a warpgroup keeps dK and dV of 64 keys in registers; beyond 128, half of
// their columns, and a 2-CTA cluster computes a tile (cluster2/kernel.cuh).
constexpr bool uses_cluster2(const Config& config) { return config.head_dim_v > 128; }

// At 192 columns of V the two consumer warpgroups of a CTA have roles of their own
// (specialized/roles.cuh).
constexpr bool is_specialized(const Config& config) { return config.head_dim_v == 192; }

// Without a cluster: parts of dQ's columns that are computed one at a time, where dK and dV leave
// no registers for more (wide_step.cuh).
constexpr int num_dq_parts(const Config& config) {
  return config.head_dim > 128 && !uses_cluster2(config) ? config.head_dim / 64 : 1;
}

// Threads of the producer warpgroup that add dQ to memory: one for each consumer warpgroup, or for
// each part.
constexpr int num_dq_writers(const Config& config) {
  return num_dq_parts(config) > 1 ? num_dq_parts(config) : config.num_mma_warpgroups;
}

// log2 of the unit in which P is stored. Beyond 128 columns dS is computed from P in 16 bits. fp16
// rounds below 2^-25 to 0, and dP may be large there, so P is stored in units of 2^-12; it is at
// most 1, or a few times that if lse is not exact.
constexpr int log2_unit_of_probabilities(const Config& config) {
  return config.dtype == ElementType::kFloat16 && config.head_dim > 128 ? -12 : 0;
}
constexpr float unit_of_probabilities(const Config& config) {
  return 1.f / static_cast<float>(1 << -log2_unit_of_probabilities(config));
}

constexpr bool has_bias(const Config& config) { return config.term == ScoreTerm::kBias; }

// Tiles of dQ in shared memory, one for each consumer warpgroup; beside tiles of the bias and 128
// columns there is space for one, which they take in turn.
constexpr int num_dq_buffers(const Config& config) {
  return has_bias(config) && config.head_dim > 64 ? 1 : config.num_mma_warpgroups;
}

// Keys of a tile.
constexpr int block_n(const Config& config) {
  return uses_cluster2(config) ? 128 : 64 * config.num_mma_warpgroups;
}

// Consumer warps of a work tile.
constexpr int warps_of_tile(const Config& config) {
  return (uses_cluster2(config) ? 8 : 4) * config.num_mma_warpgroups;
}

// Accumulators of dK and dV of a lane, which are added where query heads are divided.
constexpr int reduced_floats(const Config& config) {
  return (config.head_dim + config.head_dim_v) * block_n(config) / (32 * warps_of_tile(config));
}

// Threads of a CTA: consumer warpgroups and one producer warpgroup.
constexpr int num_threads(const Config& config) { return 128 * (config.num_mma_warpgroups + 1); }

// Bytes for the barriers, the work tiles, lse and delta, before the K/V/Q/dO tiles, which need
// 1024-byte alignment.
constexpr int kSharedStorageBytes = 3072;

constexpr int head_dim_bytes(int head_dim) { return (head_dim + 63) / 64 * 128; }
constexpr int head_dim_bytes(const Config& config) { return head_dim_bytes(config.head_dim); }

// K, V; stages of Q and of dO; two tiles of dS, keys x queries of a step; num_dq_buffers() times 64
// rows of dQ, or of a part of it, in fp32; a tile of the bias for each stage of Q. cluster2: 64
// keys of K, of V and of half the columns of the other CTA's K; two Q, one dO; two tiles each of P,
// dS and the other CTA's dS. Specialized: two Q, two dO, and of both CTAs' K a second time half the
// columns, in two atoms.
constexpr int smem_bytes(const Config& config) {
  const int bytes = head_dim_bytes(config), keys = block_n(config);
  if (is_specialized(config)) {
    return kSharedStorageBytes + 2 * (64 + 2 * kBlockM) * bytes + 2 * 64 * 2 * 128 +
           6 * 64 * kBlockM * 2;
  }
  if (uses_cluster2(config)) {
    return kSharedStorageBytes + 5 * 64 * bytes / 2 + 3 * kBlockM * bytes + 6 * 64 * kBlockM * 2;
  }
  const int bytes_v = head_dim_bytes(config.head_dim_v);
  return kSharedStorageBytes + (keys + config.num_stages * kBlockM) * (bytes + bytes_v) +
         2 * keys * kBlockM * 2 +
         num_dq_buffers(config) * kBlockM * (config.head_dim / num_dq_parts(config)) * 4 +
         (has_bias(config) ? config.num_stages * keys * kBlockM * 2 : 0);
}

// dq_semaphores per m_block: one for each CTA of a cluster, or each part of dQ, whose columns are
// added separately.
constexpr int num_dq_semaphores(const Config& config) {
  return uses_cluster2(config) ? 2 : num_dq_parts(config);
}

}  // namespace flashattn3::backward
