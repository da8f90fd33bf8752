// A CTA's tile, 64 tokens of one head, and which parts of it a thread has: eight units of 8
// neighbouring columns. With fewer the work that a thread does once would cost more than a
// rotation.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "quantize/arguments.h"
#include "tile/permuted_v.h"

namespace flashattn3::quantize {

constexpr int kTileTokens = 64;
constexpr int kVec = 8;  // columns
constexpr int kVecsOfThread = 8;

constexpr int quantize_threads(int columns) {
  return kTileTokens * columns / (kVec * kVecsOfThread);
}

// For rows: four lanes have a token and a warp eight, so that 32 bytes of each are stored together
// and a rotation needs two exchanges between lanes, whatever the head dim. Unit u of a token is
// columns 32 u + 8 lane.
template <int kColumns>
struct TokenPositions {
  static constexpr int kLanes = 4;
  static constexpr int kVecsOfToken = kColumns / (kLanes * kVec);
  static constexpr int kTokens = kVecsOfThread / kVecsOfToken;  // of a thread
  __device__ static int token(int vec) {
    const int pass = threadIdx.x / 32 * kTokens + vec / kVecsOfToken;
    return pass * (32 / kLanes) + threadIdx.x % 32 / kLanes;
  }
  // Past the end the last token comes again, which changes no maximum: zeros would with a mean.
  __device__ static int loaded_token(int vec, int num_tokens) {
    return min(token(vec), num_tokens - 1);
  }
  __device__ static int column(int vec) {
    return threadIdx.x % kLanes * kVec + vec % kVecsOfToken * (kLanes * kVec);
  }
};

// For slots: a warp has a group of 32 slots, as two rows of 16, of 64 columns; a thread four
// neighbouring slots of 8 columns in each.
struct PermutedPositions {
  static constexpr int kColumnsOfWarp = 64;
  static constexpr int kVecsOfRow = 4;
  __device__ static int first_token() { return threadIdx.x / 32 % 2 * kKeyGroup; }
  __device__ static int first_column() { return threadIdx.x / 64 * kColumnsOfWarp; }
  __device__ static int quad() { return threadIdx.x % 32 / 8; }
  __device__ static int column_in_warp() { return threadIdx.x % 8 * kVec; }
  __device__ static int token(int vec) {
    return first_token() + vec / kVecsOfRow * kCoreRowKeys + permuted_key(quad(), vec % kVecsOfRow);
  }
  __device__ static int loaded_token(int vec, int) { return token(vec); }
  __device__ static int column(int) { return first_column() + column_in_warp(); }
};

// Tokens `first` to `sequence.length` - 1 of a head; a tile is the first 64 of them, in the block
// with this number.
struct WorkTile {
  int batch_idx, head, number;
  Sequence sequence;
  int first;
  __device__ int num_tokens() const { return sequence.length - first; }
  __device__ bool has(int token, int column, const Source& source) const {
    return token < num_tokens() && column < source.head_dim;
  }
};

// The `index`th of all blocks of `block` tokens: heads first, which are neighbours in memory where
// the tensor is dense, then the blocks of the longest sequence.
__device__ __forceinline__ WorkTile find_block(const Source& source, uint32_t index, int block) {
  WorkTile tile;
  int rest;
  source.by_heads(rest, tile.head, index);
  source.by_blocks(tile.batch_idx, tile.number, rest);
  tile.first = tile.number * block;
  tile.sequence = find_sequence(source.tokens, tile.batch_idx);
  return tile;
}

// First element of the tile's first token.
template <class Bits>
__device__ __forceinline__ const Bits* tile_rows(const Source& source, const WorkTile& tile) {
  const int64_t row = int64_t{tile.sequence.offset} + tile.first;
  return static_cast<const Bits*>(source.data) + tile.batch_idx * source.stride.batch +
         row * source.stride.seq + tile.head * source.stride.head;
}

template <class Bits>
using VecWords = uint32_t[kVec * sizeof(Bits) / 4];

// 8 columns of a row, as one vector.
template <class Bits>
__device__ __forceinline__ void load_vec(VecWords<Bits>& word, const Bits* columns) {
  using Vector = std::conditional_t<sizeof(Bits) == 2, uint4, uint2>;
  const Vector loaded = *reinterpret_cast<const Vector*>(columns);
  memcpy(word, &loaded, sizeof(Vector));
}

// The first num_columns of 8 columns, one by one.
template <class Bits>
__device__ __forceinline__ void load_vec(VecWords<Bits>& word, const Bits* columns,
                                         int num_columns) {
  constexpr int kInWord = 4 / sizeof(Bits);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    if (i < num_columns) {
      word[i / kInWord] |= uint32_t{columns[i]} << (i % kInWord * 8 * sizeof(Bits));
    }
  }
}

// A thread's units; zeros past the columns and, in slots, past the tokens.
template <class Bits, class Positions>
__device__ __forceinline__ void load_tile(VecWords<Bits> (&vec)[kVecsOfThread],
                                          const Source& source, const WorkTile& tile) {
  const Bits* rows = tile_rows<Bits>(source, tile);
  const auto token = [&](int u) { return Positions::loaded_token(u, tile.num_tokens()); };
  const auto columns = [&](int u) {
    return rows + token(u) * source.stride.seq + Positions::column(u);
  };
  memset(vec, 0, sizeof(vec));
  if (source.whole_vecs) {
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
      if (tile.has(token(u), Positions::column(u), source)) load_vec(vec[u], columns(u));
    }
  } else {
#pragma unroll
    for (int u = 0; u < kVecsOfThread; ++u) {
      if (tile.has(token(u), Positions::column(u), source)) {
        load_vec(vec[u], columns(u), source.head_dim - Positions::column(u));
      }
    }
  }
}

}  // namespace flashattn3::quantize
