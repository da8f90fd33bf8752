// tile/tma_load.cuh: tiles and boxes of floats, also past the end of the tensor, where zeros
// arrive. Zero fill of tiles of NaN: zeros from a row on, or also before one, and no other byte
// changed.
#pragma once

#include "../unit.cuh"
#include "backward/copy_floats.cuh"
#include "forward/load_cached.cuh"
#include "launch/tensor_map.h"
#include "tile/tma_load.cuh"

namespace unit::tma_load {

using namespace flashattn3;

constexpr int kRows = 48, kBatch = 2, kSeq = 100, kHeads = 3;

// kFirstAtom > 0: the atoms from there on, by copy_tile; else the whole tile by load_tile.
template <int kAtoms, int kAtomColumns, int kFirstAtom>
__global__ void load_one(const __grid_constant__ CUtensorMap map, int row, int head, int batch,
                         uint8_t* found) {
  store_loaded<kRows * kAtoms * 128>(found, [&](uint8_t* tile, Barrier& full) {
    if constexpr (kFirstAtom > 0) {
      full.arrive_and_expect(kRows * kAtoms * 128);
      copy_tile<kRows, kAtoms, kAtomColumns>(tile, &map, full, kReadAgain, row, head, batch,
                                             kFirstAtom);
    } else {
      load_tile<kRows, kAtoms, kAtomColumns>(tile, &map, full, kReadOnce, row, head, batch);
    }
  });
}

template <ElementType kElement, int kHeadDim, int kAtoms, int kFirstAtom>
void check_tile(Result& result) {
  constexpr int kElementBytes = element_bytes(kElement), kPitchBytes = kHeadDim * kElementBytes;
  const std::vector<uint8_t> tensor = some_bytes(size_t{kBatch} * kSeq * kHeads * kPitchBytes);
  Array<uint8_t> device(tensor);
  const CUtensorMap map = make_tensor_map(
      "test", kElement, device.device(), device.device(), {kHeadDim, kSeq, kHeads, kBatch},
      {int64_t{kSeq} * kHeads * kHeadDim, kHeads * kHeadDim, kHeadDim}, kRows);
  for (const int row : {0, 17, 60, 99, 100}) {
    for (int b = 0; b < kBatch; ++b) {
      const int head = row % kHeads;
      constexpr int kBytes = kRows * kAtoms * 128;
      const auto tile =
          results_of<uint8_t>(kBytes, load_one<kAtoms, 128 / kElementBytes, kFirstAtom>, 1, 64,
                              kTileOffset + kBytes, map, row, head, b);
      const std::string name = "tile from row " + std::to_string(row);
      for (int r = 0; r < kRows; ++r) {
        for (int byte = 0; byte < kAtoms * 128; ++byte) {
          const int of_row = kFirstAtom * 128 + byte;
          const bool inside = row + r < kSeq && of_row < kPitchBytes;
          const size_t at =
              ((size_t{static_cast<uint32_t>(b)} * kSeq + row + r) * kHeads + head) * kPitchBytes +
              of_row;
          result.equal(inside ? tensor[at] : 0, tile[tile_offset(kRows, r, byte)], name, r, byte);
        }
      }
    }
  }
}

constexpr int kBoxColumns = 64;

__global__ void load_floats(const __grid_constant__ CUtensorMap map, int column, int row,
                            uint8_t* found) {
  store_loaded<kBoxColumns * 4>(found, [&](uint8_t* tile, Barrier& full) {
    full.arrive_and_expect(kBoxColumns * 4);
    backward::copy_floats(reinterpret_cast<float*>(tile), &map, full, kReadAgain, column, row);
  });
}

inline void check_floats(Result& result) {
  constexpr int kColumns = 192, kFloatRows = 5;
  std::vector<float> matrix(kColumns * kFloatRows);
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i] = static_cast<float>(i + 1);
  Array<float> device(matrix);
  const CUtensorMap map =
      make_float_map("test", device.device(), kColumns, kFloatRows, kBoxColumns);
  for (const int column : {0, 64, 128, 160}) {
    for (const int row : {0, 4}) {
      const auto found = results_of<uint8_t>(kBoxColumns * 4, load_floats, 1, 64,
                                             kTileOffset + kBoxColumns * 4, map, column, row);
      const float* box = reinterpret_cast<const float*>(found.data());
      for (int i = 0; i < kBoxColumns; ++i) {
        const bool inside = column + i < kColumns;
        result.equal(inside ? matrix[row * kColumns + column + i] : 0.f, box[i], "floats", column,
                     i);
      }
    }
  }
}

