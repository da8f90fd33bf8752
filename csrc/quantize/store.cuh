// Stores quantized bytes to device memory, as rows or as permuted V (tile/permuted_v.h).
#pragma once

#include <cstdint>

#include "quantize/tile.cuh"
#include "tile/permuted_v.h"

namespace flashattn3::quantize {

// Stores a thread's vectors of 8 columns. data: (batch, tokens, heads, columns), dense.
template <class Positions>
__device__ __forceinline__ void store_tile(const uint32_t (&bytes)[kVecsOfThread][kVec / 4],
                                           uint8_t* data, const HeadStrides& stride,
                                           const WorkTile& tile, const Source& source) {
  const int64_t row = int64_t{tile.sequence.offset} + tile.first;
  uint8_t* rows = data + tile.batch_idx * stride.batch + row * stride.seq + tile.head * stride.head;
  const auto columns = [&](int u) {
    return rows + Positions::token(u) * stride.seq + Positions::column(u);
  };
  if (source.whole_vecs) {
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
      if (tile.has(Positions::token(u), Positions::column(u), source)) {
        *reinterpret_cast<uint2*>(columns(u)) = make_uint2(bytes[u][0], bytes[u][1]);
      }
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < kVecsOfThread; ++u) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (tile.has(Positions::token(u), Positions::column(u) + i, source)) {
        columns(u)[i] = static_cast<uint8_t>(bytes[u][i / 4] >> (i % 4 * 8));
      }
    }
  }
}

// A warp's staging buffer for 32 keys x 64 columns of permuted V: two rows of 16 bytes per column.
// The position of a column among its 8 is swizzled, so that neither the warp's writes, 4 bytes of
// every eighth column, nor its reads have bank conflicts.
struct PermutedStage {
  static constexpr int kRows = kKeyGroup / kCoreRowKeys;
  uint4 bytes[kRows][PermutedPositions::kColumnsOfWarp];

  __device__ static int swizzled_column(int column) { return column ^ (column / kVec % kVec); }
};

// word[row][i]: column i of the thread's 8, for its four keys. data: (batch, heads, keys / 16,
// kColumns, 16), varlen: without batch. Called by the whole CTA, once.
template <int kColumns>
__device__ __forceinline__ void store_permuted(const uint32_t (&word)[PermutedStage::kRows][kVec],
                                               uint8_t* data, const HeadStrides& stride,
                                               const WorkTile& tile, const SequenceTable& tokens) {
  __shared__ PermutedStage stages[quantize_threads(kColumns) / 32];
  PermutedStage& stage = stages[threadIdx.x / 32];
#pragma unroll
  for (int row = 0; row < PermutedStage::kRows; ++row) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      uint4& column =
          stage.bytes[row][PermutedStage::swizzled_column(PermutedPositions::column_in_warp() + i)];
      reinterpret_cast<uint32_t*>(&column)[PermutedPositions::quad()] = word[row][i];
    }
  }
  __syncwarp();  // all four quads of every column are written
  const int first_token = PermutedPositions::first_token();
  if (first_token >= tile.num_tokens()) return;  // else the whole group belongs to the sequence
  const int64_t before =
      tokens.cu_seqlens != nullptr ? first_permuted_key(tile.sequence.offset, tile.batch_idx) : 0;
  uint8_t* group = data + tile.batch_idx * stride.batch + tile.head * stride.head +
                   (before + tile.first + first_token) * stride.seq;
  auto* columns = reinterpret_cast<uint4*>(group) + PermutedPositions::first_column();
#pragma unroll
  for (int row = 0; row < PermutedStage::kRows; ++row) {
#pragma unroll
    for (int i = 0; i < PermutedPositions::kColumnsOfWarp; i += 32) {
      const int column = i + threadIdx.x % 32;
      columns[row * kColumns + column] = stage.bytes[row][PermutedStage::swizzled_column(column)];
    }
  }
}

}  // namespace flashattn3::quantize
