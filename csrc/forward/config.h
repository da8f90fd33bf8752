// One kernel config as C++ sees it: everything that is fixed when a forward kernel is
// compiled. A value of Config is a template argument (C++20), so all members are public and the
// type is an aggregate. launch/forward_config.h hands it to the layers above.
#pragma once

#include <cstdint>

#include "ptx/element.h"
#include "tile/permuted_v.h"

namespace flashattn3::forward {

struct Config {
  ElementType dtype;         // of q and k; v is in it too, or in e4m3; out is, or in 16 bits
  int head_dim;              // 64, 96, 128, 192 or 256; TMA fills smaller heads with zeros
  bool masked;               // whether causal or a window may hide keys; false: only lengths do
  int block_m;               // query rows of a CTA tile: 64 for each warpgroup that multiplies
  int block_n;               // keys of a step, a multiple of 16
  int num_stages;            // K tiles (and V tiles) in shared memory, at least 2
  int num_mma_warpgroups;    // 1 to 3
  int num_q_buffers = 1;     // 2: the next tile's Q is loaded while this one is worked on
  int keys_per_descale = 0;  // 8 bits: keys that share their descales, a divisor of block_n
  int promote_keys = 0;      // 8 bits: keys after which out leaves WGMMA's accumulators
                             // (promotion.cuh); a multiple of block_n
};

// Threads of a CTA: the warpgroups that multiply and the one that loads.
constexpr int num_threads(const Config& config) { return 128 * (config.num_mma_warpgroups + 1); }

// Bytes of a row of Q or K in shared memory: whole chunks of 128.
constexpr int head_dim_bytes(const Config& config) {
  return (config.head_dim * element_bytes(config.dtype) + 127) / 128 * 128;
}

// Of a tile of V: rows as K's, in 8 bits slots with columns for the sums (blocks/permuted_v.h).
constexpr int v_tile_bytes(const Config& config) {
  return config.block_n *
         (is_quantized(config.dtype) ? config.head_dim + kRowSumColumns : head_dim_bytes(config));
}

// Whether sums of out in bf16 are kept where its rows are laid down
// (forward/promotion.cuh). With 256 columns and two buffers for Q there is no room for all
// of them.
constexpr bool promotes_in_smem(const Config& config) {
  return is_quantized(config.dtype) && (config.head_dim <= 128 || config.num_q_buffers == 1);
}

// Room for the barriers and the tile descriptions, and the references of these sums, before the
// tiles; the tiles want 1024-byte alignment.
constexpr int shared_storage_bytes(const Config& config) {
  return is_quantized(config.dtype) && config.head_dim <= 128 ? 2048 : 1024;
}

// Whether a warp lays out down over its rows of Q: with one buffer the next Q is to come as soon as
// may be, and 8 bits are too few.
constexpr bool out_over_q(const Config& config) {
  return config.num_q_buffers == 2 && !is_quantized(config.dtype);
}

// Columns of out, 16 bits each, that a warp lays down in shared memory at once: all over Q or sums
// of theirs, else up to 128.
constexpr int out_columns_staged(const Config& config) {
  const int all = (config.head_dim + 63) / 64 * 64;
  return out_over_q(config) || promotes_in_smem(config) || all < 128 ? all : 128;
}

constexpr int smem_bytes(const Config& config) {
  const int staged = out_over_q(config) ? 0 : config.block_m * out_columns_staged(config) * 2;
  return shared_storage_bytes(config) +
         config.num_q_buffers * config.block_m * head_dim_bytes(config) +
         config.num_stages * (config.block_n * head_dim_bytes(config) + v_tile_bytes(config)) +
         staged;
}

// What a thread keeps of out in device memory (promotion.cuh), in 16 bytes: its accumulators in
// fp32, two references, and its accumulators in bf16.
constexpr int promoted_words(int head_dim) { return head_dim / 8 + 1 + head_dim / 16; }

// What all CTAs need for it; 0 where there are so few keys that out stays in the accumulators.
constexpr int64_t promoted_bytes(const Config& config, int num_ctas, int seqlen_k) {
  if (config.promote_keys == 0 || seqlen_k <= 512) return 0;
  return int64_t{num_ctas} * promoted_words(config.head_dim) * 128 * config.num_mma_warpgroups * 16;
}

}  // namespace flashattn3::forward
