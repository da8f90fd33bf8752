// The tree mask of a cached call as kernels read it.
#pragma once

#include <string>

#include "attention/tree_mask.cuh"
#include "launch/decode_params.h"
#include "launch/errors.h"

namespace flashattn3 {

inline TreeMask tree_mask_of(const DecodeParams& params) {
  return {.words = params.tree_mask,
          .batch = params.cu_seqlens_q != nullptr ? 0 : params.tree_stride.batch,
          .seq = params.tree_stride.seq,
          .num_words = params.tree_words};
}

// Throws for a mask that the kernel does not read, and for one that it lacks; the call has rows.
template <bool kTree>
void expect_tree(const char* name, const DecodeParams& params) {
  const bool given = params.tree_mask != nullptr;
  if (given == kTree) return;
  expect(false, "launch", "tree_mask", std::string(kTree ? "a mask for " : "none for ") + name,
         given ? "a mask" : "none");
}

}  // namespace flashattn3
