// The append kernel: writes new keys and values into a cache, dense or paged, with rotary position
// embedding on the way, and the rotated queries beside them. A CTA takes some tokens of one tensor,
// all heads of them: a thread finds the place of each token, then all threads move items
// (arguments.h), several at a time.
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

// The tokens of a CTA.
struct CtaTokens {
  const Tensor& tensor;
  const RotaryTables& tables;
  const Token* tokens;
  int num_items;
};

// An item of a CTA, found by its index among them.
struct Item {
  const uint16_t* from;  // of the head
  uint16_t* to;          // of the head; null: there is no such item, or it has no place
  ItemColumns columns;
  int position;
  float descale;

  template <bool kVectors>
  static __device__ __forceinline__ Item find(const CtaTokens& cta, int index) {
    Item item{};
    if (index >= cta.num_items) return item;
    const Tensor& tensor = cta.tensor;
    int place, number, token_idx, head;
    tensor.items(place, number, index);
    tensor.heads(token_idx, head, place);
    const Token& token = cta.tokens[token_idx];
    if (token.to == nullptr) return item;
    item.from = token.from + head * tensor.from_head;
    item.to = token.to + head * tensor.to_head;
    item.columns = find_columns<kVectors>(number, tensor.half, cta.tables.interleaved);
    item.position = item.columns.rotated ? token.position : kUnrotated;
    item.descale = token.descale == nullptr ? 1.f : token.descale[head * tensor.descale_head];
    return item;
  }
};

union Vector {
  uint4 all;
  uint32_t words[4];
};

// kHalves: an item that is rotated has a vector of each half.
template <ElementType kElement, bool kHalves>
__device__ __forceinline__ void move_vectors(const CtaTokens& cta) {
  constexpr int kInFlight = kHalves ? 2 : 4;  // items of a thread that are loaded together
#pragma unroll 1
  for (int begin = threadIdx.x; begin < cta.num_items; begin += kInFlight * kThreads) {
    Item items[kInFlight];
    Vector first[kInFlight], second[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const Item item = Item::find<true>(cta, begin + i * kThreads);
      if (item.to != nullptr) {
        first[i].all = load_vector<uint4>(item.from + item.columns.first);
        // A query of no sequence has both vectors, too.
        if (kHalves && item.columns.rotated) {
          second[i].all = load_vector<uint4>(item.from + item.columns.second);
        }
      }
      items[i] = item;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const Item& item = items[i];
      if (item.to == nullptr) continue;
      const bool both = kHalves && item.columns.rotated;
      if (item.position == kUnrotated) {
        divide_vector<kElement>(first[i].words, item.descale);
        if (both) divide_vector<kElement>(second[i].words, item.descale);
      } else if (kHalves) {
        rotate_halves<kElement>(cta.tables, item.position, item.columns.first, item.descale,
                                first[i].words, second[i].words);
      } else {
        rotate_interleaved<kElement>(cta.tables, item.position, item.columns.first / 2,
                                     item.descale, first[i].words);
      }
      store_vector(item.to + item.columns.first, first[i].all);
      if (both) store_vector(item.to + item.columns.second, second[i].all);
    }
  }
}

// For head dims, rotated columns, addresses and strides that have no 16-byte vectors.
template <ElementType kElement>
__device__ __forceinline__ void move_elements(const CtaTokens& cta) {
  constexpr int kInFlight = 4;
  const RotaryTables& tables = cta.tables;
#pragma unroll 1
  for (int begin = threadIdx.x; begin < cta.num_items; begin += kInFlight * kThreads) {
    Item items[kInFlight];
    uint16_t first[kInFlight], second[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      items[i] = Item::find<false>(cta, begin + i * kThreads);
      if (items[i].to == nullptr) continue;
      first[i] = items[i].from[items[i].columns.first];
      second[i] = items[i].from[items[i].columns.second];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const Item& item = items[i];
      if (item.to == nullptr) continue;
      const ItemColumns& columns = item.columns;
      if (item.position != kUnrotated || item.descale != 1.f) {
        float2 x = make_float2(to_float<kElement>(first[i]), to_float<kElement>(second[i]));
        if (item.position == kNoPosition) {
          x = make_float2(NAN, NAN);
        } else if (item.position != kUnrotated) {
          const int pair = tables.interleaved ? columns.first / 2 : columns.first;
          const int64_t at = item.position * tables.stride + pair;
          x = rotate(x.x, x.y, load_angle<kElement>(tables.cos, tables.is_fp32, at),
                     load_angle<kElement>(tables.sin, tables.is_fp32, at));
        }
        const uint32_t turned = pack_divided<kElement>(x.x, x.y, item.descale);
        first[i] = static_cast<uint16_t>(turned), second[i] = static_cast<uint16_t>(turned >> 16);
      }
      item.to[columns.first] = first[i];
      if (columns.rotated) item.to[columns.second] = second[i];
    }
  }
}

// CTAs take the tokens of K, then those of V, then those of Q. kElement: of all tensors, and of the
// rotary tables where they are not fp32.
template <ElementType kElement>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ Arguments args) {
  __shared__ Token tokens[kMaxTokensPerCta];
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
  __syncthreads();
  const CtaTokens cta{tensor, args.rotary, tokens,
                      num_tokens * tensor.heads.divisor * tensor.items.divisor};
  if (!tensor.vectors) {
    move_elements<kElement>(cta);
  } else if (tensor.half > 0 && !args.rotary.interleaved) {
    move_vectors<kElement, true>(cta);
  } else {
    move_vectors<kElement, false>(cta);
  }
}

}  // namespace flashattn3::append
