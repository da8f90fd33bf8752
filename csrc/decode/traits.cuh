// Compile-time properties of a decode kernel, its shared memory, and the barriers with their
// arrival counts.
#pragma once

#include <cstdint>
#include <type_traits>

#include "decode/arguments.h"
#include "decode/config.h"
#include "decode/work_share.cuh"
#include "ptx/mbarrier.cuh"

namespace flashattn3::decode {

// kIsPlain: of the kernel for plain calls alone (arguments.h).
template <Config kTheConfig, bool kIsPlain = false>
struct KernelTraits {
  static constexpr Config kConfig = kTheConfig;
  static constexpr bool kPlain = kIsPlain;
  using Arguments =
      std::conditional_t<kConfig.tree, TreeArguments,
                         std::conditional_t<kConfig.prefix, PrefixArguments, decode::Arguments>>;
  static constexpr ElementType kElement = kConfig.dtype;
  static constexpr bool kHasBytes = has_bytes(kConfig);
  // The operands in shared memory have this type: fp16 holds all numbers of 8 bits, and Q with a
  // factor.
  static constexpr ElementType kOperand = kHasBytes ? ElementType::kFloat16 : kElement;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kStages = kConfig.num_stages;
  static constexpr int kConsumers = kConfig.num_consumers;
  static constexpr int kThreads = num_threads(kConfig);
  static constexpr int kCtasPerSm = ctas_per_sm(kConfig);
  static constexpr int kQBuffers = kConfig.num_q_buffers;
  static constexpr int kOutRegisters = kHeadDim / 2;
  static constexpr int kVecs = kHeadDim / 8;  // 16-byte vectors of a row
  static constexpr int kQBytes = q_tile_bytes(kConfig);
  static constexpr int kKvBytes = kv_tile_bytes(kConfig);
  // Byte offsets in shared memory: SharedStorage, Q buffers, the stages of each warpgroup with a K
  // and a V tile each, the exchange buffer.
  static constexpr int kQOffset = kSharedStorageBytes;
  static constexpr int kKvOffset = kQOffset + kQBuffers * kQBytes;
  static constexpr int kExchangeOffset = kKvOffset + 2 * kConsumers * kStages * kKvBytes;
  // With bytes: tiles of 8 bits, the descales of each, those of the stages, K's before V's, and the
  // factors of Q's rows.
  static constexpr int kByteTiles = kConfig.num_byte_tiles;
  static constexpr int kByteTileBytes = byte_tile_bytes(kConfig);
  static constexpr int kDescaleBytes = tile_descale_bytes(kConfig);
  static constexpr int kByteTileOffset = kExchangeOffset + exchange_bytes(kConfig);
  static constexpr int kByteDescaleOffset = kByteTileOffset + kByteTiles * kByteTileBytes;
  static constexpr int kDescaleOffset = kByteDescaleOffset + kByteTiles * kDescaleBytes;
  static constexpr int kRowFactorOffset = kDescaleOffset + 2 * kConsumers * kStages * kDescaleBytes;

  // setmaxnreg: multiples of 8; their sum is at most the launch allocation.
  static constexpr int kProducerRegisters = kHasBytes ? (kConsumers == 1 ? 112 : 120) : 104;
  static constexpr int kConsumerRegisters = (kCtasPerSm == 2   ? 152
                                             : kConsumers == 1 ? 240
                                                               : 200) -
                                            (kHasBytes ? 8 : 0);

  static_assert(!is_quantized(kElement));
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256);
  static_assert(kBlockN % 16 == 0 && kBlockN / 4 <= 32, "a warp loads a quarter of the rows");
  static_assert(kBlockN / 4 * kVecs % 32 == 0, "a warp copies 32 vectors at a time");
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (kConsumers + 1) * (65536 / (kCtasPerSm * kThreads) / 8 * 8));
  static_assert(kConsumers == 1 || kConsumers == 2);
  static_assert(!kHasBytes || (kQBuffers == 1 && !kConfig.spans),
                "consumers write Q between two parts");
  static_assert(!kConfig.tree || (!kHasBytes && !kConfig.spans));
  static_assert(!kConfig.prefix || (!kConfig.spans && !kConfig.tree));
  static_assert(kConfig.num_stages_beside <= kStages);
  static_assert(kQOffset % 1024 == 0 && kKvOffset % 1024 == 0 && kKvBytes % 1024 == 0);
  static_assert(smem_bytes(kConfig) <= 232448, "227 KB for a CTA on compute capability 9.0");
  static_assert(kCtasPerSm * (smem_bytes(kConfig, kConfig.num_stages_beside) + 1024) <= 228 * 1024,
                "228 KB for an SM");
};

