// Block quantization to e4m3 or int8: once through memory. A cluster has one block of tokens of one
// head, a CTA 64 tokens of it, in registers from the load to the store; the CTAs tell each other
// their largest magnitude. Values bit for bit those of flashattn3/quantization/torch_operations.py.
#pragma once

#include <cmath>
#include <cstdint>

#include "blocks/cluster.cuh"
#include "blocks/eight_bit.cuh"
#include "blocks/grid_dependency.cuh"
#include "kernels/quantize/store.cuh"
#include "kernels/quantize/tile.cuh"
#include "kernels/quantize/values.cuh"

namespace flashattn3 {

// The type that is quantized to. kHasNan: else NaN and infinities go into the scale.
template <ElementType kType>
struct Narrow;
template <>
struct Narrow<ElementType::kE4m3> {
  static constexpr float kLargest = 448.f;
  static constexpr bool kHasNan = true;
  static __device__ __forceinline__ uint32_t bytes(float a, float b, float c, float d) {
    return to_e4m3(a, b, c, d);
  }
};
template <>
struct Narrow<ElementType::kInt8> {
  static constexpr float kLargest = 127.f;
  static constexpr bool kHasNan = false;
  static __device__ __forceinline__ uint32_t bytes(float a, float b, float c, float d) {
    return to_int8(a, b, c, d);
  }
};

// The smallest scale. Blocks below are scaled as if they reached it: 1 / it stays finite.
constexpr float kSmallestScale = 0x1p-126f;

template <class To, int kColumns, class Values>
__device__ __forceinline__ void store_rows(const QuantizeTensor& tensor, const TilePlace& place,
                                           const Values& values, float factor) {
  uint32_t bytes[kUnitsOfThread][kUnit / 4];
#pragma unroll
  for (int u = 0; u < kUnitsOfThread; ++u) {
#pragma unroll
    for (int i = 0; i < kUnit; i += 4) {
      bytes[u][i / 4] = To::bytes(values(u, i) * factor, values(u, i + 1) * factor,
                                  values(u, i + 2) * factor, values(u, i + 3) * factor);
    }
  }
  store_tile<RowPlaces<kColumns>>(bytes, tensor.data, tensor.data_stride, place, tensor.x);
}

// By one thread of the cluster.
__device__ __forceinline__ void store_scale(const QuantizeTensor& tensor, const TilePlace& place,
                                            float descale) {
  if (cluster_rank() != 0 || threadIdx.x != 0) return;
  const int64_t head = int64_t{place.entry} * tensor.x.by_heads.divisor + place.head;
  tensor.descale[head * tensor.x.by_blocks.divisor + place.number] = descale;
}

template <int kColumns>
using LargestOfCluster = ClusterMax<quantize_threads(kColumns) / 32>[2];

// What the block's values are multiplied with; its inverse, the scale, is stored.
// largest: of the block; the second for what is finite if the first is not.
template <class To, class Values, class Maximum>
__device__ __forceinline__ float find_factor(const QuantizeTensor& tensor, const TilePlace& place,
                                             Values& values, Maximum (&largest)[2]) {
  float amax;
  if constexpr (To::kHasNan) {
#pragma unroll 1
    for (Maximum& maximum : largest) {
      amax = maximum.find(values.template largest<false>());
      if (amax != INFINITY) break;  // in all threads or in none
      values.make_infinities_nan();
    }
  } else {
    amax = largest[0].find(values.template largest<true>());
    if (!(amax < INFINITY)) {
      store_scale(tensor, place, NAN);
      return 0.f;
    }
  }
  amax = fmaxf(amax, To::kLargest * kSmallestScale);
  store_scale(tensor, place, amax / To::kLargest);
  return To::kLargest / amax;
}

// The CTA's tile to rows.
template <ElementType kType, int kColumns, class Values>
__device__ __forceinline__ void quantize_rows(const QuantizeTensor& tensor, const TilePlace& place,
                                              LargestOfCluster<kColumns>& largest) {
  LoadedUnits loaded;
  load_tile<uint16_t, RowPlaces<kColumns>>(loaded, tensor.x, place);
  Values values(loaded, tensor, place);
  cluster_wait();  // every CTA does
  const auto narrow = [&](auto to) {
    using To = decltype(to);
    store_rows<To, kColumns>(tensor, place, values,
                             find_factor<To>(tensor, place, values, largest));
  };
  if (tensor.to == Narrowed::kInt8Rows) {
    narrow(Narrow<ElementType::kInt8>{});
  } else {
    narrow(Narrow<ElementType::kE4m3>{});
  }
}

// The CTA's tile to slots.
template <ElementType kType, int kColumns>
__device__ __forceinline__ void quantize_slots(const QuantizeTensor& tensor, const TilePlace& place,
                                               LargestOfCluster<kColumns>& largest) {
  LoadedUnits loaded;
  load_tile<uint16_t, SlotPlaces>(loaded, tensor.x, place);
  LoadedValues<kType> values(loaded, tensor, place);
  cluster_wait();  // every CTA does
  const float factor = find_factor<Narrow<ElementType::kE4m3>>(tensor, place, values, largest);
  uint32_t word[SlotStage::kRows][kUnit];
#pragma unroll
  for (int row = 0; row < SlotStage::kRows; ++row) {
    const int u = row * SlotPlaces::kUnitsOfRow;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      word[row][i] = to_e4m3(values(u, i) * factor, values(u + 1, i) * factor,
                             values(u + 2, i) * factor, values(u + 3, i) * factor);
    }
  }
  store_slots<kColumns>(word, tensor.data, tensor.data_stride, place, tensor.x.tokens);
}

