// Computes the number of CTAs, the workspace and the kernel's arguments of a decode launch from
// DecodeParams.
#pragma once

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdint>
#include <string>

#include "decode/arguments.h"
#include "decode/config.h"
#include "decode/workspace.h"
#include "launch/decode_params.h"
#include "launch/errors.h"
#include "launch/launch.cuh"

namespace flashattn3 {

inline decode::PackedRows packed_rows(const DecodeParams& params) {
  return decode::PackedRows::of(params.num_heads_q / params.num_heads_kv);
}

// Upper bound on the units of work (decode/work_share.cuh) of `token_tiles` tiles of tokens whose
// keys are at most `capacity`.
inline int64_t units_of_tiles(const DecodeParams& params, int64_t token_tiles, int block_n,
                              int capacity) {
  const int64_t blocks =
      params.whole_tiles ? 1 : std::max<int64_t>(1, (int64_t{capacity} + block_n - 1) / block_n);
  return token_tiles * params.num_heads_kv * packed_rows(params).head_tiles * blocks;
}

// Those of a prefix, whose rows are those of all sequences.
inline int64_t units_of_prefix(const DecodeParams& params, int block_n) {
  if (params.prefix_pages == nullptr) return 0;
  const int tokens = packed_rows(params).tokens;
  return units_of_tiles(params, (params.tokens() + tokens - 1) / tokens, block_n,
                        params.prefix_capacity);
}

// The bound if every sequence has seqlen_q queries, by which the grid is chosen.
inline int64_t max_decode_units(const DecodeParams& params, int block_n) {
  const int tokens = packed_rows(params).tokens;
  const int64_t token_tiles = (int64_t{params.seqlen_q} + tokens - 1) / tokens;
  return units_of_tiles(params, params.batch * token_tiles, block_n, params.capacity) +
         units_of_prefix(params, block_n);
}

// The bound for sequences that together have the queries of the call.
inline int64_t most_decode_units(const DecodeParams& params, int block_n) {
  const int64_t units = max_decode_units(params, block_n);
  if (params.cu_seqlens_q == nullptr) return units;
  const int64_t token_tiles = params.total_q / packed_rows(params).tokens + int64_t{params.batch};
  return std::min(units, units_of_tiles(params, token_tiles, block_n, params.capacity) +
                             units_of_prefix(params, block_n));
}

// The CTAs and the workspace of a launch, whatever the lengths are.
struct DecodeGrid {
  static constexpr int kMostCtasPerSm = 2;
  // Parts of a work tile from which on combining them costs more than half SMs gain.
  static constexpr int kManyParts = 64;
  // Rows of a work tile up to which SMs are halved: the workspace grows with CTAs and rows.
  static constexpr int kFewRows = 32;

  int num_shares;    // at most one per unit
  int share_heads;   // neighbouring CTAs with the same share of neighbouring KV heads
  int num_ctas;      // all run at a time
  int partial_rows;  // rows of a work tile that there can be
  int log2_stages;   // of the stages in use
  bool whole_tiles;  // no work tile is split
  int span_slots;    // Arguments::span_slots; 0 without spans

  // Each CTA has an SM, or the half of one. A call that leaves SMs free has one CTA for each SM
  // that it may use.
  static DecodeGrid of(const DecodeParams& params, const decode::Config& config) {
    const decode::PackedRows rows = packed_rows(params);
    const int tokens = std::min<int>(rows.tokens, std::max(params.seqlen_q, 1));
    const int64_t tiles = std::max<int64_t>(1, max_decode_units(params, INT_MAX));
    const bool many_tiles =
        config.spans && tokens * rows.heads > kFewRows && tiles >= 2 * params.num_sms;
    const bool share_sm = decode::ctas_per_sm(config) == 2 && !params.leaves_sms &&
                          (many_tiles || (tokens * rows.heads <= kFewRows &&
                                          2 * params.num_sms < kManyParts * tiles));
    const int most = (share_sm ? 2 : 1) * params.num_sms;
    const int heads = heads_of_share(params.num_heads_kv, most);
    const int64_t tiles_of_head = std::max<int64_t>(1, tiles / heads);
    // With spans the workspace grows with them and the rows of a work tile.
    const bool whole = params.whole_tiles || many_tiles;
    const int unit = whole ? INT_MAX : config.spans ? params.split_tokens : config.block_n;
    const int64_t units = max_decode_units(params, unit) / heads;
    // A unit for each share, but two where combining their parts would take longer than a unit.
    const int64_t wanted =
        config.spans ? units
                     : std::max((units + 1) / 2, std::min(units, tiles_of_head * decode::kGroup));
    const int64_t most_shares = std::clamp<int64_t>(wanted, 1, most / heads);
    const bool has_prefix = params.prefix_pages != nullptr;  // its work tiles are not like others
    const int shares =
        static_cast<int>(has_prefix ? most_shares : aligned_shares(most_shares, tiles_of_head));
    const int64_t most_tokens = has_prefix ? params.tokens() : params.seqlen_q;
    // Few spans have an SM for each CTA anyway.
    const bool beside = share_sm && (!config.spans || shares * heads > params.num_sms);
    const int num_stages = beside ? config.num_stages_beside : config.num_stages;
    const int64_t of_tile = (int64_t{params.capacity} + unit - 1) / unit;
    const int64_t of_share = std::min(of_tile, (units + shares - 1) / shares);
    return {.num_shares = shares,
            .share_heads = heads,
            .num_ctas = shares * heads,
            .partial_rows = static_cast<int>(std::clamp<int64_t>(most_tokens, 1, int{rows.tokens}) *
                                             rows.heads),
            .log2_stages = std::countr_zero(static_cast<unsigned>(num_stages)),
            .whole_tiles = whole,
            .span_slots = config.spans ? static_cast<int>(1 + (whole ? 0 : of_share)) : 0};
  }

