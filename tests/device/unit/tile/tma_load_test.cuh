// tile/tma_load.cuh: tiles, boxes of floats and permuted V, also past the end of the tensor, where
// zeros arrive.
#pragma once

#include "../unit.cuh"
#include "launch/tensor_map.h"
#include "tile/permuted_v.h"
#include "tile/tma_load.cuh"

namespace unit::tma_load {

using namespace flashattn3;

constexpr int kTileOffset = 1024;  // the barrier is before it

// Runs load(tile, full) in thread 0 over poisoned bytes, waits, and stores the bytes.
template <int kBytes, class Load>
__device__ void store_loaded(uint8_t* found, Load load) {
  Barrier& full = *reinterpret_cast<Barrier*>(shared_memory());
  uint8_t* tile = shared_memory() + kTileOffset;
  for (int i = threadIdx.x; i < kBytes; i += blockDim.x) tile[i] = 0xff;
  fence_async_proxy();
  if (threadIdx.x == 0) {
    full.init(1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) load(tile, full);
  full.wait(0);
  for (int i = threadIdx.x; i < kBytes; i += blockDim.x) found[i] = tile[i];
}

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

// Any bytes that differ from their neighbours.
inline std::vector<uint8_t> some_bytes(size_t count) {
  std::mt19937 random(11);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& x : bytes) x = static_cast<uint8_t>(random());
  return bytes;
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
      Array<uint8_t> found(kRows * kAtoms * 128);
      launch(load_one<kAtoms, 128 / kElementBytes, kFirstAtom>, 1, 64,
             kTileOffset + kRows * kAtoms * 128, map, row, head, b, found.device());
      const std::vector<uint8_t>& tile = found.download();
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
    copy_floats(reinterpret_cast<float*>(tile), &map, full, kReadAgain, column, row);
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
      Array<uint8_t> found(kBoxColumns * 4);
      launch(load_floats, 1, 64, kTileOffset + kBoxColumns * 4, map, column, row, found.device());
      const float* box = reinterpret_cast<const float*>(found.download().data());
      for (int i = 0; i < kBoxColumns; ++i) {
        const bool inside = column + i < kColumns;
        result.equal(inside ? matrix[row * kColumns + column + i] : 0.f, box[i], "floats", column,
                     i);
      }
    }
  }
}

constexpr int kKeys = 96, kColumns = 128;

__global__ void load_v(const __grid_constant__ CUtensorMap map, int key, int head, uint8_t* found) {
  store_loaded<kKeys * kColumns>(found, [&](uint8_t* tile, Barrier& full) {
    load_permuted_v<kKeys, kColumns>(tile, &map, full, kReadAgain, key, head);
  });
}

// In memory (heads, keys / 16, columns, 16), in the tile (columns / 8, keys / 16, 8 columns, 16).
inline void check_permuted(Result& result) {
  constexpr int kAllKeys = 160, kVHeads = 2;
  const std::vector<uint8_t> v = some_bytes(size_t{kVHeads} * kAllKeys * kColumns);
  Array<uint8_t> device(v);
  const CUtensorMap map =
      make_permuted_v_map(device.device(), device.device(), kAllKeys, kVHeads, kColumns, kKeys);
  for (const int key : {0, 32, 96, 144}) {
    for (int head = 0; head < kVHeads; ++head) {
      Array<uint8_t> found(kKeys * kColumns);
      launch(load_v, 1, 64, kTileOffset + kKeys * kColumns, map, key, head, found.device());
      const std::vector<uint8_t>& tile = found.download();
      for (int k = 0; k < kKeys; ++k) {
        for (int column = 0; column < kColumns; ++column) {
          const int tile_at = ((column / 8 * (kKeys / 16) + k / 16) * 8 + column % 8) * 16 + k % 16;
          const int at =
              ((head * (kAllKeys / 16) + (key + k) / 16) * kColumns + column) * 16 + k % 16;
          result.equal(key + k < kAllKeys ? v[at] : 0, tile[tile_at], "permuted V", key + k,
                       column);
        }
      }
    }
  }
}

static const Tests kTests = {
    {"tile/tma_load: bf16, d96", Where::kGpu, check_tile<ElementType::kBFloat16, 96, 2, 0>},
    {"tile/tma_load: fp16, second atom", Where::kGpu, check_tile<ElementType::kFloat16, 128, 1, 1>},
    {"tile/tma_load: e4m3, d256", Where::kGpu, check_tile<ElementType::kE4m3, 256, 2, 0>},
    {"tile/tma_load: floats", Where::kGpu, check_floats},
    {"tile/tma_load: permuted V", Where::kGpu, check_permuted}};

}  // namespace unit::tma_load
