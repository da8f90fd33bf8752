// attention/recompute_scores.cuh: S of one warp's rows from the tiles in shared memory, exact for
// small integers.
#pragma once

#include "../unit.cuh"
#include "attention/recompute_scores.cuh"
#include "tile/fragment.h"

namespace unit::recompute_scores {

using namespace flashattn3;

// All eight warps of two warpgroups, one after the other: no other warp takes part.
template <ElementType kElement, int kN, int kHeadDim>
__global__ void store_scores(const uint8_t* q, const uint8_t* k, float* found) {
  constexpr int kBlockM = 128;
  uint8_t* q_tile = shared_memory();
  uint8_t* k_tile = q_tile + tile_bytes(kBlockM, kHeadDim * 2);
  fill_tile(q_tile, q, kBlockM, kHeadDim * 2);
  fill_tile(k_tile, k, kN, kHeadDim * 2);
  __syncthreads();
  const int warp = threadIdx.x / 32;
  for (int turn = 0; turn < 8; ++turn) {
    if (warp == turn) {
      float s[kN / 2];
      flashattn3::recompute_scores<kElement, kBlockM, kN, kHeadDim>(
          s, cute::cast_smem_ptr_to_uint(q_tile), cute::cast_smem_ptr_to_uint(k_tile),
          warp * kRowsOfWarp);
      for (int i = 0; i < kN / 2; ++i) {
        const int row = thread_row(threadIdx.x) + register_row(i);
        found[row * kN + thread_column(threadIdx.x) + register_column(i)] = s[i];
      }
    }
    __syncthreads();
  }
}

template <ElementType kElement, int kN, int kHeadDim>
void check_scores(Result& result) {
  const Matrix q(128, kHeadDim, 4, 31), k(kN, kHeadDim, 4, 32);
  Array<uint8_t> q_bytes(q.bytes(kElement)), k_bytes(k.bytes(kElement));
  Array<float> found(128 * kN);
  launch(store_scores<kElement, kN, kHeadDim>, 1, 256, tile_bytes(128 + kN, kHeadDim * 2),
         q_bytes.device(), k_bytes.device(), found.device());
  const std::vector<float>& s = found.download();
  for (int row = 0; row < 128; ++row) {
    for (int key = 0; key < kN; ++key) {
      int wanted = 0;
      for (int i = 0; i < kHeadDim; ++i) wanted += q.at(row, i) * k.at(key, i);
      result.equal(wanted, s[row * kN + key], "S", row, key);
    }
  }
}

static const Tests kTests = {{"attention/recompute_scores: bf16, 64 keys, d64", Where::kGpu,
                              check_scores<ElementType::kBFloat16, 64, 64>},
                             {"attention/recompute_scores: fp16, 80 keys, d192", Where::kGpu,
                              check_scores<ElementType::kFloat16, 80, 192>}};

}  // namespace unit::recompute_scores
