// Finds where a token of an append comes from, where it goes, and its position.
#pragma once

#include <cstdint>

#include "append/arguments.h"

namespace flashattn3::append {

// Sequence of a token and the token's index in it. batch_idx: -1: no sequence has the token.
struct TokenPlace {
  int batch_idx, token;
};

// index: of a token, below num_tokens. Values of cu_seqlens may be anything.
__host__ __device__ __forceinline__ TokenPlace find_place(const Tensor& tensor, int batch,
                                                          int index) {
  TokenPlace place;
  if (tensor.cu_seqlens == nullptr) {
    tensor.seqlen(place.batch_idx, place.token, index);
    return place;
  }
  // The number of sequences that end at or before the token, by bisection.
  int low = 0, high = batch;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (tensor.cu_seqlens[middle + 1] <= index) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == batch) return {-1, 0};
  const int begin = tensor.cu_seqlens[low];
  if (begin < 0 || begin > index) return {-1, 0};
  return {low, index - begin};
}

// A value of Token::position, as kNoPosition is one: all columns stay as they are.
constexpr int kUnrotated = -2;

// A token and its offsets in elements of Tensor::from and to. They are no addresses, because the
// compiler does not know to what kind of memory an address in shared memory points.
struct Token {
  int64_t from;
  int64_t to;    // -1: the token has no place in the cache
  int position;  // of the rotary tables
  int batch_idx;
};

// of_q: queries of no sequence are copied as they are; new keys and values of none are dropped.
__host__ __device__ __forceinline__ Token find_token(const Arguments& args, const Tensor& tensor,
                                                     bool of_q, int index) {
  const TokenPlace place = find_place(tensor, args.batch, index);
  const int64_t in_batch = tensor.cu_seqlens == nullptr ? place.token : index;
  const bool exists = place.batch_idx >= 0;
  const int batch_idx = exists ? place.batch_idx : 0;
  Token token{batch_idx * tensor.from_batch + in_batch * tensor.from_seq, -1, kUnrotated,
              batch_idx};
  if (of_q) token.to = batch_idx * tensor.to_batch + in_batch * tensor.to_seq;
  if (!exists) return token;
  const int cached = args.keys.num_cached(batch_idx);
  const int cache_idx = of_q ? -1 : args.keys.cache_idx(batch_idx);
  if (tensor.half > 0) {
    int64_t position = args.rotary_seqlens == nullptr ? cached : args.rotary_seqlens[batch_idx];
    if (!(of_q && args.one_q_position)) position += place.token;
    const bool known = position >= 0 && position < args.rotary.num_positions;
    token.position = known ? static_cast<int>(position) : kNoPosition;
  }
  if (of_q) return token;
  const int key = cached + place.token;
  if (key >= args.keys.capacity) return token;
  int page, slot;
  args.keys.find(cache_idx, key, page, slot);
  if (page >= 0) token.to = page * tensor.to_batch + slot * tensor.to_seq;
  return token;
}

// Columns of an item: the first of each of its vectors, or the columns themselves. Without
// rotation, and where a vector holds both columns of its pairs, there is only `first`.
struct ItemColumns {
  int first, second;
  bool rotated;
};

template <bool kVectors>
__host__ __device__ __forceinline__ ItemColumns find_columns(int item, int half, bool interleaved) {
  constexpr int kWidth = kVectors ? kVec : 1;
  const int column = item * kWidth;
  if (kVectors && interleaved) return {column, column, column < 2 * half};
  if (column >= half) return {column + half, column + half, false};
  if (interleaved) return {2 * column, 2 * column + 1, true};
  return {column, column + half, true};
}

// Items of a head of a token.
template <bool kVectors>
constexpr int num_items(int head_dim, int half, bool interleaved) {
  if (kVectors) return (interleaved ? head_dim : head_dim - half) / kVec;
  return head_dim - half;
}

}  // namespace flashattn3::append
