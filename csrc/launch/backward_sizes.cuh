// Sizes of one backward: tiles, parts, workspace and grid.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

#include "backward/config.h"
#include "backward/waves.h"
#include "launch/errors.h"
#include "launch/launch.cuh"
#include "launch/params.h"

namespace flashattn3 {

template <class Integer>
constexpr Integer round_up(Integer value, Integer multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Sizes of a launch, all of which follow from the problem.
struct BackwardSizes {
  int64_t rows_of_head;  // of dq_accum, lse and delta: Workspace::num_rows
  int64_t rows;          // of all heads
  int num_head_parts;    // parts into which the query heads of a KV head are divided
  int num_part_heads;    // heads of work tiles: one for each part of a KV head
  WorkTiles tiles;
  int64_t num_tiles;
  int tiles_of_sequence;     // PartialSums
  int64_t num_heads_done;    // counts of tiles_done
  int64_t num_partial_sums;  // of a consumer warp's sums of parts; 0 if heads are not divided
  int64_t bytes_before_partial_sums, workspace_bytes;

  unsigned num_m_blocks() const { return static_cast<unsigned>(rows / backward::kBlockM); }
};

// Rows of a head in the workspace, in whole blocks: of one sequence, or with cu_seqlens of all
// sequences, each of which starts at a new block.
inline int64_t workspace_rows(const AttentionProblem& problem) {
  const int64_t blocks =
      problem.varlen ? problem.total_q / backward::kBlockM + problem.batch
                     : (int64_t{problem.seqlen_q} + backward::kBlockM - 1) / backward::kBlockM;
  return blocks * backward::kBlockM;
}

// Heads whose tiles take turns. Deterministic without a mask: each tile of a head is a step behind
// the previous one, so tiles that are drawn at the same time should be of different heads; the
// fewer queries a tile visits, the more tiles are drawn in the time of a step. What they read and
// add to, Q, dO and dq_accum of these heads, 8 bytes for each element of Q, should stay in L2.
template <backward::Config kConfig>
int heads_in_turn(const AttentionProblem& problem, int num_heads) {
  if (problem.masked() || !problem.deterministic) return 1;
  constexpr int64_t kElements = 1 << 21, kMostHeads = 16;
  const int64_t queries = int64_t{std::max(1, problem.seqlen_q)} * problem.num_heads_q / num_heads;
  return static_cast<int>(
      std::clamp<int64_t>(kElements / (queries * kConfig.head_dim), 1, kMostHeads));
}

// Deterministic: tiles of the last L2 head group, where tiles add in another order. The number of
// SMs plays no part, so that results have the same bits on GPUs that differ in it.
constexpr int kTilesOfLastGroup = 132;

// num_heads: heads of dk and dv. With a mask the longest tiles come first; if deterministic, the
// last tiles must come first.
template <backward::Config kConfig>
WorkTiles backward_tiles(const AttentionProblem& problem, int num_heads) {
  return {.shape = {.rows = backward::block_n(kConfig)},
          .longest = problem.seqlen_k,
          .total = problem.total_k,
          .num_heads = num_heads,
          .l2_group_heads = heads_in_turn<kConfig>(problem, num_heads),
          .last_group_tiles = !problem.masked() && !kConfig.listed ? 0
                              : problem.deterministic              ? kTilesOfLastGroup
                                                                   : problem.num_sms,
          .last_block_first = problem.masked() && problem.deterministic};
}

// Estimates how many queries see a key. In a varlen batch the average key is in a sequence longer
// than the average sequence: twice as long if the lengths are distributed exponentially.
inline int64_t queries_of_a_key(const AttentionProblem& problem) {
  int64_t queries = problem.seqlen_q;
  if (problem.varlen) {
    queries = std::min(queries, 2 * int64_t{problem.total_q} / std::max(1, problem.batch));
  }
  if (problem.window_left < 0 || problem.window_right < 0) return queries;
  return std::min(queries, int64_t{problem.window_left} + problem.window_right + 1);
}

// Parts into which the query heads of a KV head are divided. Each part has work tiles of its own:
// there are then enough for all SMs, and those that run at a time read few heads of Q and dO. The
// tiles of the parts sum their dK and dV in float32 (reduce_parts.cuh). That costs time in
// proportion to the keys and gains time in proportion to the queries that see a key, so it takes
// many of these, or a mask and few work tiles, or idle SMs. Measured on an H100
// (docs/log/hopper-backward.md).
template <backward::Config kConfig>
int num_head_parts(const AttentionProblem& problem) {
  constexpr int kManyQueries = 2048, kSomeQueries = 512;
  const int heads_kv = problem.num_heads_kv, group = problem.num_heads_q / heads_kv;
  if (group == 1) return 1;
  const int64_t tiles = num_tiles(problem, backward_tiles<kConfig>(problem, heads_kv));
  if (tiles == 0) return 1;
  if constexpr (kConfig.listed) return group;  // query heads may have lists of their own
  int parts = 1;
  const auto divide = [&](int least_heads, int64_t wanted_tiles) {
    for (int more = 2; more * least_heads <= group && tiles * parts < wanted_tiles; ++more) {
      if (group % more == 0 && more > parts) parts = more;
    }
  };
  const int64_t queries = queries_of_a_key(problem);
  if (queries >= kManyQueries) {
    divide(2, INT64_MAX);
  } else if (problem.masked() && queries >= kSomeQueries) {
    divide(2, int64_t{4} * problem.num_sms);
  }
  divide(1, problem.num_sms);
  return parts;
}

// name: of the kernel config. Throws if the kernel does not take the problem.
template <backward::Config kConfig>
BackwardSizes backward_sizes(const char* name, const AttentionProblem& problem) {
  check_fits(name, kConfig, problem);
  BackwardSizes sizes;
  sizes.rows_of_head = workspace_rows(problem);
  sizes.rows =
      sizes.rows_of_head * problem.num_heads_q * int64_t{problem.varlen ? 1 : problem.batch};
  expect(sizes.rows <= INT_MAX, "launch", "rows of queries of all heads", "below 2^31", sizes.rows);
  sizes.num_head_parts = num_head_parts<kConfig>(problem);
  sizes.num_part_heads = problem.num_heads_kv * sizes.num_head_parts;
  sizes.tiles = backward_tiles<kConfig>(problem, sizes.num_part_heads);
  sizes.num_tiles = num_tiles(problem, sizes.tiles);
  constexpr int kBlockN = backward::block_n(kConfig);
  sizes.tiles_of_sequence = problem.varlen ? 1 : (problem.seqlen_k + kBlockN - 1) / kBlockN;
  const int64_t tiles = int64_t{problem.batch} * sizes.tiles_of_sequence +
                        (problem.varlen ? problem.total_k / kBlockN : 0);
  sizes.num_heads_done = int64_t{problem.batch} * sizes.num_part_heads;
  sizes.num_partial_sums =
      tiles * backward::warps_of_tile(kConfig) * (sizes.num_part_heads - problem.num_heads_kv);
  const int64_t semaphores = sizes.rows / backward::kBlockM * backward::num_dq_semaphores(kConfig);
  const int64_t words = sizes.rows * (kConfig.head_dim + 2) + 1 + sizes.num_heads_done +
                        sizes.num_partial_sums + semaphores + sizes.num_m_blocks();
  sizes.bytes_before_partial_sums = round_up<int64_t>(words * 4, 16);
  sizes.workspace_bytes = sizes.bytes_before_partial_sums +
                          sizes.num_partial_sums * backward::reduced_floats(kConfig) * 32 * 4;
  return sizes;
}

// Estimates how many keys a query sees, on average.
inline int64_t keys_of_a_query(const AttentionProblem& problem) {
  int64_t keys = problem.seqlen_k;
  if (problem.varlen) {
    keys = std::min(keys, 2 * int64_t{problem.total_k} / std::max(1, problem.batch));
  }
  if (problem.window_right < 0) return keys;
  const int64_t before = problem.window_left < 0 ? keys : problem.window_left;
  const int64_t causal = keys - std::min<int64_t>(keys, problem.seqlen_q) / 2;
  return std::min(causal, before + 1) + problem.window_right;
}

// cluster2: whether work tiles write the zeros of dq_accum. Zeros of preprocess go to memory and
// back. Waiting for those of work tiles costs each step a little, but nothing if deterministic,
// where it waits for the tiles before it anyway.
template <backward::Config kConfig>
bool zeroes_dq(const AttentionProblem& problem) {
  constexpr int64_t kFewKeys = 2048;  // H100 (docs/log/hopper-backward.md)
  return backward::uses_cluster2(kConfig) &&
         (problem.deterministic || keys_of_a_query(problem) <= kFewKeys);
}

// CTAs of a persistent main kernel. It leaves SMs to the postprocess kernel, which converts a
// head's dq_accum there as soon as its tiles are done: while it is in L2, and not when all of them
// are. So many SMs convert as many rows as the others finish; the main kernel takes the longer for
// a row, the more keys it sees. It leaves none if the tiles
// would take many more rounds on fewer SMs.
inline int persistent_backward_ctas(const AttentionProblem& problem, int64_t num_tiles) {
  constexpr int64_t kKeysOfOneSm = 4096;  // H100 (docs/log/hopper-backward.md)
  const int64_t most = num_persistent_ctas(problem, num_tiles);
  const int64_t left =
      std::min(kKeysOfOneSm / std::max<int64_t>(1, keys_of_a_query(problem)), most / 8);
  if (left < 2) return static_cast<int>(most);  // one SM gains nothing
  const auto rounds = [&](int64_t ctas) { return (num_tiles + ctas - 1) / ctas; };
  const bool many_more = rounds(most - left) * 8 > rounds(most) * 9;
  return static_cast<int>(many_more ? most : most - left);
}

// cluster2: each cluster has one work tile, or with varlen possibly none. Deterministic with lists:
// the tiles of a wave run at a time, whatever SMs the call should leave to others.
template <backward::Config kConfig>
int backward_num_ctas(const AttentionProblem& problem, int64_t num_tiles) {
  if (backward::uses_cluster2(kConfig)) return static_cast<int>(2 * num_tiles);
  const int ctas = persistent_backward_ctas(problem, num_tiles);
  const bool waves = kConfig.listed && problem.deterministic;
  return waves ? std::max(ctas, static_cast<int>(std::min<int64_t>(backward::kWave, num_tiles)))
               : ctas;
}

// Returns the size of a launch.
template <backward::Config kConfig>
LaunchSize backward_size(const char* name, const AttentionProblem& problem) {
  const BackwardSizes sizes = backward_sizes<kConfig>(name, problem);
  return {.num_ctas = backward_num_ctas<kConfig>(problem, sizes.num_tiles),
          .workspace_bytes = sizes.workspace_bytes};
}

}  // namespace flashattn3
