// Block quantization to e4m3 or int8 in one pass over memory. A cluster quantizes one block of
// tokens of one head, a CTA 64 tokens of it, in registers from the load to the store; the CTAs
// exchange their amax. quantize_limits.h, which the build writes, has the numbers that it shares
// with Python. The results equal flashattn3/quantization/torch_operations.py bit for bit.
#pragma once

#include <cmath>
#include <cstdint>

#include "ptx/cluster.cuh"
#include "ptx/convert_fp8.cuh"
#include "ptx/pdl.cuh"
#include "quantize/store.cuh"
#include "quantize/tile.cuh"
#include "quantize/values.cuh"
#include "quantize_limits.h"

namespace flashattn3::quantize {

// The quantized type. kHasNan: it can store NaN; else NaN and infinities make the descale NaN.
template <ElementType kType>
struct Narrow;
template <>
struct Narrow<ElementType::kE4m3> {
  static constexpr float kLargest = kLargestE4m3;
  static constexpr bool kHasNan = true;
  static __device__ __forceinline__ uint32_t bytes(float a, float b, float c, float d) {
    return to_e4m3(a, b, c, d);
  }
};
template <>
struct Narrow<ElementType::kInt8> {
  static constexpr float kLargest = kLargestInt8;
  static constexpr bool kHasNan = false;
  static __device__ __forceinline__ uint32_t bytes(float a, float b, float c, float d) {
    return to_int8(a, b, c, d);
  }
};

// store(bytes): stores a thread's values.
template <class To, class Values, class Store>
__device__ __forceinline__ void narrow_and_store(const Values& values, float factor, Store store) {
  uint32_t bytes[kVecsOfThread][kVec / 4];
#pragma unroll
  for (int u = 0; u < kVecsOfThread; ++u) {
#pragma unroll
    for (int i = 0; i < kVec; i += 4) {
      bytes[u][i / 4] = To::bytes(values(u, i) * factor, values(u, i + 1) * factor,
                                  values(u, i + 2) * factor, values(u, i + 3) * factor);
    }
  }
  store(bytes);
}

// Stores the block's descale; one thread of the cluster writes it.
__device__ __forceinline__ void store_scale(const QuantizedTensor& tensor, const WorkTile& tile,
                                            float descale) {
  if (cluster_rank() != 0 || threadIdx.x != 0) return;
  const int64_t head = int64_t{tile.batch_idx} * tensor.x.by_heads.divisor + tile.head;
  tensor.descale[head * tensor.x.by_blocks.divisor + tile.number] = descale;
}

template <int kColumns>
using LargestOfCluster = ClusterMax<quantize_threads(kColumns) / 32>[2];

// Returns the factor that quantizes the block's values and stores its inverse, the descale.
// largest: exchange of the block's amax; the second is used without infinities if the first is inf.
template <class To, class Values, class Maximum>
__device__ __forceinline__ float find_factor(const QuantizedTensor& tensor, const WorkTile& tile,
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
      store_scale(tensor, tile, NAN);
      return 0.f;
    }
  }
  amax = fmaxf(amax, To::kLargest * kSmallestScale);
  store_scale(tensor, tile, amax / To::kLargest);
  return To::kLargest / amax;
}

// Quantizes values of the CTA's tile to rows of tokens. store: as for narrow_and_store.
template <int kColumns, class Values, class Store>
__device__ __forceinline__ void quantize_tokens(const QuantizedTensor& tensor, const WorkTile& tile,
                                                Values& values, LargestOfCluster<kColumns>& largest,
                                                Store store) {
  const auto narrow = [&](auto to) {
    using To = decltype(to);
    narrow_and_store<To>(values, find_factor<To>(tensor, tile, values, largest), store);
  };
  if (tensor.to == Narrowed::kInt8) {
    narrow(Narrow<ElementType::kInt8>{});
  } else {
    narrow(Narrow<ElementType::kE4m3>{});
  }
}

// Loads the CTA's tile and quantizes it to rows of tokens.
template <ElementType kType, int kColumns, class Values>
__device__ __forceinline__ void load_and_quantize(const QuantizedTensor& tensor,
                                                  const WorkTile& tile,
                                                  LargestOfCluster<kColumns>& largest) {
  LoadedVecs loaded;
  load_tile<uint16_t, TokenPositions<kColumns>>(loaded, tensor.x, tile);
  Values values(loaded, tensor, tile);
  cluster_wait();  // every CTA does
  quantize_tokens<kColumns>(tensor, tile, values, largest, [&](const auto& bytes) {
    store_tile<TokenPositions<kColumns>>(bytes, tensor.data, tensor.data_stride, tile, tensor.x);
  });
}

