// tile/zero_fill.cuh on tiles of NaN: zeros from a key on, or before one, and no other byte
// changed.
#pragma once

#include "../unit.cuh"
#include "tile/permuted_v.h"
#include "tile/zero_fill.cuh"

namespace unit::zero_fill {

using namespace flashattn3;

constexpr int kMargin = 128;  // bytes after a tile

// Poisons a tile and the bytes after it with 0xff, fills it, and stores them.
template <int kBytes, class Fill>
__device__ void store_filled(uint8_t* found, Fill fill) {
  uint8_t* tile = shared_memory();
  for (int i = threadIdx.x; i < kBytes + kMargin; i += blockDim.x) tile[i] = 0xff;
  __syncthreads();
  fill(tile);
  __syncthreads();
  for (int i = threadIdx.x; i < kBytes + kMargin; i += blockDim.x) found[i] = tile[i];
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
      Array<uint8_t> found(kBytes + kMargin);
      launch(fill_rows<kRows, kAtoms>, 1, num_threads, kBytes + kMargin, used, found.device());
      const std::vector<uint8_t>& bytes = found.download();
      for (int row = 0; row < kRows; ++row) {
        for (int byte = 0; byte < kAtoms * 128; ++byte) {
          result.equal(row < used ? 0xff : 0, bytes[tile_offset(kRows, row, byte)],
                       "V used " + std::to_string(used), row, byte);
        }
      }
      for (int i = 0; i < kMargin; ++i) result.equal(0xff, bytes[kBytes + i], "after V", used, i);
    }
  }
}

template <int kRows, int kAtoms>
__global__ void fill_rows_outside(int begin, int end, uint8_t* found) {
  store_filled<kRows * kAtoms * 128>(found, [&](uint8_t* tile) {
    zero_fill_rows_outside<kRows, kAtoms>(tile, begin, end, threadIdx.x, blockDim.x);
  });
}

template <int kRows, int kAtoms>
void check_rows_outside(Result& result) {
  constexpr int kBytes = kRows * kAtoms * 128;
  for (const int begin : {-100, 0, 1, 15, 31, kRows - 1, kRows, kRows + 100}) {
    for (const int end : {-1, 0, 1, 15, 16, 33, kRows - 1, kRows, kRows + 100}) {
      Array<uint8_t> found(kBytes + kMargin);
      launch(fill_rows_outside<kRows, kAtoms>, 1, 32, kBytes + kMargin, begin, end, found.device());
      const std::vector<uint8_t>& bytes = found.download();
      const std::string name = "V from " + std::to_string(begin) + " to " + std::to_string(end);
      for (int row = 0; row < kRows; ++row) {
        for (int byte = 0; byte < kAtoms * 128; ++byte) {
          result.equal(row >= begin && row < end ? 0xff : 0, bytes[tile_offset(kRows, row, byte)],
                       name, row, byte);
        }
      }
      for (int i = 0; i < kMargin; ++i) result.equal(0xff, bytes[kBytes + i], name, kRows, i);
    }
  }
}

template <int kKeys, int kHeadDim>
__global__ void fill_permuted(int used, uint8_t* found) {
  store_filled<kKeys * kHeadDim>(found, [&](uint8_t* tile) {
    zero_fill_permuted_v<kKeys, kHeadDim>(tile, used, threadIdx.x, blockDim.x);
  });
}

// Byte of a key and column in a tile of permuted V: (columns / 8, keys / 16, 8 columns, 16 bytes).
inline int permuted_offset(int keys, int key, int column) {
  int at = 0;
  while (permuted_key(at / 4, at % 4) != key % 16) ++at;
  return ((column / 8 * (keys / 16) + key / 16) * 8 + column % 8) * 16 + at;
}

template <int kKeys, int kHeadDim>
void check_permuted(Result& result) {
  constexpr int kBytes = kKeys * kHeadDim;
  for (const int num_threads : {32, 128}) {
    for (int used = 0; used <= kKeys; ++used) {
      Array<uint8_t> found(kBytes + kMargin);
      launch(fill_permuted<kKeys, kHeadDim>, 1, num_threads, kBytes + kMargin, used,
             found.device());
      const std::vector<uint8_t>& bytes = found.download();
      const std::string name = "permuted V used " + std::to_string(used);
      for (int key = 0; key < kKeys; ++key) {
        for (int column = 0; column < kHeadDim; ++column) {
          result.equal(key < used ? 0xff : 0, bytes[permuted_offset(kKeys, key, column)], name, key,
                       column);
        }
      }
      // The columns of the row sums follow the tile and stay as they are.
      for (int i = 0; i < kMargin; ++i) result.equal(0xff, bytes[kBytes + i], name, kKeys, i);
    }
  }
}

static const Tests kTests = {
    {"tile/zero_fill: 64 rows of 128 bytes", Where::kGpu, check_rows<64, 1>},
    {"tile/zero_fill: 80 rows of 384 bytes", Where::kGpu, check_rows<80, 3>},
    {"tile/zero_fill: 64 rows of 256 bytes, both ends", Where::kGpu, check_rows_outside<64, 2>},
    {"tile/zero_fill: permuted V, 96 x 64", Where::kGpu, check_permuted<96, 64>},
    {"tile/zero_fill: permuted V, 128 x 128", Where::kGpu, check_permuted<128, 128>}};

}  // namespace unit::zero_fill
