// What one call of the forward asks for. Filled by torch_binding (or a test), read by
// launch_forward. No torch here. All pointers are device pointers.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Rows of q and keys at most: positions are 32-bit, with the distance of a window and a tile's rows
// beyond them. flashattn3/backends/gpu_limits.py has it too.
constexpr int64_t kMaxRows = (int64_t{1} << 30) - 1024;

// Distance, in elements, between neighbours along each axis; the head dim axis has stride 1.
// Byte distances must be multiples of 16 where the axis is longer than 1. For variable lengths
// (cu_seqlens) the batch stride is not read: the tensor is (total, heads, head_dim).
struct Strides {
  int64_t batch;
  int64_t seq;
  int64_t head;
};

// The descales of a quantized tensor, float32 on the device, (batch, heads, blocks), any strides.
struct BlockDescales {
  const float* data = nullptr;  // null: 1 everywhere
  int64_t batch = 0, head = 0, block = 0;
  int num_blocks = 1;  // tokens behind them share the last one's
  int block_tokens =
      1;  // of a sequence that share one: a power of 2, at least the row's keys_per_descale
          // for k and v and 64 for q; or anything where there is one block
  int heads_per_descale = 1;  // neighbouring heads that share theirs
};

// What inputs of 8 bits have besides; q and k are then e4m3 or int8, v is e4m3 in slots
// (blocks/permuted_v.h): (batch, num_heads_kv, num_permuted_keys / 16, head_dim of the row, 16),
// variable (num_heads_kv, ...), where sequence i begins at slot 32 * (cu_seqlens_k[i] / 32 + i).
// Strides of v are not read.
struct QuantizedParams {
  int64_t num_permuted_keys = 0;  // a multiple of 32
  BlockDescales q, k, v;          // of q's heads, and of those of k and v
  bool out_is_fp16 = false;       // else bf16
  // Room for forward::promoted_bytes() of num_sms CTAs; null where that is 0, or where out is to
  // stay in WGMMA's accumulators, fast and less exact.
  void* promoted = nullptr;
};

struct ForwardParams {
  // Tensors of the row's element type; base addresses are multiples of 16 bytes.
  const void* q;  // (batch, seqlen_q, num_heads_q, head_dim); variable: (total_q, ...)
  const void* k;  // (batch, seqlen_k, num_heads_kv, head_dim); variable: (total_k, ...); may be
                  // null when it has no element
  const void* v;  // (batch, seqlen_k, num_heads_kv, head_dim_v); as k
  void* out;      // (batch, seqlen_q, num_heads_q, head_dim_v); variable: (total_q, ...)
  float* lse;     // (batch, num_heads_q, seqlen_q), natural log; variable: (num_heads_q, total_q);
                  // may be null: not written
  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides out_stride;
  Strides lse_stride;  // elements; here no axis has to be 1, and variable lengths read no batch

  int batch;
  int seqlen_q;  // rows; with cu_seqlens_q the longest sequence: rows past it are not computed
  int seqlen_k;  // rows; with cu_seqlens_k an upper bound
  int total_q;   // rows of q and out; read only with cu_seqlens_q
  int total_k;   // rows of k and v; read only with cu_seqlens_k
  int num_heads_q;
  int num_heads_kv;  // divides num_heads_q
  int head_dim;      // at most the row's
  int head_dim_v;    // at most the row's head_dim

  // int32, on the device; values are clamped to the tensors, so no value of theirs leads outside.
  const int32_t* cu_seqlens_q;  // (batch + 1), or null: every sequence has seqlen_q rows
  const int32_t* cu_seqlens_k;  // (batch + 1), or null: every sequence has seqlen_k rows
  const int32_t* seqused_q;     // (batch), shortens the sequences, or null
  const int32_t* seqused_k;     // (batch), shortens the sequences, or null
  // Rows of out and lse that belong to no sequence (gaps, beyond seqused_q): with cu_seqlens_q out
  // becomes 0 and lse -inf, else they are not written.

  // With cu_seqlens_q: room for 2 * batch + 1 int32, which every launch fills.
  int32_t* varlen_schedule;

  QuantizedParams quantized;  // read by 8-bit kernel configs

  float softmax_scale;  // any finite value
  float softcap;        // scores become softcap * tanh(score / softcap); 0: off
  // Query i of a sequence sees keys from i + shift - window_left to i + shift + window_right, both
  // included, shift = seqlen_k - seqlen_q of that sequence; -1: open. Causal: window_right 0. Both
  // must be -1 for a row that is not masked.
  int window_left;
  int window_right;

  int num_sms;    // of the device
  int sm_margin;  // SMs left free, at least 0
  // Two int32, zero before the first launch that uses them; every launch leaves them zero. Never
  // shared by launches that may run at the same time (one for each device and stream). Null: the
  // order of tiles is fixed beforehand, which balances uneven tiles less well.
  int32_t* tile_counter;
};

// What one call of the backward asks for: the call whose gradient is wanted, with its results, and
// what backward kernels read and write besides.
struct BackwardParams {
  ForwardParams forward;  // out and lse are read; varlen_schedule: of sequences of keys

  const void* dout;   // as out
  const float* dlse;  // as lse; null: 0
  // Rows that belong to no sequence are not written; columns up to a multiple of 8 may be.
  void* dq;  // as q
  void* dk;  // as k
  void* dv;  // as v
  Strides dout_stride;
  Strides dlse_stride;  // elements; here no axis has to be 1
  Strides dq_stride;
  Strides dk_stride;
  Strides dv_stride;

  bool deterministic;  // sums of dq are added up in the same order in every call
  void* workspace;     // backward_workspace_bytes(), 16-byte aligned; nothing is expected in it
};

}  // namespace flashattn3