  // With sequences of equal lengths a share is then a whole number of work tiles, or a work tile a
  // whole number of shares, whole groups of them if there are more than one, if this leaves at most
  // a sixteenth of the shares unused.
  static int64_t aligned_shares(int64_t most, int64_t tiles) {
    const auto nearly_all = [&](int64_t shares) { return shares * 16 >= most * 15; };
    if (tiles > most) {
      const int64_t tiles_of_share = (tiles + most - 1) / most;
      const int64_t aligned = (tiles + tiles_of_share - 1) / tiles_of_share;
      return nearly_all(aligned) ? aligned : most;
    }
    const int64_t of_tile = most / tiles, in_groups = of_tile / decode::kGroup * decode::kGroup;
    if (nearly_all(in_groups * tiles)) return in_groups * tiles;
    return nearly_all(of_tile * tiles) ? of_tile * tiles : most;
  }

  // The most KV heads that divide all of them and leave at most a sixteenth of the CTAs unused.
  static int heads_of_share(int num_heads_kv, int most_ctas) {
    int heads = std::min(num_heads_kv, most_ctas);
    while (num_heads_kv % heads != 0 || most_ctas % heads * 16 > most_ctas) --heads;
    return heads;
  }

  int64_t num_partials() const {
    return span_slots > 0 ? int64_t{num_ctas} * span_slots : decode::num_partials(num_ctas);
  }
  // The parts have statistics, and so do the groups of parts that kernels without spans combine.
  int64_t stats_bytes() const {
    return 2 * num_partials() * partial_rows * int64_t{sizeof(float2)};
  }
  int64_t workspace_bytes(int head_dim_v) const {
    return stats_bytes() + num_partials() * partial_rows * head_dim_v * int64_t{sizeof(float)};
  }
};

static_assert(DecodeGrid::kMostCtasPerSm * decode::Counters::kMostSms ==
              decode::Counters::kMostCtas);

inline decode::CacheTensor cache_tensor(const CacheParams& cache) {
  return {.data = static_cast<const uint16_t*>(cache.data),
          .page = cache.stride.batch,
          .slot = cache.stride.seq,
          .head = cache.stride.head};
}

inline decode::HeadDescales head_descales(const float* data, const DescaleStrides& stride) {
  return {.data = data, .batch = stride.batch, .head = stride.head};
}

inline void check_decode(const char* name, const decode::Config& config,
                         const DecodeParams& params) {
  const auto check_head_dim = [&](const char* what, int value) {
    if (value > 0 && value <= config.head_dim && value % 8 == 0) return;
    expect(false, "launch", what,
           "a multiple of 8, at most " + std::to_string(config.head_dim) + " for " + name, value);
  };
  check_head_dim("head_dim", params.head_dim);
  check_head_dim("head_dim_v", params.head_dim_v);
  constexpr int kMostSms = decode::Counters::kMostSms;
  expect(params.num_sms <= kMostSms, "launch", "num_sms", "at most " + std::to_string(kMostSms),
         params.num_sms);
  const bool fits = config.spans ? params.split_tokens > 0 && params.split_tokens % 128 == 0
                                 : params.split_tokens == 0;
  expect(fits, "launch", "split_tokens",
         std::string(config.spans ? "a multiple of 128 for " : "0 for ") + name,
         params.split_tokens);
  const int64_t units = most_decode_units(params, config.block_n);
  expect(units < INT_MAX, "launch", "the number of units of work", "below 2^31 - 1", units);
}

// Returns whether a kernel for plain calls takes the call, because decode::plain keeps all
// arguments that its result depends on. One query sees all keys whatever window_right is.
inline bool is_plain(const DecodeParams& params, const decode::Config& config) {
  const bool one_query = params.cu_seqlens_q == nullptr && params.seqlen_q == 1;
  const bool few_heads = params.num_heads_q / params.num_heads_kv <= decode::kBlockM;
  const bool all_columns =
      params.head_dim == config.head_dim && params.head_dim_v == config.head_dim;
  const bool has_tables = params.cu_seqlens_k_new != nullptr || params.cache_leftpad != nullptr ||
                          params.cache_batch_idx != nullptr;
  const bool has_descales =
      params.q_descale != nullptr || params.k_descale != nullptr || params.v_descale != nullptr;
  const bool has_window = params.window_left >= 0 || params.sinks != nullptr;
  return !decode::has_bytes(config) && one_query && few_heads && all_columns && !has_tables &&
         !has_descales && (!has_window || decode::plain_has_window(config.head_dim)) &&
         score_scale_of(params, false).tanh_scale == 0.f && !params.whole_tiles;
}

// block_n: of a warp kernel not the config's.
inline decode::Arguments make_decode_arguments(const DecodeParams& params, const DecodeGrid& grid,
                                               int block_n) {
  const bool varlen = params.cu_seqlens_q != nullptr;
  const bool paged = params.page_table != nullptr;
  auto* memory = static_cast<uint8_t*>(params.workspace);
  // No distance of two positions exceeds 2^30 - 1 (MAX_ROWS); position + side + 1 fits in an int.
  static constexpr int kMostDistance = (1 << 30) - 1;
  const auto window = [](int side) { return side < 0 ? INT_MAX : std::min(side, kMostDistance); };
  return {.q = static_cast<const uint16_t*>(params.q),
          .out = static_cast<uint16_t*>(params.out),
          .lse = params.lse,
          .q_batch = varlen ? 0 : params.q_stride.batch,
          .q_seq = params.q_stride.seq,
          .q_head = params.q_stride.head,
          .out_batch = varlen ? 0 : params.out_stride.batch,
          .out_seq = params.out_stride.seq,
          .out_head = params.out_stride.head,
          .lse_batch = varlen ? 0 : params.lse_stride.batch,
          .lse_seq = params.lse_stride.seq,
          .lse_head = params.lse_stride.head,
          .k = cache_tensor(params.k),
          .v = cache_tensor(params.v),
          .page_table = params.page_table,
          .page_table_stride = params.page_table_stride,
          .page_size = cutlass::FastDivmod(paged ? params.page_size : 1),
          .even_blocks = !paged || params.page_size % block_n == 0,
          .num_pages = paged ? params.num_pages : params.num_caches,
          .num_caches = params.num_caches,
          .capacity = params.capacity,
          .seqlens_q = {params.cu_seqlens_q, nullptr, params.seqlen_q, params.total_q},
          .cache_seqlens = params.cache_seqlens,
          .cu_seqlens_k_new = params.cu_seqlens_k_new,
          .cache_leftpad = params.cache_leftpad,
          .cache_batch_idx = params.cache_batch_idx,
          .seqlen_k = params.seqlen_k,
          .seqlen_new = params.seqlen_new,
          .batch = params.batch,
          .max_queries = params.max_queries,
          .num_shares = cutlass::FastDivmod(grid.num_shares),
          .share_heads = cutlass::FastDivmod(grid.share_heads),
          .rows = packed_rows(params),
          .num_heads_kv = params.num_heads_kv,
          .qhead_per_kvhead = params.num_heads_q / params.num_heads_kv,
          .head_groups = params.num_heads_kv / grid.share_heads,
          .head_dim = params.head_dim,
          .head_dim_v = params.head_dim_v,
          .out_vectors = cutlass::FastDivmod(params.head_dim_v / 4),
          .window_left = window(params.window_left),
          .window_right = window(params.window_right),
          .score_scale = score_scale_of(params, false),
          .q_descale = head_descales(params.q_descale, params.q_descale_stride),
          .k_descale = head_descales(params.k_descale, params.k_descale_stride),
          .v_descale = head_descales(params.v_descale, params.v_descale_stride),
          .sinks = params.sinks,
          .whole_tiles = grid.whole_tiles,
          .log2_stages = grid.log2_stages,
          .partial_rows = grid.partial_rows,
          .partial_out = reinterpret_cast<float*>(memory + grid.stats_bytes()),
          .partial_stats = reinterpret_cast<float2*>(memory),
          .counters = grid.whole_tiles ? nullptr : params.counters,
          .span_blocks = params.split_tokens / block_n,
          .span_slots = grid.span_slots};
}

}  // namespace flashattn3
