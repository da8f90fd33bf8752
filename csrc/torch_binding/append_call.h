// Shared by the operators that append to a cache: the tensors of an append, and its launch.
// append_op.cpp defines it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "launch/append.h"
#include "torch_binding/boxed.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// Arguments of an append, in the order of the schema. The tensors are those of AppendTensors in
// flashattn3/call/cached.py. seqlen: cached tokens where cache_seqlens is null; -1: the
// capacity.
struct AppendCall {
  Tensor k, v, k_cache, v_cache;
  std::optional<Tensor> q, q_out, cache_seqlens, page_table, cache_batch_idx, cu_seqlens_q,
      cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens, k_descale, v_descale;
  int64_t seqlen;
  bool rotary_interleaved, one_q_position;

  static AppendCall take(Arguments& arguments) {
    using Optional = std::optional<Tensor>;
    return {.k = arguments.take<Tensor>(),
            .v = arguments.take<Tensor>(),
            .k_cache = arguments.take<Tensor>(),
            .v_cache = arguments.take<Tensor>(),
            .q = arguments.take<Optional>(),
            .q_out = arguments.take<Optional>(),
            .cache_seqlens = arguments.take<Optional>(),
            .page_table = arguments.take<Optional>(),
            .cache_batch_idx = arguments.take<Optional>(),
            .cu_seqlens_q = arguments.take<Optional>(),
            .cu_seqlens_k_new = arguments.take<Optional>(),
            .rotary_cos = arguments.take<Optional>(),
            .rotary_sin = arguments.take<Optional>(),
            .rotary_seqlens = arguments.take<Optional>(),
            .k_descale = arguments.take<Optional>(),
            .v_descale = arguments.take<Optional>(),
            .seqlen = arguments.take<int64_t>(),
            .rotary_interleaved = arguments.take<bool>(),
            .one_q_position = arguments.take<bool>()};
  }
};

// An append whose tensors fit each other. They must outlive it.
struct CheckedAppend {
  AppendParams params;
  int device;

  // Throws for tensors that do not fit.
  static CheckedAppend of(const AppendCall& call);
  // Launches on torch's current stream.
  void launch() const;
};

}  // namespace flashattn3
