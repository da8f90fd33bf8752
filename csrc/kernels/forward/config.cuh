// Everything that follows from a row at compile time: tile sizes, registers, the shared memory map,
// and who arrives at which barrier.
#pragma once

#include <cstdint>

#include "blocks/barrier.cuh"
#include "blocks/int8_scores.cuh"
#include "blocks/row_sums.cuh"
#include "blocks/score_scale.cuh"
#include "blocks/visible_range.cuh"
#include "kernels/forward/row.h"

namespace flashattn3 {

template <ForwardRow kTheRow>
struct ForwardConfig {
  static constexpr ForwardRow kRow = kTheRow;
  static constexpr ElementType kElement = kRow.dtype;
  static constexpr bool kWindowed = kRow.windowed;
  static constexpr int kHeadDim = kRow.head_dim;
  static constexpr int kBlockM = kRow.block_m;
  static constexpr int kBlockN = kRow.block_n;
  static constexpr int kStages = kRow.num_stages;
  static constexpr int kQBuffers = kRow.num_q_buffers;
  static constexpr int kConsumers = kRow.num_mma_warpgroups;
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static constexpr int kThreads = forward_num_threads(kRow);

  static constexpr bool kQuantized = is_quantized(kElement);
  // Exponents, to log2 units.
  static constexpr float kUnits = kQuantized ? kCodesOfOctave : 1.f;
  // Where scores of int8 start; what the shifts of their codes are relative to.
  static constexpr bool kInteger = kElement == ElementType::kInt8;
  static constexpr int kScoreZero = kInteger ? kInt8Zero<kHeadDim> : 0;
  static constexpr int kShiftUnit = kInteger ? kScoreZero : 1;
  // log2 of a row's largest probability when its reference is set (code_softmax.cuh): as low as the
  // error on data with outliers allows, as it costs rescaling (docs/fp8.md).
  static constexpr int kLowest = kHeadDim > 128 && !kInteger ? 7 : 5;
  static constexpr int kChunks = forward_row_bytes(kRow) / 128;  // of a row of Q, K or 16-bit V
  static constexpr int kChunkColumns = 128 / element_bytes(kElement);
  static constexpr int kQBytes = kBlockM * kChunks * 128;
  static constexpr int kKBytes = kBlockN * kChunks * 128;
  static constexpr int kVBytes = forward_value_bytes(kRow);
  static constexpr int kScaleKeys = kRow.scale_keys;
  static constexpr int kScaleGroups = kQuantized ? kBlockN / kScaleKeys : 1;
  // Of a warpgroup's 64 rows of out; in quantized rows the last ones are sums of P.
  static constexpr int kOutRegisters = (kHeadDim + (kQuantized ? kSumColumns : 0)) / 2;
  static constexpr int kWeightsInV = kBlockN * kHeadDim;  // of P, behind V's columns
  static constexpr bool kOutOverQ = forward_out_over_q(kRow);
  static constexpr int kOutChunks = forward_staged_columns(kRow) / 64;  // that a warp lays down
  // From the start of shared memory: control, Q buffers, K stages, out if it has room of its own, V
  // stages.
  static constexpr int kQOffset = forward_control_bytes(kRow);
  static constexpr int kKOffset = kQOffset + kQBuffers * kQBytes;
  static constexpr int kOutOffset = kKOffset + kStages * kKBytes;
  static constexpr int kVOffset = kOutOffset + (kOutOverQ ? 0 : kBlockM * kOutChunks * 128);

  // setmaxnreg: multiples of 8, in all what the CTA was launched with; more would never come.
  static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
  static constexpr bool kTight = kQuantized && kHeadDim == 256;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kTight ? 24 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 3   ? 160
                                            : kConsumers == 2 ? (kTight ? 240 : 232)
                                                              : 248;
  // Blocks of keys after which out leaves WGMMA's accumulators, and how often it does until its
  // sums in bf16 leave for fp32 (promotion.cuh).
  static constexpr int kChunkBlocks = kRow.promote_keys / kBlockN;
  static constexpr int kChunks16 = 8;

