// Compile-time properties of a warp kernel (warp_kernel.cuh).
#pragma once

#include <algorithm>
#include <cstdint>

#include "decode/config.h"

namespace flashattn3::decode {

// Where the tokens of a cache are.
enum class Pages {
  kNone,    // a dense cache
  kEven,    // pages whose size is a multiple of a KV block
  kUneven,  // pages of any size
  kAny      // the arguments say it
};

// Registers of a warp of each warpgroup at the launch. setmaxnreg divides them anew: warps would
// wait for more for ever.
constexpr int launch_registers(int num_threads) {
  return num_threads / 128 * (65536 / num_threads / 8 * 8);
}

// kTheRowTiles: of 8 packed rows. kIsPlain: of the kernel for plain calls alone (arguments.h).
template <Config kConfig, int kTheRowTiles, Pages kThePages, bool kIsPlain>
struct WarpTraits {
  static constexpr bool kPlain = kIsPlain;
  static constexpr Pages kPages = kThePages;
  static constexpr ElementType kElement = kConfig.dtype;
  static constexpr bool kHasBytes = has_bytes(kConfig);
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kRowTiles = kTheRowTiles;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kBlockN = warp_block_n(kConfig);
  static constexpr int kVecs = kHeadDim / 8;       // vectors of eight elements of a row
  static constexpr int kWarps = kWarpKernelWarps;  // that load and multiply
  static constexpr int kThreads = kWarpKernelThreads;
  static constexpr int kRegisters = 240;
  static constexpr int kControlRegisters = launch_registers(kThreads) - kWarps / 4 * kRegisters;

  static_assert(kBlockN % 8 == 0 && kControlRegisters >= 24);
};

// The warp kernel of equal shares (warp_share_kernel.cuh), for a cache of 8 bits.
constexpr bool has_warp_shares(const Config& config) {
  return has_bytes(config) && !has_one_kernel(config);
}
// The config whose shares of the work, queue of parts and memory of parts it has: the loading warps
// are the consumers. Registers bound their number.
constexpr Config of_warp_shares(Config config, int row_tiles) {
  config.num_consumers = config.head_dim * row_tiles <= 128 ? 3 : 2;
  return config;
}

template <Config kTheConfig, int kTheRowTiles>
struct WarpShareTraits : WarpTraits<kTheConfig, kTheRowTiles, Pages::kAny, false> {
  static constexpr Config kConfig = kTheConfig;
  static constexpr int kConsumers = kConfig.num_consumers;
  static constexpr int kWarps = 4 * kConsumers;
  static constexpr int kThreads = num_threads(kConfig);
  static constexpr int kRegisters = kConsumers == 3 ? 160 : 232;
  static constexpr int kControlRegisters = launch_registers(kThreads) - kConsumers * kRegisters;
  static constexpr int kOutRegisters = 0;  // O is stored by rows
  static constexpr int kBlockN = warp_block_n(kConfig);
  static constexpr int kBlocksOfUnit = kConfig.block_n / kBlockN;
  static_assert(kConfig.block_n % kBlockN == 0 && kControlRegisters >= 24);
};

}  // namespace flashattn3::decode
