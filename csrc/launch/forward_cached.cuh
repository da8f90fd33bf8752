// Launch of one forward kernel for cached calls of many query rows.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>

#include "launch/decode_params.h"
#include "launch/errors.h"
#include "launch/forward.cuh"
#include "launch/forward_params.h"
#include "launch/tree_arguments.h"

namespace flashattn3 {

// Slots of a TMA box: the largest number that divides the page and the KV block. A dense cache has
// pages of any size, but a box that crosses the end of one has no keys beyond it.
inline int box_rows_of(const DecodeParams& params, int block_n) {
  return params.page_table == nullptr ? block_n : std::gcd(params.page_size, block_n);
}

// Groups of 8 slots from one page to the next, if a box can have all atoms of its slots: there are
// several atoms, all columns of a head fill whole ones, and pages begin at whole groups. Else 0.
inline int page_groups_of(const CacheParams& cache, int head_dim, int slots, int pages,
                          int box_rows) {
  if (head_dim <= 64 || head_dim % 64 != 0 || box_rows % 8 != 0 || slots % 8 != 0) return 0;
  const int64_t group_stride = 8 * cache.stride.seq;
  if (group_stride <= 0) return 0;
  if (pages == 1) return slots / 8;
  const int64_t groups = cache.stride.batch / group_stride;
  const bool whole = groups > 0 && cache.stride.batch % group_stride == 0;
  return whole && groups * pages < INT_MAX ? static_cast<int>(groups) : 0;
}

template <forward::Config kConfig>
void check_cached_forward(const char* name, const DecodeParams& params) {
  check_fits(name, kConfig, forward_params_of(params));
  const bool scaled =
      params.q_descale != nullptr || params.k_descale != nullptr || params.v_descale != nullptr;
  const std::string none = std::string("none for ") + name;
  expect(!scaled, "launch", "descales", none, "some");
  const int span = params.split_tokens;
  expect(kConfig.spans ? span > 0 && span % 128 == 0 : span == 0, "launch", "split_tokens",
         std::string(kConfig.spans ? "a multiple of 128 for " : "0 for ") + name, span);
}

// Bytes of the order of the sequences and, behind it, the tile semaphore, in whole vectors.
inline int64_t schedule_bytes(const ForwardParams& forward) {
  if (!forward.varlen) return 0;
  return (varlen_schedule_bytes(forward.batch) + int64_t{sizeof(int32_t)} + 15) / 16 * 16;
}

// Returns the size of a launch at any lengths. The workspace has the schedule, then the totals of
// spans.
template <forward::Config kConfig>
LaunchSize cached_forward_size(const char* name, const DecodeParams& params) {
  check_cached_forward<kConfig>(name, params);
  const ForwardParams forward = forward_params_of(params);
  const int64_t tiles = num_tiles(forward, forward_tiles<kConfig>(forward));
  const int num_ctas = num_persistent_ctas(forward, tiles);
  return {
      .num_ctas = num_ctas,
      .workspace_bytes = schedule_bytes(forward) + num_ctas * forward::span_total_bytes<kConfig>()};
}

template <forward::Config kConfig>
forward::CachedArgumentsOf<kConfig> make_cached_arguments(const DecodeParams& params,
                                                          const ForwardParams& forward) {
  const bool paged = params.page_table != nullptr;
  const int pages = paged ? params.num_pages : params.num_caches;
  const int slots = paged ? params.page_size : params.capacity;
  const int box_rows = box_rows_of(params, kConfig.block_n);
  forward::CachedArgumentsOf<kConfig> args;
  set_query_arguments<kConfig>(args, forward);
  args.keys = cached_keys_of(params);
  const bool no_keys = args.keys.capacity == 0;
  constexpr int kAtoms = forward::KernelTraits<kConfig>::kAtoms;
  const auto set_cache = [&](const char* what, const CacheParams& cache, int head_dim,
                             CUtensorMap& map, forward::CacheTile& tile) {
    const int groups = no_keys ? 0 : page_groups_of(cache, head_dim, slots, pages, box_rows);
    if (groups > 0) {
      const GroupedRows rows{head_dim / 64, int64_t{groups} * (pages - 1) + slots / 8,
                             params.num_heads_kv, cache.stride.seq, cache.stride.head};
      map = make_grouped_map(what, kConfig.dtype, cache.data, rows, kAtoms, box_rows / 8);
      tile = {.strides = {.atom = 1024 / 16, .group = kAtoms * 1024 / 16}, .page_groups = groups};
    } else {
      using Strides = AtomMajor<kConfig.block_n>;
      const TensorMapShape shape{head_dim, no_keys ? 0 : slots, params.num_heads_kv,
                                 std::max(pages, 1)};
      map =
          make_tensor_map(what, kConfig.dtype, cache.data, params.q, shape, cache.stride, box_rows);
      tile = {.strides = {.atom = Strides::atom, .group = Strides::group}, .page_groups = 0};
    }
  };
  set_cache("k_cache", params.k, params.head_dim, args.k, args.k_tile);
  set_cache("v_cache", params.v, params.head_dim_v, args.v, args.v_tile);
  args.seqlens_k = {};
  args.variant.scale = score_scale_of(params, false);
  args.slices_of_tile = forward_tile_shape<kConfig>(forward).slices;
  args.log2_box_rows = std::bit_width(static_cast<unsigned>(box_rows)) - 1;
  args.span_blocks = params.split_tokens / kConfig.block_n;
  args.span_totals = reinterpret_cast<float4*>(static_cast<std::byte*>(params.workspace) +
                                               schedule_bytes(forward));
  if constexpr (kConfig.tree) args.tree = tree_mask_of(params);
  return args;
}

// Enqueues the kernel asynchronously. name: of the kernel config. Throws std::runtime_error for a
// problem that the kernel does not take and for a failed launch. With cu_seqlens_q rows of no
// sequence become out 0 and lse -inf.
template <forward::Config kConfig>
void launch_cached_forward(const char* name, const DecodeParams& params, cudaStream_t stream) {
  static_assert(kConfig.cached && std::has_single_bit(static_cast<unsigned>(kConfig.block_n)));
  check_cached_forward<kConfig>(name, params);
  const ForwardParams forward = forward_params_of(params);
  if (forward.num_heads_q <= 0 || (forward.varlen && forward.total_q <= 0)) return;
  // Beside a decode kernel some CTAs start late. Each draws even its first tile then, so that none
  // waits for a CTA that has no SM yet.
  int32_t* const semaphore =
      params.min_queries > 0
          ? reinterpret_cast<int32_t*>(static_cast<std::byte*>(forward.varlen_schedule) +
                                       varlen_schedule_bytes(forward.batch))
          : nullptr;
  if (forward.varlen) {
    launch_varlen_forward(forward, forward_tile_shape<kConfig>(forward), stream, params.min_queries,
                          semaphore);
  }
  if (forward.batch <= 0 || forward.seqlen_q <= 0) return;
  expect_tree<kConfig.tree>(name, params);
  auto args = make_cached_arguments<kConfig>(params, forward);
  args.scheduler.tile_semaphore = semaphore;
  if (semaphore != nullptr) args.scheduler.tile_counter = nullptr;
  constexpr auto kKernel = forward_kernel<kConfig>();
  constexpr int kSharedBytes = forward::KernelTraits<kConfig>::kSmemBytes;
  allow_shared_memory<kKernel>(kSharedBytes);
  const unsigned num_ctas = num_persistent_ctas(forward, args.scheduler.num_tiles);
  launch_kernel(name, "", kKernel, {num_ctas, forward::num_threads(kConfig), kSharedBytes}, stream,
                params.pdl, args);
}

}  // namespace flashattn3
