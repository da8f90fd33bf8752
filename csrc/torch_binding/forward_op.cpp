// flashattn3_hopper::forward, forward_into and forward_fp8: fill ForwardParams from tensors and
// launch on torch's current stream of their device. Uses only LibTorch's stable ABI, so that one
// library runs under every torch from 2.9, including CPU builds (where the operator can be
// inspected but not called).
//
// The caller, flashattn3/backends/hopper/backend.py, has checked dtypes, alignment and options and
// chosen the kernel config. These functions check only that the tensors' shapes match.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "launch/errors.h"
#include "launch/params.h"
#include "launch/registry.h"
#include "launch/tile_counters.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/boxed.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

// Allocates out, with rows of a multiple of 16 bytes, and lse.
std::tuple<Tensor, Tensor> new_results(const Tensor& q, int64_t head_dim_v, int32_t dtype,
                                       const Axes& axes, int device) {
  const int32_t fp32 = aoti_torch_dtype_float32();
  const int64_t rows = q.size(axes.rows), heads = q.size(axes.heads);
  return {new_rows(q, head_dim_v, dtype, axes, device),
          axes.rows == 1 ? new_tensor<3>({q.size(axes.batch), heads, rows}, fp32, device)
                         : new_tensor<2>({heads, rows}, fp32, device)};
}

void launch(const ForwardKernel& kernel, ForwardParams params, int device) {
  const cudaStream_t stream = current_stream(device);
  params.tile_counter = tile_counter(device, stream);
  kernel.launch(params, stream);
}

// out: (batch, rows, heads, columns) or (rows, heads, columns), with at least v's columns; rows are
// at multiples of 16 bytes. lse: (batch, heads, rows) or (heads, rows). config: index into
// FORWARD_CONFIGS.
void forward_into(Tensor q, Tensor k, Tensor v, std::optional<Tensor> cu_seqlens_q,
                  std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_q,
                  std::optional<Tensor> seqused_k, Tensor out, Tensor lse, int64_t config,
                  int64_t seqlen_q, int64_t seqlen_k, double softmax_scale, double softcap,
                  int64_t window_left, int64_t window_right, int64_t num_sms, int64_t sm_margin) {
  const ForwardKernel& kernel = forward_kernel(config);
  const VarlenTensors varlen_tensors{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k};
  const Axes axes(varlen_tensors.varlen());
  if (!fit_together(q, k, out, lse, axes) || !fit_together(k, v, out, axes)) {
    fail(kernel.info.name, "the tensors do not fit together");
  }
  const int device = q.get_device_index();
  const DeviceGuard guard(device);
  const std::optional<Tensor> schedule = new_varlen_schedule(varlen_tensors, device);
  ForwardParams params = make_params(
      q, k, v.size(axes.dim), out, lse, varlen_tensors, schedule,
      {seqlen_q, seqlen_k, softmax_scale, softcap, window_left, window_right, num_sms, sm_margin});
  params.v = v.data_ptr();
  params.v_stride = row_strides(v, varlen_tensors.varlen());
  launch(kernel, params, device);
}

// Allocates out, with v's columns rounded up to a multiple of 8, and lse, and calls forward_into.
std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, std::optional<Tensor> cu_seqlens_q,
                                   std::optional<Tensor> cu_seqlens_k,
                                   std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k,
                                   int64_t config, int64_t seqlen_q, int64_t seqlen_k,
                                   double softmax_scale, double softcap, int64_t window_left,
                                   int64_t window_right, int64_t num_sms, int64_t sm_margin) {
  const Axes axes(cu_seqlens_q.has_value());
  if (q.dim() != axes.dim + 1 || v.dim() != axes.dim + 1) {
    fail(forward_kernel(config).info.name, "the tensors do not fit together");
  }
  const std::tuple<Tensor, Tensor> results =
      new_results(q, v.size(axes.dim), dtype_of(q), axes, q.get_device_index());
  forward_into(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, std::get<0>(results),
               std::get<1>(results), config, seqlen_q, seqlen_k, softmax_scale, softcap,
               window_left, window_right, num_sms, sm_margin);
  return results;
}

