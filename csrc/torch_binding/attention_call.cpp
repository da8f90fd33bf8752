#include "torch_binding/attention_call.h"

#include <string>

#include "launch/capture.h"
#include "launch/errors.h"
#include "launch/tile_counters.h"

namespace flashattn3 {
namespace {

std::string text_of(const Shape& shape) {
  std::string text = "(";
  for (int i = 0; i < shape.rank; ++i) text += (i ? ", " : "") + std::to_string(shape.size[i]);
  return text + (shape.rank == 1 ? ",)" : ")");
}

std::string shape_text(const Tensor& tensor) {
  std::string text = "(";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.size(i));
  }
  return text + (tensor.dim() == 1 ? ",)" : ")");
}

// index: int32 of `size` positions; none only if not required.
void check_index(const char* function, const char* name, const std::optional<Tensor>& index,
                 int64_t size, bool required) {
  expect(index || !required, function, name, "a tensor of a varlen launch", "None");
  if (index) expect_shape(function, name, *index, {1, {size}});
}

void check_absent(const char* function, const char* name, const std::optional<Tensor>& index) {
  expect(!index, function, name, "None unless the launch is varlen", "a tensor");
}

}  // namespace

CallTensors CallTensors::take(Arguments& arguments) {
  using Optional = std::optional<Tensor>;
  return {.q = arguments.take<Tensor>(),
          .k = arguments.take<Tensor>(),
          .v = arguments.take<Tensor>(),
          .cu_seqlens_q = arguments.take<Optional>(),
          .cu_seqlens_k = arguments.take<Optional>(),
          .seqused_q = arguments.take<Optional>(),
          .seqused_k = arguments.take<Optional>()};
}

void expect_shape(const char* function, const char* name, const Tensor& tensor,
                  const Shape& wanted) {
  bool equal = tensor.dim() == wanted.rank;
  for (int axis = 0; equal && axis < wanted.rank; ++axis) {
    equal = tensor.size(axis) == wanted.size[axis];
  }
  if (equal) return;
  const std::string what = std::string(name) + ".shape";
  expect(false, function, what.c_str(), text_of(wanted), shape_text(tensor));
}

void expect_rows(const char* function, const char* name, const Tensor& tensor, Shape wanted) {
  const int last = wanted.rank - 1;
  if (tensor.dim() == wanted.rank && tensor.size(last) > wanted.size[last]) {
    wanted.size[last] = tensor.size(last);
  }
  expect_shape(function, name, tensor, wanted);
  if (tensor.size(last) <= 1 || tensor.stride(last) == 1) return;
  const std::string what = std::string(name) + ".stride(-1)";
  expect(false, function, what.c_str(), 1, tensor.stride(last));
}

Shape rows_shape(const AttentionProblem& problem, int64_t tokens, int64_t heads, int64_t columns) {
  if (problem.varlen) return {3, {tokens, heads, columns}};
  return {4, {problem.batch, tokens, heads, columns}};
}

Shape lse_shape(const AttentionProblem& problem) {
  if (problem.varlen) return {2, {problem.num_heads_q, problem.total_q}};
  return {3, {problem.batch, problem.num_heads_q, problem.total_q}};
}

void check_tensors(const char* function, const AttentionProblem& problem,
                   const CallTensors& tensors, bool v_is_permuted) {
  const int64_t heads_kv = problem.num_heads_kv;
  expect_shape(function, "q", tensors.q,
               rows_shape(problem, problem.total_q, problem.num_heads_q, problem.head_dim));
  expect_shape(function, "k", tensors.k,
               rows_shape(problem, problem.total_k, heads_kv, problem.head_dim));
  if (!v_is_permuted) {
    expect_shape(function, "v", tensors.v,
                 rows_shape(problem, problem.total_k, heads_kv, problem.head_dim_v));
  }
  if (problem.varlen) {
    check_index(function, "cu_seqlens_q", tensors.cu_seqlens_q, problem.batch + 1, true);
    check_index(function, "cu_seqlens_k", tensors.cu_seqlens_k, problem.batch + 1, true);
  } else {
    check_absent(function, "cu_seqlens_q", tensors.cu_seqlens_q);
    check_absent(function, "cu_seqlens_k", tensors.cu_seqlens_k);
  }
  check_index(function, "seqused_q", tensors.seqused_q, problem.batch, false);
  check_index(function, "seqused_k", tensors.seqused_k, problem.batch, false);
}

void check_results(const char* function, const AttentionProblem& problem, const Tensor& out,
                   const Tensor& lse) {
  expect_rows(function, "out", out,
              rows_shape(problem, problem.total_q, problem.num_heads_q, problem.head_dim_v));
  expect_shape(function, "lse", lse, lse_shape(problem));
  expect(lse.is_contiguous(), function, "lse", "contiguous", "another layout");
}

Tensor new_rows(const AttentionProblem& problem, int64_t tokens, int64_t heads, int64_t columns,
                int32_t dtype, int device) {
  const int64_t whole = (columns + 7) / 8 * 8;
  if (problem.varlen) return new_tensor<3>({tokens, heads, whole}, dtype, device);
  return new_tensor<4>({problem.batch, tokens, heads, whole}, dtype, device);
}

ForwardParams make_params(const AttentionProblem& problem, const CallTensors& tensors,
                          const Tensor& out, const Tensor& lse,
                          const std::optional<Tensor>& varlen_schedule, int device,
                          cudaStream_t stream) {
  const bool varlen = problem.varlen, captured = is_captured(stream);
  ForwardParams params{problem};
  params.q = tensors.q.data_ptr();
  params.k = tensors.k.data_ptr();
  params.v = tensors.v.data_ptr();
  params.out = out.data_ptr();
  params.lse = static_cast<float*>(lse.data_ptr());
  params.q_stride = row_strides(tensors.q, varlen);
  params.k_stride = row_strides(tensors.k, varlen);
  params.out_stride = row_strides(out, varlen);
  const int64_t rows = problem.total_q;
  params.lse_stride = {.batch = varlen ? 0 : problem.num_heads_q * rows, .seq = 1, .head = rows};
  params.positions_q = {indices(tensors.cu_seqlens_q), indices(tensors.seqused_q)};
  params.positions_k = {indices(tensors.cu_seqlens_k), indices(tensors.seqused_k)};
  if (varlen_schedule) {
    params.varlen_schedule = static_cast<int32_t*>(varlen_schedule->data_ptr());
  }
  // Graphs that were captured on one stream may run side by side, so they share no counter.
  params.tile_counter = captured ? nullptr : tile_counter(device, stream);
  params.pdl = !captured;
  return params;
}

std::optional<Tensor> new_varlen_schedule(const AttentionProblem& problem, int device) {
  if (!problem.varlen) return std::nullopt;
  return new_tensor<1>({2 * int64_t{problem.batch} + 1}, aoti_torch_dtype_int32(), device);
}

std::optional<Tensor> new_workspace(int64_t bytes, int device) {
  if (bytes == 0) return std::nullopt;
  return new_tensor<1>({(bytes + 3) / 4}, aoti_torch_dtype_float32(), device);
}

int device_of(const char* function, const CallTensors& tensors) {
  const Tensor* given[] = {&tensors.q, &tensors.k, &tensors.v};
  const char* names[] = {"q.device", "k.device", "v.device"};
  const int device = tensors.q.get_device_index();
  for (int i = 0; i < 3; ++i) {
    expect(given[i]->is_cuda(), function, names[i], "a GPU", "another device");
    expect(given[i]->get_device_index() == device, function, names[i], "the GPU of q",
           "another GPU");
  }
  return device;
}

}  // namespace flashattn3
