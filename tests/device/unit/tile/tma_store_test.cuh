// tile/tma_store.cuh: from the fragments of one warp to rows of a tensor, by TMA where all 16 rows
// exist and by plain stores where fewer do. Nothing else is written.
#pragma once

#include "../unit.cuh"
#include "launch/tensor_map.h"
#include "tile/fragment.h"
#include "tile/tma_store.cuh"

namespace unit::tma_store {

using namespace flashattn3;

constexpr int kAtoms = 2, kSeq = 40, kHeads = 2;

// One warp stages 16 x 128 elements, an atom as a whole and another in two halves, and stores them.
__global__ void store_rows(const __grid_constant__ CUtensorMap map, RowTarget target) {
  target.tensor_map = &map;
  uint8_t* staged = shared_memory();
  constexpr int kAtomStride = kRowsOfWarp * 128;
  uint32_t word[16], half[2][8];
  for (int i = 0; i < 16; ++i) word[i] = element_pair(i, 0);
  for (int i = 0; i < 16; ++i) half[i / 8][i % 8] = element_pair(i, 64);
  stage_rows(staged, word);
  stage_rows(staged + kAtomStride, half[0], 0);
  stage_rows(staged + kAtomStride, half[1], 2);
  store_staged<kAtoms>(target, staged, kAtomStride, 0);
  if (threadIdx.x == 0) wait_for_stores();
  __syncwarp();
}

inline void check_rows(Result& result) {
  for (const int head_dim : {128, 96, 72, 64, 8}) {
    for (const int num_rows : {16, 15, 8, 1}) {
      const int row = 40 - num_rows - 3, head = num_rows % 2;
      Array<uint16_t> out(kSeq * kHeads * head_dim);
      const int64_t stride = kHeads * head_dim;
      const CUtensorMap map =
          make_tensor_map("test", ElementType::kBFloat16, out.device(), out.device(),
                          {head_dim, kSeq, kHeads, 1}, {kSeq * stride, stride, head_dim}, 16);
      const RowTarget target{.tensor_map = nullptr,
                             .row = row,
                             .head = head,
                             .batch_coord = 0,
                             .data = out.device() + row * stride + head * head_dim,
                             .row_stride = stride,
                             .num_rows = num_rows,
                             .num_columns = head_dim};
      launch(store_rows, 1, 32, kAtoms * kRowsOfWarp * 128, map, target);
      const std::vector<uint16_t>& found = out.download();
      const std::string name =
          "out of " + std::to_string(num_rows) + " rows, d" + std::to_string(head_dim);
      for (int token = 0; token < kSeq; ++token) {
        for (int i = 0; i < stride; ++i) {
          const bool written = token >= row && token < row + num_rows && i / head_dim == head;
          result.equal(written ? element(token - row, i % head_dim) : 0xffff,
                       found[token * stride + i], name, token, i);
        }
      }
    }
  }
}

// store_columns at the end of a row of odd length.
__global__ void store_eight(uint16_t* row, int column, int num_columns) {
  store_columns(row, column, num_columns,
                make_uint4(0x00020001, 0x00040003, 0x00060005, 0x00080007));
}

inline void check_columns(Result& result) {
  for (int num_columns = 9; num_columns <= 17; ++num_columns) {
    Array<uint16_t> row(32);
    launch(store_eight, 1, 1, 0, row.device(), 8, num_columns);
    for (int i = 0; i < 32; ++i) {
      const bool written = i >= 8 && i < 16 && i < num_columns;
      result.equal(written ? i - 7 : 0xffff, row.download()[i], "columns", num_columns, i);
    }
  }
}

// staged_columns reads 8 neighbouring columns of a row of the staging buffer.
__global__ void store_staged_columns(uint4* found) {
  uint8_t* staged = shared_memory();
  uint32_t word[16];
  for (int i = 0; i < 16; ++i) word[i] = element_pair(i, 0);
  stage_rows(staged, word);
  __syncwarp();
  for (int i = threadIdx.x; i < 16 * 8; i += 32) found[i] = staged_columns(staged, i / 8, i % 8);
}

inline void check_staged(Result& result) {
  const auto found = results_of<uint4>(16 * 8, store_staged_columns, 1, 32, kRowsOfWarp * 128);
  const uint16_t* elements = reinterpret_cast<const uint16_t*>(found.data());
  for (int i = 0; i < 16 * 64; ++i) {
    result.equal(element(i / 64, i % 64), elements[i], "staged", i / 64, i % 64);
  }
}

static const Tests kTests = {{"tile/tma_store: rows", Where::kGpu, check_rows},
                             {"tile/tma_store: columns", Where::kGpu, check_columns},
                             {"tile/tma_store: staged rows", Where::kGpu, check_staged}};

}  // namespace unit::tma_store
