// tile/permuted_v_tile.cuh: tiles of permuted V, also past the end of the tensor, where zeros
// arrive. Zero fill of tiles of NaN: zeros from a key on, and no other byte changed.
#pragma once

#include "../unit.cuh"
#include "launch/tensor_map.h"
#include "tile/permuted_v.h"
#include "tile/permuted_v_tile.cuh"
#include "tile/tma_load.cuh"

namespace unit::permuted_v_tile {

using namespace flashattn3;

constexpr int kKeys = 96, kColumns = 128;

__global__ void load_v(const __grid_constant__ CUtensorMap map, int key, int head, uint8_t* found) {
  store_loaded<kKeys * kColumns>(found, [&](uint8_t* tile, Barrier& full) {
    full.arrive_and_expect(kKeys * kColumns);
    copy_permuted_v(tile, &map, full, kReadAgain, key, head);
  });
}

// In memory (heads, keys / 16, columns, 16), in the tile (columns / 8, keys / 16, 8 columns, 16).
inline void check_load(Result& result) {
  constexpr int kAllKeys = 160, kVHeads = 2;
  const std::vector<uint8_t> v = some_bytes(size_t{kVHeads} * kAllKeys * kColumns);
  Array<uint8_t> device(v);
  const CUtensorMap map =
      make_permuted_v_map(device.device(), device.device(), kAllKeys, kVHeads, kColumns, kKeys);
  for (const int key : {0, 32, 96, 144}) {
    for (int head = 0; head < kVHeads; ++head) {
      constexpr int kBytes = kKeys * kColumns;
      const auto tile =
          results_of<uint8_t>(kBytes, load_v, 1, 64, kTileOffset + kBytes, map, key, head);
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
void check_filled(Result& result) {
  constexpr int kBytes = kKeys * kHeadDim;
  for (const int num_threads : {32, 128}) {
    for (int used = 0; used <= kKeys; ++used) {
      const auto found = results_of<uint8_t>(kBytes + kMargin, fill_permuted<kKeys, kHeadDim>, 1,
                                             num_threads, kBytes + kMargin, used);
      // The columns of the row sums follow the tile and stay as they are.
      compare_filled(
          result, "permuted V used " + std::to_string(used), found, kKeys, kHeadDim,
          [](int key, int column) { return permuted_offset(kKeys, key, column); },
          [&](int key) { return key >= used; });
    }
  }
}

static const Tests kTests = {
    {"tile/permuted_v_tile: load", Where::kGpu, check_load},
    {"tile/permuted_v_tile: zero fill, 96 x 64", Where::kGpu, check_filled<96, 64>},
    {"tile/permuted_v_tile: zero fill, 128 x 128", Where::kGpu, check_filled<128, 128>}};

}  // namespace unit::permuted_v_tile
