// Computes the arguments of widen_cache, and the parameters of the kernel that follows it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "forward/widen_cache.cuh"
#include "launch/forward_params.h"
#include "launch/launch.cuh"
#include "launch/widen_cache.h"

namespace flashattn3 {

// KV heads that are widened together, and their memory.
struct WidenedHeads {
  int first, count;
  void *k, *v;

  static int64_t bytes(const DecodeParams& params, int count, int head_dim) {
    return int64_t{params.batch} * params.capacity * count * head_dim * 2;
  }
  static WidenedHeads of(const DecodeParams& params, int first, int count, void* memory) {
    return {first, count, memory,
            static_cast<uint8_t*>(memory) + bytes(params, count, params.head_dim)};
  }
};

inline forward::WidenTensor make_widen_tensor(const CacheParams& cache, const float* descale,
                                              const DescaleStrides& descale_stride,
                                              const KeyDescaleParams& key_descale,
                                              const WidenedHeads& heads, void* to, int head_dim) {
  const int vecs = head_dim / forward::kWidenVec;
  forward::WidenTensor tensor{
      .from = static_cast<const uint8_t*>(cache.data) + heads.first * cache.stride.head,
      .page = cache.stride.batch,
      .slot = cache.stride.seq,
      .head = cache.stride.head,
      .to = static_cast<uint16_t*>(to),
      .vecs_of_head = cutlass::FastDivmod(vecs),
      .vecs_of_token = cutlass::FastDivmod(vecs * heads.count)};
  if (descale != nullptr) {
    tensor.descale = descale + heads.first * descale_stride.head;
    tensor.descale_batch = descale_stride.batch;
    tensor.descale_head = descale_stride.head;
  } else if (key_descale.data != nullptr) {
    const Strides& stride = key_descale.stride;
    tensor.descale = key_descale.data + heads.first * stride.head;
    tensor.descale_page = stride.batch;
    tensor.descale_slot = stride.seq;
    tensor.descale_head = stride.head;
  }
  return tensor;
}

inline forward::WidenArguments make_widen_arguments(const ByteDecodeParams& params,
                                                    const WidenedHeads& heads) {
  constexpr uint32_t kTwoNaNs = 0x7fff7fffu;  // in fp16 and bf16
  const ForwardParams forward = forward_params_of(params);
  forward::WidenArguments args{
      .k = make_widen_tensor(params.k, params.k_descale, params.k_descale_stride,
                             params.k_key_descale, heads, heads.k, params.head_dim),
      .v = make_widen_tensor(params.v, params.v_descale, params.v_descale_stride,
                             params.v_key_descale, heads, heads.v, params.head_dim_v),
      .keys = cached_keys_of(params),
      .seqlens_q = seqlens_q_of(forward),
      .window = window_of(forward),
      .batch = params.batch,
      .min_queries = params.min_queries,
      .is_int8 = params.is_int8};
  // A key whose page does not exist makes the rows that see it NaN; its V is not read then.
  args.k.lost = kTwoNaNs;
  const int vecs = std::max(args.k.vecs_of_token.divisor, args.v.vecs_of_token.divisor);
  args.unit_keys = std::clamp(forward::kWidenThreads * forward::kWidenInFlight / vecs, 1,
                              forward::kWidenThreads);
  return args;
}

inline int num_widen_ctas(const DecodeParams& params, const forward::WidenArguments& args) {
  const int64_t units = (int64_t{params.capacity} + args.unit_keys - 1) / args.unit_keys;
  const int64_t most = int64_t{params.num_sms} * forward::kWidenCtasPerSm;
  return static_cast<int>(std::min(units * params.batch, most));
}

// The call on the widened heads.
inline DecodeParams params_of_widened(const DecodeParams& params, const WidenedHeads& heads) {
  const int group = params.num_heads_q / params.num_heads_kv, first = heads.first * group;
  DecodeParams of = params;
  of.num_heads_kv = heads.count;
  of.num_heads_q = heads.count * group;
  of.q = static_cast<const uint16_t*>(params.q) + first * params.q_stride.head;
  of.out = static_cast<uint16_t*>(params.out) + first * params.out_stride.head;
  if (params.lse != nullptr) of.lse = params.lse + first * params.lse_stride.head;
  if (params.sinks != nullptr) of.sinks = params.sinks + first;
  const auto dense = [&](const void* data, int64_t head_dim) -> CacheParams {
    const int64_t token = heads.count * head_dim;
    return {data, {.batch = params.capacity * token, .seq = token, .head = head_dim}};
  };
  of.k = dense(heads.k, params.head_dim);
  of.v = dense(heads.v, params.head_dim_v);
  of.page_table = nullptr;
  of.page_table_stride = 0;
  of.page_size = of.num_pages = 0;
  of.capacity = cached_keys_of(params).capacity;  // 0 where a cache without pages has no keys
  of.cache_batch_idx = nullptr;
  of.num_caches = params.batch;
  of.k_descale = of.v_descale = nullptr;
  return of;
}

}  // namespace flashattn3
