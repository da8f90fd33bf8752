// Postprocess: converts dq_accum, which is in accumulator order, to dq, and sums the gradients of
// sinks.
#pragma once

#include "attention/block_list.cuh"
#include "attention/sinks.cuh"
#include "backward/arguments.h"
#include "backward/dq_semaphore.cuh"
#include "ptx/pdl.cuh"
#include "tile/gemm.cuh"
#include "tile/tma_store.cuh"

namespace flashattn3::backward {

// Arrivals of a work tile at tiles_done: one of each CTA, or of each dQ writer.
constexpr int arrivals_of_tile(const Config& config) {
  return uses_cluster2(config) ? 2 : num_dq_writers(config);
}

// Waits until all work tiles of the KV head are done; their additions are then visible. All threads
// of the CTA call it. Clusters have one tile each, so that tiles of sequences that overlap, where
// cu_seqlens is wrong, may have none: nothing waits for them.
template <Config kConfig>
__device__ __forceinline__ void wait_for_tiles(const Arguments& args, int batch_idx, int head,
                                               int num_keys) {
  constexpr int kBlockN = block_n(kConfig);
  const int num_tiles = (num_keys + kBlockN - 1) / kBlockN;
  const bool all_run =
      !uses_cluster2(kConfig) || count_tiles(args.scheduler) <= args.scheduler.num_tiles;
  if (threadIdx.x == 0 && all_run) {
    const int32_t* tiles_done =
        args.workspace.tiles_done + batch_idx * args.num_heads_kv + head / args.qhead_per_kvhead;
    while (load_acquire(tiles_done) < num_tiles * arrivals_of_tile(kConfig)) __nanosleep(256);
  }
  __syncthreads();
  fence_global_proxies();
}

// Converts 64 rows of a head with a CTA of 128 threads, 16 rows per warp as in WGMMA accumulators.
// number: index of the workspace block.
template <Config kConfig>
__device__ __forceinline__ void postprocess_block(const Arguments& args, int number) {
  constexpr ElementType kElement = kConfig.dtype;
  constexpr int kHeadDim = kConfig.head_dim;
  constexpr int kAtoms = (kHeadDim + 63) / 64;
  __shared__ __align__(1024) uint8_t staged[4][kAtoms][kRowsOfWarp * 128];
  const MBlock block = MBlock::of_number(number, args.workspace, args.seqlens_q,
                                         args.scheduler.varlen.batch, args.num_heads_q);
  if (!block.any()) return;
  const int head = block.head, batch_idx = block.batch_idx, first_row = block.first_row;
  const Sequence rows = block.rows;
  const int num_keys = find_sequence(args.seqlens_k, batch_idx).length;
  const BlockRange seen =
      Mask::of(rows.length, num_keys, args.window)
          .template n_blocks<64>(first_row, min(first_row + kBlockM, rows.length) - 1);
  wait_for_tiles<kConfig>(args, batch_idx, head, num_keys);
  bool has_sum = seen.begin < seen.end;
  // The lists of keys do not tell whether a block of queries is in one, but the additions do, or
  // zeros that preprocess has written.
  if constexpr (kConfig.listed) {
    const bool has_zeros = uses_cluster2(kConfig) && !args.zeroes_dq;
    has_sum = has_zeros ||
              __ldcg(args.workspace.dq_semaphore + number * num_dq_semaphores(kConfig)) != kNobody;
  }
  const float4* dq_accum = reinterpret_cast<const float4*>(args.workspace.dq_accum +
                                                           int64_t{number} * (kBlockM * kHeadDim)) +
                           threadIdx.x;
  float4 sum[kHeadDim / 8];
#pragma unroll
  for (int i = 0; i < kHeadDim / 8; ++i) {
    sum[i] = has_sum ? __ldcs(dq_accum + i * 128) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int atom = 0; atom < kAtoms; ++atom) {
    uint32_t word[16] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (8 * atom + i >= kHeadDim / 8) continue;
      const float4 four = sum[8 * atom + i];
      const float scale = args.softmax_scale;
      word[2 * i] = pack<kElement>(four.x * scale, four.y * scale);
      word[2 * i + 1] = pack<kElement>(four.z * scale, four.w * scale);
    }
    stage_rows(staged[warp][atom], word);
  }
  __syncwarp();
  const int vecs = (args.head_dim + 7) / 8;
  const int64_t batch_coord = args.seqlens_q.cu_seqlens != nullptr ? 0 : batch_idx;
  const int row_of_warp = first_row + warp * kRowsOfWarp;
  uint16_t* dq = args.dq + batch_coord * args.dq_batch + (rows.offset + row_of_warp) * args.dq_seq +
                 head * args.dq_head;
  for (int i = lane; i < kRowsOfWarp * vecs; i += 32) {
    const int row = i / vecs, vec = i % vecs;
    if (row_of_warp + row >= rows.length) break;
    store_columns(dq + row * args.dq_seq, vec * 8, args.head_dim,
                  staged_columns(staged[warp][vec / 8], row, vec % 8));
  }
}

// Sums the gradient of a head's sink over the blocks of all sequences, always in the same order.
__device__ __forceinline__ void reduce_sink_gradient(const Arguments& args, int head) {
  const int num_blocks = static_cast<int>(args.workspace.num_rows / kBlockM);
  const int sequences = args.seqlens_q.cu_seqlens != nullptr ? 1 : args.scheduler.varlen.batch;
  constexpr int kThreads = 128;
  float sum = 0.f;
  for (int i = threadIdx.x; i < sequences * num_blocks; i += kThreads) {
    const int sequence = i / num_blocks;
    sum += args.workspace.sink_gradients[int64_t{sequence} * (args.num_heads_q - 1) * num_blocks +
                                         int64_t{head} * num_blocks + i];
  }
  __shared__ float parts[kThreads];
  parts[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) store_sink(args.dsinks, args.sink_type, head, parts[0]);
}

// CTAs start on SMs that the main kernel leaves free or whose CTAs exit (PDL), with the heads whose
// dq_accum is complete first.
template <class Traits>  // a type and not a Config, as for attention_kernel
__global__ void __launch_bounds__(128) postprocess_kernel(const __grid_constant__ Arguments args) {
  constexpr Config kConfig = Traits::kConfig;
  launch_dependents();
  postprocess_block<kConfig>(args, blockIdx.x);
  // Keeps this grid alive until the main kernel is complete, so no dependent starts early. The last
  // CTAs, of which there are no fewer than heads, then find all of preprocess's sums.
  const int behind = static_cast<int>(gridDim.x - 1 - blockIdx.x);
  const bool reduces = args.dsinks != nullptr && behind < args.num_heads_q;
  if (behind == 0 || reduces) griddepcontrol_wait();
  if (reduces) reduce_sink_gradient(args, behind);
}

}  // namespace flashattn3::backward
