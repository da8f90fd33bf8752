// flashattn3_hopper::backward and backward_into: fill BackwardParams from a prepared launch and the
// tensors of a call, and launch on torch's current stream. The notes in forward_op.cpp apply.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "launch/errors.h"
#include "launch/params.h"
#include "launch/registry.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

BackwardCall take_call(Arguments& arguments) {
  return {.dout = arguments.take<Tensor>(),
          .dlse = arguments.take<std::optional<Tensor>>(),
          .out = arguments.take<Tensor>(),
          .lse = arguments.take<Tensor>(),
          .tensors = CallTensors::take(arguments)};
}

void check_call(const char* function, const AttentionProblem& problem, const BackwardCall& call) {
  check_tensors(function, problem, call.tensors, false);
  check_results(function, problem, call.out, call.lse);
  expect_rows(function, "dout", call.dout,
              rows_shape(problem, axes_of(problem), problem.total_q, problem.num_heads_q,
                         problem.head_dim_v));
  if (call.dlse) expect_shape(function, "dlse", *call.dlse, lse_shape(problem));
}

void check_lists(const char* function, const AttentionProblem& problem, const BackwardCall& call,
                 int device) {
  const auto& entries = call.mask.entries;
  check_mask(function, problem, call.mask, problem.seqlen_k, problem.seqlen_q, device);
  const bool wanted = entries && problem.deterministic;
  expect(call.turns.has_value() == wanted, function, "turns",
         wanted ? "a tensor of a deterministic call with a mask" : "None without those",
         call.turns ? "a tensor" : "None");
  if (!wanted) return;
  expect_shape(function, "turns", *call.turns,
               {4, {entries->size(0), entries->size(1), entries->size(2), entries->size(3)}});
  expect(dtype_of(*call.turns) == dtype_of(*entries), function, "turns", "int32", "another dtype");
  expect(call.turns->is_contiguous(), function, "turns", "contiguous", "another layout");
  expect_on_gpu(function, "turns", *call.turns, device, "on the GPU of q");
}

void check_gradient(const char* function, const char* name, const Tensor& gradient,
                    const Shape& rows) {
  expect_rows(function, name, gradient, rows);
  const bool dense = gradient.is_contiguous() && gradient.size(rows.rank - 1) % 8 == 0;
  expect(dense, function, name, "contiguous, with a multiple of 8 columns", "another layout");
}

void check_gradients(const char* function, const AttentionProblem& problem,
                     const Gradients& gradients) {
  const Axes& axes = axes_of(problem);
  const int64_t heads_kv = problem.num_heads_kv;
  check_gradient(function, "dq", gradients.dq,
                 rows_shape(problem, axes, problem.total_q, problem.num_heads_q, problem.head_dim));
  check_gradient(function, "dk", gradients.dk,
                 rows_shape(problem, axes, problem.total_k, heads_kv, problem.head_dim));
  check_gradient(function, "dv", gradients.dv,
                 rows_shape(problem, axes, problem.total_k, heads_kv, problem.head_dim_v));
}

// Strides of (batch, heads, rows), or with varlen (heads, rows).
Strides lse_strides(const Tensor& tensor, bool varlen) {
  const int64_t heads = varlen ? 0 : 1;
  return {.batch = varlen ? 0 : tensor.stride(0),
          .seq = tensor.stride(heads + 1),
          .head = tensor.stride(heads)};
}

void clear(const Tensor& tensor, cudaStream_t stream) {
  const int64_t bytes = tensor.numel() * 2;
  if (bytes > 0) {
    check_cuda(cudaMemsetAsync(tensor.data_ptr(), 0, bytes, stream), "clearing a gradient");
  }
}

// Rows of gradients that belong to no sequence become 0: with varlen by the launch.
void run(const BackwardKernel& kernel, const AttentionProblem& problem, const BackwardCall& call,
         const Gradients& gradients, int device) {
  const auto& [dq, dk, dv, dsinks, dbias] = gradients;
  const bool varlen = problem.varlen;
  const Axes& axes = axes_of(problem, call.tensors.bhsd);
  const cudaStream_t stream = current_stream(device);
  const std::optional<Tensor> schedule = new_varlen_schedule(problem, device);
  const std::optional<Tensor> workspace =
      new_workspace(kernel.size(kernel.info.name, problem).workspace_bytes, device);
  BackwardParams params{
      .forward = make_params(problem, call.tensors, call.out, call.lse, schedule),
      .dout = call.dout.data_ptr(),
      .dlse = call.dlse ? static_cast<const float*>(call.dlse->data_ptr()) : nullptr,
      .dq = dq.data_ptr(),
      .dk = dk.data_ptr(),
      .dv = dv.data_ptr(),
      .dout_stride = row_strides(call.dout, axes_of(problem)),
      .dlse_stride = call.dlse ? lse_strides(*call.dlse, varlen) : Strides{},
      .dq_stride = row_strides(dq, axes),
      .dk_stride = row_strides(dk, axes),
      .dv_stride = row_strides(dv, axes),
      .workspace = workspace ? workspace->data_ptr() : nullptr,
  };
  params.forward.v_stride = row_strides(call.tensors.v, axes);
  set_scores(params.forward, call.tensors);
  params.lists = list_params(call.mask);
  params.turns = indices(call.turns);
  if (dsinks) params.dsinks = dsinks->data_ptr();
  std::optional<Tensor> ds;
  if (dbias) {
    params.dbias = dbias->data_ptr();
    if (num_bias_terms(params.forward) > 2) {
      ds = new_tensor({4, {problem.batch, problem.num_heads_q, problem.seqlen_q, dbias->size(3)}},
                      dtype_of(*dbias), device);
      params.ds = ds->data_ptr();
    }
  }
  if (problem.has_no_gradients() || (!varlen && call.tensors.shortened())) {
    for (const Tensor* gradient : {&dq, &dk, &dv}) clear(*gradient, stream);
    if (dbias) clear(*dbias, stream);
  }
  kernel.launch(kernel.info.name, params, stream);
}

