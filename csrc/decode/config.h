// Config: the compile-time choices of one decode kernel. A value of Config is a template argument
// (C++20), so all members are public and the type is an aggregate.
#pragma once

#include <algorithm>

#include "ptx/element.h"

namespace flashattn3::decode {

struct Config {
  ElementType dtype;  // of q, k, v and out: fp16 or bf16
  int head_dim;       // 64, 128 or 256; columns past a smaller head dim are zeros
  int block_n;        // keys of a KV block, a multiple of 16
  int num_stages;  // K tiles, and V tiles, of each consumer warpgroup in shared memory, a power of
                   // 2
  int num_stages_beside;  // of them in use where two CTAs share an SM, a power of 2
  int num_q_buffers;      // 2: the next part's Q is loaded while this part is computed
  int num_consumers;      // warpgroups, which take the KV blocks of a part in turn
  bool spans;  // results of fixed spans of keys are joined in order (spans.cuh, split_tokens)
  int num_byte_tiles;   // of a cache of 8 bits: K and V tiles in flight before they are widened to
                        // fp16 (load_bytes.cuh); 0: the cache has q's dtype
  bool tree = false;    // bits say which new tokens a query sees (attention/tree_mask.cuh)
  bool prefix = false;  // all sequences have the same keys in front of theirs (join_prefix.cuh)
};

constexpr bool has_bytes(const Config& config) { return config.num_byte_tiles > 0; }
// Whether a config has one kernel for all calls, neither one for plain calls nor a warp kernel.
constexpr bool has_one_kernel(const Config& config) {
  return config.spans || config.tree || config.prefix;
}

// A short call is bound by instructions that run once, of which plain calls need two thirds.
// Besides the kernel for all calls there is one for plain ones, which may have a window and sinks
// where models with that head dim have them (gpt-oss).
constexpr bool plain_has_window(int head_dim) { return head_dim == 64; }

// Warp kernels (warp_kernel.cuh; DecodeConfig has the same in Python): warps of a CTA; the most
// sequences, a lane of a warp for each, and packed rows; keys of a KV block, 4 KB of K and of V at
// most: a lane finds the place of one.
constexpr int kWarpKernelWarps = 8;
// A warpgroup more, one warp of which counts the CTAs: setmaxnreg is for whole warpgroups.
constexpr int kWarpKernelThreads = 32 * (kWarpKernelWarps + 4);
constexpr int kWarpKernelBatch = 32;
constexpr int warp_kernel_rows(const Config& config) { return config.head_dim <= 128 ? 16 : 8; }
constexpr int warp_block_n(const Config& config) {
  return std::min(32, (has_bytes(config) ? 4096 : 2048) / config.head_dim);
}

constexpr int kBlockM = 64;  // packed query rows of a work tile
constexpr int kSharedStorageBytes = 1024;

constexpr int num_threads(const Config& config) { return 128 * (config.num_consumers + 1); }
// With one consumer warpgroup two CTAs share an SM, up to 128 columns.
constexpr int ctas_per_sm(const Config& config) {
  return config.num_consumers == 1 && config.head_dim <= 128 ? 2 : 1;
}

// KV blocks that the consumer warpgroups take at a time; 0: the kernel has no spans.
constexpr int span_step(const Config& config) { return config.spans ? config.num_consumers : 0; }

constexpr int row_bytes(const Config& config) { return config.head_dim * 2; }
// One tile of rows of Q takes these bytes.
constexpr int q_tile_bytes(const Config& config) { return kBlockM * row_bytes(config); }
constexpr int kv_tile_bytes(const Config& config) { return config.block_n * row_bytes(config); }

// O and the row statistics that one consumer warpgroup hands to the other: 4 bytes per element and
// 16 bytes per thread.
constexpr int exchange_bytes(const Config& config) {
  if (config.num_consumers == 1) return 0;
  return kBlockM * config.head_dim * 4 + 128 * 16;
}

// A cache of 8 bits takes more shared memory: its tiles and their descales, the descales of the
// stages, and a factor of each row of Q.
constexpr int byte_tile_bytes(const Config& config) { return config.block_n * config.head_dim; }
constexpr int tile_descale_bytes(const Config& config) { return config.block_n * 4; }
constexpr int widening_bytes(const Config& config) {
  if (!has_bytes(config)) return 0;
  return config.num_byte_tiles * (byte_tile_bytes(config) + tile_descale_bytes(config)) +
         2 * config.num_consumers * config.num_stages * tile_descale_bytes(config) + kBlockM * 4;
}

constexpr int smem_bytes(const Config& config) {
  return kSharedStorageBytes + config.num_q_buffers * q_tile_bytes(config) +
         2 * config.num_consumers * config.num_stages * kv_tile_bytes(config) +
         exchange_bytes(config) + widening_bytes(config);
}

// Bytes that a launch with so many stages in use takes: with spans and one consumer warpgroup those
// are behind all else.
constexpr int smem_bytes(const Config& config, int num_stages) {
  const int unused = config.spans && config.num_consumers == 1 ? config.num_stages - num_stages : 0;
  return smem_bytes(config) - 2 * unused * kv_tile_bytes(config);
}

}  // namespace flashattn3::decode
