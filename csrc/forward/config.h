// Config: the compile-time choices of one forward kernel. A value of Config is a template argument
// (C++20), so all members are public and the type is an aggregate.
#pragma once

#include <cstdint>

#include "attention/list_sizes.h"
#include "attention/score_term.h"
#include "ptx/element.h"
#include "tile/permuted_v.h"

namespace flashattn3::forward {

struct Config {
  ElementType dtype;         // of q and k; v has it too or is e4m3; out has it or is 16-bit
  int head_dim;              // 64, 96, 128, 192 or 256; TMA fills smaller heads with zeros
  int head_dim_v;            // of v and out: head_dim; with head_dim 192 and 16 bits also 128
  bool masked;               // whether causal or a window may mask keys; false: only lengths do
  int block_m;               // query rows of a work tile: 64 per consumer warpgroup
  int block_n;               // keys of a KV block, a multiple of 16
  int num_stages;            // K tiles (and V tiles) in shared memory, at least 2
  int num_mma_warpgroups;    // 1 to 3
  int num_q_buffers = 1;     // Q of so many work tiles, this one and the next ones
  int keys_per_descale = 0;  // 8 bits: keys that share their descales, a divisor of block_n
  int promote_keys = 0;      // 8 bits: keys between promotions of O, a multiple of block_n
  bool cached = false;       // K and V are in a paged or dense cache (load_cached.cuh)
  ScoreTerm term = ScoreTerm::kNone;  // with one the config is masked
  bool listed = false;  // the mask is lists of blocks (attention/mask_lists.cuh); then also masked
  bool spans = false;   // results of fixed spans of keys are joined in order (split_tokens); cached
};

// Threads of a CTA: the consumer warpgroups and the producer warpgroup.
constexpr int num_threads(const Config& config) { return 128 * (config.num_mma_warpgroups + 1); }

// Bytes of a row of Q, K or 16-bit V with so many columns in shared memory, rounded up to 128.
constexpr int row_bytes(const Config& config, int columns) {
  return (columns * element_bytes(config.dtype) + 127) / 128 * 128;
}

// Bytes of a V tile: laid out as K, or permuted V with row sum columns (tile/permuted_v.h).
constexpr int v_tile_bytes(const Config& config) {
  return config.block_n * (is_quantized(config.dtype) ? config.head_dim_v + kRowSumColumns
                                                      : row_bytes(config, config.head_dim_v));
}

// Whether promotion keeps its bf16 sums in the staging buffer of out (forward/promotion.cuh). With
// 256 columns and two Q buffers it does not: the buffer is too small then.
constexpr bool promotes_in_smem(const Config& config) {
  return is_quantized(config.dtype) && (config.head_dim <= 128 || config.num_q_buffers == 1);
}

// Bytes reserved for SharedStorage before the tiles, which need 1024-byte alignment.
constexpr int shared_storage_bytes(const Config& config) {
  return is_quantized(config.dtype) && config.head_dim <= 128 ? 2048 : 1024;
}

// Whether a warp stages out over its rows of Q. It does not with one Q buffer, which must be
// free for the next Q as early as possible, nor with 8-bit Q, whose rows are too small, nor with
// spans, whose total leaves room for out.
constexpr bool out_over_q(const Config& config) {
  return config.num_q_buffers >= 2 && !is_quantized(config.dtype) && !config.spans;
}

// Columns of out, 16 bits each, that a warp stages in shared memory at once: all of them over Q or
// over bf16 sums, else up to 128.
constexpr int out_columns_staged(const Config& config) {
  const int all = (config.head_dim_v + 63) / 64 * 64;
  return out_over_q(config) || promotes_in_smem(config) || all < 128 ? all : 128;
}

// Bytes of a tile of the bias, which each K stage has beside K: atoms of 64 columns, 16 bits each.
constexpr int bias_tile_bytes(const Config& config) {
  return config.term == ScoreTerm::kBias ? config.block_m * ((config.block_n + 63) / 64) * 128 : 0;
}

// Rows of a box of K and V: with lists a stage has any two blocks.
constexpr int kv_box_rows(const Config& config) {
  return config.listed ? kListColumns : config.block_n;
}

// Bytes of the bit tiles of a KV block, which each K stage has beside K.
constexpr int bit_tiles_bytes(const Config& config) {
  return config.listed ? config.block_n / kListColumns * kBitTileBytes : 0;
}

// Bytes of a row with spans: the total of the spans before the current one, and statistics
// (span_total.cuh).
constexpr int span_row_bytes(const Config& config) { return 4 * config.head_dim_v + 64; }

// Bytes in which out is staged, if not over Q: with spans over the total.
constexpr int staged_bytes(const Config& config) {
  if (config.spans) return config.block_m * span_row_bytes(config);
  return out_over_q(config) ? 0 : config.block_m * out_columns_staged(config) * 2;
}

constexpr int smem_bytes(const Config& config) {
  const int row = row_bytes(config, config.head_dim);
  return shared_storage_bytes(config) + config.num_q_buffers * config.block_m * row +
         config.num_stages * (config.block_n * row + v_tile_bytes(config) +
                              bias_tile_bytes(config) + bit_tiles_bytes(config)) +
         staged_bytes(config);
}

}  // namespace flashattn3::forward
