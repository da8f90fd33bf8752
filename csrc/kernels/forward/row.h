// One row of the kernel table as C++ sees it: everything that is fixed when a forward kernel is
// compiled. A value of ForwardRow is a template argument (C++20), so all members are public and the
// type is an aggregate. host/forward_row.h hands it to the layers above.
#pragma once

#include <cstdint>

#include "blocks/element.h"
#include "blocks/slot_order.h"

namespace flashattn3 {

struct ForwardRow {
  ElementType dtype;       // of q and k; v is in it too, or in e4m3; out is, or in 16 bits
  int head_dim;            // 64, 96, 128, 192 or 256; TMA fills smaller heads with zeros
  bool windowed;           // whether causal or a window may hide keys; false: only lengths do
  int block_m;             // query rows of a CTA tile: 64 for each warpgroup that multiplies
  int block_n;             // keys of a step, a multiple of 16
  int num_stages;          // K tiles (and V tiles) in shared memory, at least 2
  int num_mma_warpgroups;  // 1 to 3
  int num_q_buffers = 1;   // 2: the next tile's Q is loaded while this one is worked on
  int scale_keys = 0;      // 8 bits: keys that share their descales, a divisor of block_n
  int promote_keys = 0;    // 8 bits: keys after which out leaves WGMMA's accumulators
                           // (promotion.cuh); a multiple of block_n
};

// Threads of a CTA: the warpgroups that multiply and the one that loads.
constexpr int forward_num_threads(const ForwardRow& row) {
  return 128 * (row.num_mma_warpgroups + 1);
}

// Bytes of a row of Q or K in shared memory: whole chunks of 128.
constexpr int forward_row_bytes(const ForwardRow& row) {
  return (row.head_dim * element_bytes(row.dtype) + 127) / 128 * 128;
}

// Of a tile of V: rows as K's, in 8 bits slots with columns for the sums (blocks/slot_order.h).
constexpr int forward_value_bytes(const ForwardRow& row) {
  return row.block_n *
         (is_quantized(row.dtype) ? row.head_dim + kSumColumns : forward_row_bytes(row));
}

// Whether sums of out in bf16 are kept where its rows are laid down
// (kernels/forward/promotion.cuh). With 256 columns and two buffers for Q there is no room for all
// of them.
constexpr bool forward_sums_in_shared(const ForwardRow& row) {
  return is_quantized(row.dtype) && (row.head_dim <= 128 || row.num_q_buffers == 1);
}

// Room for the barriers and the tile descriptions, and the references of these sums, before the
// tiles; the tiles want 1024-byte alignment.
constexpr int forward_control_bytes(const ForwardRow& row) {
  return is_quantized(row.dtype) && row.head_dim <= 128 ? 2048 : 1024;
}

// Whether a warp lays out down over its rows of Q: with one buffer the next Q is to come as soon as
// may be, and 8 bits are too few.
constexpr bool forward_out_over_q(const ForwardRow& row) {
  return row.num_q_buffers == 2 && !is_quantized(row.dtype);
}

// Columns of out, 16 bits each, that a warp lays down in shared memory at once: all over Q or sums
// of theirs, else up to 128.
constexpr int forward_staged_columns(const ForwardRow& row) {
  const int all = (row.head_dim + 63) / 64 * 64;
  return forward_out_over_q(row) || forward_sums_in_shared(row) || all < 128 ? all : 128;
}

constexpr int forward_shared_bytes(const ForwardRow& row) {
  const int staged = forward_out_over_q(row) ? 0 : row.block_m * forward_staged_columns(row) * 2;
  return forward_control_bytes(row) + row.num_q_buffers * row.block_m * forward_row_bytes(row) +
         row.num_stages * (row.block_n * forward_row_bytes(row) + forward_value_bytes(row)) +
         staged;
}

// What a thread keeps of out in device memory (promotion.cuh), in 16 bytes: its accumulators in
// fp32, two references, and its accumulators in bf16.
constexpr int forward_promoted_words(int head_dim) { return head_dim / 8 + 1 + head_dim / 16; }

// What all CTAs need for it; 0 where there are so few keys that out stays in the accumulators.
constexpr int64_t forward_promoted_bytes(const ForwardRow& row, int num_ctas, int seqlen_k) {
  if (row.promote_keys == 0 || seqlen_k <= 512) return 0;
  return int64_t{num_ctas} * forward_promoted_words(row.head_dim) * 128 * row.num_mma_warpgroups *
         16;
}

}  // namespace flashattn3
