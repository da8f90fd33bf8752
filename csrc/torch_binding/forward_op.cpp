// flashattn3_hopper::forward and forward_into: fill ForwardParams from a prepared launch and the
// tensors of a call, and launch on torch's current stream of their device. Uses only LibTorch's
// stable ABI, so that one library runs under every torch from 2.9, including CPU builds (where the
// operators check their arguments but launch nothing).
//
// The caller, flashattn3/backends/hopper, has checked dtypes, alignment and options and chosen the
// kernel config. These functions check that the tensors are those of the prepared launch.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "launch/errors.h"
#include "launch/params.h"
#include "launch/quantize.h"
#include "launch/registry.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/passes.h"
#include "torch_binding/prepared.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
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
         const Tensor& out, const Tensor& lse, int device) {
  const cudaStream_t stream = current_stream(device);
  const std::optional<Tensor> schedule = new_varlen_schedule(problem, device);
  ForwardParams params = make_params(problem, call.tensors, out, lse, schedule, device, stream);
  std::optional<Tensor> promoted;
  if (is_quantized(kernel.info.dtype)) {
    promoted = new_workspace(kernel.size(kernel.info.name, problem).workspace_bytes, device);
    params.quantized = quantized_params(problem, call, promoted);
  } else {
    params.v_stride = row_strides(call.tensors.v, problem.varlen);
  }
  kernel.launch(kernel.info.name, params, stream);
}

void forward(StableIValue* stack, uint64_t, uint64_t) {
  constexpr char kName[] = "forward";
  Arguments arguments(stack);
  const Tensor launch = arguments.take<Tensor>();
  const ForwardCall call = take_call(arguments);
  const auto [out, lse] = run_forward(kName, prepared_launch(kName, Pass::kForward, launch), call);
  return_results(stack, std::tuple(out, lse));
}

// out: at least v's columns; rows are at multiples of 16 bytes.
void forward_into(StableIValue* stack, uint64_t, uint64_t) {
  constexpr char kName[] = "forward_into";
  Arguments arguments(stack);
  const Tensor handle = arguments.take<Tensor>();
  const ForwardCall call = take_call(arguments);
  const Tensor out = arguments.take<Tensor>(), lse = arguments.take<Tensor>();
  const PreparedLaunch& launch = prepared_launch(kName, Pass::kForward, handle);
  const ForwardKernel& kernel = forward_kernel(launch.config);
  check_call(kName, launch.problem, kernel.info, call);
  check_results(kName, launch.problem, out, lse);
  const int device = device_of(kName, call.tensors);
  const DeviceGuard guard(device);
  run(kernel, launch.problem, call, out, lse, device);
}

}  // namespace

ForwardResults run_forward(const char* function, const PreparedLaunch& launch,
                           const ForwardCall& call) {
  const AttentionProblem& problem = launch.problem;
  const ForwardKernel& kernel = forward_kernel(launch.config);
  check_call(function, problem, kernel.info, call);
  const int device = device_of(function, call.tensors);
  const DeviceGuard guard(device);
  const int32_t dtype = !is_quantized(kernel.info.dtype) ? dtype_of(call.tensors.q)
                        : problem.out_is_fp16            ? aoti_torch_dtype_float16()
                                                         : aoti_torch_dtype_bfloat16();
  const int64_t rows = problem.total_q, heads = problem.num_heads_q;
  const Tensor out = new_rows(problem, rows, heads, problem.head_dim_v, dtype, device);
  const int32_t fp32 = aoti_torch_dtype_float32();
  const Tensor lse = problem.varlen ? new_tensor<2>({heads, rows}, fp32, device)
                                    : new_tensor<3>({problem.batch, heads, rows}, fp32, device);
  run(kernel, problem, call, out, lse, device);
  return {out, lse};
}

#define FA3_CALL \
  "Tensor launch, " FA3_TENSORS ", Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
STABLE_TORCH_LIBRARY(flashattn3_hopper, library) {
  library.def("forward(" FA3_CALL ") -> (Tensor out, Tensor lse)");
  library.def("forward_into(" FA3_CALL ", Tensor(a!) out, Tensor(b!) lse) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("forward", forward);
  library.impl("forward_into", forward_into);
}

// Tensors on the CPU get an error that names them.
STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CPU, library) {
  library.impl("forward", forward);
  library.impl("forward_into", forward_into);
}

}  // namespace flashattn3
