// Parameters of one forward or backward call. torch_binding (or a test) fills them, and
// launch_forward or launch_backward reads them. No torch here. All pointers are device pointers.
// A call has at most MAX_ROWS (flashattn3/backends/gpu_limits.py) rows of q and of keys: a position
// plus a window's distance plus a tile's rows fits in 32 bits.
#pragma once

#include <cstdint>

#include "attention/score_term.h"

namespace flashattn3 {

// The numbers of one attention call: FIELD(type, name) for each, in the order of the operators
// prepare_forward and prepare_backward. flashattn3/backends/hopper/launch_record.py has the same.
//
//   seqlen_q, seqlen_k: rows and keys of a sequence; varlen: of the longest, rows past it are not
//     computed, and seqlen_k may be an upper bound
//   total_q, total_k: varlen: tokens of q and out, and of k and v; else seqlen_q, seqlen_k
//   num_heads_kv: divides num_heads_q
//   head_dim, head_dim_v: at most the config's
//   varlen: the sequences are concatenated, and cu_seqlens_q and cu_seqlens_k are given
//   softmax_scale: any finite value
//   softcap: scores become softcap * tanh(score / softcap); 0: off
//   window_left, window_right: query i of a sequence sees keys i + shift - window_left to
//     i + shift + window_right, inclusive, with shift = seqlen_k - seqlen_q of that sequence; -1:
//     unbounded. Causal: window_right 0. Both are -1 for a kernel config that is not masked.
//   num_sms: of the device
//   sm_margin: SMs left free, at least 0
//   q_block, k_block, v_block: 8 bits: tokens of a sequence that share a descale; BlockDescales
//   out_is_fp16: 8 bits: else out is bf16
//   use_fast_accum: 8 bits: O stays in WGMMA's accumulators, which is faster and less accurate
//   deterministic: backward: additions to dq run in the same order in every call
#define FLASHATTN3_PROBLEM_FIELDS(FIELD) \
  FIELD(int, batch)                      \
  FIELD(int, seqlen_q)                   \
  FIELD(int, seqlen_k)                   \
  FIELD(int, total_q)                    \
  FIELD(int, total_k)                    \
  FIELD(int, num_heads_q)                \
  FIELD(int, num_heads_kv)               \
  FIELD(int, head_dim)                   \
  FIELD(int, head_dim_v)                 \
  FIELD(bool, varlen)                    \
  FIELD(float, softmax_scale)            \
  FIELD(float, softcap)                  \
  FIELD(int, window_left)                \
  FIELD(int, window_right)               \
  FIELD(int, num_sms)                    \
  FIELD(int, sm_margin)                  \
  FIELD(int, q_block)                    \
  FIELD(int, k_block)                    \
  FIELD(int, v_block)                    \
  FIELD(bool, out_is_fp16)               \
  FIELD(bool, use_fast_accum)            \
  FIELD(bool, deterministic)

struct AttentionProblem {
#define FLASHATTN3_MEMBER(type, name) type name;
  FLASHATTN3_PROBLEM_FIELDS(FLASHATTN3_MEMBER)
#undef FLASHATTN3_MEMBER

  bool masked() const { return window_left >= 0 || window_right >= 0; }
  // Whether a backward has nothing to compute: there is no query or no key.
  bool has_no_gradients() const {
    const bool no_tokens = varlen && (total_q <= 0 || total_k <= 0);
    return batch <= 0 || num_heads_q <= 0 || seqlen_q <= 0 || seqlen_k <= 0 || no_tokens;
  }
};

// Strides in elements; the head dim axis has stride 1. Strides in bytes must be multiples of 16
// where the axis is longer than 1. With varlen (cu_seqlens) the batch stride is not read: the
// tensor is (total, heads, head_dim).
struct Strides {
  int64_t batch;
  int64_t seq;
  int64_t head;
};

// Where the sequences of a tensor are: int32, on the device. Values are clamped to the tensor, so
// no value causes an access outside.
struct TokenPositions {
  const int32_t* cu_seqlens;  // (batch + 1); null if not varlen
  const int32_t* seqused;     // (batch), shortens the sequences, or null
};

// Descales of a quantized tensor, float32, (batch, heads, blocks), any strides (in elements).
struct BlockDescales {
  const float* data = nullptr;  // null: 1 everywhere
  int64_t batch = 0, head = 0, block = 0;
  int num_blocks = 1;  // tokens past the last block use the last block's descale
  int block_tokens =
      1;  // tokens of a sequence that share a descale: a power of 2, at least 64 for q and the
          // config's keys_per_descale for k and v; any value if num_blocks is 1
  int heads_per_descale = 1;  // consecutive heads that share a descale
};

// Extra arguments of kernels with 8-bit inputs. q and k are e4m3 or int8; v is permuted e4m3
// (tile/permuted_v.h): (batch, num_heads_kv, num_permuted_keys / 16, the config's head_dim, 16);
// varlen: (num_heads_kv, ...), where sequence i begins at key 32 * (cu_seqlens_k[i] / 32 + i).
// Strides of v are not read.
struct QuantizedParams {
  int64_t num_permuted_keys = 0;  // a multiple of 32
  BlockDescales q, k, v;          // per head of q, and of k and v
  // Workspace for accumulator promotion (DeepSeek-V3), LaunchSize::workspace_bytes; null if that is
  // 0, as with use_fast_accum.
  void* promoted = nullptr;
};

// Bytes for the order of the sequences (attention/tile_scheduler.cuh, VarlenSchedule).
constexpr int64_t varlen_schedule_bytes(int64_t batch) { return 16 * (batch + 1) + 4 * batch; }

// A bias of the scores, of the config's element type: (batch | 1, num_heads_q | 1, seqlen_q,
// seqlen_k). Rows and base addresses are multiples of 16 bytes; the keys have stride 1.
struct BiasParams {
  const void* data = nullptr;  // null: none
  Strides stride{};
  bool one_sequence = false, one_head = false;  // which serves all
};

// A mask as lists of blocks of the rows' side (flashattn3/masks/block_lists.py): contiguous.
struct MaskListParams {
  const int32_t* entries = nullptr;  // (batch, heads, row blocks, column blocks)
  const int32_t* work = nullptr;     // (batch, heads, row blocks, 4), 16-byte aligned
  const int64_t* tiles = nullptr;    // (num_tiles, 128), 16-byte aligned
  int batch = 1, heads = 1;          // 1: the lists serve all; heads are query heads
  int num_tiles = 0;
};

struct ForwardParams : AttentionProblem {
  // Tensors of the config's element type; base addresses are multiples of 16 bytes.
  const void* q;  // (batch, seqlen_q, num_heads_q, head_dim); varlen: (total_q, ...)
  const void* k;  // (batch, seqlen_k, num_heads_kv, head_dim); varlen: (total_k, ...); may be
                  // null if it has no elements
  const void* v;  // (batch, seqlen_k, num_heads_kv, head_dim_v); else as k
  void* out;      // (batch, seqlen_q, num_heads_q, head_dim_v); varlen: (total_q, ...)
  float* lse;     // (batch, num_heads_q, seqlen_q), natural log; varlen: (num_heads_q, total_q);
                  // null: not written
  Strides q_stride;
  Strides k_stride;
  Strides v_stride;
  Strides out_stride;
  Strides lse_stride;  // in elements, any value; varlen: batch is not read

