// Everything that follows from a row of more than 128 columns at compile time. Its tile of keys is
// worked on by a cluster of two CTAs, 64 keys each.
#pragma once

#include <cstdint>

#include "blocks/barrier.cuh"
#include "kernels/backward/key_tile.cuh"
#include "kernels/backward/row.h"

namespace flashattn3 {

template <BackwardRow kTheRow>
struct PairConfig {
  static constexpr BackwardRow kRow = kTheRow;
  static constexpr ElementType kElement = kRow.dtype;
  static constexpr int kHeadDim = kRow.head_dim;
  static constexpr int kConsumers = kRow.num_mma_warpgroups;
  static constexpr int kThreads = backward_num_threads(kRow);
  static constexpr int kKeys = backward_keys(kRow) / 2;  // of a CTA
  static constexpr int kHalf = kHeadDim / 2;  // columns of dK and dV that a warpgroup accumulates
  static constexpr int kQuarter = kHeadDim / 4;                   // and of dQ
  static constexpr int kChunks = backward_row_bytes(kRow) / 128;  // 64 columns each
  static constexpr int kKeyBytes = kKeys * kChunks * 128;
  static constexpr int kRowBytes = kBackwardRows * kChunks * 128;
  static constexpr int kScoreBytes = kKeys * kBackwardRows * 2;
  // From the start of shared memory: control, K, V, half of the columns of the other CTA's K, two
  // tiles of Q, one of dO, two of P, of dS and of the other CTA's dS.
  static constexpr int kKOffset = kBackwardControlBytes;
  static constexpr int kVOffset = kKOffset + kKeyBytes;
  static constexpr int kOtherKOffset = kVOffset + kKeyBytes;
  static constexpr int kQOffset = kOtherKOffset + kKeyBytes / 2;
  static constexpr int kDoutOffset = kQOffset + 2 * kRowBytes;
  static constexpr int kPOffset = kDoutOffset + kRowBytes;
  static constexpr int kDsOffset = kPOffset + 2 * kScoreBytes;
  static constexpr int kOtherDsOffset = kDsOffset + 2 * kScoreBytes;

  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  static_assert(kConsumers == 2 && kRow.num_stages == 2);
  static_assert(kHeadDim == 256, "halves and quarters are whole chunks");
  static_assert(kOtherDsOffset + 2 * kScoreBytes == backward_shared_bytes(kRow));
  static_assert(backward_shared_bytes(kRow) <= 232448, "227 KB for a CTA");
};

// Barriers, and the arrivals for each phase:
//   keys_full    1: the producer, and the bytes of K, V and the other K; one phase
//   q_full[b], dout_full    1: the producer, and the bytes of the copies
//   q_empty[b], dout_empty  one for each consumer warp, after its last read
//   ds_full[b]      one for each consumer warp: its part of P and dS of a step is written
//   other_full[b]   1: this CTA's exchanger, and the bytes of the other CTA's dS
//   other_empty[b]  one for each consumer warp of the other CTA: it has read what it got from here
//   turn[b]         1: the thread that watches; in order alone: dQ of the step may be added
// Step i uses buffer b = i % 2 of all but dO.
struct PairControl {
  float lse[2][kBackwardRows];
  float minus_delta[kBackwardRows];
  Barrier keys_full;
  Barrier q_full[2], q_empty[2];
  Barrier dout_full, dout_empty;
  Barrier ds_full[2];
  Barrier other_full[2], other_empty[2];
  Barrier turn[2];
  int32_t ticket;  // in order, of the cluster's first CTA: the number of its tile
  KeyTile tile;

  // One thread, before the CTA's first __syncthreads and the cluster's first barrier.
  __device__ __forceinline__ void init() {
    constexpr int kWarps = 8;  // that multiply
    keys_full.init(1);
    dout_full.init(1), dout_empty.init(kWarps);
    for (int i = 0; i < 2; ++i) {
      q_full[i].init(1), q_empty[i].init(kWarps);
      ds_full[i].init(kWarps);
      other_full[i].init(1), other_empty[i].init(kWarps);
      turn[i].init(1);
    }
    fence_barrier_init();
  }
};

}  // namespace flashattn3
