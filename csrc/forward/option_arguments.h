// Additional arguments of kernel configs with a bias, and of those whose mask is lists of blocks.
#pragma once

#include <cuda.h>

#include "attention/mask_lists.cuh"
#include "forward/arguments.h"

namespace flashattn3::forward {

struct BiasArguments : Arguments {
  // (seqlen_k, seqlen_q, heads, batch), innermost first; boxes of 64 columns x block_m rows.
  CUtensorMap bias;
  // 0 where one head, or one sequence, of the bias serves all; else 1.
  int heads_differ, sequences_differ;
  int batch;
};

struct ListedArguments : Arguments {
  MaskLists lists;  // of queries
};

}  // namespace flashattn3::forward
