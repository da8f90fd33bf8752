// Shared by the operators that append to a cache: the tensors of an append, and its launch.
// append_op.cpp defines it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "call_tensors.h"
#include "launch/append.h"
#include "torch_binding/boxed.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// Arguments of an append, in the order of the schema. AppendTensors in flashattn3/call/cached.py
// says what the tensors are. seqlen: cached tokens where cache_seqlens is null; -1: the
// capacity.
struct AppendCall {
#define FLASHATTN3_REQUIRED(name) Tensor name;
#define FLASHATTN3_OPTIONAL(name) std::optional<Tensor> name;
  FLASHATTN3_APPEND_TENSORS(FLASHATTN3_REQUIRED, FLASHATTN3_OPTIONAL)
#undef FLASHATTN3_REQUIRED
#undef FLASHATTN3_OPTIONAL
  int64_t seqlen = -1;
  bool rotary_interleaved = true, one_q_position = false;

  static AppendCall take(Arguments& arguments) {
#define FLASHATTN3_REQUIRED(name) .name = arguments.take<Tensor>(),
#define FLASHATTN3_OPTIONAL(name) .name = arguments.take<std::optional<Tensor>>(),
    AppendCall call{FLASHATTN3_APPEND_TENSORS(FLASHATTN3_REQUIRED, FLASHATTN3_OPTIONAL)};
#undef FLASHATTN3_REQUIRED
#undef FLASHATTN3_OPTIONAL
    call.seqlen = arguments.take<int64_t>();
    call.rotary_interleaved = arguments.take<bool>();
    call.one_q_position = arguments.take<bool>();
    return call;
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
