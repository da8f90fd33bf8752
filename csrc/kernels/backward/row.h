// One row of the kernel table of backward kernels as C++ sees it: everything that is fixed when one
// is compiled. A template argument, as ForwardRow is.
#pragma once

#include <cstdint>

#include "blocks/element.h"

namespace flashattn3 {

struct BackwardRow {
  ElementType dtype;       // of q, k, v, out and their gradients: 16 bits
  int head_dim;            // 64, 96, 128 or 256; TMA fills smaller heads with zeros
  int num_stages;          // tiles of Q (and of dO) in shared memory, at least 2
  int num_mma_warpgroups;  // of a CTA, 64 keys each; in pairs 2
};

constexpr int kBackwardRows = 64;  // queries of a step

// Up to 128 columns a warpgroup keeps dK and dV of 64 keys in registers; beyond, half of the
// columns, and two CTAs work on a tile (pair_kernel.cuh).
constexpr bool backward_in_pairs(const BackwardRow& row) { return row.head_dim > 128; }

// Keys of a tile.
constexpr int backward_keys(const BackwardRow& row) {
  return backward_in_pairs(row) ? 128 : 64 * row.num_mma_warpgroups;
}

// Threads of a CTA: the warpgroups that multiply and the one that loads.
constexpr int backward_num_threads(const BackwardRow& row) {
  return 128 * (row.num_mma_warpgroups + 1);
}

// Room for the barriers, the tile descriptions and the rows' statistics, before the tiles, which
// want 1024-byte alignment.
constexpr int kBackwardControlBytes = 3072;

constexpr int backward_row_bytes(const BackwardRow& row) { return (row.head_dim + 63) / 64 * 128; }

// K, V; stages of Q and dO; two tiles of dS, keys x queries of a step; for each warpgroup 64 rows
// of dQ in fp32. In pairs: 64 keys of K, of V and of half of the other K; two Q, one dO; two tiles
// of P, of dS and of the other dS.
constexpr int backward_shared_bytes(const BackwardRow& row) {
  const int bytes = backward_row_bytes(row), keys = backward_keys(row);
  if (backward_in_pairs(row)) {
    return kBackwardControlBytes + 5 * 64 * bytes / 2 + 3 * kBackwardRows * bytes +
           6 * 64 * kBackwardRows * 2;
  }
  return kBackwardControlBytes + 2 * keys * bytes + 2 * row.num_stages * kBackwardRows * bytes +
         2 * keys * kBackwardRows * 2 + row.num_mma_warpgroups * kBackwardRows * row.head_dim * 4;
}

// Counts of arrivals for each block of queries: parts of its sums that are added by themselves.
constexpr int backward_arrivals(const BackwardRow& row) { return backward_in_pairs(row) ? 4 : 1; }

}  // namespace flashattn3
