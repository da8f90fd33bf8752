// What the operators of the forward and the backward share: the tensors and options of a call, and
// the ForwardParams made of them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "launch/params.h"
#include "torch_binding/tensors.h"

// Arguments of every operator on attention, in schemas.
#define FA3_TENSORS                                                                               \
  "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, " \
  "Tensor? seqused_k, "
#define FA3_OPTIONS                                                                               \
  "int config, int seqlen_q, int seqlen_k, float softmax_scale, float softcap, int window_left, " \
  "int window_right, int num_sms, int sm_margin"

namespace flashattn3 {

// Where the axes of a tensor are: (batch, rows, heads, head_dim), or (rows, heads, head_dim).
struct Axes {
  explicit Axes(bool varlen) : batch(0), rows(varlen ? 0 : 1), heads(rows + 1), dim(rows + 2) {}
  int64_t batch, rows, heads, dim;
};

// q with k and the results, k with v.
bool fit_together(const Tensor& q, const Tensor& k, const Tensor& out, const Tensor& lse,
                  const Axes& axes);
bool fit_together(const Tensor& k, const Tensor& v, const Tensor& out, const Axes& axes);

// As a tensor of `rows`'s rows and heads, with room for so many columns in whole 16 bytes.
Tensor new_rows(const Tensor& rows, int64_t columns, int32_t dtype, const Axes& axes, int device);

// Which rows are sequences; cu_seqlens are both there or both not.
struct VarlenTensors {
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  bool varlen() const { return cu_seqlens_q.has_value(); }
};

// seqlen_q, seqlen_k: rows of a sequence, of the longest one where there are cu_seqlens.
struct Scalars {
  int64_t seqlen_q, seqlen_k;
  double softmax_scale, softcap;
  int64_t window_left, window_right;
  int64_t num_sms, sm_margin;
};

// All but v, of which only the head dim is read, and the tile counter. varlen_schedule: room for
// it.
ForwardParams make_params(const Tensor& q, const Tensor& k, int64_t head_dim_v, const Tensor& out,
                          const Tensor& lse, const VarlenTensors& varlen_tensors,
                          const std::optional<Tensor>& varlen_schedule, const Scalars& scalars);

// Memory for the order of the sequences. Its owner may go once the launch is in the stream, as with
// all of torch's memory.
std::optional<Tensor> new_varlen_schedule(const VarlenTensors& varlen_tensors, int device);

}  // namespace flashattn3
