// The tensors that change scores: their checks, and what ForwardParams has of them.
#include <torch/csrc/stable/tensor.h>

#include "launch/errors.h"
#include "launch/params.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

void check_scores(const char* function, const AttentionProblem& problem, const CallTensors& tensors,
                  int device) {
  const int64_t heads = problem.num_heads_q, batch = problem.batch;
  if (const auto& sinks = tensors.sinks) {
    expect_shape(function, "sinks", *sinks, {1, {heads}});
    expect_on_gpu(function, "sinks.device", *sinks, device, "the GPU of q");
    expect(heads == 1 || sinks->stride(0) == 1, function, "sinks.stride(-1)", 1, sinks->stride(0));
  }
  if (const auto& slopes = tensors.alibi_slopes) {
    const bool of_batch = slopes->dim() == 2;
    expect_shape(function, "alibi_slopes", *slopes,
                 of_batch ? Shape{2, {batch, heads}} : Shape{1, {heads}});
    expect_on_gpu(function, "alibi_slopes.device", *slopes, device, "the GPU of q");
    const int64_t stride = slopes->stride(of_batch);
    expect(heads == 1 || stride == 1, function, "alibi_slopes.stride(-1)", 1, stride);
  }
  if (const auto& bias = tensors.bias) {
    const bool one_sequence = bias->dim() == 4 && bias->size(0) == 1;
    const bool one_head = bias->dim() == 4 && bias->size(1) == 1;
    expect_shape(
        function, "bias", *bias,
        {4, {one_sequence ? 1 : batch, one_head ? 1 : heads, problem.seqlen_q, problem.seqlen_k}});
    expect_on_gpu(function, "bias.device", *bias, device, "the GPU of q");
    const bool fits = bias->numel() == 0 || fits_tma(*bias);
    expect(fits, function, "bias", "in rows of multiples of 16 bytes", "another layout");
  }
}

void set_scores(ForwardParams& params, const CallTensors& tensors) {
  if (const auto& sinks = tensors.sinks) {
    const int32_t dtype = dtype_of(*sinks);
    params.sinks = sinks->data_ptr();
    params.sink_type = dtype == aoti_torch_dtype_float16()    ? SinkType::kFloat16
                       : dtype == aoti_torch_dtype_bfloat16() ? SinkType::kBFloat16
                                                              : SinkType::kFloat32;
  }
  if (const auto& slopes = tensors.alibi_slopes) {
    params.alibi_slopes = static_cast<const float*>(slopes->data_ptr());
    params.alibi_batch = slopes->dim() == 2 ? slopes->stride(0) : 0;
  }
  if (const auto& bias = tensors.bias) {
    params.bias = {.data = bias->data_ptr(),
                   .stride = row_strides(*bias, kBhsd),
                   .one_sequence = bias->size(0) == 1,
                   .one_head = bias->size(1) == 1};
  }
}

}  // namespace flashattn3
