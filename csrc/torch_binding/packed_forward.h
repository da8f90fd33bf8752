// The forward of a repeated call. Where it has few query rows and many keys a decode kernel runs
// it, for which the keys are a full cache (flashattn3/backends/packed.py).
#pragma once

#include "torch_binding/attention_call.h"
#include "torch_binding/launch_cache.h"

namespace flashattn3 {

// From the tensors of a call, which fit_tma and whose sizes are those of the plan, to new results,
// as run_forward.
ForwardResults run_kept_forward(const char* function, const KeptPasses& kept,
                                const ForwardCall& call);

}  // namespace flashattn3
