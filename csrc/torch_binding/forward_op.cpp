// flashattn3_hopper::forward and forward_into: tensors to ForwardParams, and the launch on the
// stream that torch has current for their device. Uses LibTorch's stable interface alone, so that
// one library runs under every torch from 2.9, under its CPU build too (where the operator can be
// looked at, not called).
//
// The caller, flashattn3/backends/hopper.py, has checked dtypes, alignment and options, and chosen
// the row; checked here is only that the tensors fit together.
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "host/errors.h"
#include "host/kernel_registry.h"
#include "host/params.h"
#include "host/tile_counters.h"
#include "torch_binding/boxed.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

using torch::stable::Tensor;

// Where the axes of a tensor are: (batch, rows, heads, head_dim), or (rows, heads, head_dim).
struct Axes {
  explicit Axes(bool varlen) : batch(0), rows(varlen ? 0 : 1), heads(rows + 1), dim(rows + 2) {}
  int64_t batch, rows, heads, dim;
};

bool fit_together(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                  const Tensor& lse, const Axes& axes) {
  const int64_t rank = axes.dim + 1;
  if (q.dim() != rank || k.dim() != rank || v.dim() != rank || out.dim() != rank) return false;
  return k.size(axes.dim) == q.size(axes.dim) && v.size(axes.rows) == k.size(axes.rows) &&
         v.size(axes.heads) == k.size(axes.heads) && out.size(axes.rows) == q.size(axes.rows) &&
         out.size(axes.heads) == q.size(axes.heads) && out.size(axes.dim) >= v.size(axes.dim) &&
         lse.numel() * q.size(axes.dim) == q.numel() && lse.is_contiguous();
}

// out, its rows of whole 16 bytes, and lse.
std::tuple<Tensor, Tensor> new_results(const Tensor& q, const Tensor& v, const Axes& axes,
                                       int device) {
  int32_t dtype;
  check_torch(aoti_torch_get_dtype(q.get(), &dtype), "asking for a dtype");
  const int32_t fp32 = aoti_torch_dtype_float32();
  const int64_t rows = q.size(axes.rows), heads = q.size(axes.heads);
  const int64_t columns = (v.size(axes.dim) + 7) / 8 * 8;
  if (axes.rows == 1) {
    const int64_t batch = q.size(axes.batch);
    return {new_tensor<4>({batch, rows, heads, columns}, dtype, device),
            new_tensor<3>({batch, heads, rows}, fp32, device)};
  }
  return {new_tensor<3>({rows, heads, columns}, dtype, device),
          new_tensor<2>({heads, rows}, fp32, device)};
}

// out: (batch, rows, heads, columns) or (rows, heads, columns), at least the columns of v, its rows
// at multiples of 16 bytes. lse: (batch, heads, rows) or (heads, rows). row: index into the kernel
// table. seqlen_q, seqlen_k: rows of a sequence, of the longest one where there are cu_seqlens.
void forward_into(Tensor q, Tensor k, Tensor v, std::optional<Tensor> cu_seqlens_q,
                  std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_q,
                  std::optional<Tensor> seqused_k, Tensor out, Tensor lse, int64_t row,
                  int64_t seqlen_q, int64_t seqlen_k, double softmax_scale, double softcap,
                  int64_t window_left, int64_t window_right, int64_t num_sms, int64_t sm_margin) {
  const ForwardKernel& kernel = forward_kernel(row);
  const bool varlen = cu_seqlens_q.has_value();
  const Axes axes(varlen);
  if (!fit_together(q, k, v, out, lse, axes)) fail(kernel.name, "the tensors do not fit together");
  const int device = q.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const int64_t total_q = q.size(axes.rows), heads_q = q.size(axes.heads);
  const int64_t batch = varlen ? cu_seqlens_q->numel() - 1 : q.size(axes.batch);

  std::optional<Tensor> order;  // lives until the launch is in the stream, as torch's memory may
  if (varlen) order = new_tensor<1>({2 * batch + 1}, aoti_torch_dtype_int32(), device);

  const ForwardParams params{
      .q = q.data_ptr(),
      .k = k.data_ptr(),
      .v = v.data_ptr(),
      .out = out.data_ptr(),
      .lse = static_cast<float*>(lse.data_ptr()),
      .q_stride = row_strides(q, varlen),
      .k_stride = row_strides(k, varlen),
      .v_stride = row_strides(v, varlen),
      .out_stride = row_strides(out, varlen),
      .lse_stride = {.batch = varlen ? 0 : heads_q * total_q, .seq = 1, .head = total_q},
      .batch = static_cast<int>(batch),
      .seqlen_q = static_cast<int>(seqlen_q),
      .seqlen_k = static_cast<int>(seqlen_k),
      .total_q = static_cast<int>(total_q),
      .total_k = static_cast<int>(k.size(axes.rows)),
      .num_heads_q = static_cast<int>(heads_q),
      .num_heads_kv = static_cast<int>(k.size(axes.heads)),
      .head_dim = static_cast<int>(q.size(axes.dim)),
      .head_dim_v = static_cast<int>(v.size(axes.dim)),
      .cu_seqlens_q = indices(cu_seqlens_q),
      .cu_seqlens_k = indices(cu_seqlens_k),
      .seqused_q = indices(seqused_q),
      .seqused_k = indices(seqused_k),
      .ragged_order = order ? static_cast<int32_t*>(order->data_ptr()) : nullptr,
      .softmax_scale = static_cast<float>(softmax_scale),
      .softcap = static_cast<float>(softcap),
      .window_left = static_cast<int>(window_left),
      .window_right = static_cast<int>(window_right),
      .num_sms = static_cast<int>(num_sms),
      .sm_margin = static_cast<int>(sm_margin),
      .tile_counter = tile_counter(device, stream),
  };
  kernel.launch(params, stream);
}

// forward_into new out and lse, with the columns of v rounded up to a multiple of 8.
std::tuple<Tensor, Tensor> forward(Tensor q, Tensor k, Tensor v, std::optional<Tensor> cu_seqlens_q,
                                   std::optional<Tensor> cu_seqlens_k,
                                   std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k,
                                   int64_t row, int64_t seqlen_q, int64_t seqlen_k,
                                   double softmax_scale, double softcap, int64_t window_left,
                                   int64_t window_right, int64_t num_sms, int64_t sm_margin) {
  const Axes axes(cu_seqlens_q.has_value());
  if (q.dim() != axes.dim + 1 || v.dim() != axes.dim + 1) {
    fail(forward_kernel(row).name, "the tensors do not fit together");
  }
  const std::tuple<Tensor, Tensor> results = new_results(q, v, axes, q.get_device_index());
  forward_into(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, std::get<0>(results),
               std::get<1>(results), row, seqlen_q, seqlen_k, softmax_scale, softcap, window_left,
               window_right, num_sms, sm_margin);
  return results;
}

}  // namespace

#define FA3_TENSORS                                                                               \
  "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, " \
  "Tensor? seqused_k, "
#define FA3_OPTIONS                                                                            \
  "int row, int seqlen_q, int seqlen_k, float softmax_scale, float softcap, int window_left, " \
  "int window_right, int num_sms, int sm_margin"
STABLE_TORCH_LIBRARY(flashattn3_hopper, library) {
  library.def("forward(" FA3_TENSORS FA3_OPTIONS ") -> (Tensor out, Tensor lse)");
  library.def("forward_into(" FA3_TENSORS "Tensor(a!) out, Tensor(b!) lse, " FA3_OPTIONS ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("forward", boxed<forward>);
  library.impl("forward_into", boxed<forward_into>);
}

}  // namespace flashattn3
