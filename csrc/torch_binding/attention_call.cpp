#include "torch_binding/attention_call.h"

#include <algorithm>
#include <string>

#include "launch/errors.h"

namespace flashattn3 {

bool fit_together(const Tensor& q, const Tensor& k, const Tensor& out, const Tensor& lse,
                  const Axes& axes) {
  const int64_t rank = axes.dim + 1;
  if (q.dim() != rank || k.dim() != rank || out.dim() != rank) return false;
  return k.size(axes.dim) == q.size(axes.dim) && out.size(axes.rows) == q.size(axes.rows) &&
         out.size(axes.heads) == q.size(axes.heads) &&
         lse.numel() * q.size(axes.dim) == q.numel() && lse.is_contiguous();
}

bool fit_together(const Tensor& k, const Tensor& v, const Tensor& out, const Axes& axes) {
  return v.dim() == axes.dim + 1 && v.size(axes.rows) == k.size(axes.rows) &&
         v.size(axes.heads) == k.size(axes.heads) && out.size(axes.dim) >= v.size(axes.dim);
}

Tensor new_rows(const Tensor& rows, int64_t columns, int32_t dtype, const Axes& axes, int device) {
  const int64_t whole = (columns + 7) / 8 * 8;
  if (axes.rows == 0) {
    return new_tensor<3>({rows.size(0), rows.size(1), whole}, dtype, device);
  }
  return new_tensor<4>({rows.size(0), rows.size(1), rows.size(2), whole}, dtype, device);
}

ForwardParams make_params(const Tensor& q, const Tensor& k, int64_t head_dim_v, const Tensor& out,
                          const Tensor& lse, const VarlenTensors& varlen_tensors,
                          const std::optional<Tensor>& varlen_schedule, const Scalars& scalars) {
  const bool varlen = varlen_tensors.varlen();
  const Axes axes(varlen);
  const int64_t total_q = q.size(axes.rows), heads_q = q.size(axes.heads);
  if (std::max(total_q, k.size(axes.rows)) > kMaxRows) {
    fail("attention", "q, k and v may have up to " + std::to_string(kMaxRows) + " rows");
  }
  return {
      .q = q.data_ptr(),
      .k = k.data_ptr(),
      .out = out.data_ptr(),
      .lse = static_cast<float*>(lse.data_ptr()),
      .q_stride = row_strides(q, varlen),
      .k_stride = row_strides(k, varlen),
      .out_stride = row_strides(out, varlen),
      .lse_stride = {.batch = varlen ? 0 : heads_q * total_q, .seq = 1, .head = total_q},
      .batch =
          static_cast<int>(varlen ? varlen_tensors.cu_seqlens_q->numel() - 1 : q.size(axes.batch)),
      .seqlen_q = static_cast<int>(scalars.seqlen_q),
      .seqlen_k = static_cast<int>(scalars.seqlen_k),
      .total_q = static_cast<int>(total_q),
      .total_k = static_cast<int>(k.size(axes.rows)),
      .num_heads_q = static_cast<int>(heads_q),
      .num_heads_kv = static_cast<int>(k.size(axes.heads)),
      .head_dim = static_cast<int>(q.size(axes.dim)),
      .head_dim_v = static_cast<int>(head_dim_v),
      .cu_seqlens_q = indices(varlen_tensors.cu_seqlens_q),
      .cu_seqlens_k = indices(varlen_tensors.cu_seqlens_k),
      .seqused_q = indices(varlen_tensors.seqused_q),
      .seqused_k = indices(varlen_tensors.seqused_k),
      .varlen_schedule =
          varlen_schedule ? static_cast<int32_t*>(varlen_schedule->data_ptr()) : nullptr,
      .softmax_scale = static_cast<float>(scalars.softmax_scale),
      .softcap = static_cast<float>(scalars.softcap),
      .window_left = static_cast<int>(scalars.window_left),
      .window_right = static_cast<int>(scalars.window_right),
      .num_sms = static_cast<int>(scalars.num_sms),
      .sm_margin = static_cast<int>(scalars.sm_margin),
  };
}

std::optional<Tensor> new_varlen_schedule(const VarlenTensors& varlen_tensors, int device) {
  if (!varlen_tensors.varlen()) return std::nullopt;
  return new_tensor<1>({2 * varlen_tensors.cu_seqlens_q->numel() - 1}, aoti_torch_dtype_int32(),
                       device);
}

}  // namespace flashattn3