// descale: fp32 (batch, heads of the tensor, blocks), for q also (batch, heads of k, blocks); or
// none. heads: those of the tensor.
BlockDescales block_descales(const std::optional<Tensor>& descale, int64_t heads, int64_t block) {
  if (!descale) return {};
  return {.data = static_cast<const float*>(descale->data_ptr()),
          .batch = descale->stride(0),
          .head = descale->stride(1),
          .block = descale->stride(2),
          .num_blocks = static_cast<int>(descale->size(2)),
          .block_tokens = static_cast<int>(block),
          .heads_per_descale = static_cast<int>(heads / descale->size(1))};
}

// q, k: e4m3 or int8, as in the kernel config. v: e4m3, permuted (tile/permuted_v.h), of head_dim_v
// columns. q_block, k_block, v_block: tokens that share a descale. use_fast_accum: out stays in
// WGMMA's accumulators, so no memory for promoted sums is allocated. Other arguments, and the
// results except out's dtype: as in forward.
std::tuple<Tensor, Tensor> forward_fp8(
    Tensor q, Tensor k, Tensor v, std::optional<Tensor> cu_seqlens_q,
    std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_q,
    std::optional<Tensor> seqused_k, std::optional<Tensor> q_descale,
    std::optional<Tensor> k_descale, std::optional<Tensor> v_descale, int64_t q_block,
    int64_t k_block, int64_t v_block, int64_t head_dim_v, bool out_is_fp16, bool use_fast_accum,
    int64_t config, int64_t seqlen_q, int64_t seqlen_k, double softmax_scale, double softcap,
    int64_t window_left, int64_t window_right, int64_t num_sms, int64_t sm_margin) {
  const ForwardKernel& kernel = forward_kernel(config);
  const VarlenTensors varlen_tensors{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k};
  const Axes axes(varlen_tensors.varlen());
  const int device = q.get_device_index();
  const DeviceGuard guard(device);
  if (q.dim() != axes.dim + 1) fail(kernel.info.name, "the tensors do not fit together");
  const int32_t dtype = out_is_fp16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
  const auto [out, lse] = new_results(q, head_dim_v, dtype, axes, device);
  // v: (batch, heads, keys / 16, columns, 16), or with varlen (heads, keys / 16, columns, 16).
  const int64_t v_heads = axes.rows;
  if (!fit_together(q, k, out, lse, axes) || v.dim() != axes.dim + 2 || !v.is_contiguous() ||
      v.size(v_heads) != k.size(axes.heads) || v.size(v_heads + 2) != kernel.info.head_dim) {
    fail(kernel.info.name, "the tensors do not fit together");
  }
  const std::optional<Tensor> schedule = new_varlen_schedule(varlen_tensors, device);
  ForwardParams params = make_params(
      q, k, head_dim_v, out, lse, varlen_tensors, schedule,
      {seqlen_q, seqlen_k, softmax_scale, softcap, window_left, window_right, num_sms, sm_margin});
  std::optional<Tensor> promoted;
  const int64_t promoted_bytes = use_fast_accum ? 0 : kernel.promoted_bytes(params);
  if (promoted_bytes > 0) {
    promoted = new_tensor<1>({promoted_bytes / 4}, aoti_torch_dtype_float32(), device);
  }
  params.v = v.data_ptr();
  params.quantized = {.num_permuted_keys = v.size(v_heads + 1) * v.size(v_heads + 3),
                      .q = block_descales(q_descale, params.num_heads_q, q_block),
                      .k = block_descales(k_descale, params.num_heads_kv, k_block),
                      .v = block_descales(v_descale, params.num_heads_kv, v_block),
                      .out_is_fp16 = out_is_fp16,
                      .promoted = promoted ? promoted->data_ptr() : nullptr};
  launch(kernel, params, device);
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY(flashattn3_hopper, library) {
  library.def("forward(" FA3_TENSORS FA3_OPTIONS ") -> (Tensor out, Tensor lse)");
  library.def("forward_into(" FA3_TENSORS "Tensor(a!) out, Tensor(b!) lse, " FA3_OPTIONS ") -> ()");
  library.def("forward_fp8(" FA3_TENSORS
              "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, int q_block, int k_block, "
              "int v_block, int head_dim_v, bool out_is_fp16, bool use_fast_accum, " FA3_OPTIONS
              ") -> (Tensor out, Tensor lse)");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("forward", boxed<forward>);
  library.impl("forward_into", boxed<forward_into>);
  library.impl("forward_fp8", boxed<forward_fp8>);
}

}  // namespace flashattn3
