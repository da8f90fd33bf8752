// Fills the rows that the decode kernel must not decide: rows of no sequence become out 0 and lse
// -inf, and the rows of a sequence whose scheduler metadata was made for another call become NaN,
// never plausible numbers. It runs after the decode kernel.
#pragma once

#include <cstdint>

#include "attention/seqlen.cuh"
#include "decode/fill_arguments.h"
#include "ptx/pdl.cuh"

namespace flashattn3::decode {

// Layout of the scheduler metadata, as in flashattn3/call/scheduler_metadata.py: kMagic, the hash
// of the options, then for each sequence cached tokens, new tokens, queries, left padding.
constexpr int kMetadataMagic = 0x6b763031;
constexpr int kMetadataHeader = 2, kMetadataPerSequence = 4;

constexpr int kFillThreads = 256;

// Writes all heads of the tokens begin to end - 1 of q; each warp takes whole tokens.
__device__ __forceinline__ void fill(const FillArguments& args, int batch_idx, int begin, int end,
                                     uint16_t value, float lse) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int64_t token = begin + warp; token < end; token += kFillThreads / 32) {
    for (int head = 0; head < args.num_heads_q; ++head) {
      uint16_t* out =
          args.out + batch_idx * args.out_batch + token * args.out_seq + head * args.out_head;
      for (int column = lane; column < args.head_dim_v; column += 32) out[column] = value;
      if (lane == 0 && args.lse != nullptr) {
        args.lse[batch_idx * args.lse_batch + token * args.lse_seq + head * args.lse_head] = lse;
      }
    }
  }
}

// Returns whether the metadata fits the lengths of the sequence and the options of the call. A
// sequence without new tokens fits any number of them, as in flashattn3/call/scheduler_metadata.py.
__device__ __forceinline__ bool metadata_fits(const FillArguments& args, int batch_idx,
                                              int num_queries) {
  int num_new = args.seqlen_new;
  if (args.cu_seqlens_k_new != nullptr) {
    num_new = args.cu_seqlens_k_new[batch_idx + 1] - args.cu_seqlens_k_new[batch_idx];
  }
  const int cached = args.cache_seqlens == nullptr ? args.seqlen_k : args.cache_seqlens[batch_idx];
  const int leftpad = args.cache_leftpad == nullptr ? 0 : args.cache_leftpad[batch_idx];
  const int32_t* own = args.metadata + kMetadataHeader + batch_idx * kMetadataPerSequence;
  return args.metadata[0] == kMetadataMagic && args.metadata[1] == args.options_hash &&
         own[0] == cached && (num_new == 0 || own[1] == num_new) && own[2] == num_queries &&
         own[3] == leftpad;
}

// CTA b has sequence b and, with cu_seqlens_q, the tokens between it and the next one; the last CTA
// has the tokens before the first sequence and after the last.
__global__ void __launch_bounds__(kFillThreads) fill_rows(const FillArguments args) {
  launch_dependents();
  griddepcontrol_wait();
  constexpr uint16_t kNaN = 0x7fff;  // in fp16 and bf16
  const int batch_idx = blockIdx.x;
  const int32_t* cu_seqlens = args.seqlens_q.cu_seqlens;
  const int total = args.seqlens_q.total;
  if (batch_idx == args.batch) {
    fill(args, 0, 0, min(max(cu_seqlens[0], 0), total), 0, -INFINITY);
    fill(args, 0, min(max(cu_seqlens[args.batch], 0), total), total, 0, -INFINITY);
    return;
  }
  const Sequence queries = find_sequence(args.seqlens_q, batch_idx);
  const int end = queries.offset + queries.length;
  if (args.metadata != nullptr && !metadata_fits(args, batch_idx, queries.length)) {
    fill(args, batch_idx, queries.offset, end, kNaN, __int_as_float(0x7fffffff));
  }
  if (cu_seqlens != nullptr) {
    const int next = min(max(cu_seqlens[batch_idx + 1], end), total);
    fill(args, 0, end, next, 0, -INFINITY);
  }
}

}  // namespace flashattn3::decode