  // Rows of out and lse that belong to no sequence (gaps, past a used length): varlen: out becomes
  // 0 and lse -inf, else they are not written.
  TokenPositions positions_q;  // of q and out
  TokenPositions positions_k;  // of k and v

  // Varlen: workspace of varlen_schedule_bytes, 16-byte aligned, which every launch fills.
  void* varlen_schedule;

  QuantizedParams quantized;  // read by 8-bit kernel configs
  MaskListParams lists;       // of queries; read by listed kernel configs
  BiasParams bias;            // read by kernel configs with a bias

  const void* sinks = nullptr;  // (num_heads_q), a logit without a value for each; null: none
  SinkType sink_type = SinkType::kFloat32;
  // ALiBi: (batch, num_heads_q), alibi_batch elements apart, 0 if all sequences have the same.
  // Null: none. Kernel configs with slopes read it.
  const float* alibi_slopes = nullptr;
  int64_t alibi_batch = 0;
  // (num_heads_q), initially -inf: becomes the largest score that a row sees, after the softcap and
  // with its term. Null: not written. Configs that look for it write it.
  float* max_logit = nullptr;

  // Two int32, zero before the first launch that uses them; every launch resets them to zero.
  // Launches that may run concurrently must not share them (use one per device and stream). Null:
  // static tile schedule, which balances uneven tiles less well.
  int32_t* tile_counter;
  bool pdl;  // the kernels may start while the stream's previous kernel ends
};

// Parameters of one backward call: the forward call with its results, and the tensors that only the
// backward reads and writes.
struct BackwardParams {
  ForwardParams forward;  // out and lse are read; varlen_schedule: over sequences of keys

  const void* dout;   // as out
  const float* dlse;  // as lse; null: 0
  // Varlen: rows that belong to no sequence become 0. Columns up to a multiple of 8 may be written.
  void* dq;  // as q
  void* dk;  // as k
  void* dv;  // as v
  Strides dout_stride;
  Strides dlse_stride;  // in elements, any value
  Strides dq_stride;
  Strides dk_stride;
  Strides dv_stride;

  MaskListParams lists;            // of keys; read by listed kernel configs
  const int32_t* turns = nullptr;  // as lists.entries; ListedArguments::turns

  void* workspace;  // LaunchSize::workspace_bytes, 16-byte aligned; need not be initialised

  // If the bias needs a gradient: that, of its sequences and heads, in 16 bits and dense but for
  // rows of seqlen_k rounded up to a multiple of 8. ds: the same of all sequences and heads, where
  // more than two share the bias, else null.
  void* dbias = nullptr;
  void* ds = nullptr;
  void* dsinks = nullptr;  // as forward.sinks, of its type; null: not written
};

// Elements of a row of the gradient of a bias, and of ds.
constexpr int64_t bias_pitch(int64_t seqlen_k) { return (seqlen_k + 7) / 8 * 8; }

// Sequences and heads that share each element of the bias.
inline int64_t num_bias_terms(const ForwardParams& params) {
  return int64_t{params.bias.one_sequence ? params.batch : 1} *
         (params.bias.one_head ? params.num_heads_q : 1);
}

// Arguments of one launch that depend on the problem.
struct LaunchSize {
  int num_ctas;             // of the main kernel, a one-dimensional grid
  int64_t workspace_bytes;  // device memory for the duration of the launch
  bool on_warps = false;    // whether a warp kernel takes a cached call
};

}  // namespace flashattn3
