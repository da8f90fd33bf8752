#include "torch_binding/planned_passes.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

#include "launch/registry.h"

namespace flashattn3 {
namespace {

bool are_edges(const std::optional<Tensor>& edges, int64_t device, int batch) {
  return edges && edges->dim() == 1 && edges->size(0) == batch + 1 && edges->is_contiguous() &&
         dtype_of(*edges) == aoti_torch_dtype_int32() && edges->get_device_index() == device;
}

// All tensors have four axes.
bool are_planned_for(const PlannedPasses& planned, const GivenTensors& tensors) {
  const AttentionProblem& problem = planned.forward.problem;
  const bool edges = tensors.cu_seqlens_k.has_value();
  if (tensors.varlen() != problem.varlen || edges != problem.varlen) return false;
  const Axes& axes = planned.axes();
  const bool fp16 = forward_kernel(planned.forward.config).info.dtype == ElementType::kFloat16;
  const int32_t dtype = fp16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
  const int64_t batch = tensors.q.size(0);
  const auto fits = [&](const Tensor& x, int64_t heads, int64_t tokens, int64_t columns) {
    return x.size(axes.rows) == tokens && x.size(axes.heads) == heads && x.size(0) == batch &&
           x.size(3) == columns && dtype_of(x) == dtype && x.get_device_index() == planned.device;
  };
  const int64_t seqlen_q = problem.seqlen_q, seqlen_k = problem.seqlen_k;
  if (!fits(tensors.q, problem.num_heads_q, seqlen_q, problem.head_dim) ||
      !fits(tensors.k, problem.num_heads_kv, seqlen_k, problem.head_dim) ||
      !fits(tensors.v, problem.num_heads_kv, seqlen_k, problem.head_dim_v)) {
    return false;
  }
  if (!problem.varlen) return batch == problem.batch;
  return batch * seqlen_q == problem.total_q && batch * seqlen_k == problem.total_k &&
         are_edges(tensors.cu_seqlens_q, planned.device, problem.batch) &&
         are_edges(tensors.cu_seqlens_k, planned.device, problem.batch);
}

}  // namespace

const PlannedPasses* find_planned(const char* function, const Tensor& launches,
                                  const GivenTensors& tensors) {
  const auto all = planned_passes(function, launches);
  if (tensors.q.dim() != 4 || tensors.k.dim() != 4 || tensors.v.dim() != 4) return nullptr;
  for (const PlannedPasses& planned : all) {
    if (are_planned_for(planned, tensors)) return &planned;
  }
  return nullptr;
}

}  // namespace flashattn3
