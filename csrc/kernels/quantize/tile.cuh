// A CTA's tile, 64 tokens of one head, and which parts of it a thread has: eight units of 8
// neighbouring columns. With fewer the work that a thread does once would cost more than a
// rotation.
#pragma once

#include <cstdint>
#include <cstring>
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
  // Past the end the last token comes again, which changes no maximum: zeros would with a mean.
  __device__ static int loaded_token(int unit, int num_tokens) {
    return min(token(unit), num_tokens - 1);
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
  __device__ static int loaded_token(int unit, int) { return token(unit); }
  __device__ static int column(int) { return first_column() + column_in_warp(); }
};

// Tokens `first` to `sequence.length` - 1 of a head; a tile is the first 64 of them, in the block
// with this number.
struct TilePlace {
  int entry, head, number;
  Sequence sequence;
  int first;
  __device__ int num_tokens() const { return sequence.length - first; }
  __device__ bool has(int token, int column, const QuantizeSource& source) const {
    return token < num_tokens() && column < source.head_dim;
  }
};

// The `index`th of all blocks of `block` tokens: heads first, which are neighbours in memory where
// the tensor is dense, then the blocks of the longest sequence.
__device__ __forceinline__ TilePlace find_block(const QuantizeSource& source, uint32_t index,
                                                int block) {
  TilePlace place;
  int rest;
  source.by_heads(rest, place.head, index);
  source.by_blocks(place.entry, place.number, rest);
  place.first = place.number * block;
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

// 8 columns of a row, as one vector.
template <class Bits>
__device__ __forceinline__ void load_unit(UnitWords<Bits>& word, const Bits* columns) {
  using Vector = std::conditional_t<sizeof(Bits) == 2, uint4, uint2>;
  const Vector loaded = *reinterpret_cast<const Vector*>(columns);
  memcpy(word, &loaded, sizeof(Vector));
}

// The first num_columns of 8 columns, one by one.
template <class Bits>
__device__ __forceinline__ void load_unit(UnitWords<Bits>& word, const Bits* columns,
                                          int num_columns) {
  constexpr int kInWord = 4 / sizeof(Bits);
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    if (i < num_columns) {
      word[i / kInWord] |= uint32_t{columns[i]} << (i % kInWord * 8 * sizeof(Bits));
    }
  }
}

// A thread's units; zeros past the columns and, in slots, past the tokens.
template <class Bits, class Places>
__device__ __forceinline__ void load_tile(UnitWords<Bits> (&unit)[kUnitsOfThread],
                                          const QuantizeSource& source, const TilePlace& place) {
  const Bits* rows = tile_rows<Bits>(source, place);
  const auto token = [&](int u) { return Places::loaded_token(u, place.num_tokens()); };
  const auto columns = [&](int u) {
    return rows + token(u) * source.stride.seq + Places::column(u);
  };
  memset(unit, 0, sizeof(unit));
  if (source.whole_units) {
#pragma unroll
    for (int u = 0; u < kUnitsOfThread; ++u) {
      if (place.has(token(u), Places::column(u), source)) load_unit(unit[u], columns(u));
    }
  } else {
#pragma unroll
    for (int u = 0; u < kUnitsOfThread; ++u) {
      if (place.has(token(u), Places::column(u), source)) {
        load_unit(unit[u], columns(u), source.head_dim - Places::column(u));
      }
    }
  }
}

}  // namespace flashattn3
