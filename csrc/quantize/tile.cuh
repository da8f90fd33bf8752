// A CTA's tile, 64 tokens of one head, and its partition over threads: eight vectors of 8
// neighbouring columns each. With fewer, a thread's fixed work would cost more than a rotation.
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

// Partition for row output: four lanes share a token and a warp holds eight, so that 32 bytes of
// each are stored together and a rotation needs two shuffles, whatever the head dim. Vector u of a
// token holds columns 32 u + 8 lane to 32 u + 8 lane + 7.
template <int kColumns>
struct TokenPositions {
  static constexpr int kLanes = 4;
  static constexpr int kVecsOfToken = kColumns / (kLanes * kVec);
  static constexpr int kTokens = kVecsOfThread / kVecsOfToken;  // per thread
  __device__ static int token(int vec) {
    const int pass = threadIdx.x / 32 * kTokens + vec / kVecsOfToken;
    return pass * (32 / kLanes) + threadIdx.x % 32 / kLanes;
  }
  // Past the end the last token is repeated, which keeps the amax; zeros minus a mean might not.
  __device__ static int loaded_token(int vec, int num_tokens) {
    return min(token(vec), num_tokens - 1);
  }
  __device__ static int column(int vec) {
    return threadIdx.x % kLanes * kVec + vec % kVecsOfToken * (kLanes * kVec);
  }
  // Lanes, or else vectors, between a token's columns that are a power of two apart.
  __device__ static constexpr int lanes_apart(int columns) {
    return columns < kLanes * kVec ? columns / kVec : 0;
  }
  __device__ static constexpr int vecs_apart(int columns) { return columns / (kLanes * kVec); }
};

// Partition for permuted V: a warp holds 32 keys, as two rows of 16, of 64 columns; a thread holds
// four keys, neighbours in the permuted order, of 8 columns in each row.
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

// Tokens `first` to `sequence.length` - 1 of a head; the tile is the first 64 of them. number: of
// the tile's block in the sequence.
struct WorkTile {
  int batch_idx, head, number;
  Sequence sequence;
  int first;
  __device__ int num_tokens() const { return sequence.length - first; }
  __device__ bool has(int token, int column, const Source& source) const {
    return token < num_tokens() && column < source.head_dim;
  }
};

// Returns the `index`th block of `block` tokens. Heads are innermost, as they are neighbours in
// memory if the tensor is dense, then the blocks of the longest sequence, then the batch.
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

// Loads 8 columns of a row as one vector.
template <class Bits>
__device__ __forceinline__ void load_vec(VecWords<Bits>& word, const Bits* columns) {
  using Vector = std::conditional_t<sizeof(Bits) == 2, uint4, uint2>;
  const Vector loaded = *reinterpret_cast<const Vector*>(columns);
  memcpy(word, &loaded, sizeof(Vector));
}

// Loads the first num_columns of 8 columns, one by one, into zeroed words.
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

// Loads a thread's vectors; zeros past the columns and, for permuted V, past the tokens.
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
