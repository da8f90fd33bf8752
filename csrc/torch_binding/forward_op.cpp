// flashattn3_hopper::forward and forward_into: fill ForwardParams from a prepared launch and the
// tensors of a call, and launch on torch's current stream of their device. Uses only LibTorch's
// stable ABI, so that one library runs under every torch from 2.9, including CPU builds (where the
// operators check their arguments but launch nothing).
//
// The caller, flashattn3/backends/hopper, has checked dtypes, alignment and options and chosen the
// kernel config. These functions check that the tensors are those of the prepared launch. The
// backward operator has the checks, the allocations and make_params in common.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "launch/errors.h"
#include "launch/params.h"
#include "launch/quantize.h"
#include "launch/registry.h"
#include "launch/stream_counters.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/tensors.h"

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
#define FLASHATTN3_REQUIRED(name) .name = arguments.take<Tensor>(),
#define FLASHATTN3_OPTIONAL(name) .name = arguments.take<std::optional<Tensor>>(),
  return {FLASHATTN3_TENSORS(FLASHATTN3_REQUIRED, FLASHATTN3_OPTIONAL)};
#undef FLASHATTN3_REQUIRED
#undef FLASHATTN3_OPTIONAL
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
  if (tensor.numel() == 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1) return;
  const std::string what = std::string(name) + ".stride(-1)";
  expect(false, function, what.c_str(), 1, tensor.stride(last));
}

Shape rows_shape(const AttentionProblem& problem, const Axes& axes, int64_t tokens, int64_t heads,
                 int64_t columns) {
  if (problem.varlen) return {3, {tokens, heads, columns}};
  Shape shape{4, {problem.batch, 0, 0, columns}};
  shape.size[axes.rows] = tokens;
  shape.size[axes.heads] = heads;
  return shape;
}

Shape lse_shape(const AttentionProblem& problem) {
  if (problem.varlen) return {2, {problem.num_heads_q, problem.total_q}};
  return {3, {problem.batch, problem.num_heads_q, problem.total_q}};
}

void check_tensors(const char* function, const AttentionProblem& problem,
                   const CallTensors& tensors, bool v_is_permuted) {
  const auto expect_rows_of = [&](const char* name, const Tensor& tensor, int64_t tokens,
                                  int64_t heads, int64_t columns) {
    expect_shape(function, name, tensor,
                 rows_shape(problem, axes_of(problem, tensors.bhsd), tokens, heads, columns));
  };
  const int64_t heads_kv = problem.num_heads_kv;
  expect_rows_of("q", tensors.q, problem.total_q, problem.num_heads_q, problem.head_dim);
  expect_rows_of("k", tensors.k, problem.total_k, heads_kv, problem.head_dim);
  if (!v_is_permuted) {
    expect_rows_of("v", tensors.v, problem.total_k, heads_kv, problem.head_dim_v);
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
              rows_shape(problem, axes_of(problem), problem.total_q, problem.num_heads_q,
                         problem.head_dim_v));
  expect_shape(function, "lse", lse, lse_shape(problem));
  expect(lse.is_contiguous(), function, "lse", "contiguous", "another layout");
}

Tensor new_rows(const AttentionProblem& problem, const Axes& axes, int64_t tokens, int64_t heads,
                int64_t columns, int32_t dtype, int device) {
  const int64_t whole = (columns + 7) / 8 * 8, row = heads * whole;
  if (problem.varlen) return new_tensor({3, {tokens, heads, whole}}, dtype, device);
  std::array<int64_t, 4> sizes{problem.batch, 0, 0, whole}, strides{tokens * row, 0, 0, 1};
  sizes[axes.rows] = tokens, strides[axes.rows] = row;
  sizes[axes.heads] = heads, strides[axes.heads] = whole;
  return new_strided(sizes, strides, dtype, device);
}

std::optional<Tensor> new_lse(const AttentionProblem& problem, bool returns_lse, int device) {
  if (!returns_lse) return {};
  return new_tensor(lse_shape(problem), aoti_torch_dtype_float32(), device);
}

ForwardParams make_params(const AttentionProblem& problem, const CallTensors& tensors,
                          const Tensor& out, const std::optional<Tensor>& lse,
                          const std::optional<Tensor>& varlen_schedule) {
  const bool varlen = problem.varlen;
  ForwardParams params{problem};
  params.q = tensors.q.data_ptr();
  params.k = tensors.k.data_ptr();
  params.v = tensors.v.data_ptr();
  params.out = out.data_ptr();
  params.lse = lse ? static_cast<float*>(lse->data_ptr()) : nullptr;
  params.q_stride = row_strides(tensors.q, axes_of(problem, tensors.bhsd));
  params.k_stride = row_strides(tensors.k, axes_of(problem, tensors.bhsd));
  params.out_stride = row_strides(out, axes_of(problem));
  const int64_t rows = problem.total_q;
  params.lse_stride = {.batch = varlen ? 0 : problem.num_heads_q * rows, .seq = 1, .head = rows};
  params.positions_q = {indices(tensors.cu_seqlens_q), indices(tensors.seqused_q)};
  params.positions_k = {indices(tensors.cu_seqlens_k), indices(tensors.seqused_k)};
  if (varlen_schedule) {
    params.varlen_schedule = varlen_schedule->data_ptr();
  }
  params.pdl = true;
  return params;
}

