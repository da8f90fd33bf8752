// Compile-time constants of a kernel config: sizes, registers, shared memory layout and barrier
// arrival counts.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backward/arguments.h"
#include "backward/config.h"
#include "backward/work_tile.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/smem_desc.cuh"

namespace flashattn3::backward {

template <Config kTheConfig>
struct KernelTraits {
  static constexpr Config kConfig = kTheConfig;
  static constexpr ElementType kElement = kConfig.dtype;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.num_stages;
  static constexpr int kAtoms = head_dim_bytes(kConfig) / 128;  // 64 columns each
  static constexpr int kAtomsV = head_dim_bytes(kHeadDimV) / 128;
  static constexpr int kConsumers = kConfig.num_mma_warpgroups;
  static constexpr int kThreads = num_threads(kConfig);
  static constexpr int kBlockN = block_n(kConfig);
  static constexpr int kKBytes = kBlockN * kAtoms * 128;
  static constexpr int kVBytes = kBlockN * kAtomsV * 128;
  static constexpr int kQBytes = kBlockM * kAtoms * 128;
  static constexpr int kDoutBytes = kBlockM * kAtomsV * 128;
  static constexpr int kDsBytes = kBlockN * kBlockM * 2;
  // The warpgroups compute the last part of dQ in turn, and the others one each.
  static constexpr int kDqParts = num_dq_parts(kConfig);
  static constexpr int kDqWriters = num_dq_writers(kConfig);
  static constexpr int kDqColumns = kHeadDim / kDqParts;
  static constexpr int kDqBytes = kBlockM * kDqColumns * 4;  // of a part
  static constexpr bool kBias = has_bias(kConfig);
  static constexpr bool kListed = kConfig.listed;
  using Arguments =
      std::conditional_t<kListed, ListedArguments,
                         std::conditional_t<kBias, BiasArguments, backward::Arguments>>;
  static constexpr int kBiasBytes = kBlockM * kBlockN * 2;
  // Where a warpgroup hands over dQ.
  static constexpr bool kOneDqBuffer = num_dq_buffers(kConfig) == 1;
  static constexpr int dq_offset(int warpgroup) {
    return kDqOffset + (kOneDqBuffer ? 0 : warpgroup * kDqBytes);
  }
  // Shared memory, in bytes: SharedStorage, K, V, stages of Q, stages of dO, dS, dQ, tiles of the
  // bias: for each warpgroup 64 queries x its 64 keys.
  static constexpr int kKOffset = kSharedStorageBytes;
  static constexpr int kVOffset = kKOffset + kKBytes;
  static constexpr int kQOffset = kVOffset + kVBytes;
  static constexpr int kDoutOffset = kQOffset + kStages * kQBytes;
  static constexpr int kDsOffset = kDoutOffset + kStages * kDoutBytes;
  static constexpr int kDqOffset = kDsOffset + 2 * kDsBytes;
  static constexpr int kBiasOffset = kDqOffset + num_dq_buffers(kConfig) * kDqBytes;

  // setmaxnreg: multiples of 8; the total is at most the CTA's registers at launch.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;

  // Number of S accumulators whose lse is loaded to registers before the GEMMs start, because loads
  // from shared memory are slow during WGMMA. All of them where registers suffice.
  static constexpr int kLseInRegisters = kConsumers == 3 ? kBlockM / 4 : kBlockM / 2;

  // Whether a warpgroup skips steps that see none of its keys. With two warpgroups that would save
  // half of one step in a masked tile, and the branch slows every step (ptxas then keeps the parts
  // of descriptors in vector registers).
  static constexpr bool kSkipsSteps = kConsumers == 3;

  // Low words of the operands' matrix descriptors without the address of shared memory / 16, which
  // is added in the kernel: one register is then the base of all five operands. Without a cluster
  // that address has no CTA rank to mask.
  static constexpr uint32_t kKLow = smem_desc_low(kKOffset, kBlockN * 128);
  static constexpr uint32_t kVLow = smem_desc_low(kVOffset, kBlockN * 128);
  static constexpr uint32_t kQLow = smem_desc_low(kQOffset, kBlockM * 128);
  static constexpr uint32_t kDoutLow = smem_desc_low(kDoutOffset, kBlockM * 128);
  static constexpr uint32_t kDsLow = smem_desc_low(kDsOffset, 16);

