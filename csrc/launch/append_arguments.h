// Computes the grid and the kernel's arguments of an append from AppendParams.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "append/arguments.h"
#include "append/find_token.cuh"
#include "launch/append.h"
#include "launch/errors.h"

namespace flashattn3 {

// CTAs of a tensor below which a thread moves one head and a CTA fewer tokens, down to one.
constexpr int kAppendFewCtas = 128;
constexpr int kAppendMaxHeadDim = append::kThreads;

// Returns whether the kernel loads four neighbouring elements of the rotary tables at once.
inline bool rotary_has_vectors(const AppendParams& params) {
  const int bytes = 4 * (params.rotary_is_fp32 ? sizeof(float) : sizeof(uint16_t));
  return reinterpret_cast<uintptr_t>(params.rotary_cos) % bytes == 0 &&
         reinterpret_cast<uintptr_t>(params.rotary_sin) % bytes == 0 &&
         params.rotary_stride % 4 == 0;
}

// Returns whether every item of a tensor is 16-byte vectors.
inline bool append_has_vectors(const AppendTensor& tensor, int half, bool interleaved) {
  const auto aligned = [](const void* data, const Strides& stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride.batch % append::kVec == 0 &&
           stride.seq % append::kVec == 0 && stride.head % append::kVec == 0;
  };
  return tensor.head_dim % append::kVec == 0 &&
         (interleaved ? 2 * half : half) % append::kVec == 0 &&
         aligned(tensor.from, tensor.from_stride) && aligned(tensor.to, tensor.to_stride);
}

inline append::Tensor make_append_tensor(const AppendParams& params, AppendTensor tensor,
                                         append::TensorIndex which) {
  const bool rotated = which != append::kV && params.rotary_cos != nullptr;
  const int half = rotated ? params.rotary_dim / 2 : 0;
  const bool interleaved = params.rotary_interleaved;
  const int64_t tokens = int64_t{tensor.cu_seqlens == nullptr ? params.batch : 1} * tensor.seqlen;
  if (tensor.cu_seqlens != nullptr) {
    tensor.from_stride.batch = 0;
    if (which == append::kQ) tensor.to_stride.batch = 0;
  }
  const bool vectors =
      append_has_vectors(tensor, half, interleaved) && (!rotated || rotary_has_vectors(params));
  const int items = vectors ? append::num_items<true>(tensor.head_dim, half, interleaved)
                            : append::num_items<false>(tensor.head_dim, half, interleaved);
  const int heads = std::max(tensor.num_heads, 1);
  const bool some = tokens > 0 && tensor.num_heads > 0;
  expect(!some || (items >= 1 && tensor.head_dim <= kAppendMaxHeadDim), "launch", "head_dim",
         "1 to 256", tensor.head_dim);
  expect(tokens < INT_MAX / 2, "launch", "the number of new tokens", "below 2^30", tokens);
  // A thread moves as many heads as it loads together, or one where there are few tokens.
  const bool halves = vectors && half > 0 && !interleaved;
  const int in_flight = halves ? append::kHeadsInFlight<true> : append::kHeadsInFlight<false>;
  const int groups = append::kThreads / std::max(items, 1);
  int head_groups = std::min((heads + in_flight - 1) / in_flight, groups);
  int64_t tokens_per_cta = groups / head_groups;
  if (tokens < kAppendFewCtas * tokens_per_cta) {
    head_groups = std::min(heads, groups);
    tokens_per_cta = std::clamp<int64_t>((tokens + kAppendFewCtas - 1) / kAppendFewCtas, 1,
                                         groups / head_groups);
  }
  return {.from = static_cast<const uint16_t*>(tensor.from),
          .to = static_cast<uint16_t*>(tensor.to),
          .from_batch = tensor.from_stride.batch,
          .from_seq = tensor.from_stride.seq,
          .from_head = tensor.from_stride.head,
          .to_batch = tensor.to_stride.batch,
          .to_seq = tensor.to_stride.seq,
          .to_head = tensor.to_stride.head,
          .descale = tensor.descale,
          .descale_batch = tensor.descale_batch,
          .descale_head = tensor.descale_head,
          .cu_seqlens = tensor.cu_seqlens,
          .seqlen = cutlass::FastDivmod(std::max(tensor.seqlen, 1)),
          .items = cutlass::FastDivmod(std::max(items, 1)),
          .head_groups = cutlass::FastDivmod(head_groups),
          .num_heads = tensor.num_heads,
          .num_tokens = static_cast<int>(tokens),
          .tokens_per_cta = static_cast<int>(tokens_per_cta),
          .num_ctas = some ? static_cast<int>((tokens + tokens_per_cta - 1) / tokens_per_cta) : 0,
          .half = half,
          .vectors = vectors};
}

inline append::Arguments make_append_arguments(const AppendParams& params) {
  const bool paged = params.page_table != nullptr;
  append::Arguments args{};
  args.tensors[append::kK] = make_append_tensor(params, params.k, append::kK);
  args.tensors[append::kV] = make_append_tensor(params, params.v, append::kV);
  args.tensors[append::kQ] = make_append_tensor(params, params.q, append::kQ);
  args.keys = {
      .page_table = params.page_table,
      .page_table_stride = params.page_table_stride,
      .page_size = cutlass::FastDivmod(std::max(paged ? params.page_size : params.capacity, 1)),
      .num_pages = paged ? params.num_pages : params.num_caches,
      .num_caches = params.num_caches,
      .capacity = params.capacity,
      .cache_seqlens = params.cache_seqlens,
      .cache_batch_idx = params.cache_batch_idx,
      .seqlen_k = params.seqlen_k};
  args.batch = params.batch;
  args.rotary = {.cos = params.rotary_cos,
                 .sin = params.rotary_sin,
                 .stride = params.rotary_stride,
                 .num_positions = params.num_positions,
                 .is_fp32 = params.rotary_is_fp32,
                 .interleaved = params.rotary_interleaved};
  args.rotary_seqlens = params.rotary_seqlens;
  args.one_q_position = params.one_q_position;
  return args;
}

inline int64_t num_append_ctas(const append::Arguments& args) {
  int64_t sum = 0;
  for (const append::Tensor& tensor : args.tensors) sum += tensor.num_ctas;
  return sum;
}

}  // namespace flashattn3