std::optional<Tensor> new_varlen_schedule(const AttentionProblem& problem, int device) {
  if (!problem.varlen) return std::nullopt;
  return new_workspace(varlen_schedule_bytes(problem.batch), device);
}

std::optional<Tensor> new_workspace(int64_t bytes, int device) {
  if (bytes == 0) return std::nullopt;
  return new_tensor({1, {(bytes + 3) / 4}}, aoti_torch_dtype_float32(), device);
}

int device_of(const char* function, const CallTensors& tensors) {
  const Tensor* given[] = {&tensors.q, &tensors.k, &tensors.v};
  const char* names[] = {"q.device", "k.device", "v.device"};
  const int device = tensors.q.get_device_index();
  for (int i = 0; i < 3; ++i) {
    expect_on_gpu(function, names[i], *given[i], device, "the GPU of q");
  }
  return device;
}

namespace {

ForwardCall take_call(Arguments& arguments) {
  using Optional = std::optional<Tensor>;
  return {.tensors = CallTensors::take(arguments),
          .q_descale = arguments.take<Optional>(),
          .k_descale = arguments.take<Optional>(),
          .v_descale = arguments.take<Optional>()};
}

// Permuted e4m3 V: (batch, num_heads_kv, keys / 16, the config's head_dim, 16), with varlen without
// the batch (tile/permuted_v.h).
void check_permuted_v(const char* function, const AttentionProblem& problem, int columns,
                      const Tensor& v) {
  const int64_t heads = problem.num_heads_kv, groups = num_permuted_keys(problem) / kCoreRowKeys;
  expect_shape(function, "v", v,
               problem.varlen ? Shape{4, {heads, groups, columns, kCoreRowKeys}}
                              : Shape{5, {problem.batch, heads, groups, columns, kCoreRowKeys}});
  expect(v.is_contiguous(), function, "v", "contiguous", "another layout");
}

void check_descale(const char* function, const char* name, const AttentionProblem& problem,
                   const std::optional<Tensor>& descale, bool quantized, int64_t heads) {
  if (!descale) return;
  expect(quantized, function, name, "None for 16-bit inputs", "a tensor");
  const bool fits = descale->dim() == 3 && descale->size(0) == problem.batch &&
                    descale->size(1) >= 1 && heads % descale->size(1) == 0;
  expect(fits, function, name, "of shape (batch, heads, blocks)", "another shape");
}

void check_call(const char* function, const AttentionProblem& problem, const KernelInstance& info,
                const ForwardCall& call) {
  const bool quantized = is_quantized(info.dtype);
  check_tensors(function, problem, call.tensors, quantized);
  if (quantized) check_permuted_v(function, problem, info.head_dim, call.tensors.v);
  const int64_t heads_kv = problem.num_heads_kv;
  check_descale(function, "q_descale", problem, call.q_descale, quantized, problem.num_heads_q);
  check_descale(function, "k_descale", problem, call.k_descale, quantized, heads_kv);
  check_descale(function, "v_descale", problem, call.v_descale, quantized, heads_kv);
}

// heads: of the tensor. block: tokens that share a descale.
BlockDescales block_descales(const std::optional<Tensor>& descale, int heads, int block) {
  if (!descale) return {};
  return {.data = static_cast<const float*>(descale->data_ptr()),
          .batch = descale->stride(0),
          .head = descale->stride(1),
          .block = descale->stride(2),
          .num_blocks = static_cast<int>(descale->size(2)),
          .block_tokens = block,
          .heads_per_descale = static_cast<int>(heads / descale->size(1))};
}

QuantizedParams quantized_params(const AttentionProblem& problem, const ForwardCall& call,
                                 const std::optional<Tensor>& promoted) {
  return {.num_permuted_keys = num_permuted_keys(problem),
          .q = block_descales(call.q_descale, problem.num_heads_q, problem.q_block),
          .k = block_descales(call.k_descale, problem.num_heads_kv, problem.k_block),
          .v = block_descales(call.v_descale, problem.num_heads_kv, problem.v_block),
          .promoted = promoted ? promoted->data_ptr() : nullptr};
}

void run(const ForwardKernel& kernel, const AttentionProblem& problem, const ForwardCall& call,
         const Tensor& out, const std::optional<Tensor>& lse, int device) {
  const cudaStream_t stream = current_stream(device);
  const std::optional<Tensor> schedule = new_varlen_schedule(problem, device);
  ForwardParams params = make_params(problem, call.tensors, out, lse, schedule);
  set_scores(params, call.tensors);
  params.lists = list_params(call.mask);
  if (call.max_logit) params.max_logit = static_cast<float*>(call.max_logit->data_ptr());
  const StreamCounters counters(device, stream);
  params.tile_counter = counters.get() == nullptr ? nullptr : counters.get()->tile;
  std::optional<Tensor> promoted;
  if (is_quantized(kernel.info.dtype)) {
    promoted = new_workspace(kernel.size(kernel.info.name, problem).workspace_bytes, device);
    params.quantized = quantized_params(problem, call, promoted);
  } else {
    params.v_stride = row_strides(call.tensors.v, axes_of(problem, call.tensors.bhsd));
  }
  kernel.launch(kernel.info.name, params, stream);
}

void forward(StableIValue* stack, uint64_t num_arguments, uint64_t) {
  constexpr char kName[] = "forward";
  Arguments arguments(stack, num_arguments);
  const Tensor launch = arguments.take<Tensor>();
  ForwardCall call = take_call(arguments);
  if (arguments.has_more()) {
    take_scores(arguments, call.tensors);
    call.max_logit = arguments.take<std::optional<Tensor>>();
    call.mask = MaskTensors::take(arguments);
  }
  const auto [out, lse] = run_forward(kName, attention_launch(kName, Pass::kForward, launch), call);
  return_results(stack, std::tuple(out, *lse));
}

// out: at least v's columns; rows are at multiples of 16 bytes.
void forward_into(StableIValue* stack, uint64_t, uint64_t) {
  constexpr char kName[] = "forward_into";
  Arguments arguments(stack);
  const Tensor handle = arguments.take<Tensor>();
  const ForwardCall call = take_call(arguments);
  const Tensor out = arguments.take<Tensor>(), lse = arguments.take<Tensor>();
  const AttentionLaunch& launch = attention_launch(kName, Pass::kForward, handle);
  const ForwardKernel& kernel = forward_kernel(launch.config);
  check_call(kName, launch.problem, kernel.info, call);
  check_results(kName, launch.problem, out, lse);
  const int device = device_of(kName, call.tensors);
  const DeviceGuard guard(device);
  run(kernel, launch.problem, call, out, lse, device);
}

}  // namespace

