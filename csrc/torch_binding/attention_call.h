// Shared by the forward and backward operators and the autograd node: the tensors of a call, their
// checks, the ForwardParams built from them and a prepared launch, and the two passes.
// forward_op.cpp and score_tensors.cpp define all but the backward pass.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "call_tensors.h"
#include "launch/params.h"
#include "torch_binding/boxed.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/mask_tensors.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// The tensors that both passes read, arguments of every attention operator: FLASHATTN3_SCHEMA, and
// those that change scores, FLASHATTN3_SCORES. varlen: the cu_seqlens are given. bhsd: q, k and v
// have their heads before their tokens; not with varlen.
//   sinks: (num_heads_q), float32 or 16 bits. alibi_slopes: float32, (num_heads_q) or (batch,
//   num_heads_q). Dense along their heads. bias: of q's dtype, (batch or 1, num_heads_q or 1,
//   seqlen_q, seqlen_k), as TMA reads it.
struct CallTensors {
#define FLASHATTN3_REQUIRED(name) Tensor name;
#define FLASHATTN3_OPTIONAL(name) std::optional<Tensor> name;
  FLASHATTN3_TENSORS(FLASHATTN3_REQUIRED, FLASHATTN3_OPTIONAL)
  FLASHATTN3_SCORE_TENSORS(FLASHATTN3_OPTIONAL)
#undef FLASHATTN3_REQUIRED
#undef FLASHATTN3_OPTIONAL
  bool bhsd = false;

  // Takes all but those that change scores.
  static CallTensors take(Arguments& arguments);
  // Whether used lengths shorten the sequences.
  bool shortened() const { return seqused_q || seqused_k; }
};

// Throws "function: name.shape must be wanted, got found".
void expect_shape(const char* function, const char* name, const Tensor& tensor,
                  const Shape& wanted);
// Throws the same of tensors of `wanted` with any larger last axis, or if that has another stride
// than 1 in a tensor with elements.
void expect_rows(const char* function, const char* name, const Tensor& tensor, Shape wanted);

// Axes of q, k, v and their gradients; by default of out and dout.
inline const Axes& axes_of(const AttentionProblem& problem, bool bhsd = false) {
  return problem.varlen ? kVarlen : bhsd ? kBhsd : kBshd;
}
// The shape of `tokens` rows in these axes, without the batch if varlen.
Shape rows_shape(const AttentionProblem& problem, const Axes& axes, int64_t tokens, int64_t heads,
                 int64_t columns);
// (batch, num_heads_q, seqlen_q), or with varlen (num_heads_q, total_q): of lse.
Shape lse_shape(const AttentionProblem& problem);

// Takes the tensors that change scores, which the overload "scores" of an operator has behind the
// arguments of its other overload: torch takes 0.1 us for each argument, given or not.
template <class Tensors>
void take_scores(Arguments& arguments, Tensors& tensors) {
#define FLASHATTN3_OPTIONAL(name) tensors.name = arguments.take<std::optional<Tensor>>();
  FLASHATTN3_SCORE_TENSORS(FLASHATTN3_OPTIONAL)
#undef FLASHATTN3_OPTIONAL
}

// Checks them, and fills what ForwardParams has of them. device: of q.
void check_scores(const char* function, const AttentionProblem& problem, const CallTensors& tensors,
                  int device);
void set_scores(ForwardParams& params, const CallTensors& tensors);

// Checks q, k, the token positions and, if it has rows, v: all but their dtypes, which the plan
// determined. v_is_permuted: v's shape is left to the caller.
void check_tensors(const char* function, const AttentionProblem& problem,
                   const CallTensors& tensors, bool v_is_permuted);

// Checks out and lse: out may have more columns than v.
void check_results(const char* function, const AttentionProblem& problem, const Tensor& out,
                   const Tensor& lse);

// Allocates a 16-bit tensor of `tokens` rows whose columns are rounded up to a multiple of 8 (16
// bytes). In memory each row follows the row before it, whatever the axes.
Tensor new_rows(const AttentionProblem& problem, const Axes& axes, int64_t tokens, int64_t heads,
                int64_t columns, int32_t dtype, int device);

// Allocates lse, dense, for a call that returns it.
std::optional<Tensor> new_lse(const AttentionProblem& problem, bool returns_lse, int device);

// Fills everything but v_stride, tile_counter and the extra arguments of 8-bit kernels.
// varlen_schedule: its memory, or null.
ForwardParams make_params(const AttentionProblem& problem, const CallTensors& tensors,
                          const Tensor& out, const std::optional<Tensor>& lse,
                          const std::optional<Tensor>& varlen_schedule);

// Allocates memory for the order of the sequences; none if not varlen. It may be released once the
// launch is enqueued, because torch's allocator reuses memory in stream order.
std::optional<Tensor> new_varlen_schedule(const AttentionProblem& problem, int device);

// Allocates LaunchSize::workspace_bytes, as above; none if 0.
std::optional<Tensor> new_workspace(int64_t bytes, int device);

// Index of the GPU of q. Throws for a tensor on another device.
int device_of(const char* function, const CallTensors& tensors);

// Descales, only of 8-bit inputs: fp32 (batch, heads of the tensor, blocks), for q also (batch,
// heads of k, blocks); none: 1 everywhere.
struct ForwardCall {
  CallTensors tensors;
  std::optional<Tensor> q_descale, k_descale, v_descale;
  std::optional<Tensor> max_logit;  // (num_heads_q), float32: -inf before the call
  MaskTensors mask;                 // lists of queries
  bool returns_lse = true;          // else no kernel writes it
};

// out: head_dim_v columns rounded up to a multiple of 8 (16 bytes).
struct ForwardResults {
  Tensor out;
  std::optional<Tensor> lse;  // of a call that returns it
};

// dout: rows and heads of out. dlse: shape of lse; none: 0. lse: dense. q, k, v, out, dout:
// addresses and strides are multiples of 16 bytes, the last stride is 1.
struct BackwardCall {
  Tensor dout;
  std::optional<Tensor> dlse;
  Tensor out, lse;
  CallTensors tensors;
  bool with_dbias = false;      // whether the bias needs a gradient
  MaskTensors mask;             // lists of keys
  std::optional<Tensor> turns;  // as mask.entries, whose order of additions they are; a
                                // deterministic call with a mask has them
};

// In the axes of q, k and v, as new_rows allocates them.
struct Gradients {
  Tensor dq, dk, dv;
  std::optional<Tensor> dsinks;  // as the sinks
  std::optional<Tensor> dbias;   // (.., seqlen_k rounded up to a multiple of 8), else as the bias
};

// From a prepared launch and the tensors of a call to new results, on torch's current stream of the
// tensors' device. function: named in the message of the error for tensors that are not those of
// the launch.
ForwardResults run_forward(const char* function, const AttentionLaunch& launch,
                           const ForwardCall& call);
Gradients run_backward(const char* function, const AttentionLaunch& launch,
                       const BackwardCall& call);

}  // namespace flashattn3
