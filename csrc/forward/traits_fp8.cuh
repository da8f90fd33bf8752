// Additional traits and shared storage of kernel configs with 8-bit inputs.
#pragma once

#include <cstdint>

#include "attention/block_scale.cuh"
#include "forward/listed_work_tile.cuh"
#include "forward/traits.cuh"
#include "tile/gemm_int8.cuh"

namespace flashattn3::forward {

template <Config kConfig>
struct QuantizedTraits : KernelTraits<kConfig> {
  using Base = KernelTraits<kConfig>;
  using Base::kBlockN, Base::kBoxKeys, Base::kElement, Base::kHeadDim;

  static constexpr float kExponentUnit = kCodesPerOctave;  // exponents per log2 unit
  // int8: initial value of the score accumulators; the shifts of the codes are relative to it.
  static constexpr bool kInteger = kElement == ElementType::kInt8;
  static constexpr int kAccumulatorBias = kInteger ? kInt8Bias<kHeadDim> : 0;
  static constexpr int kShiftUnit = kInteger ? kAccumulatorBias : 1;
  // Lower bound on log2 of a row's largest probability when row_max is set (softmax_e4m3.cuh): as
  // low as the error on data with outliers allows, because it costs rescaling (docs/hopper-fp8.md).
  static constexpr int kLowest = kHeadDim > 128 && !kInteger ? 7 : 5;
  static constexpr int kKeysPerDescale = kConfig.keys_per_descale;
  static constexpr int kDescaleGroups = kBlockN / kKeysPerDescale;
  // Each box of V is followed by its row sum columns.
  static constexpr int kRowSumOffset = kBoxKeys * kHeadDim;
  static constexpr int kBoxBytes = kRowSumOffset + kBoxKeys * kRowSumColumns;
  // KV blocks between promotions of O, and promotions to bf16 before the bf16 sums are added to the
  // fp32 sums (promotion.cuh).
  static constexpr int kPromotionBlocks = kConfig.promote_keys / kBlockN;
  static constexpr int kPromotionsToFp32 = 8;

  static_assert(kKeysPerDescale % 32 == 0 && kBlockN % kKeysPerDescale == 0);
  static_assert(kConfig.promote_keys % kBlockN == 0);
  static_assert(kBoxKeys % kKeysPerDescale == 0 && kBlockN / kBoxKeys * kBoxBytes == Base::kVBytes);
};

// Barriers as in SharedStorage. Further, k_full and v_full count an arrival of the DescaleLoader
// warp, which waits for k_empty and v_empty as the producer does. It also writes V's zero fill.
template <class Base, int kStages, int kDescaleGroups, int kSumsRows>
struct QuantizedStorage : Base {
  // k_full covers it. The last is of no stage: it is read, and not used, where a work tile has no
  // next block.
  KvDescales<kDescaleGroups> kv_descales[kStages + 1];
  float out_scale[2];  // factor of out, per work tile; consumers read it after the last V tile
  alignas(16) uint8_t bias_tile[kBiasTileBytes];  // operand of the int8 accumulator bias
  float promoted_row_max[kSumsRows];  // row_max of the bf16 sums, per query row of the work tile
};

template <Config kConfig>
using QuantizedStorageOf =
    QuantizedStorage<SharedStorageOf<kConfig>, kConfig.num_stages,
                     QuantizedTraits<kConfig>::kDescaleGroups,
                     QuantizedTraits<kConfig>::kPromotesInSmem ? kConfig.block_m : 1>;

}  // namespace flashattn3::forward
