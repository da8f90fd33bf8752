// Shared by the operators of cached calls: the tensors of a call, and its launch. decode_op.cpp
// defines them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "call_tensors.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// Whether the elements of a tensor have 8 bits of a cache: e4m3 or int8.
inline bool has_bytes(const Tensor& tensor) {
  const int32_t dtype = dtype_of(tensor);
  return dtype == aoti_torch_dtype_float8_e4m3fn() || dtype == aoti_torch_dtype_int8();
}

// Whether a descale is that of all heads, as in flashattn3/call/cache_descales.py.
inline bool is_one_number(const Tensor& descale) {
  return descale.dim() <= 1 && descale.numel() == 1;
}

// Arguments of a cached call, in the order of the schema of decode. DecodeTensors in
// flashattn3/call/cached.py says what the tensors are. seqlen: cached tokens where cache_seqlens is
// null; -1: the capacity. max_seqlen_q: with cu_seqlens_q; -1: all rows. options_hash: what the
// metadata holds.
struct DecodeCall {
  std::optional<Tensor> lse;
  int64_t seqlen = -1, seqlen_new = 0, max_seqlen_q = -1, options_hash = 0;
#define FLASHATTN3_REQUIRED(name) Tensor name;
#define FLASHATTN3_OPTIONAL(name) std::optional<Tensor> name;
  FLASHATTN3_DECODE_TENSORS(FLASHATTN3_REQUIRED, FLASHATTN3_OPTIONAL)
#undef FLASHATTN3_REQUIRED
#undef FLASHATTN3_OPTIONAL
  // Keys that all sequences have in front of their own, of decode_after_prefix alone: int32
  // (1, pages), and int32 (1) in place of prefix_len.
  std::optional<Tensor> prefix_page_table, prefix_seqlen;
  int64_t prefix_len = 0;

  static DecodeCall take(Arguments& arguments) {
#define FLASHATTN3_REQUIRED(name) .name = arguments.take<Tensor>(),
#define FLASHATTN3_OPTIONAL(name) .name = arguments.take<std::optional<Tensor>>(),
    return {.lse = arguments.take<std::optional<Tensor>>(),
            .seqlen = arguments.take<int64_t>(),
            .seqlen_new = arguments.take<int64_t>(),
            .max_seqlen_q = arguments.take<int64_t>(),
            .options_hash = arguments.take<int64_t>(),
            FLASHATTN3_DECODE_TENSORS(FLASHATTN3_REQUIRED, FLASHATTN3_OPTIONAL)};
#undef FLASHATTN3_REQUIRED
#undef FLASHATTN3_OPTIONAL
  }
  bool varlen() const { return cu_seqlens_q.has_value(); }
  int64_t batch() const { return varlen() ? cu_seqlens_q->size(0) - 1 : q.size(0); }
  // Tokens of q, with varlen of all sequences.
  int64_t total_q() const { return q.size(varlen() ? 0 : 1); }
  // Queries of a sequence, with varlen of the longest.
  int64_t seqlen_q() const {
    const int64_t total = total_q();
    return varlen() && max_seqlen_q >= 0 ? std::min(max_seqlen_q, total) : total;
  }
  int64_t device() const { return q.get_device_index(); }
  int64_t dtype() const { return dtype_of(q); }
  int64_t num_heads_q() const { return q.size(varlen() ? 1 : 2); }
  int64_t num_heads_kv() const { return k_cache.size(2); }
  int64_t head_dim() const { return q.size(q.dim() - 1); }
  int64_t head_dim_v() const { return v_cache.size(3); }
  int64_t page_size() const { return page_table ? k_cache.size(1) : 0; }
  int64_t byte_cache() const { return has_bytes(k_cache); }
};

// Returns whether all rows of a tensor begin at multiples of 16 bytes and are dense.
bool has_aligned_rows(const Tensor& tensor, int element_bytes = 2);

// Allocates (batch, seqlen_q, num_heads_q, columns), or with varlen (total_q, ...), in q's dtype.
// The number of axes of q must be right.
Tensor new_rows(const DecodeCall& call, int64_t columns);

// Throws for a call that does not fit its prepared launch. out: none: a new tensor.
void check_decode(const CachedLaunch& launch, const DecodeCall& call,
                  const std::optional<Tensor>& out);
// Launches a call that check_decode accepts on torch's current stream. Returns out.
Tensor run_checked_decode(const CachedLaunch& launch, const DecodeCall& call,
                          const std::optional<Tensor>& out);
// Both.
Tensor run_decode(const CachedLaunch& launch, const DecodeCall& call,
                  const std::optional<Tensor>& out);

}  // namespace flashattn3
