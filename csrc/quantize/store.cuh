// Stores quantized bytes to device memory, as rows or as permuted V (tile/permuted_v.h).
#pragma once

#include <cstdint>

#include "quantize/staged_tile.cuh"
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

// Stores the bytes of a thread's columns of its token, RowPositions. Lanes store 32 neighbouring
// bytes together: L2 gets whole sectors. The row's address is found here, once for each head: kept
// from head to head it would be spilled.
template <int kColumns>
__device__ __forceinline__ void store_token(const uint32_t (&bytes)[kVecsOfThread][kVec / 4],
                                            const QuantizedTensor& tensor, const WorkTile& tile) {
  using Positions = RowPositions<kColumns>;
  const HeadStrides& stride = tensor.data_stride;
  const int token = Positions::token(0), head_dim = tensor.x.head_dim;
  uint8_t* const row = tensor.data + tile.batch_idx * stride.batch + tile.head * stride.head +
                       (int64_t{tile.sequence.offset} + tile.first + token) * stride.seq;
  if (Positions::kLanes == 4 || head_dim % 16 != 0) {
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
      const int column = Positions::column(u);
      if (token >= tile.num_tokens() || column >= head_dim) continue;
      *reinterpret_cast<uint2*>(row + column) = make_uint2(bytes[u][0], bytes[u][1]);
    }
  } else if constexpr (Positions::kLanes == 2) {
#pragma unroll
    for (int u = 0; u < kVecsOfThread; u += 2) {
      const int column = Positions::column(u);
      if (token >= tile.num_tokens() || column >= head_dim) continue;
      *reinterpret_cast<uint4*>(row + column) =
          make_uint4(bytes[u][0], bytes[u][1], bytes[u + 1][0], bytes[u + 1][1]);
    }
  } else {
    // Of each 32 bytes of two neighbouring tokens the even lane stores the first 16, the odd lane
    // the last 16: they exchange the other token's.
    const int odd = threadIdx.x % 2;
    uint8_t* const even_row = row - odd * stride.seq;
    const int num_tokens = tile.num_tokens() - (token - odd);  // 1: the even token alone
#pragma unroll
    for (int u = 0; u < kVecsOfThread; u += 4) {
      uint32_t of_even[4], of_odd[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t first16 = bytes[u + i / 2][i % 2], last16 = bytes[u + 2 + i / 2][i % 2];
        const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? first16 : last16, 1);
        of_even[i] = odd ? other : first16;
        of_odd[i] = odd ? last16 : other;
      }
      const int column = u * kVec + odd * 16;
      if (column >= head_dim) continue;
      if (num_tokens > 0) {
        *reinterpret_cast<uint4*>(even_row + column) =
            make_uint4(of_even[0], of_even[1], of_even[2], of_even[3]);
      }
      if (num_tokens > 1) {
        *reinterpret_cast<uint4*>(even_row + stride.seq + column) =
            make_uint4(of_odd[0], of_odd[1], of_odd[2], of_odd[3]);
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
// kColumns, 16), varlen: without batch. stage: of the warp, whose lanes all call it.
template <int kColumns>
__device__ __forceinline__ void store_permuted(const uint32_t (&word)[PermutedStage::kRows][kVec],
                                               PermutedStage& stage, uint8_t* data,
                                               const HeadStrides& stride, const WorkTile& tile,
                                               const SequenceTable& tokens) {
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
