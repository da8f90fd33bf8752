// One row of the kernel table as C++ sees it: everything that is fixed when a forward kernel is
// compiled. A value of ForwardRow is a template argument (C++20), so all members are public and the
// type is an aggregate. host/forward_row.h hands it to the layers above.
#pragma once

#include "blocks/element.h"

namespace flashattn3 {

struct ForwardRow {
  ElementType dtype;       // of q, k, v and out
  int head_dim;            // 64, 96, 128, 192 or 256; TMA fills smaller heads with zeros
  bool windowed;           // whether causal or a window may hide keys; false: only lengths do
  int block_m;             // query rows of a CTA tile: 64 for each warpgroup that multiplies
  int block_n;             // keys of a step, a multiple of 16
  int num_stages;          // K tiles (and V tiles) in shared memory, at least 2
  int num_mma_warpgroups;  // 1 to 3
  int num_q_buffers = 1;   // 2: the next tile's Q is loaded while this one is worked on
};

// Of a warp in its warpgroup's 64.
constexpr int kRowsOfWarp = 16;

// Threads of a CTA: the warpgroups that multiply and the one that loads.
constexpr int forward_num_threads(const ForwardRow& row) {
  return 128 * (row.num_mma_warpgroups + 1);
}

// Columns of a tile in shared memory: whole 64-element (128-byte) chunks.
constexpr int forward_padded_head_dim(const ForwardRow& row) {
  return (row.head_dim + 63) / 64 * 64;
}

// Room for the barriers and the tile descriptions, before the tiles; the tiles want 1024-byte
// alignment.
constexpr int kForwardControlBytes = 1024;

// Columns of out that a warp lays down in shared memory at once: with two buffers for Q all, over
// its rows of Q; with one, which the next Q is to fill as soon as may be, in room of their own.
constexpr int forward_staged_columns(const ForwardRow& row) {
  return row.num_q_buffers == 2 ? forward_padded_head_dim(row) : 128;
}

constexpr int forward_shared_bytes(const ForwardRow& row) {
  const int staged = row.num_q_buffers == 2 ? 0 : row.block_m * forward_staged_columns(row);
  return kForwardControlBytes +
         2 * (forward_padded_head_dim(row) *
                  (row.num_q_buffers * row.block_m + 2 * row.num_stages * row.block_n) +
              staged);
}

}  // namespace flashattn3
