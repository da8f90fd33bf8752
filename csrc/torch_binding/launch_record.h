// A prepared launch: the kernel config and the numbers of a call, stored in a CPU tensor, so that
// torch owns the memory and any thread may use it. It holds no pointer and no device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "launch/decode_params.h"
#include "launch/params.h"
#include "launch/registry.h"
#include "torch_binding/boxed.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

enum class Pass : int64_t {
  kForward = 0x6677640a,
  kBackward = 0x6277640a,
  kDecode = 0x6465630a,
};

template <class Problem>
struct LaunchOf {
  Pass pass;
  int64_t config;  // index into FORWARD_CONFIGS, BACKWARD_CONFIGS or CACHED_CONFIGS
  Problem problem;
};
using AttentionLaunch = LaunchOf<AttentionProblem>;
using CachedLaunch = LaunchOf<CachedProblem>;

// The prepared launch in `tensor`. Throws for a tensor that prepare_forward (or prepare_backward,
// as the pass says) did not return.
const AttentionLaunch& attention_launch(const char* function, Pass pass, const Tensor& tensor);
// The same of prepare_decode.
const CachedLaunch& cached_launch(const char* function, const Tensor& tensor);

}  // namespace flashattn3