ForwardResults run_forward(const char* function, const AttentionLaunch& launch,
                           const ForwardCall& call) {
  const AttentionProblem& problem = launch.problem;
  const ForwardKernel& kernel = forward_kernel(launch.config);
  check_call(function, problem, kernel.info, call);
  const int device = device_of(function, call.tensors);
  check_scores(function, problem, call.tensors, device);
  check_mask(function, problem, call.mask, problem.seqlen_q, problem.seqlen_k, device);
  if (call.max_logit) {
    expect_shape(function, "max_logit", *call.max_logit, {1, {problem.num_heads_q}});
    expect_on_gpu(function, "max_logit.device", *call.max_logit, device, "the GPU of q");
  }
  const DeviceGuard guard(device);
  const int32_t dtype = !is_quantized(kernel.info.dtype) ? dtype_of(call.tensors.q)
                        : problem.out_is_fp16            ? aoti_torch_dtype_float16()
                                                         : aoti_torch_dtype_bfloat16();
  const int64_t rows = problem.total_q, heads = problem.num_heads_q;
  const Tensor out =
      new_rows(problem, axes_of(problem), rows, heads, problem.head_dim_v, dtype, device);
  const std::optional<Tensor> lse = new_lse(problem, call.returns_lse, device);
  run(kernel, problem, call, out, lse, device);
  return {out, lse};
}

#define FA3_CALL \
  "Tensor launch, " FLASHATTN3_SCHEMA ", Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
STABLE_TORCH_LIBRARY(flashattn3_hopper, library) {
  library.def("forward(" FA3_CALL ") -> (Tensor out, Tensor lse)");
  library.def("forward.scores(" FA3_CALL ", " FLASHATTN3_SCORES
              ", Tensor(a!)? max_logit=None, " FLASHATTN3_MASK() ") -> (Tensor out, Tensor lse)");
  library.def("forward_into(" FA3_CALL ", Tensor(a!) out, Tensor(b!) lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("forward", forward);
  library.impl("forward.scores", forward);
  library.impl("forward_into", forward_into);
}

// Tensors on the CPU get an error that names them.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("forward", forward);
  library.impl("forward.scores", forward);
  library.impl("forward_into", forward_into);
}

}  // namespace flashattn3
