// The autograd nodes of dense 16-bit calls.
#pragma once

namespace flashattn3 {

// Register the kernels of autograd_node.cpp for the dispatch key, for the life of the process: of
// plain calls, and of those with one tensor that changes scores.
void register_autograd_node(const char* dispatch_key);
void register_score_node(const char* dispatch_key);

}  // namespace flashattn3
