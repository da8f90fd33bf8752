// Compile-time properties of a kernel config: tile sizes, registers, the shared memory layout, and
// the barriers with their arrival counts. traits_fp8.cuh and traits_cached.cuh have what 8-bit and
// cached kernel configs add, traits_options.cuh what options do.
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/block_list.cuh"
#include "forward/arguments.h"
#include "forward/config.h"
#include "forward/traits_options.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/smem_desc.cuh"
#include "tile/permuted_v.h"

namespace flashattn3::forward {

template <Config kTheConfig>
struct KernelTraits : OptionTraits<kTheConfig> {
  using Options = OptionTraits<kTheConfig>;
  using Options::kQuantized, Options::kBias, Options::kSpans, Options::kBesideKBytes;
  static constexpr Config kConfig = kTheConfig;
  static constexpr ElementType kElement = kConfig.dtype;
  static constexpr bool kMasked = kConfig.masked;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kStages = kConfig.num_stages;
  static constexpr int kQBuffers = kConfig.num_q_buffers;
  static constexpr int kConsumers = kConfig.num_mma_warpgroups;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kThreads = num_threads(kConfig);

  static constexpr int kAtomColumns = 128 / element_bytes(kElement);
  static constexpr int kAtoms = (kHeadDim + kAtomColumns - 1) / kAtomColumns;  // per row of Q or K
  static constexpr int kAtomsV = (kHeadDimV + kAtomColumns - 1) / kAtomColumns;  // of 16-bit V
  static constexpr int kQBytes = kBlockM * kAtoms * 128;
  static constexpr int kKBytes = kBlockN * kAtoms * 128;
  // A V tile is laid out as K, or permuted with row sum columns (tile/permuted_v.h).
  static constexpr int kVBytes =
      kBlockN * (kQuantized ? kHeadDimV + kRowSumColumns : kAtomsV * 128);
  static constexpr auto strides() { return AtomMajor<kBlockN>(); }  // of K and 16-bit V
  // O accumulator registers per thread; in 8-bit kernel configs the last ones are row sums of P.
  static constexpr int kOutRegisters = (kHeadDimV + (kQuantized ? kRowSumColumns : 0)) / 2;
  // Whether a warp stages out over its rows of Q. It does not with one Q buffer, which must be free
  // for the next Q as early as possible, nor with 8-bit Q, whose rows are too small, nor with
  // spans, whose total leaves room for out.
  static constexpr bool kOutOverQ = kQBuffers >= 2 && !kQuantized && !kSpans;
  // Atoms of out, 64 columns of 16 bits each, that a warp stages at once: all of them over Q or
  // over bf16 sums, else up to 2.
  static constexpr int kAllOutAtoms = (kHeadDimV + 63) / 64;
  static constexpr int kOutAtoms =
      kOutOverQ || Options::kPromotesInSmem || kAllOutAtoms < 2 ? kAllOutAtoms : 2;
  static constexpr int kStagedBytes = Options::kSpansInShared ? kBlockM * Options::kSpanRowBytes
                                      : kOutOverQ             ? 0
                                                              : kBlockM * kOutAtoms * 128;
  // Byte offsets in shared memory: SharedStorage, Q buffers, K stages, staged out (if it does not
  // overlay Q; with spans over their total, if it is there), V stages, and what the K stages have
  // beside K.
  static constexpr int kQOffset = Options::kStorageBytes;
  static constexpr int kKOffset = kQOffset + kQBuffers * kQBytes;
  static constexpr int kOutOffset = kKOffset + kStages * kKBytes;
  static constexpr int kVOffset = kOutOffset + kStagedBytes;
  static constexpr int kBesideKOffset = kVOffset + kStages * kVBytes;
  static constexpr int beside_k_offset(int stage) { return kBesideKOffset + stage * kBesideKBytes; }
  static constexpr int kSmemBytes = kBesideKOffset + kStages * kBesideKBytes;

