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

// 16-byte vectors that a CTA moves where there are many: four for each thread.
constexpr int kAppendVecsPerCta = 4 * append::kThreads;
// CTAs of a tensor below which they take fewer tokens, down to one.
constexpr int kAppendFewCtas = 128;

// Whether every item of a tensor is 16-byte vectors.
inline bool append_has_vectors(const AppendTensor& tensor, int half, bool interleaved) {
  const auto aligned = [](const void* data, const Strides& stride) {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride.batch % append::kVec == 0 &&
           stride.seq % append::kVec == 0 && stride.head % append::kVec == 0;
  };
  return tensor.head_dim % append::kVec == 0 &&
         (interleaved ? 2 * half : half) % append::kVec == 0 &&
         aligned(tensor.from, tensor.from_stride) && aligned(tensor.to, tensor.to_stride);
}

// half: half of the rotated columns. tokens: of all sequences. of_q: `to` has the shape of `from`.
inline append::Tensor make_append_tensor(AppendTensor tensor, int64_t tokens, int half,
                                         bool interleaved, bool of_q) {
  if (tensor.cu_seqlens != nullptr) {
    tensor.from_stride.batch = 0;
    if (of_q) tensor.to_stride.batch = 0;
  }
  const bool vectors = append_has_vectors(tensor, half, interleaved);
  const int items = vectors ? append::num_items<true>(tensor.head_dim, half, interleaved)
                            : append::num_items<false>(tensor.head_dim, half, interleaved);
  const int64_t items_of_token = int64_t{items} * tensor.num_heads;
  const bool some = tokens > 0 && items_of_token > 0;
  expect(items_of_token < INT_MAX / 2 && tokens < INT_MAX / 2, "launch", "the size of an append",
         "below 2^30 tokens of 2^30 elements", "more");
  const int per_cta =
      vectors && half > 0 && !interleaved ? kAppendVecsPerCta / 2 : kAppendVecsPerCta;
  const int64_t fitting = std::clamp<int64_t>(per_cta / std::max<int64_t>(items_of_token, 1), 1,
                                              append::kMaxTokensPerCta);
  const int64_t shared = std::max<int64_t>((tokens + kAppendFewCtas - 1) / kAppendFewCtas, 1);
  const int64_t tokens_per_cta = std::min(fitting, shared);
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
          .heads = cutlass::FastDivmod(std::max(tensor.num_heads, 1)),
          .items = cutlass::FastDivmod(std::max(items, 1)),
          .num_tokens = static_cast<int>(tokens),
          .tokens_per_cta = static_cast<int>(tokens_per_cta),
          .num_ctas = some ? static_cast<int>((tokens + tokens_per_cta - 1) / tokens_per_cta) : 0,
          .half = half,
          .vectors = vectors};
}

inline append::Arguments make_append_arguments(const AppendParams& params) {
  const bool paged = params.page_table != nullptr;
  const int half = params.rotary_cos == nullptr ? 0 : params.rotary_dim / 2;
  const auto tensor = [&](const AppendTensor& of, int rotated, bool of_q) {
    const int64_t sequences = of.cu_seqlens == nullptr ? params.batch : 1;
    return make_append_tensor(of, sequences * of.seqlen, rotated, params.rotary_interleaved, of_q);
  };
  const int element = params.rotary_is_fp32 ? sizeof(float) : sizeof(uint16_t);
  const auto fours = [&](const void* table) {
    return reinterpret_cast<uintptr_t>(table) % (4 * element) == 0;
  };
  append::Arguments args{};
  args.tensors[append::kK] = tensor(params.k, half, false);
  args.tensors[append::kV] = tensor(params.v, 0, false);
  args.tensors[append::kQ] = tensor(params.q, half, true);
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
                 .vectors = fours(params.rotary_cos) && fours(params.rotary_sin) &&
                            params.rotary_stride % 4 == 0,
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
