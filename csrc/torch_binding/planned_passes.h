// Finds the passes that were planned for a call like an earlier one, as each layer of a model is
// like the layer before: it reads the tensors in less time than Python takes to make a key of them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "torch_binding/boxed.h"
#include "torch_binding/prepared.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// The tensors of a call as its caller has them: q, k and v have four axes, also with cu_seqlens.
struct GivenTensors {
  Tensor q, k, v;
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k;

  bool varlen() const { return cu_seqlens_q.has_value(); }
};

// Returns those of the PlannedPasses in `launches` that are for calls with such tensors; null if
// none are. It compares everything that a plan depends on but strides and addresses. Throws for a
// tensor without PlannedPasses.
const PlannedPasses* find_planned(const char* function, const Tensor& launches,
                                  const GivenTensors& tensors);

}  // namespace flashattn3
