// The autograd node of dense 16-bit calls.
#pragma once

namespace flashattn3 {

// Registers the kernels of autograd_node.cpp for the dispatch key, for the life of the process.
void register_autograd_node(const char* dispatch_key);

}  // namespace flashattn3
