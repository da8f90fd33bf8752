// Keeps the launches of calls, each under the number of its options and what else of a call a plan
// depends on, and finds them for further calls like it, as each layer of a model is like the layer
// before: it reads the tensors in less time than Python takes to make a key of them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "call_tensors.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// The tensors of a call as its caller has them, FLASHATTN3_FOUND_SCHEMA of the operators: q, k and
// v have four axes, also with cu_seqlens.
struct GivenTensors {
#define FLASHATTN3_ROWS(name) Tensor name;
#define FLASHATTN3_EDGES(name) std::optional<Tensor> name;
  FLASHATTN3_FOUND_TENSORS(FLASHATTN3_ROWS, FLASHATTN3_EDGES)
#undef FLASHATTN3_ROWS
#undef FLASHATTN3_EDGES

  static GivenTensors take(Arguments& arguments);
  bool varlen() const { return cu_seqlens_q.has_value(); }
};

// Both passes of a call.
struct KeptPasses {
  AttentionLaunch forward, backward;
  std::optional<CachedLaunch> packed;  // of the decode kernel that runs the forward, if one does
  bool bhsd;  // q, k and v have their heads before their tokens, out does not

  const Axes& axes() const { return bhsd ? kBhsd : kBshd; }  // of q, k and v with a batch
};

// options: Python's number of the options and axes of a call (flashattn3/run/launches.py).
// Returns the passes that were kept for calls with these options and such tensors. It compares
// everything that a plan depends on but strides and addresses.
std::optional<KeptPasses> find_passes(int64_t options, const GivenTensors& tensors);

// Any thread may find and keep passes.
void keep_passes(int64_t options, const GivenTensors& tensors, const KeptPasses& passes);

}  // namespace flashattn3
