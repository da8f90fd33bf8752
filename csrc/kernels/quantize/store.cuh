// e4m3 bytes on their way to memory, in rows or in slot order (blocks/slot_order.h).
#pragma once

#include <cstdint>

#include "blocks/slot_order.h"
#include "kernels/quantize/tile.cuh"

namespace flashattn3 {

// Units of rows in the places of a thread. data: (batch, tokens, heads, columns), dense.
template <class Places>
__device__ __forceinline__ void store_tile(const uint32_t (&bytes)[kUnitsOfThread][kUnit / 4],
                                           uint8_t* data, const HeadRows& stride,
                                           const TilePlace& place, const QuantizeSource& source) {
  const int64_t row = int64_t{place.sequence.offset} + place.first;
  uint8_t* rows = data + place.entry * stride.batch + row * stride.seq + place.head * stride.head;
  const auto columns = [&](int u) {
    return rows + Places::token(u) * stride.seq + Places::column(u);
  };
  if (source.whole_units) {
#pragma unroll
    for (int u = 0; u < kUnitsOfThread; ++u) {
      if (place.has(Places::token(u), Places::column(u), source)) {
        *reinterpret_cast<uint2*>(columns(u)) = make_uint2(bytes[u][0], bytes[u][1]);
      }
    }
    return;
  }
#pragma unroll
  for (int u = 0; u < kUnitsOfThread; ++u) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (place.has(Places::token(u), Places::column(u) + i, source)) {
        columns(u)[i] = static_cast<uint8_t>(bytes[u][i / 4] >> (i % 4 * 8));
      }
    }
  }
}

// A group of 32 slots of 64 columns, of one warp: two rows of 16 bytes for each column. The place
// of a column among its 8 is swizzled so that neither a warp's writes, 4 bytes of every eighth
// column, nor its reads meet in a bank.
struct SlotStage {
  static constexpr int kRows = kSlotGroup / kSlotsOfRow;
  uint4 bytes[kRows][SlotPlaces::kColumnsOfWarp];

  __device__ static int place(int column) { return column ^ (column / kUnit % kUnit); }
};

// word[row][i]: column i of the thread's 8 in its four slots. data: (batch, heads, slots / 16,
// kColumns, 16), or without batch where the sequences are unequal. Called by the whole CTA, once.
template <int kColumns>
__device__ __forceinline__ void store_slots(const uint32_t (&word)[SlotStage::kRows][kUnit],
                                            uint8_t* data, const HeadRows& stride,
                                            const TilePlace& place, const SequenceTable& tokens) {
  __shared__ SlotStage stages[quantize_threads(kColumns) / 32];
  SlotStage& stage = stages[threadIdx.x / 32];
#pragma unroll
  for (int row = 0; row < SlotStage::kRows; ++row) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      uint4& column = stage.bytes[row][SlotStage::place(SlotPlaces::column_in_warp() + i)];
      reinterpret_cast<uint32_t*>(&column)[SlotPlaces::quad()] = word[row][i];
    }
  }
  __syncwarp();  // the four quads of every column are there
  const int first_token = SlotPlaces::first_token();
  if (first_token >= place.num_tokens()) return;  // else the whole group is the sequence's
  const int64_t before =
      tokens.cu_seqlens != nullptr ? first_slot(place.sequence.offset, place.entry) : 0;
  uint8_t* group = data + place.entry * stride.batch + place.head * stride.head +
                   (before + place.first + first_token) * stride.seq;
  auto* columns = reinterpret_cast<uint4*>(group) + SlotPlaces::first_column();
#pragma unroll
  for (int row = 0; row < SlotStage::kRows; ++row) {
#pragma unroll
    for (int i = 0; i < SlotPlaces::kColumnsOfWarp; i += 32) {
      const int column = i + threadIdx.x % 32;
      columns[row * kColumns + column] = stage.bytes[row][SlotStage::place(column)];
    }
  }
}

}  // namespace flashattn3
