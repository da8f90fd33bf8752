// A CTA's tile, 64 tokens of one head, and which parts of it a thread has: eight units of 8
// neighbouring columns. With fewer the work that a thread does once would cost more than a
// rotation.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blocks/slot_order.h"
#include "kernels/quantize/arguments.h"

namespace flashattn3 {

constexpr int kTileTokens = 64;
constexpr int kUnit = 8;  // columns
constexpr int kUnitsOfThread = 8;

constexpr int quantize_threads(int columns) {
  return kTileTokens * columns / (kUnit * kUnitsOfThread);
}

// For rows: four lanes have a token and a warp eight, so that 32 bytes of each are stored together
// and a rotation needs two exchanges between lanes, whatever the head dim. Unit u of a token is
// columns 32 u + 8 lane.
template <int kColumns>
struct RowPlaces {
  static constexpr int kLanes = 4;
  static constexpr int kUnitsOfToken = kColumns / (kLanes * kUnit);
  static constexpr int kTokens = kUnitsOfThread / kUnitsOfToken;  // of a thread
  __device__ static int token(int unit) {
    const int pass = threadIdx.x / 32 * kTokens + unit / kUnitsOfToken;
    return pass * (32 / kLanes) + threadIdx.x % 32 / kLanes;
  }
  __device__ static int column(int unit) {
    return threadIdx.x % kLanes * kUnit + unit % kUnitsOfToken * (kLanes * kUnit);
  }
};

// For slots: a warp has a group of 32 slots, as two rows of 16, of 64 columns; a thread four
// neighbouring slots of 8 columns in each.
struct SlotPlaces {
  static constexpr int kColumnsOfWarp = 64;
  static constexpr int kUnitsOfRow = 4;
  __device__ static int first_token() { return threadIdx.x / 32 % 2 * kSlotGroup; }
  __device__ static int first_column() { return threadIdx.x / 64 * kColumnsOfWarp; }
  __device__ static int quad() { return threadIdx.x % 32 / 8; }
  __device__ static int column_in_warp() { return threadIdx.x % 8 * kUnit; }
  __device__ static int token(int unit) {
    return first_token() + unit / kUnitsOfRow * kSlotsOfRow +
           key_of_quad(quad(), unit % kUnitsOfRow);
  }
  __device__ static int column(int) { return first_column() + column_in_warp(); }
};

// Tokens `first` to `sequence.length` - 1 of a head; a tile is the first 64 of them.
struct TilePlace {
  int entry, head;
  Sequence sequence;
  int first;
  __device__ int num_tokens() const { return sequence.length - first; }
};

// The `index`th of all blocks of `block` tokens: heads first, which are neighbours in memory where
// the tensor is dense, then the blocks of the longest sequence.
__device__ __forceinline__ TilePlace find_block(const QuantizeSource& source, uint32_t index,
                                                uint32_t num_blocks, int block) {
  const uint32_t num_heads = source.num_heads, rest = index / num_heads;
  TilePlace place;
  place.head = index % num_heads;
  place.first = rest % num_blocks * block;
  place.entry = rest / num_blocks;
  place.sequence = find_sequence(source.tokens, place.entry);
  return place;
}

// First element of the tile's first token.
template <class Bits>
__device__ __forceinline__ const Bits* tile_rows(const QuantizeSource& source,
                                                 const TilePlace& place) {
  const int64_t row = int64_t{place.sequence.offset} + place.first;
  return static_cast<const Bits*>(source.data) + place.entry * source.stride.batch +
         row * source.stride.seq + place.head * source.stride.head;
}

template <class Bits>
using UnitWords = uint32_t[kUnit * sizeof(Bits) / 4];

// 8 columns of a row, zeros where the row has no more.
template <class Bits>
__device__ __forceinline__ void load_unit(UnitWords<Bits>& word, const Bits* row, int column,
                                          int num_columns, bool whole) {
  using Vector = std::conditional_t<sizeof(Bits) == 2, uint4, uint2>;
  constexpr int kInWord = 4 / sizeof(Bits);
  Vector loaded{};
  if (whole) {
    if (column < num_columns) loaded = *reinterpret_cast<const Vector*>(row + column);
  }
  const uint32_t* part = reinterpret_cast<const uint32_t*>(&loaded);
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Vector) / 4); ++i) word[i] = part[i];
  if (whole) return;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (column + i < num_columns) {
      word[i / kInWord] |= uint32_t{row[column + i]} << (i % kInWord * 8 * sizeof(Bits));
    }
  }
}

// A thread's units; zeros past the tokens and the columns.
template <class Bits, class Places>
__device__ __forceinline__ void load_tile(UnitWords<Bits> (&unit)[kUnitsOfThread],
                                          const QuantizeSource& source, const TilePlace& place) {
  const Bits* rows = tile_rows<Bits>(source, place);
#pragma unroll
  for (int u = 0; u < kUnitsOfThread; ++u) {
    const int token = Places::token(u);
    const int num_columns = token < place.num_tokens() ? source.head_dim : 0;
    load_unit<Bits>(unit[u], rows + token * source.stride.seq, Places::column(u), num_columns,
                    source.whole_units);
  }
}

}  // namespace flashattn3
