// Everything that follows from a row at compile time: sizes, registers, the shared memory map, and
// who arrives at which barrier.
#pragma once

#include <cstdint>

#include "blocks/barrier.cuh"
#include "kernels/backward/key_tile.cuh"
#include "kernels/backward/row.h"

namespace flashattn3 {

template <BackwardRow kTheRow>
struct BackwardConfig {
  static constexpr BackwardRow kRow = kTheRow;
  static constexpr ElementType kElement = kRow.dtype;
  static constexpr int kHeadDim = kRow.head_dim;
  static constexpr int kStages = kRow.num_stages;
  static constexpr int kChunks = backward_row_bytes(kRow) / 128;  // 64 columns each
  static constexpr int kConsumers = kRow.num_mma_warpgroups;
  static constexpr int kThreads = backward_num_threads(kRow);
  static constexpr int kKeys = backward_keys(kRow);
  static constexpr int kKeyBytes = kKeys * kChunks * 128;
  static constexpr int kRowBytes = kBackwardRows * kChunks * 128;
  static constexpr int kScoreBytes = kKeys * kBackwardRows * 2;
  static constexpr int kSumBytes = kBackwardRows * kHeadDim * 4;
  // From the start of shared memory: control, K, V, stages of Q, stages of dO, dS, dQ.
  static constexpr int kKOffset = kBackwardControlBytes;
  static constexpr int kVOffset = kKOffset + kKeyBytes;
  static constexpr int kQOffset = kVOffset + kKeyBytes;
  static constexpr int kDoutOffset = kQOffset + kStages * kRowBytes;
  static constexpr int kScoreOffset = kDoutOffset + kStages * kRowBytes;
  static constexpr int kSumOffset = kScoreOffset + 2 * kScoreBytes;

  // setmaxnreg: multiples of 8, in all what the CTA was launched with.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;

  // Accumulators of the scores whose lse is in registers before the products begin, beside which
  // loads from shared memory crawl. All of them, if there is room.
  static constexpr int kEarlyLse = kConsumers == 3 ? kBackwardRows / 4 : kBackwardRows / 2;

  // Whether a warpgroup leaves steps out that see none of its keys. Of two it would be the half of
  // one step in a masked tile, and the branch costs every step (ptxas then keeps what descriptors
  // are made of in vector registers).
  static constexpr bool kPassesBy = kConsumers == 3;

  static_assert(kConsumers == 2 || kConsumers == 3);
  static_assert(kStages >= 2);
  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 128, "dK and dV are kept in registers");
  static_assert(kSumOffset + kConsumers * kSumBytes == backward_shared_bytes(kRow));
  static_assert(backward_shared_bytes(kRow) <= 232448, "227 KB for a CTA");
};

// Barriers. Arrivals for each phase:
//   k_full, v_full, q_full, dout_full     1: the producer, and the bytes of the copies
//   k_empty, q_empty, dout_empty          one for each consumer warp, after its last read
//   v_empty                               every consumer thread, after its last read of V's place
//   ds_full[s]   each consumer warp: its part of dS of a step is written
//   ds_empty[s]  the 4 warps of the warpgroup that multiplies dQ of the step
//   sum_full[w]  the 4 warps of warpgroup w: dQ of a step is written
//   sum_empty[w] the thread that sends it to memory: it has been read
//   tile_full    1: the producer; tile_empty: every thread that reads the description
// First phase: who reads waits with parity 0, who writes with parity 1, which passes at once.
// A step is 64 queries of one head for this tile of keys. Steps are counted from the kernel's start
// on: step t uses dS buffer t % 2, and warpgroup t % kConsumers multiplies its dQ.
template <int kStages, int kConsumers>
struct BackwardControl {
  float lse[kStages][kBackwardRows];
  float minus_delta[kStages][kBackwardRows];
  Barrier k_full, k_empty, v_full, v_empty;
  Barrier q_full[kStages], q_empty[kStages];
  Barrier dout_full[kStages], dout_empty[kStages];
  Barrier ds_full[2], ds_empty[2];
  Barrier sum_full[kConsumers], sum_empty[kConsumers];
  Barrier tile_full[2], tile_empty[2];
  KeyTile tile[2];

  // One thread, before the CTA's first __syncthreads.
  __device__ __forceinline__ void init() {
    constexpr int kWarps = 4 * kConsumers;
    k_full.init(1), k_empty.init(kWarps);
    v_full.init(1), v_empty.init(32 * kWarps);
    for (int i = 0; i < kStages; ++i) {
      q_full[i].init(1), q_empty[i].init(kWarps);
      dout_full[i].init(1), dout_empty[i].init(kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ds_full[i].init(kWarps), ds_empty[i].init(4);
      // The consumers' threads, and one thread for each warpgroup that sends dQ.
      tile_full[i].init(1), tile_empty[i].init(32 * kWarps + kConsumers);
    }
    for (int i = 0; i < kConsumers; ++i) sum_full[i].init(4), sum_empty[i].init(1);
    fence_barrier_init();
  }
};

template <BackwardRow kRow>
using BackwardControlOf = BackwardControl<kRow.num_stages, kRow.num_mma_warpgroups>;

}  // namespace flashattn3