  static_assert(kConsumers == 2 || kConsumers == 3);
  static_assert(kStages >= 2 && (kStages & (kStages - 1)) == 0, "a step's number gives its stage");
  static_assert(kDqParts == 1 ? kHeadDimV == kHeadDim : kDqParts == kConsumers + 1);
  static_assert(kHeadDim % 32 == 0 && kHeadDimV <= 128, "dK and dV are kept in registers");
  static_assert(!kListed || !kBias);
  static_assert(!kBias || kDqParts == 1, "a step of up to 128 columns adds the bias");
  static_assert(!kOneDqBuffer || kConsumers == 2, "consumer_state.cuh: turns");
  static_assert(kBiasOffset % 1024 == 0);
  static_assert(kBiasOffset + (kBias ? kStages * kBiasBytes : 0) == smem_bytes(kConfig));
  static_assert(smem_bytes(kConfig) <= 232448, "227 KB for a CTA");
};

// Barriers. Arrivals for each phase:
//   k_full, v_full         1: the producer, and the bytes of the copy
//   q_dout_full            2: the producer, for Q with lse and for dO with delta, and the bytes.
//                          One barrier for both saves each warp a wait and an arrival per step.
//   k_empty, q_dout_empty  one for each consumer warp, after its last read
//   v_empty                every consumer thread, after its last read of V's buffer
//   ds_full[s]   each consumer warp: its part of dS of a step is written
//   ds_empty[s]  the 4 warps of the warpgroup that computes dQ of the step; where dQ is in parts,
//                every consumer warp
//   dq_full[w]   the 4 warps of warpgroup w: dQ of a step, or its last part, is written in turn
//   dq_full[kConsumers + w]  the same warps: part w is written
//   dq_empty[w]  1: a dQ writer has read what warpgroup w wrote last
//   tile_full    1: the producer; tile_empty: every thread that reads the work tile
// First phase: readers wait with phase 0, writers with phase 1, which passes at once.
// A step is 64 queries of one head for this n_block. Steps are counted from the start of the
// kernel: step t uses dS buffer t % 2, and warpgroup t % kConsumers computes its dQ.
template <int kStages, int kConsumers, int kDqWriters, class TheTile = WorkTile>
struct SharedStorage {
  using Tile = TheTile;
  float lse[kStages][kBlockM];
  float minus_delta[kStages][kBlockM];
  Barrier k_full, k_empty, v_full, v_empty;
  Barrier q_dout_full[kStages], q_dout_empty[kStages];
  Barrier ds_full[2], ds_empty[2];
  Barrier dq_full[kDqWriters == kConsumers ? kConsumers : 2 * kConsumers], dq_empty[kConsumers];
  Barrier tile_full[2], tile_empty[2];
  Tile tile[2];
  float slopes[kStages];  // of the query head; written before q_dout_full

  // One thread calls it, before the CTA's first __syncthreads. loads: arrivals at q_dout_full.
  __device__ __forceinline__ void init(int loads = 2) {
    constexpr int kWarps = 4 * kConsumers;
    k_full.init(1), k_empty.init(kWarps);
    v_full.init(1), v_empty.init(32 * kWarps);
    for (int i = 0; i < kStages; ++i) {
      q_dout_full[i].init(loads), q_dout_empty[i].init(kWarps);
    }
    for (int i = 0; i < 2; ++i) {
      ds_full[i].init(kWarps), ds_empty[i].init(kDqWriters == kConsumers ? 4 : kWarps);
      // All consumer threads, and the dQ writer threads.
      tile_full[i].init(1), tile_empty[i].init(32 * kWarps + kDqWriters);
    }
    for (Barrier& barrier : dq_full) barrier.init(4);
    for (Barrier& barrier : dq_empty) barrier.init(1);
    fence_barrier_init();
  }
};

// With a bias, whose tile of a step is loaded at the stage of Q and replaced by its gradient:
//   q_dout_full  3: the producer for the bias too
//   bias_empty   one for each warpgroup: its part has been read, and the gradient copied from it
template <class Base, int kStages, int kConsumers>
struct BiasStorage : Base {
  Barrier bias_empty[kStages];
  struct {
    int row, head;  // of the step's first query, and of q
  } place[kStages];

  __device__ __forceinline__ void init() {
    for (Barrier& barrier : bias_empty) barrier.init(kConsumers);
    Base::init(3);
  }
};

template <Config kConfig>
using PlainStorage =
    SharedStorage<kConfig.num_stages, kConfig.num_mma_warpgroups, num_dq_writers(kConfig),
                  std::conditional_t<kConfig.listed, ListedWorkTile, WorkTile>>;

template <Config kConfig>
using SharedStorageOf = std::conditional_t<
    has_bias(kConfig),
    BiasStorage<PlainStorage<kConfig>, kConfig.num_stages, kConfig.num_mma_warpgroups>,
    PlainStorage<kConfig>>;

}  // namespace flashattn3::backward
