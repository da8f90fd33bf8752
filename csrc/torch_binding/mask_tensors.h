// The tensors of a mask as lists of blocks, the last arguments of the operators of both passes:
// FLASHATTN3_MASK. The forward takes the lists of queries, the backward those of keys.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "launch/params.h"
#include "torch_binding/boxed.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// side: behind the names.
#define FLASHATTN3_MASK(side)                                                                     \
  "Tensor? mask_entries" #side "=None, Tensor? mask_work" #side "=None, Tensor? mask_tiles" #side \
  "=None"
struct MaskTensors {
  // int32 (batch | 1, num_heads_q | 1, row blocks, column blocks) and (..., row blocks, 4); int64
  // (bit tiles, 128). Contiguous, at multiples of 16 bytes. All or none is given.
  std::optional<Tensor> entries, work, tiles;

  static MaskTensors take(Arguments& arguments) {
    return {.entries = arguments.take<std::optional<Tensor>>(),
            .work = arguments.take<std::optional<Tensor>>(),
            .tiles = arguments.take<std::optional<Tensor>>()};
  }
};

// Checks the lists of `rows` tokens, whose columns are `columns` tokens. device: of q.
void check_mask(const char* function, const AttentionProblem& problem, const MaskTensors& mask,
                int rows, int columns, int device);
MaskListParams list_params(const MaskTensors& mask);

}  // namespace flashattn3
