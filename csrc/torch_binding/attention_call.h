// Shared by the forward and backward operators: the tensors and options of a call, and the
// ForwardParams built from them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "launch/params.h"
#include "torch_binding/tensors.h"

// Schema arguments of every attention operator.
#define FA3_TENSORS                                                                               \
  "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, " \
  "Tensor? seqused_k, "
#define FA3_OPTIONS                                                                               \
  "int config, int seqlen_q, int seqlen_k, float softmax_scale, float softcap, int window_left, " \
  "int window_right, int num_sms, int sm_margin"

namespace flashattn3 {

// Indices of the axes of (batch, rows, heads, head_dim), or with varlen (rows, heads, head_dim).
struct Axes {
  explicit Axes(bool varlen) : batch(0), rows(varlen ? 0 : 1), heads(rows + 1), dim(rows + 2) {}
  int64_t batch, rows, heads, dim;
};

// True if the shapes of q match those of k and the results, and those of k match v's.
bool fit_together(const Tensor& q, const Tensor& k, const Tensor& out, const Tensor& lse,
                  const Axes& axes);
bool fit_together(const Tensor& k, const Tensor& v, const Tensor& out, const Axes& axes);

// Allocates a 16-bit tensor with the rows and heads of `rows` and with `columns` columns, rounded
// up to a multiple of 8 (16 bytes).
Tensor new_rows(const Tensor& rows, int64_t columns, int32_t dtype, const Axes& axes, int device);

// Token positions of the sequences. Both cu_seqlens are given, or neither.
struct VarlenTensors {
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k;
  bool varlen() const { return cu_seqlens_q.has_value(); }
};

// seqlen_q, seqlen_k: tokens of a sequence; with cu_seqlens, of the longest one.
struct Scalars {
  int64_t seqlen_q, seqlen_k;
  double softmax_scale, softcap;
  int64_t window_left, window_right;
  int64_t num_sms, sm_margin;
};

// Fills everything but v (only its head dim is read) and the tile counter. varlen_schedule: its
// memory.
ForwardParams make_params(const Tensor& q, const Tensor& k, int64_t head_dim_v, const Tensor& out,
                          const Tensor& lse, const VarlenTensors& varlen_tensors,
                          const std::optional<Tensor>& varlen_schedule, const Scalars& scalars);

// Allocates memory for the order of the sequences. It may be released once the launch is enqueued,
// because torch's allocator reuses memory in stream order.
std::optional<Tensor> new_varlen_schedule(const VarlenTensors& varlen_tensors, int device);

}  // namespace flashattn3