// Of the `index`th cluster.
struct BlockOfTensor {
  int tensor;
  uint32_t block;
};
__device__ __forceinline__ BlockOfTensor find_tensor(const QuantizeArguments& args,
                                                     uint32_t index) {
  int round, turn;
  args.by_tensors(round, turn, index);
  if (round < args.rounds) return {turn, static_cast<uint32_t>(round)};
  BlockOfTensor of{0, index - args.rounds * (args.by_tensors.divisor - 1)};
  while (of.block >= args.num_blocks[of.tensor]) {
    of.block -= args.num_blocks[of.tensor++] - args.rounds;
  }
  return of;
}

// CTAs on an SM at the same time: as many as there are registers for.
constexpr int quantize_ctas(int columns) { return 65536 / (80 * quantize_threads(columns)); }

// Grid: for each tensor heads * blocks * batch clusters of block / 64 CTAs.
template <ElementType kType, int kColumns>
__global__ void __launch_bounds__(quantize_threads(kColumns), quantize_ctas(kColumns))
    quantize_blocks(const __grid_constant__ QuantizeArguments args) {
  __shared__ LargestOfCluster<kColumns> largest;
  allow_dependents();
  wait_for_earlier_kernels();
  const BlockOfTensor of = find_tensor(args, cluster_index());
  const QuantizeTensor& tensor = args.tensor[of.tensor];
  TilePlace place = find_block(tensor.x, of.block, cluster_size() * kTileTokens);
  if (place.num_tokens() <= 0) {  // the sequence has no such block
    store_scale(tensor, place, kSmallestScale);
    return;
  }
  place.first += cluster_rank() * kTileTokens;

  if (threadIdx.x == 0) {
    for (auto& maximum : largest) maximum.init();
    fence_barrier_init();
  }
  cluster_arrive();  // every thread of the cluster: the CTA takes what the others send
  if (tensor.to == Narrowed::kE4m3Slots) {
    quantize_slots<kType, kColumns>(tensor, place, largest);
  } else if (tensor.signs != nullptr || tensor.mean != nullptr) {
    quantize_rows<kType, kColumns, FloatValues<kType, kColumns>>(tensor, place, largest);
  } else {
    quantize_rows<kType, kColumns, LoadedValues<kType>>(tensor, place, largest);
  }
}

// e4m3 rows to slots. Grid: heads * tiles * batch.
template <int kColumns>
__global__ void __launch_bounds__(quantize_threads(kColumns))
    rows_to_slots(const __grid_constant__ ToSlotsArguments args) {
  allow_dependents();
  wait_for_earlier_kernels();
  const TilePlace place = find_block(args.v, blockIdx.x, kTileTokens);
  if (place.num_tokens() <= 0) return;
  UnitWords<uint8_t> loaded[kUnitsOfThread];
  load_tile<uint8_t, SlotPlaces>(loaded, args.v, place);
  uint32_t word[SlotStage::kRows][kUnit];
#pragma unroll
  for (int row = 0; row < SlotStage::kRows; ++row) {
#pragma unroll
    for (int half = 0; half < kUnit / 4; ++half) {
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = loaded[row * SlotPlaces::kUnitsOfRow + i][half];
      transpose_bytes(four);
#pragma unroll
      for (int i = 0; i < 4; ++i) word[row][half * 4 + i] = four[i];
    }
  }
  store_slots<kColumns>(word, args.data, args.data_stride, place, args.v.tokens);
}

}  // namespace flashattn3
