// Config: the compile-time choices of one forward kernel. A value of Config is a template argument
// (C++20), so all members are public and the type is an aggregate.
#pragma once

#include "attention/score_term.h"
#include "ptx/element.h"

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
  bool tree = false;    // bits say which new tokens a query sees (attention/tree_mask.cuh); cached
};

// Threads of a CTA: the consumer warpgroups and the producer warpgroup.
constexpr int num_threads(const Config& config) { return 128 * (config.num_mma_warpgroups + 1); }

}  // namespace flashattn3::forward