  static_assert(kConsumers >= 1 && kConsumers <= 3);
  static_assert(kProducerRegisters + kConsumers * kConsumerRegisters <=
                (kConsumers + 1) * kLaunchRegisters);
  static_assert(kBlockM == 64 * kConsumers, "each warpgroup multiplies 64 rows");
  static_assert(kBlockM <= 256 && kBlockN <= 256, "a TMA box has at most 256 rows");
  static_assert(kBlockN % 16 == 0, "P is multiplied 16 keys at a time");
  static_assert(kHeadDim % 32 == 0 && kHeadDim <= 256, "quads store groups of 32 columns");
  // Scores, P and out in registers, and about 32 more.
  static_assert(kBlockN / 2 + kBlockN * element_bytes(kElement) / 8 + kHeadDim / 2 +
                    (kQuantized ? 20 : 32) <=
                kConsumerRegisters);
  static_assert(kQuantized ? kScaleKeys % 32 == 0 && kBlockN % kScaleKeys == 0 : kScaleKeys == 0);
  static_assert(kRow.promote_keys % kBlockN == 0);
  static_assert(kStages >= 2, "the K tile after the current one must fit beside it");
  // Under a mask the first warpgroup passes this many K tiles before its first one; their V tiles
  // wait until then.
  static_assert((kBlockM - 64 + kBlockN - 1) / kBlockN <= kStages);
  static_assert(kQBuffers == 1 || kQBuffers == 2);
  static_assert(kOutOffset % 1024 == 0 && kVOffset % 1024 == 0);
  static_assert(kVOffset + kStages * kVBytes == forward_shared_bytes(kRow));
  static_assert(forward_shared_bytes(kRow) <= 232448, "227 KB for a CTA on compute capability 9.0");
};

// One block of query rows of one head, as the producer hands it to the consumers.
struct alignas(16) RowTile {
  int first_row;    // in the sequence; -1: no tile is left
  int head;         // of q and out
  int entry;        // of the batch, for pointers; 0 with cu_seqlens_q
  int row_offset;   // of the sequence in q and out
  int num_rows;     // of the sequence
  int num_keys;     // of the sequence
  BlockRange keys;  // K and V tiles that come for it, last one first; may be none
  int sequence;     // of the batch, for descales
};

// Barriers. "Threads" wait for full ones (all threads of the consumers), one thread (the producer)
// for empty ones, in quantized rows the warp that brings the descales too. Arrivals for each phase:
//   *_full   1: the producer; q, k and v also wait for the bytes of the copy, `tile` for nothing;
//            in quantized rows k and v also for the warp that brings the descales. Where V gets
//            zeros behind the end of a sequence, `tail` has the producer and the bytes, and v in
//            its place the warp that waits for tail and writes them, which in quantized rows is the
//            same. It reads tiles and leaves them as the consumers do
//   *_empty  one for each consumer warp, after its last read; tile_empty one for each thread (a
//            description is read by plain loads, which a warp's one arrival orders too, but
//            racecheck does not follow that)
// First phase: consumers wait with parity 0, the producer with parity 1, which passes at once.
// Each side passes every barrier of a ring once for each use of a buffer, in ring order, whatever
// it does with the buffer: a warpgroup that needs no part of a K or V tile still waits for it and
// releases it. Q has no phase for a tile without keys; both sides see that in RowTile::keys.
template <int kStages, int kQBuffers, int kScaleGroups, int kSumsRows>
struct ForwardControl {
  Barrier q_full[kQBuffers], q_empty[kQBuffers];
  Barrier k_full[kStages], k_empty[kStages];
  Barrier v_full[kStages], v_empty[kStages];
  Barrier tail_full[kStages];  // of V's stages
  Barrier tile_full[2], tile_empty[2];
  RowTile tile[2];
  // Quantized rows alone. key_scales come with K; v_scale, which out is to be multiplied with,
  // comes with the tile, but not before the first K. start: what scores of int8 start from.
  KeyScales<kScaleGroups> key_scales[kStages];
  float v_scale[2];
  alignas(16) uint8_t start[kStartBytes];
  float sums_reference[kSumsRows];  // of each query row of the tile, that its sums in bf16 are on

  // One thread, before the CTA's first __syncthreads.
  __device__ __forceinline__ void init(int consumer_warps, bool quantized) {
    for (int i = 0; i < kQBuffers; ++i) {
      q_full[i].init(1);
      q_empty[i].init(consumer_warps);
    }
    for (int i = 0; i < kStages; ++i) {
      k_full[i].init(quantized ? 1 + kArrivalsOfLanes : 1);
      k_empty[i].init(consumer_warps * kArrivalsOfLanes);
      v_full[i].init(quantized ? 1 + kArrivalsOfLanes : 1);
      v_empty[i].init(consumer_warps);
      tail_full[i].init(1);
    }
    for (int i = 0; i < 2; ++i) {
      tile_full[i].init(1);
      tile_empty[i].init(32 * (consumer_warps + 1));
    }
    fence_barrier_init();
  }
};

template <ForwardRow kRow>
using ForwardControlOf =
    ForwardControl<kRow.num_stages, kRow.num_q_buffers, ForwardConfig<kRow>::kScaleGroups,
                   forward_sums_in_shared(kRow) ? kRow.block_m : 1>;

}  // namespace flashattn3
