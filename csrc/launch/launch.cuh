// Helpers that the forward and the backward launches share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <string>

#include "attention/mask_lists.cuh"
#include "attention/seqlen.cuh"
#include "attention/tile_scheduler.cuh"
#include "attention/tile_shape.h"
#include "launch/errors.h"
#include "launch/params.h"
#include "launch/score_scale.h"

namespace flashattn3 {

// An unbounded (negative) side becomes max(seqlen_q, seqlen_k), which no distance of two positions
// exceeds.
inline Window window_of(const AttentionProblem& params) {
  const int widest = std::max(params.seqlen_q, params.seqlen_k);
  return {params.window_left < 0 ? widest : std::min(params.window_left, widest),
          params.window_right < 0 ? widest : std::min(params.window_right, widest)};
}

// Work tiles of a launch, and their order.
struct WorkTiles {
  TileShape shape;        // queries in the forward, keys in the backward
  int longest, total;     // tokens of the longest sequence; varlen: and of all sequences
  int num_heads;          // heads, or groups of shape.heads
  int l2_group_heads;     // heads whose tiles take turns
  int last_group_tiles;   // the last L2 head group has as many if it can: tiles differ in length
  bool last_block_first;  // of each L2 head group
};

// Upper bound on the number of work tiles of all sequences and heads. Varlen sequences share
// `total` tokens, and the longest may be far longer than the others.
inline int64_t num_tiles(const AttentionProblem& problem, const WorkTiles& tiles) {
  const int64_t alike = tiles.shape.num_blocks(tiles.longest) * problem.batch;
  const int64_t of_head =
      problem.varlen ? std::min(alike, tiles.shape.most_blocks(tiles.total, problem.batch)) : alike;
  const int64_t count = of_head * tiles.num_heads;
  const int64_t heads = int64_t{tiles.num_heads} * problem.batch;
  expect(std::max(count, heads) <= INT_MAX / 2, "launch", "the number of work tiles",
         "at most 2^30 - 1", std::max(count, heads));
  return count;
}

// CTAs of a persistent kernel: one per SM that the call may use, at most one per work tile.
inline int num_persistent_ctas(const AttentionProblem& problem, int64_t num_tiles) {
  const int64_t sms = int64_t{problem.num_sms} - problem.sm_margin;
  return static_cast<int>(std::max<int64_t>(1, std::min(sms, num_tiles)));
}

// Tokens of q and out, and of k and v.
inline SequenceTable seqlens_q_of(const ForwardParams& params) {
  const TokenPositions& positions = params.positions_q;
  return {positions.cu_seqlens, positions.seqused, params.seqlen_q, params.total_q};
}
inline SequenceTable seqlens_k_of(const ForwardParams& params) {
  const TokenPositions& positions = params.positions_k;
  return {positions.cu_seqlens, positions.seqused, params.seqlen_k, params.total_k};
}

inline TileSchedulerParams make_scheduler_params(const ForwardParams& params,
                                                 const WorkTiles& tiles) {
  // num_tiles checks that these products fit in int.
  const int count = static_cast<int>(num_tiles(params, tiles));
  const int blocks = static_cast<int>(tiles.shape.num_blocks(tiles.longest));
  return {.num_tiles = count,
          .heads = HeadGroups::of(blocks, tiles.num_heads * params.batch, tiles.l2_group_heads,
                                  tiles.last_group_tiles),
          .last_group_tiles = tiles.last_group_tiles,
          .last_block_first = tiles.last_block_first,
          .varlen = {params.varlen ? params.varlen_schedule : nullptr, params.batch},
          .tile_counter = params.tile_counter};
}

// Throws unless a call of a kernel config has lists exactly if the config reads some.
inline void check_lists(const char* name, bool listed, const MaskListParams& lists) {
  const bool given = lists.work != nullptr;
  expect(given == listed, "launch", "mask",
         (listed ? "given for " : "None for ") + std::string(name), given ? "lists" : "None");
}

// rows, columns: of the mask, as the lists see it.
inline MaskLists mask_lists(const MaskListParams& lists, int rows, int columns) {
  return {.entries = lists.entries,
          .work = reinterpret_cast<const int4*>(lists.work),
          .tiles = reinterpret_cast<const uint8_t*>(lists.tiles),
          .batch_lists = lists.batch == 1 ? 0 : lists.heads,
          .head_lists = lists.heads == 1 ? 0 : 1,
          .row_blocks = (rows + kListRows - 1) / kListRows,
          .column_blocks = (columns + kListColumns - 1) / kListColumns,
          .num_tiles = lists.num_tiles};
}

// Sets the kernel's limit of dynamic shared memory on the current device, once per device.
template <auto kKernel>
void allow_shared_memory(int bytes) {
  static std::atomic<uint64_t> allowed{0};
  int device = 0;
  check_cuda(cudaGetDevice(&device), "the current device");
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (device < 64 && (allowed.load(std::memory_order_relaxed) & bit)) return;
  check_cuda(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
             "shared memory of a kernel");
  allowed.fetch_or(bit, std::memory_order_relaxed);
}

// Throws if a head dim is larger than the kernel config's.
template <class Config>
void check_fits(const char* name, const Config& config, const AttentionProblem& problem) {
  const auto check = [&](const char* field, int largest, int found) {
    if (found <= largest) return;
    expect(false, "launch", field, "at most " + std::to_string(largest) + " for " + name, found);
  };
  check("head_dim", config.head_dim, problem.head_dim);
  check("head_dim_v", config.head_dim_v, problem.head_dim_v);
}

struct KernelGrid {
  unsigned num_ctas;
  int num_threads;
  int shared_memory_bytes = 0;
  unsigned cluster_ctas = 0;  // CTAs of a cluster; 0: as the kernel says
};

// Enqueues a kernel. name: of the kernel config, part: of its launch ("" for the main kernel), both
// for an error message. pdl: as in ForwardParams.
template <class Arguments>
void launch_kernel(const char* name, const char* part, void (*kernel)(Arguments),
                   const KernelGrid& grid, cudaStream_t stream, bool pdl, const Arguments& args) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.attrs = attributes;
  if (pdl) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (grid.cluster_ctas > 0) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {grid.cluster_ctas, 1, 1};
  }
  config.gridDim = dim3(grid.num_ctas);
  config.blockDim = dim3(grid.num_threads);
  config.dynamicSmemBytes = grid.shared_memory_bytes;
  config.stream = stream;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, args);
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that the next call does not report it again
  fail("launch of " + std::string(name) + part + " on " + std::to_string(grid.num_ctas) +
           " CTAs with " + std::to_string(grid.shared_memory_bytes) + " bytes of shared memory",
       cudaGetErrorString(status));
}

}  // namespace flashattn3