// PipelineState of the stages in use, whose number is read at run time.
class StageState {
 public:
  __device__ __forceinline__ StageState(int log2_stages, uint32_t first_phase)
      : log2_stages_(log2_stages), uses_(first_phase << log2_stages) {}
  __device__ __forceinline__ uint32_t index() const { return uses_ & ((1u << log2_stages_) - 1); }
  __device__ __forceinline__ uint32_t phase() const { return uses_ >> log2_stages_ & 1; }
  __device__ __forceinline__ void advance() { ++uses_; }

 private:
  int log2_stages_;
  uint32_t uses_;
};

// A part of a work tile that other CTAs share, and its sequence.
struct PendingPart {
  Part part;
  CachedSequence sequence;
};

// Barriers. Arrivals per phase, and who waits:
//   q_full      128: each thread of the producer warpgroup, once its copies are complete; all
//               consumer threads wait
//   q_empty     1 per consumer warp, after its last QK GEMM of the part; the producer waits
//   k_full, v_full   128, as q_full; the threads of one warpgroup wait
//   k_empty, v_empty 1 per warp of that warpgroup (4); the producer waits
//   exchange_full    1 per warp of warpgroup 1 (4), after it has written O and its statistics;
//                    warpgroup 0 waits
//   exchange_empty   1 per warp of warpgroup 0 (4), after it has read them; warpgroup 1 waits
//   part_full   1: the thread that publishes parts (part_queue.cuh); all threads wait
//   part_empty  1 per warp, after it has read the part; the thread that publishes waits
// Every thread that waits for a barrier waits for each of its phases: warpgroup 1 waits for Q and
// releases it in a part that has no KV block for it too, and parts with one KV block have no phase
// of the exchange barriers for either side.
template <int kStages, int kQBuffers, int kConsumers, int kByteTiles>
struct SharedStorage {
  Barrier q_full[kQBuffers], q_empty[kQBuffers];
  Barrier k_full[kConsumers][kStages], k_empty[kConsumers][kStages];
  Barrier v_full[kConsumers][kStages], v_empty[kConsumers][kStages];
  Barrier exchange_full, exchange_empty;
  // While a part is published, warps may be at the three before: Q has two buffers at most. Tiles
  // of 8 bits, of two of which a part consists at least, are loaded further ahead.
  static constexpr int kPartBuffers = kByteTiles == 0 ? 4 : kByteTiles / 2 + 2;
  Barrier part_full[kPartBuffers], part_empty[kPartBuffers];
  PendingPart parts[kPartBuffers];  // num_ctas 0: no part is left
  uint64_t launch;                  // its number (ptx/arrival_counter.cuh), with the last of them
  int warp_sums[4 * (kConsumers + 1)];  // find_share
  WorkShare share;
  WorkShare unpublished;   // what is left of it; of the thread that publishes
  PendingPart pending[2];  // the parts whose work tiles other CTAs share (combine.cuh)
  int is_last[2];          // whether this CTA combines them; with spans a SpanTurn

  // Called by one thread, before the CTA's first __syncthreads.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kQBuffers; ++i) {
      q_full[i].init(128);
      q_empty[i].init(4 * kConsumers);
    }
    for (int turn = 0; turn < kConsumers; ++turn) {
      for (int i = 0; i < kStages; ++i) {
        k_full[turn][i].init(128);
        k_empty[turn][i].init(4);
        v_full[turn][i].init(128);
        v_empty[turn][i].init(4);
      }
    }
    exchange_full.init(4 * kArrivalsPerWarp);
    exchange_empty.init(4 * kArrivalsPerWarp);
    for (int i = 0; i < kPartBuffers; ++i) {
      part_full[i].init(1);
      part_empty[i].init(4 * (kConsumers + 1) * kArrivalsPerWarp);
    }
  }
};

template <Config kConfig>
using SharedStorageOf = SharedStorage<kConfig.num_stages, kConfig.num_q_buffers,
                                      kConfig.num_consumers, kConfig.num_byte_tiles>;

}  // namespace flashattn3::decode
