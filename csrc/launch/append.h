// The append of new keys and values to a cache. torch_binding (or a test) fills the structs. No
// torch here. All pointers are device pointers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch/params.h"
#include "ptx/element.h"

namespace flashattn3 {

// New keys, new values or queries, and where they go. Strides in elements, any; the last one is 1.
// Fastest where head_dim, the rotated columns and all strides are multiples of 8 (those of the
// halves, too, unless pairs are interleaved) and both addresses multiples of 16 bytes.
struct AppendTensor {
  const void* from;           // (batch, seqlen, num_heads, head_dim); with cu_seqlens (total, ...)
  void* to;                   // K or V of the cache, as CacheParams; queries: shape of from
  Strides from_stride;        // batch is not read with cu_seqlens
  Strides to_stride;          // of a cache: batch between pages, or sequences of a dense cache. Of
                              // queries: as from_stride
  int seqlen;                 // tokens of a sequence; with cu_seqlens of all
  int num_heads, head_dim;    // num_heads 0: there is no such tensor
  const int32_t* cu_seqlens;  // (batch + 1), or null. Values are clamped to the tensor
  const float* descale;       // (batch, num_heads), what is written is divided by it; or null
  int64_t descale_batch, descale_head;  // strides of descale
};

struct AppendParams {
  ElementType dtype;     // of all tensors, fp16 or bf16
  AppendTensor k, v, q;  // q has no descale
  int batch;

  // These have the meaning of DecodeParams; lengths are those before the append.
  const int32_t* page_table;
  const int32_t* cache_seqlens;
  const int32_t* cache_batch_idx;
  int64_t page_table_stride;
  int page_size;   // with page_table
  int num_pages;   // with page_table
  int num_caches;  // of the page table or of the dense cache
  int capacity;    // tokens of one cache
  int seqlen_k;    // cached tokens where cache_seqlens is null

  // (positions, rotary_dim / 2), or null: nothing is rotated. Columns from rotary_dim on stay as
  // they are. A position that the tables lack gives NaN.
  const void *rotary_cos, *rotary_sin;
  int64_t rotary_stride;  // between positions, of both
  int num_positions;
  int rotary_dim;
  bool rotary_is_fp32;            // else dtype
  bool rotary_interleaved;        // pairs are columns (2i, 2i + 1); else (i, i + rotary_dim / 2)
  bool one_q_position;            // all queries of a sequence have the first one's position
  const int32_t* rotary_seqlens;  // (batch), position of the first new token; null: cached tokens
};

// Enqueues the kernel asynchronously; nothing is launched without tokens. It may start before the
// kernel before it has ended, and the next one before it has ended itself (PDL), also in a capture.
// Throws std::runtime_error for a failed launch.
void launch_append(const AppendParams& params, cudaStream_t stream);

}  // namespace flashattn3
