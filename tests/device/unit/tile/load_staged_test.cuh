// tile/load_staged.cuh: each register gets what stage_rows staged from it.
#pragma once

#include "../unit.cuh"
#include "tile/fragment.h"
#include "tile/load_staged.cuh"
#include "tile/tma_store.cuh"

namespace unit::load_staged {

using namespace flashattn3;

__global__ void store_loaded_rows(uint32_t* found) {
  uint8_t* staged = shared_memory();
  uint32_t word[16], half[8];
  for (int i = 0; i < 16; ++i) word[i] = element_pair(i, 0);
  stage_rows(staged, word);
  __syncwarp();
  for (uint32_t& x : word) x = 0;
  load_staged_rows(word, staged);
  load_staged_rows(half, staged, 2);
  for (int i = 0; i < 16; ++i) found[threadIdx.x * 24 + i] = word[i];
  for (int i = 0; i < 8; ++i) found[threadIdx.x * 24 + 16 + i] = half[i];
}

inline void check_loaded(Result& result) {
  const auto found = results_of<uint32_t>(32 * 24, store_loaded_rows, 1, 32, kRowsOfWarp * 128);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 24; ++i) {
      const int word = i < 16 ? i : i - 8;  // the second half again
      const int row = thread_row(lane) + register_row(2 * word);
      const int column = thread_column(lane) + register_column(2 * word);
      const uint32_t pair = element(row, column) | static_cast<uint32_t>(element(row, column + 1))
                                                       << 16;
      result.equal(pair, found[lane * 24 + i], "loaded", lane, i);
    }
  }
}

static const Tests kTests = {{"tile/load_staged: registers", Where::kGpu, check_loaded}};

}  // namespace unit::load_staged
