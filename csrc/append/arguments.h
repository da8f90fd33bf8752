// Arguments of the append kernel; launch/append_arguments.h builds them from AppendParams.
#pragma once

#include <cutlass/fast_math.h>

#include <cstdint>

#include "attention/cached_keys.cuh"
#include "attention/rotary_angles.cuh"

namespace flashattn3::append {

constexpr int kThreads = 256;
constexpr int kCtasPerSm = 3;  // up to 85 registers for a thread; 64 spill 20 bytes
constexpr int kVec = 8;        // 16-bit elements of a 16-byte vector

// Heads whose vectors a thread loads together. kHalves: two vectors of each.
template <bool kHalves>
constexpr int kHeadsInFlight = kHalves ? 2 : 4;

// New keys, new values or queries, and where they go. An item is what a thread moves at once: a
// vector, or two where the rotation pairs columns of both halves; without vectors the two columns
// of a pair, or one column that is not rotated. A thread moves one item of each of several heads of
// a token: head_groups heads lie between them, and as many groups of `items` threads share the
// token. Strides are in elements.
struct Tensor {
  const uint16_t* from;  // (batch, seqlen, heads, head_dim), or (tokens, ...) with cu_seqlens
  uint16_t* to;          // the cache; of queries: as from
  int64_t from_batch, from_seq, from_head;  // the batch strides are 0 with cu_seqlens
  int64_t to_batch, to_seq, to_head;        // of a cache: between pages, slots, heads
  const float* descale;                     // (batch, heads), or null
  int64_t descale_batch, descale_head;
  const int32_t* cu_seqlens;        // (batch + 1), or null
  cutlass::FastDivmod seqlen;       // tokens of a sequence without cu_seqlens, at least 1
  cutlass::FastDivmod items;        // of a head of a token, 1 to kThreads
  cutlass::FastDivmod head_groups;  // at least 1
  int num_heads;
  int num_tokens;                // of all sequences
  int tokens_per_cta, num_ctas;  // tokens_per_cta * head_groups * items threads are at work
  int half;                      // half of the rotated columns; 0: none is rotated
  bool vectors;  // items are vectors, at multiples of 16 bytes, and so are four fp32 angles
};

enum TensorIndex { kK, kV, kQ, kNumTensors };

struct Arguments {
  Tensor tensors[kNumTensors];
  CachedKeys keys;  // lengths are those before the append; new lengths and leftpad are not read
  int batch;
  RotaryTables rotary;
  const int32_t* rotary_seqlens;  // (batch), position of the first new token; null: cached tokens
  bool one_q_position;            // all queries of a sequence have the first one's position
};

}  // namespace flashattn3::append