  // setmaxnreg: multiples of 8; their sum is at most the launch allocation, or it would hang.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr bool kTight = kQuantized && kHeadDim == 256;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kTight ? 24 : 40;
  static constexpr int kOfTwo = kTight ? 240 : 232;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kConsumers == 2 ? kOfTwo : 248;

  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (kConsumers + 1) * kLaunchRegisters);
  static_assert(kConsumers <= 3 && kBlockM == 64 * kConsumers, "a warpgroup multiplies 64 rows");
  static_assert(kBlockM <= 256 && kBlockN <= 256, "a TMA box has at most 256 rows");
  static_assert(kBlockN % 16 == 0, "P is multiplied 16 keys at a time");
  static_assert(kHeadDimV % 32 == 0 && kHeadDim <= 256, "quads store groups of 32 columns");
  static_assert(kHeadDimV == kHeadDim || (kHeadDimV < kHeadDim && !kQuantized && !kConfig.cached));
  // Registers hold S, P and O, and about 32 other values.
  static_assert(kBlockN / 2 + kBlockN * element_bytes(kElement) / 8 + kHeadDimV / 2 +
                    (kQuantized ? 20 : 32) <=
                kConsumerRegisters);
  static_assert(kStages >= 2, "the K tile after the current one must fit beside it");
  // Under a mask the first warpgroup skips this many K tiles before its first one; it releases
  // their V tiles only afterwards.
  static_assert((kBlockM - 64 + kBlockN - 1) / kBlockN <= kStages);
  static_assert(kOutOffset % 1024 == 0 && kVOffset % 1024 == 0);
  static_assert(!kBias || kBesideKOffset % 1024 == 0);
  static_assert(kSmemBytes <= 232448, "227 KB for a CTA on compute capability 9.0");
};

// One m_block of one head; the producer writes it and the consumers read it.
struct alignas(16) WorkTile {
  int first_row;        // in the sequence; -1: no tile is left
  int head;             // of q and out
  int batch_coord;      // batch index for pointers; 0 with cu_seqlens_q
  int row_offset;       // of the sequence in q and out
  int num_rows;         // of the sequence
  int num_keys;         // of the sequence
  BlockRange n_blocks;  // K and V tiles that the producer loads, last one first; may be empty
  int batch_idx;        // batch index for descales

  // A warpgroup multiplies 64 rows of one head, from row_origin + 64 * warpgroup on.
  __device__ __forceinline__ int row_origin(int) const { return first_row; }
  __device__ __forceinline__ int head_of(int) const { return head; }
  static __device__ auto k_strides(const Arguments&, auto traits) { return traits.strides(); }
  static __device__ auto v_strides(const Arguments&, auto traits) { return traits.strides(); }
  static constexpr int kProducerReaders = 1;  // warps of the producer warpgroup that read it
  __device__ __forceinline__ Mask mask(int rows, int keys, const Window& window) const {
    return Mask::of(rows, keys, window);  // the callers differ in where they read rows and keys
  }
};

// Barriers. All threads of the consumers wait for full barriers; one thread (the producer) waits
// for empty barriers. Arrivals per phase:
//   *_full   1: the producer. q, k and v also wait for the bytes of the copy, `tile` for none.
//            Where V needs zero fill past the end of a sequence, the producer and the bytes
//            complete v_unfilled_full instead of v_full; the warp that waits for v_unfilled_full
//            and writes the zeros then arrives at v_full in the producer's place. This warp waits
//            for and releases work tiles as the consumers do
//   *_empty  1 per consumer warp, after its last read; tile_empty 1 per thread (a WorkTile is read
//            by plain loads; one arrival per warp would order them too, but racecheck does not
//            follow that)
// First phase: consumers wait with phase 0, the producer with phase 1, which passes at once.
// Each side waits for or arrives at every barrier of a pipeline once per use of a buffer, in stage
// order, even if it does not use the buffer: a warpgroup that needs no part of a K or V tile still
// waits for it and releases it. Q has no phase for a work tile without keys; both sides see that in
// WorkTile::n_blocks.
template <int kStages, int kQBuffers, class TheTile = WorkTile>
struct SharedStorage {
  static constexpr int kTileBuffers = kQBuffers > 2 ? kQBuffers : 2;  // tiles published at a time
  using Tile = TheTile;
  Barrier q_full[kQBuffers], q_empty[kQBuffers];
  Barrier k_full[kStages], k_empty[kStages];
  Barrier v_full[kStages], v_empty[kStages];
  Barrier v_unfilled_full[kStages];  // V stages that still need zero fill
  Barrier tile_full[kTileBuffers], tile_empty[kTileBuffers];
  Tile tile[kTileBuffers];

  // Called by one thread, before the CTA's first __syncthreads.
  __device__ __forceinline__ void init(int consumer_warps, bool quantized) {
    const int tile_readers = consumer_warps + Tile::kProducerReaders;
    for (int i = 0; i < kQBuffers; ++i) {
      q_full[i].init(1);
      q_empty[i].init(consumer_warps);
    }
    for (int i = 0; i < kStages; ++i) {
      k_full[i].init(quantized ? 1 + kArrivalsPerWarp : 1);
      k_empty[i].init(consumer_warps * kArrivalsPerWarp);
      v_full[i].init(quantized ? 1 + kArrivalsPerWarp : 1);
      v_empty[i].init(consumer_warps);
      v_unfilled_full[i].init(1);
    }
    for (int i = 0; i < kTileBuffers; ++i) {
      tile_full[i].init(1);
      tile_empty[i].init(32 * tile_readers);
    }
    fence_barrier_init();
  }
};

}  // namespace flashattn3::forward