// Quantizes values of the CTA's tile to permuted V. stage: of the warp.
template <ElementType kType, int kColumns>
__device__ __forceinline__ void quantize_permuted(const QuantizedTensor& tensor,
                                                  const WorkTile& tile, LoadedValues<kType>& values,
                                                  LargestOfCluster<kColumns>& largest,
                                                  PermutedStage& stage) {
  const float factor = find_factor<Narrow<ElementType::kE4m3>>(tensor, tile, values, largest);
  uint32_t word[PermutedStage::kRows][kVec];
#pragma unroll
  for (int row = 0; row < PermutedStage::kRows; ++row) {
    const int u = row * PermutedPositions::kVecsOfRow;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      word[row][i] = to_e4m3(values(u, i) * factor, values(u + 1, i) * factor,
                             values(u + 2, i) * factor, values(u + 3, i) * factor);
    }
  }
  store_permuted<kColumns>(word, stage, tensor.data, tensor.data_stride, tile, tensor.x.tokens);
}

// The tensor, and the block of it, that the `index`th cluster quantizes.
struct BlockOfTensor {
  int tensor;
  uint32_t block;
};
__device__ __forceinline__ BlockOfTensor find_tensor(const Arguments& args, uint32_t index) {
  int round, turn;
  args.by_tensors(round, turn, index);
  if (round < args.rounds) return {turn, static_cast<uint32_t>(round)};
  BlockOfTensor of{0, index - args.rounds * (args.by_tensors.divisor - 1)};
  while (of.block >= args.num_blocks[of.tensor]) {
    of.block -= args.num_blocks[of.tensor++] - args.rounds;
  }
  return of;
}

// CTAs per SM, limited by registers per thread.
constexpr int quantize_ctas(int columns, int registers = 80) {
  return 65536 / (registers * quantize_threads(columns));
}

template <class Maximum, int kCount>
__device__ __forceinline__ void init_maxima(Maximum (&largest)[kCount]) {
  if (threadIdx.x != 0) return;
  for (Maximum& maximum : largest) maximum.init();
  fence_barrier_init();
}

// Grid: for each tensor heads * blocks * batch clusters of block / 64 CTAs.
template <ElementType kType, int kColumns>
__global__ void __launch_bounds__(quantize_threads(kColumns), quantize_ctas(kColumns))
    quantize_blocks(const __grid_constant__ Arguments args) {
  __shared__ LargestOfCluster<kColumns> largest;
  launch_dependents();
  griddepcontrol_wait();
  const BlockOfTensor of = find_tensor(args, cluster_index());
  const QuantizedTensor& tensor = args.tensor[of.tensor];
  WorkTile tile = find_block(tensor.x, of.block, cluster_size() * kTileTokens);
  if (tile.num_tokens() <= 0) {  // the sequence has no such block
    store_scale(tensor, tile, kSmallestScale);
    return;
  }
  tile.first += cluster_rank() * kTileTokens;

  init_maxima(largest);
  cluster_arrive();  // by every thread: this CTA's barriers are ready for the others' values
  if (tensor.to == Narrowed::kE4m3Permuted) {
    LoadedVecs loaded;
    load_tile<uint16_t, PermutedPositions>(loaded, tensor.x, tile);
    LoadedValues<kType> values(loaded, tensor, tile);
    cluster_wait();  // every CTA does
    __shared__ PermutedStage stages[quantize_threads(kColumns) / 32];
    quantize_permuted<kType, kColumns>(tensor, tile, values, largest, stages[threadIdx.x / 32]);
  } else if (tensor.signs != nullptr || tensor.mean != nullptr) {
    load_and_quantize<kType, kColumns, FloatValues<kType, kColumns>>(tensor, tile, largest);
  } else {
    load_and_quantize<kType, kColumns, LoadedValues<kType>>(tensor, tile, largest);
  }
}

// Copies e4m3 V to permuted V. Grid: heads * tiles * batch.
template <int kColumns>
__global__ void __launch_bounds__(quantize_threads(kColumns))
    permute_v(const __grid_constant__ PermuteArguments args) {
  __shared__ PermutedStage stages[quantize_threads(kColumns) / 32];
  launch_dependents();
  griddepcontrol_wait();
  const WorkTile tile = find_block(args.v, blockIdx.x, kTileTokens);
  if (tile.num_tokens() <= 0) return;
  VecWords<uint8_t> loaded[kVecsOfThread];
  load_tile<uint8_t, PermutedPositions>(loaded, args.v, tile);
  uint32_t word[PermutedStage::kRows][kVec];
#pragma unroll
  for (int row = 0; row < PermutedStage::kRows; ++row) {
#pragma unroll
    for (int half = 0; half < kVec / 4; ++half) {
      uint32_t four[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] = loaded[row * PermutedPositions::kVecsOfRow + i][half];
      transpose_bytes(four);
#pragma unroll
      for (int i = 0; i < 4; ++i) word[row][half * 4 + i] = four[i];
    }
  }
  store_permuted<kColumns>(word, stages[threadIdx.x / 32], args.data, args.data_stride, tile,
                           args.v.tokens);
}

}  // namespace flashattn3::quantize
