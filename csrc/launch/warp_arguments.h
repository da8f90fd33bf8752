// Choice of cached calls for a warp kernel (decode/warp_kernel.cuh), and its launch.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "decode/arguments.h"
#include "decode/config.h"
#include "decode/warp_traits.cuh"
#include "decode/workspace.h"
#include "launch/byte_arguments.h"
#include "launch/decode_arguments.h"
#include "launch/decode_params.h"

namespace flashattn3 {

// Bytes of K and V up to which warp kernels are faster (H100: 1 x 16k keys 27 instead of 30 us, but
// 1 x 512k 699 instead of 690); of 8 bits that of equal shares is faster from there on (H200).
constexpr int64_t most_warp_kernel_bytes(const decode::Config& config) {
  return int64_t{decode::has_warp_shares(config) ? 128 : 256} << 20;
}

inline int most_warp_ctas(const DecodeParams& params) {
  return std::min(params.num_sms, decode::PartMemory::kMostCtas);
}

inline int64_t warp_rows(const DecodeParams& params) {
  return int64_t{params.seqlen_q} * (params.num_heads_q / params.num_heads_kv);
}

// Row tiles of a warp kernel: of 8 packed rows.
inline int warp_row_tiles(const DecodeParams& params) { return warp_rows(params) > 8 ? 2 : 1; }

// Returns whether the distance of neighbouring tokens fits where the warps of a cache of 8 bits
// have it.
inline bool has_near_tokens(const DecodeParams& params) {
  return std::max(params.k.stride.seq, params.v.stride.seq) <= INT_MAX;
}

// Returns whether a call that takes no other warp kernel runs on that of equal shares. With
// whole_tiles none does: a row's bits must not depend on how many queries others have.
inline bool uses_warp_shares(const DecodeParams& params, const decode::Config& config) {
  return decode::has_warp_shares(config) && !params.whole_tiles && has_near_tokens(params) &&
         warp_rows(params) <= decode::warp_kernel_rows(config);
}

inline decode::Config config_of_shares(const DecodeParams& params, const decode::Config& config) {
  return decode::of_warp_shares(config, warp_row_tiles(params));
}

// Returns whether a call runs on a warp kernel: one sequence, or several in dense caches. Half of
// the CTAs at least can go where the keys are, however unequal the sequences: half of the SMs draw
// nearly all of the bandwidth. With whole_tiles none does: a row's bits must not depend on the
// batch or the capacity.
inline bool uses_warp_kernel(const DecodeParams& params, const decode::Config& config) {
  if (params.whole_tiles || params.cu_seqlens_q != nullptr) return false;
  if (warp_rows(params) > decode::warp_kernel_rows(config)) return false;
  if (decode::has_bytes(config) && !has_near_tokens(params)) return false;
  const bool one = params.batch == 1;
  if (!one && (params.batch > decode::kWarpKernelBatch || params.page_size > 0)) return false;
  const int64_t tiles = int64_t{params.batch} * params.num_heads_kv;
  const int num_ctas = most_warp_ctas(params);
  if (tiles > (one ? num_ctas : num_ctas / 2)) return false;
  const int bytes = decode::has_bytes(config) ? 1 : 2;
  const int64_t of_token = int64_t{params.head_dim + params.head_dim_v} * bytes;
  return tiles * params.capacity * of_token <= most_warp_kernel_bytes(config);
}

// The most KV blocks of a sequence in which a query sees a key.
inline int64_t most_n_blocks(const DecodeParams& params, const decode::Config& config) {
  const int64_t block_n = decode::warp_block_n(config);
  int64_t keys = params.capacity;
  // The first query's window begins anywhere in a KV block.
  if (params.window_left >= 0) {
    keys = std::min(keys, int64_t{params.window_left} + params.seqlen_q + block_n - 1);
  }
  return (keys + block_n - 1) / block_n;
}

// The CTAs of a launch of a warp kernel, whatever the lengths are: a share is a CTA of each KV
// head.
inline DecodeGrid warp_grid(const DecodeParams& params, const decode::Config& config) {
  // Half of the warps have a KV block at least.
  constexpr int kBlocksOfCta = decode::kWarpKernelWarps / 2;
  const int64_t wanted =
      int64_t{params.batch} * ((most_n_blocks(params, config) + kBlocksOfCta - 1) / kBlocksOfCta);
  const int shares = static_cast<int>(std::clamp<int64_t>(
      wanted, params.batch, std::max(params.batch, most_warp_ctas(params) / params.num_heads_kv)));
  return {.num_shares = shares,
          .share_heads = params.num_heads_kv,
          .num_ctas = shares * params.num_heads_kv,
          .partial_rows = params.seqlen_q * (params.num_heads_q / params.num_heads_kv),
          .log2_stages = 0,
          .whole_tiles = false,
          .span_slots = 0};
}

// Records of PartMemory that a launch takes; 0: no work tile has several CTAs.
inline int num_part_records(const DecodeParams& params, const DecodeGrid& grid) {
  if (grid.num_shares <= params.batch) return 0;
  return grid.num_ctas * (grid.partial_rows * params.head_dim_v / 8);
}

// The workspace is PartMemory.
template <decode::Config kConfig>
decode::Arguments make_warp_arguments(const DecodeParams& params, const DecodeGrid& grid) {
  decode::Arguments args = arguments_of<kConfig>(params, grid, decode::warp_block_n(kConfig));
  args.part_memory = static_cast<decode::PartMemory*>(params.workspace);
  args.part_records = num_part_records(params, grid);
  return args;
}

// Calls call.operator()<row tiles>() with the row tiles of a call that a warp kernel takes.
template <decode::Config kConfig, class Call>
void with_row_tiles(const DecodeParams& params, Call&& call) {
  if constexpr (decode::warp_kernel_rows(kConfig) > 8) {
    if (warp_row_tiles(params) > 1) return call.template operator()<2>();
  }
  call.template operator()<1>();
}

// Calls call(WarpTraits()) with those of the warp kernel that takes the call.
template <decode::Config kConfig, int kRowTiles, class Call>
void with_warp_traits_of_rows(const DecodeParams& params, Call&& call) {
  using enum decode::Pages;
  const auto with_pages = [&]<decode::Pages kPages>() {
    if constexpr (!decode::has_bytes(kConfig)) {
      if (is_plain(params, kConfig)) {
        return call(decode::WarpTraits<kConfig, kRowTiles, kPages, true>());
      }
    }
    call(decode::WarpTraits<kConfig, kRowTiles, kPages, false>());
  };
  if (params.page_table == nullptr) {
    with_pages.template operator()<kNone>();
  } else if (params.page_size % decode::warp_block_n(kConfig) == 0) {
    with_pages.template operator()<kEven>();
  } else {
    call(decode::WarpTraits<kConfig, kRowTiles, kUneven, false>());
  }
}
template <decode::Config kConfig, class Call>
void with_warp_traits(const DecodeParams& params, Call&& call) {
  with_row_tiles<kConfig>(
      params, [&]<int kRowTiles>() { with_warp_traits_of_rows<kConfig, kRowTiles>(params, call); });
}

}  // namespace flashattn3
