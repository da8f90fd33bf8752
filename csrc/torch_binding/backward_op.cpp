// flashattn3_hopper::backward and backward_into: fill BackwardParams from tensors and launch on
// torch's current stream. The notes in forward_op.cpp apply.
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

bool same_sizes(const Tensor& a, const Tensor& b, int64_t num_axes) {
  if (a.dim() != b.dim()) return false;
  for (int64_t axis = 0; axis < num_axes; ++axis) {
    if (a.size(axis) != b.size(axis)) return false;
  }
  return true;
}

// True if gradient is dense and has the rows of `of`, with at least its columns, in multiples of 8
// (16 bytes).
bool takes_gradient(const Tensor& gradient, const Tensor& of, const Axes& axes) {
  const int64_t columns = gradient.dim() == axes.dim + 1 ? gradient.size(axes.dim) : 0;
  return same_sizes(gradient, of, axes.dim) && columns >= of.size(axes.dim) && columns % 8 == 0 &&
         gradient.is_contiguous();
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

// dout: rows and heads of out. dlse: shape of lse; none: 0. lse: dense. q, k, v, out, dout:
// addresses and strides are multiples of 16 bytes, the last stride is 1. dq, dk, dv: dense, rows of
// q, k and v, columns rounded up to a multiple of 8; rows that belong to no sequence become 0.
// deterministic: bitwise equal results in every run. Other arguments: as in forward.
void backward_into(Tensor dout, std::optional<Tensor> dlse, Tensor out, Tensor lse, Tensor q,
                   Tensor k, Tensor v, std::optional<Tensor> cu_seqlens_q,
                   std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_q,
                   std::optional<Tensor> seqused_k, Tensor dq, Tensor dk, Tensor dv, int64_t config,
                   int64_t seqlen_q, int64_t seqlen_k, double softmax_scale, double softcap,
                   int64_t window_left, int64_t window_right, int64_t num_sms, int64_t sm_margin,
                   bool deterministic) {
  const BackwardKernel& kernel = backward_kernel(config);
  const VarlenTensors varlen_tensors{cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k};
  const bool varlen = varlen_tensors.varlen();
  const Axes axes(varlen);
  if (!fit_together(q, k, out, lse, axes) || !fit_together(k, v, out, axes) ||
      !same_sizes(dout, out, axes.dim) || dout.size(axes.dim) < v.size(axes.dim) ||
      (dlse && !same_sizes(*dlse, lse, lse.dim())) || !takes_gradient(dq, q, axes) ||
      !takes_gradient(dk, k, axes) || !takes_gradient(dv, v, axes)) {
    fail(kernel.info.name, "the tensors do not fit together");
  }
  const int device = q.get_device_index();
  const DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const std::optional<Tensor> schedule = new_varlen_schedule(varlen_tensors, device);
  BackwardParams params{
      .forward = make_params(q, k, v.size(axes.dim), out, lse, varlen_tensors, schedule,
                             {seqlen_q, seqlen_k, softmax_scale, softcap, window_left, window_right,
                              num_sms, sm_margin}),
      .dout = dout.data_ptr(),
      .dlse = dlse ? static_cast<const float*>(dlse->data_ptr()) : nullptr,
      .dq = dq.data_ptr(),
      .dk = dk.data_ptr(),
      .dv = dv.data_ptr(),
      .dout_stride = row_strides(dout, varlen),
      .dlse_stride = dlse ? lse_strides(*dlse, varlen) : Strides{},
      .dq_stride = row_strides(dq, varlen),
      .dk_stride = row_strides(dk, varlen),
      .dv_stride = row_strides(dv, varlen),
      .deterministic = deterministic,
  };
  params.forward.v = v.data_ptr();
  params.forward.v_stride = row_strides(v, varlen);
  params.forward.tile_counter = tile_counter(device, stream);
  // The kernels write only the rows of sequences, and none if there is no query or no key.
  if (varlen || seqused_q || seqused_k || seqlen_q == 0 || seqlen_k == 0) {
    for (const Tensor* gradient : {&dq, &dk, &dv}) clear(*gradient, stream);
  }
  const int64_t bytes = kernel.workspace_bytes(params.forward);
  const Tensor workspace = new_tensor<1>({(bytes + 3) / 4}, aoti_torch_dtype_float32(), device);
  params.workspace = workspace.data_ptr();
  kernel.launch(params, stream);
}

// Allocates dq, dk and dv and calls backward_into.
std::tuple<Tensor, Tensor, Tensor> backward(
    Tensor dout, std::optional<Tensor> dlse, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v,
    std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
    std::optional<Tensor> seqused_q, std::optional<Tensor> seqused_k, int64_t config,
    int64_t seqlen_q, int64_t seqlen_k, double softmax_scale, double softcap, int64_t window_left,
    int64_t window_right, int64_t num_sms, int64_t sm_margin, bool deterministic) {
  const Axes axes(cu_seqlens_q.has_value());
  const auto gradient_of = [&](const Tensor& tensor) {
    if (tensor.dim() != axes.dim + 1) {
      fail(backward_kernel(config).info.name, "the tensors do not fit together");
    }
    return new_rows(tensor, tensor.size(axes.dim), dtype_of(q), axes, q.get_device_index());
  };
  const Tensor dq = gradient_of(q), dk = gradient_of(k), dv = gradient_of(v);
  backward_into(dout, dlse, out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, dq,
                dk, dv, config, seqlen_q, seqlen_k, softmax_scale, softcap, window_left,
                window_right, num_sms, sm_margin, deterministic);
  return {dq, dk, dv};
}

}  // namespace

#define FA3_RESULTS "Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def("backward(" FA3_RESULTS FA3_TENSORS FA3_OPTIONS
              ", bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)");
  library.def("backward_into(" FA3_RESULTS FA3_TENSORS
              "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, " FA3_OPTIONS
              ", bool deterministic) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CUDA, library) {
  library.impl("backward", boxed<backward>);
  library.impl("backward_into", boxed<backward_into>);
}

}  // namespace flashattn3