template <int kRows, int kAtoms>
__global__ void fill_rows(int used, uint8_t* found) {
  store_filled<kRows * kAtoms * 128>(found, [&](uint8_t* tile) {
    zero_fill_rows<kRows, kAtoms>(tile, used, threadIdx.x, blockDim.x);
  });
}

template <int kRows, int kAtoms>
void check_rows(Result& result) {
  constexpr int kBytes = kRows * kAtoms * 128;
  for (const int num_threads : {32, 256}) {
    for (const int used : {0, 1, 15, 16, 31, kRows - 1, kRows}) {
      const auto found = results_of<uint8_t>(kBytes + kMargin, fill_rows<kRows, kAtoms>, 1,
                                             num_threads, kBytes + kMargin, used);
      compare_filled(
          result, "V used " + std::to_string(used), found, kRows, kAtoms * 128,
          [](int row, int byte) { return tile_offset(kRows, row, byte); },
          [&](int row) { return row >= used; });
    }
  }
}

template <int kRows, int kAtoms>
__global__ void fill_rows_outside(int begin, int end, uint8_t* found) {
  store_filled<kRows * kAtoms * 128>(found, [&](uint8_t* tile) {
    const TileStrides strides{AtomMajor<kRows>::atom, AtomMajor<kRows>::group};
    forward::zero_fill_rows_outside<kRows, kAtoms>(tile, strides, begin, end, threadIdx.x,
                                                   blockDim.x);
  });
}

template <int kRows, int kAtoms>
void check_rows_outside(Result& result) {
  constexpr int kBytes = kRows * kAtoms * 128;
  for (const int begin : {-100, 0, 1, 15, 31, kRows - 1, kRows, kRows + 100}) {
    for (const int end : {-1, 0, 1, 15, 16, 33, kRows - 1, kRows, kRows + 100}) {
      const auto found = results_of<uint8_t>(kBytes + kMargin, fill_rows_outside<kRows, kAtoms>, 1,
                                             32, kBytes + kMargin, begin, end);
      compare_filled(
          result, "V from " + std::to_string(begin) + " to " + std::to_string(end), found, kRows,
          kAtoms * 128, [](int row, int byte) { return tile_offset(kRows, row, byte); },
          [&](int row) { return row < begin || row >= end; });
    }
  }
}

static const Tests kTests = {
    {"tile/tma_load: bf16, d96", Where::kGpu, check_tile<ElementType::kBFloat16, 96, 2, 0>},
    {"tile/tma_load: fp16, second atom", Where::kGpu, check_tile<ElementType::kFloat16, 128, 1, 1>},
    {"tile/tma_load: e4m3, d256", Where::kGpu, check_tile<ElementType::kE4m3, 256, 2, 0>},
    {"tile/tma_load: floats", Where::kGpu, check_floats},
    {"tile/tma_load: zero fill, 64 rows of 128 bytes", Where::kGpu, check_rows<64, 1>},
    {"tile/tma_load: zero fill, 80 rows of 384 bytes", Where::kGpu, check_rows<80, 3>},
    {"tile/tma_load: zero fill of 64 rows of 256 bytes, both ends", Where::kGpu,
     check_rows_outside<64, 2>}};

}  // namespace unit::tma_load
