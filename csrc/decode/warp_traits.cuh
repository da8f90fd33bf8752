// Compile-time properties of a warp kernel (warp_kernel.cuh).
#pragma once

#include <cstdint>

#include "decode/config.h"

namespace flashattn3::decode {

// Where the tokens of a cache are.
enum class Pages {
  kNone,   // a dense cache
  kEven,   // pages whose size is a multiple of a KV block
  kUneven  // pages of any size
};

// kTheRowTiles: of 8 packed rows. kIsPlain: of the kernel for plain calls alone (arguments.h).
template <Config kConfig, int kTheRowTiles, Pages kThePages, bool kIsPlain>
struct WarpTraits {
  static constexpr bool kPlain = kIsPlain;
  static constexpr Pages kPages = kThePages;
  static constexpr ElementType kElement = kConfig.dtype;
  static constexpr bool kHasBytes = has_bytes(kConfig);
  static constexpr ElementType kOperand = kHasBytes ? ElementType::kFloat16 : kElement;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kRowTiles = kTheRowTiles;
  static constexpr int kRows = 8 * kRowTiles;
  static constexpr int kBlockN = warp_block_n(kConfig);
  static constexpr int kVecs = kHeadDim / 8;       // vectors of eight elements of a row
  static constexpr int kWarps = kWarpKernelWarps;  // that load and multiply
  static constexpr int kThreads = kWarpKernelThreads;
  // setmaxnreg: multiples of 8; their sum is at most the launch allocation.
  static constexpr int kRegisters = 240;
  static constexpr int kControlRegisters = 24;

  static_assert(kBlockN % 8 == 0);
  static_assert(32 * kWarps * kRegisters + (kThreads - 32 * kWarps) * kControlRegisters <=
                kThreads * (65536 / kThreads / 8 * 8));
};

}  // namespace flashattn3::decode
