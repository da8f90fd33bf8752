// The two passes, as the operators and the autograd node run them: from a prepared launch and the
// tensors of a call to new results, on torch's current stream of the tensors' device.
#pragma once

#include <optional>

#include "torch_binding/attention_call.h"
#include "torch_binding/prepared.h"

namespace flashattn3 {

// Descales, only of 8-bit inputs: fp32 (batch, heads of the tensor, blocks), for q also (batch,
// heads of k, blocks); none: 1 everywhere.
struct ForwardCall {
  CallTensors tensors;
  std::optional<Tensor> q_descale, k_descale, v_descale;
};

// out: head_dim_v columns rounded up to a multiple of 8 (16 bytes).
struct ForwardResults {
  Tensor out, lse;
};

// dout: rows and heads of out. dlse: shape of lse; none: 0. lse: dense. q, k, v, out, dout:
// addresses and strides are multiples of 16 bytes, the last stride is 1.
struct BackwardCall {
  Tensor dout;
  std::optional<Tensor> dlse;
  Tensor out, lse;
  CallTensors tensors;
};

// Dense, in the rows of q, k and v, columns rounded up to a multiple of 8 (16 bytes).
struct Gradients {
  Tensor dq, dk, dv;
};

// function: named in the message of the error for tensors that are not those of the launch.
ForwardResults run_forward(const char* function, const PreparedLaunch& launch,
                           const ForwardCall& call);
Gradients run_backward(const char* function, const PreparedLaunch& launch,
                       const BackwardCall& call);

}  // namespace flashattn3
