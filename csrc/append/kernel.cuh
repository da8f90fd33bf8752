// The append kernel: writes new keys and values into a cache, dense or paged, with rotary position
// embedding on the way, and the rotated queries beside them. A CTA takes some tokens of one tensor,
// all heads of them: a thread finds the place of each token, then every thread moves an item
// (arguments.h) of several heads of its token, for which it loads cos and sin once.
//
// A token without a place in the cache is not written, whatever the tables hold.
#pragma once

#include <cstdint>

#include "append/arguments.h"
#include "append/find_token.cuh"
#include "append/rotate.cuh"
#include "ptx/element.h"
#include "ptx/pdl.cuh"
#include "ptx/vector_access.cuh"

namespace flashattn3::append {

// The work of a thread: item `number` of the heads first_head, first_head + head_groups, ...
struct ThreadItems {
  const Tensor& tensor;
  const RotaryTables& tables;
  Token token;
  int first_head, number;

  __device__ __forceinline__ const uint16_t* from(int head) const {
    return tensor.from + token.from + head * tensor.from_head;
  }
  __device__ __forceinline__ uint16_t* to(int head) const {
    return tensor.to + token.to + head * tensor.to_head;
  }
  __device__ __forceinline__ float descale(int head) const {
    if (tensor.descale == nullptr) return 1.f;
    return tensor.descale[token.batch_idx * tensor.descale_batch + head * tensor.descale_head];
  }
};

union Vector {
  uint4 all;
  uint32_t words[4];
};

// kHalves: an item that is rotated has a vector of each half.
template <ElementType kElement, bool kHalves>
__device__ __forceinline__ void move_vectors(const ThreadItems& items) {
  constexpr int kInFlight = kHeadsInFlight<kHalves>;
  const Tensor& tensor = items.tensor;
  const ItemColumns columns = find_columns<true>(items.number, tensor.half, !kHalves);
  const bool both = kHalves && columns.rotated;
  const bool rotates = columns.rotated && items.token.position != kUnrotated;
  Angles<kElement, kHalves ? 8 : 4> angles;
  bool loads_angles = rotates;
  const int step = tensor.head_groups.divisor;
#pragma unroll 1
  for (int head = items.first_head; head < tensor.num_heads; head += kInFlight * step) {
    Vector first[kInFlight], second[kHalves ? kInFlight : 1];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (head + i * step >= tensor.num_heads) break;
      const uint16_t* from = items.from(head + i * step);
      first[i].all = load_vector<uint4>(from + columns.first);
      if (both) second[i].all = load_vector<uint4>(from + columns.second);
    }
    // After the first loads of vectors, which do not wait for those of the tables.
    if (loads_angles) {
      angles.load(items.tables, items.token.position, kHalves ? columns.first : columns.first / 2);
      loads_angles = false;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (head + i * step >= tensor.num_heads) break;
      const float descale = items.descale(head + i * step);
      if (!rotates) {
        divide_vector<kElement>(first[i].words, descale);
      } else if constexpr (kHalves) {
        rotate_halves(angles, descale, first[i].words, second[i].words);
      } else {
        rotate_interleaved(angles, descale, first[i].words);
      }
      uint16_t* to = items.to(head + i * step);
      store_vector(to + columns.first, first[i].all);
      if (both) store_vector(to + columns.second, second[i].all);
    }
  }
}

// For head dims, rotated columns, addresses and strides that have no vectors.
template <ElementType kElement>
__device__ __forceinline__ void move_elements(const ThreadItems& items) {
  const Tensor& tensor = items.tensor;
  const bool interleaved = items.tables.interleaved;
  const ItemColumns columns = find_columns<false>(items.number, tensor.half, interleaved);
  const bool rotates = columns.rotated && items.token.position != kUnrotated;
  Angles<kElement, 1> angles;
  if (rotates) {
    const int pair = interleaved ? columns.first / 2 : columns.first;
    angles.load(items.tables, items.token.position, pair);
  }
#pragma unroll 4
  for (int head = items.first_head; head < tensor.num_heads; head += tensor.head_groups.divisor) {
    const uint16_t* from = items.from(head);
    uint16_t first = from[columns.first], second = from[columns.second];
    const float descale = items.descale(head);
    if (rotates || descale != 1.f) {
      float2 x = make_float2(to_float<kElement>(first), to_float<kElement>(second));
      if (rotates) x = rotate(x.x, x.y, angles.cos[0], angles.sin[0]);
      const uint32_t turned = pack_divided<kElement>(x.x, x.y, descale);
      first = static_cast<uint16_t>(turned), second = static_cast<uint16_t>(turned >> 16);
    }
    uint16_t* to = items.to(head);
    to[columns.first] = first;
    if (columns.rotated) to[columns.second] = second;
  }
}

// CTAs take the tokens of K, then those of V, then those of Q. kElement: of all tensors, and of the
// rotary tables where they are not fp32.
template <ElementType kElement>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    append_kernel(const __grid_constant__ Arguments args) {
  __shared__ Token tokens[kThreads];
  launch_dependents();
  // A kernel before may write what this one reads, and may still read the cache that it writes.
  griddepcontrol_wait();
  int cta_idx = blockIdx.x, which = kK;
  while (which < kQ && cta_idx >= args.tensors[which].num_ctas) {
    cta_idx -= args.tensors[which].num_ctas;
    ++which;
  }
  const Tensor& tensor = args.tensors[which];
  const int first = cta_idx * tensor.tokens_per_cta;
  const int num_tokens = min(tensor.tokens_per_cta, tensor.num_tokens - first);
  const int thread = threadIdx.x;
  if (thread < num_tokens) tokens[thread] = find_token(args, tensor, which == kQ, first + thread);
  int group, number, token_idx, first_head;
  tensor.items(group, number, thread);
  tensor.head_groups(token_idx, first_head, group);
  __syncthreads();
  if (token_idx >= num_tokens) return;
  const ThreadItems items{tensor, args.rotary, tokens[token_idx], first_head, number};
  if (items.token.to < 0) return;
  if (!tensor.vectors) {
    move_elements<kElement>(items);
  } else if (tensor.half > 0 && !args.rotary.interleaved) {
    move_vectors<kElement, true>(items);
  } else {
    move_vectors<kElement, false>(items);
  }
}

}  // namespace flashattn3::append
