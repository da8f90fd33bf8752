// Both passes of a repeated call, with the mask that is kept. Where the forward has few query rows
// and many keys a decode kernel runs it, for which the keys are a full cache
// (flashattn3/backends/packed.py).
#pragma once

#include "torch_binding/attention_call.h"
#include "torch_binding/launch_cache.h"

namespace flashattn3 {

// From the tensors of a call, which fit_tma and whose sizes are those of the plan, to new results,
// as run_forward and run_backward.
ForwardResults run_kept_forward(const char* function, const KeptPasses& kept, ForwardCall call);
Gradients run_kept_backward(const char* function, const KeptPasses& kept, BackwardCall call);

}  // namespace flashattn3