// dsinks: None without sinks. dbias: None unless with_dbias; its rows are longer than the bias's
// where seqlen_k is no multiple of 8.
void backward(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr char kName[] = "backward";
  Arguments arguments(stack, num_arguments);
  const Tensor launch = arguments.take<Tensor>();
  BackwardCall call = take_call(arguments);
  const bool has_scores = arguments.has_more();
  if (has_scores) {
    take_scores(arguments, call.tensors);
    call.with_dbias = arguments.take<bool>();
    call.mask = MaskTensors::take(arguments);
    call.turns = arguments.take<std::optional<Tensor>>();
  }
  const auto [dq, dk, dv, dsinks, dbias] =
      run_backward(kName, attention_launch(kName, Pass::kBackward, launch), call);
  if (!has_scores) return return_results(stack, std::tuple(dq, dk, dv));
  return_results(stack, std::tuple(dq, dk, dv, dsinks, dbias));
}

void backward_into(StableIValue* stack, uint64_t, uint64_t) {
  constexpr char kName[] = "backward_into";
  Arguments arguments(stack);
  const Tensor handle = arguments.take<Tensor>();
  const BackwardCall call = take_call(arguments);
  const Gradients gradients{.dq = arguments.take<Tensor>(),
                            .dk = arguments.take<Tensor>(),
                            .dv = arguments.take<Tensor>()};
  const AttentionLaunch& launch = attention_launch(kName, Pass::kBackward, handle);
  check_call(kName, launch.problem, call);
  check_gradients(kName, launch.problem, gradients);
  const int device = device_of(kName, call.tensors);
  const DeviceGuard guard(device);
  run(backward_kernel(launch.config), launch.problem, call, gradients, device);
}

}  // namespace

Gradients run_backward(const char* function, const AttentionLaunch& launch,
                       const BackwardCall& call) {
  const AttentionProblem& problem = launch.problem;
  check_call(function, problem, call);
  const int device = device_of(function, call.tensors);
  check_scores(function, problem, call.tensors, device);
  check_lists(function, problem, call, device);
  const DeviceGuard guard(device);
  const int32_t dtype = dtype_of(call.tensors.q);
  const auto gradient_of = [&](int64_t tokens, int64_t heads, int64_t columns) {
    return new_rows(problem, axes_of(problem, call.tensors.bhsd), tokens, heads, columns, dtype,
                    device);
  };
  std::optional<Tensor> dsinks, dbias;
  if (const auto& sinks = call.tensors.sinks) {
    dsinks = new_tensor({1, {problem.num_heads_q}}, dtype_of(*sinks), device);
  }
  if (const auto& bias = call.tensors.bias; bias && call.with_dbias) {
    const int64_t row = bias_pitch(problem.seqlen_k);
    dbias = new_tensor({4, {bias->size(0), bias->size(1), bias->size(2), row}}, dtype, device);
  }
  const Gradients gradients{
      .dq = gradient_of(problem.total_q, problem.num_heads_q, problem.head_dim),
      .dk = gradient_of(problem.total_k, problem.num_heads_kv, problem.head_dim),
      .dv = gradient_of(problem.total_k, problem.num_heads_kv, problem.head_dim_v),
      .dsinks = dsinks,
      .dbias = dbias};
  run(backward_kernel(launch.config), problem, call, gradients, device);
  return gradients;
}

#define FA3_CALL \
  "Tensor launch, Tensor dout, Tensor? dlse, Tensor out, Tensor lse, " FLASHATTN3_SCHEMA
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def("backward(" FA3_CALL ") -> (Tensor dq, Tensor dk, Tensor dv)");
  library.def("backward.scores(" FA3_CALL ", " FLASHATTN3_SCORES
              ", bool with_dbias=False, " FLASHATTN3_MASK()
              ", Tensor? turns=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor? dsinks, "
              "Tensor? dbias)");
  library.def("backward_into(" FA3_CALL ", Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("backward", backward);
  library.impl("backward.scores", backward);
  library.impl("backward_into", backward_into);
}

// Tensors on the CPU get an error that names them.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("backward", backward);
  library.impl("backward.scores", backward);
  library.impl("backward_into", backward_into);
}

}  // namespace flashattn3
