#include "torch_binding/packed_forward.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>

#include "torch_binding/decode_call.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

// (batch, tokens, heads, columns) of a dense tensor with these axes.
Tensor in_bshd(const Tensor& x, bool bhsd) {
  if (!bhsd) return x;
  const int64_t sizes[] = {x.size(0), x.size(2), x.size(1), x.size(3)};
  const int64_t strides[] = {x.stride(0), x.stride(2), x.stride(1), 1};
  return view_of(x, sizes, strides);
}

// (batch, rows, heads, columns) of the rows of all sequences: each sequence has the same cache.
Tensor in_each_cache(const Tensor& rows, int64_t batch) {
  const int64_t sizes[] = {batch, rows.size(0), rows.size(1), rows.size(2)};
  const int64_t strides[] = {0, rows.stride(0), rows.stride(1), 1};
  return view_of(rows, sizes, strides);
}

// `count` of the cu_seqlens, from the one with this index on.
Tensor edges_from(const Tensor& cu_seqlens, int64_t first, int64_t count) {
  const int64_t stride = 1;
  return view_of(cu_seqlens, {&count, 1}, {&stride, 1}, first);
}

// A sequence hides the keys before its own, as those of a left-padded cache.
DecodeCall varlen_call(const AttentionProblem& problem, const CallTensors& tensors) {
  const int64_t batch = problem.batch;
  return {.max_seqlen_q = problem.seqlen_q,
          .q = tensors.q,
          .k_cache = in_each_cache(tensors.k, batch),
          .v_cache = in_each_cache(tensors.v, batch),
          .cache_seqlens = edges_from(*tensors.cu_seqlens_k, 1, batch),
          .cache_leftpad = edges_from(*tensors.cu_seqlens_k, 0, batch),
          .cu_seqlens_q = tensors.cu_seqlens_q,
          .sinks = tensors.sinks};
}

DecodeCall dense_call(const CallTensors& tensors) {
  return {.q = in_bshd(tensors.q, tensors.bhsd),
          .k_cache = in_bshd(tensors.k, tensors.bhsd),
          .v_cache = in_bshd(tensors.v, tensors.bhsd),
          .sinks = tensors.sinks};
}

}  // namespace

ForwardResults run_kept_forward(const char* function, const KeptPasses& kept, ForwardCall forward) {
  if (kept.mask) forward.mask = kept.mask->of_queries;
  if (!kept.packed) return run_forward(function, kept.forward, forward);
  const AttentionProblem& problem = kept.forward.problem;
  const CallTensors& tensors = forward.tensors;
  DecodeCall call = problem.varlen ? varlen_call(problem, tensors) : dense_call(tensors);
  call.lse = new_lse(problem, forward.returns_lse, device_of(function, tensors));
  const Tensor out = run_decode(*kept.packed, call, {});
  return {out, call.lse};
}

Gradients run_kept_backward(const char* function, const KeptPasses& kept, BackwardCall call) {
  if (kept.mask) call.mask = kept.mask->of_keys;
  return run_backward(function, kept.backward, call);
}

}  // namespace flashattn3
