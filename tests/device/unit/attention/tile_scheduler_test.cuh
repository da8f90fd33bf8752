// attention/tile_scheduler.cuh and varlen/prepare.cuh: the order of work tiles against nested
// loops, and that the CTAs draw each tile once.
#pragma once

#include <random>

#include "../../varlen_schedule.h"
#include "../unit.cuh"
#include "attention/tile_scheduler.cuh"
#include "varlen/prepare.cuh"

namespace unit::tile_scheduler {

using namespace flashattn3;

inline TileSchedulerParams make_params(const HeadGroups& heads, bool last_block_first) {
  return {.num_tiles = heads.num_blocks * heads.num_heads,
          .heads = heads,
          .last_group_tiles = 0,
          .last_block_first = last_block_first,
          .varlen = {nullptr, 0},
          .tile_counter = nullptr};
}

// The tiles of some heads in their order.
inline std::vector<TileCoord> tiles_of(const HeadGroups& heads, bool last_block_first) {
  std::vector<TileCoord> tiles;
  for (int first = 0; first < heads.num_heads;) {
    const bool last = first == heads.num_heads - heads.last_l2_group_heads;
    const int end = first + (last ? heads.last_l2_group_heads : heads.l2_group_heads);
    for (int i = 0; i < heads.num_blocks; ++i) {
      const int block = last_block_first ? heads.num_blocks - 1 - i : i;
      for (int head = first; head < end; ++head) tiles.push_back({block, head});
    }
    first = end;
  }
  return tiles;
}

inline void check_tiles(Result& result, const TileSchedulerParams& params,
                        const std::vector<TileCoord>& wanted) {
  const int count = static_cast<int>(wanted.size());
  result.equal(count, count_tiles(params), "count_tiles");
  for (int index = 0; index < count; ++index) {
    const TileCoord found = find_tile(params, index);
    result.equal(wanted[index].block, found.block, "block", index);
    result.equal(wanted[index].batch_head_idx, found.batch_head_idx, "batch_head_idx", index);
  }
}

inline void check_order(Result& result) {
  struct Heads {
    int heads, group, last_group;
  };
  for (const int num_blocks : {1, 3, 8}) {
    for (const Heads h : {Heads{1, 1, 1}, {8, 2, 4}, {12, 4, 4}, {7, 7, 7}, {32, 4, 24}}) {
      for (const bool last_first : {false, true}) {
        const HeadGroups heads{num_blocks, h.heads, h.group, h.last_group};
        check_tiles(result, make_params(heads, last_first), tiles_of(heads, last_first));
      }
    }
  }
}

// The last group: heads that are no whole group, or one group, and enough others for so many tiles.
inline void check_groups(Result& result) {
  struct Row {
    int num_blocks, num_heads, group, last_group_tiles, wanted_group, wanted_last;
  };
  for (const Row& row : {Row{8, 12, 4, 0, 4, 4},
                         {8, 12, 4, 33, 4, 8},
                         {8, 12, 4, 65, 4, 12},
                         {8, 10, 4, 0, 4, 2},
                         {8, 10, 4, 17, 4, 6},
                         {8, 2, 4, 99, 2, 2},
                         {64, 16, 1, 132, 1, 4},
                         {0, 3, 1, 132, 1, 3},
                         {5, 1, 0, 0, 1, 1}}) {
    const HeadGroups found =
        HeadGroups::of(row.num_blocks, row.num_heads, row.group, row.last_group_tiles);
    result.equal(row.wanted_group, found.l2_group_heads, "l2_group_heads", row.num_heads);
    result.equal(row.wanted_last, found.last_l2_group_heads, "last_l2_group_heads", row.num_heads);
  }
}

using VarlenBatch = std::vector<VarlenExtent>;

inline std::vector<int32_t> schedule_of(const VarlenBatch& batch) {
  std::vector<int32_t> words(varlen_schedule_bytes(batch.size()) / 4, -1);
  write_varlen_schedule(batch, words.data());
  return words;
}

// Batches, and the sequences of their runs in order.
struct VarlenCase {
  VarlenBatch batch;
  std::vector<std::vector<int>> runs;
};

inline std::vector<VarlenCase> varlen_cases() {
  return {{{{0, 0}}, {}},
          {{{640, 5}}, {{0}}},
          {{{100, 1}, {300, 2}, {500, 4}}, {{2}, {1}, {0}}},
          {{{0, 0}, {384, 3}, {500, 0}, {350, 3}}, {{1, 3}}},
          {{{0, 2}, {0, 2}, {256, 1}, {900, 0}, {900, 7}}, {{4}, {2}, {0, 1}}},
          {{{128, 1}, {128, 2}, {100, 1}, {129, 1}, {128, 2}}, {{3}, {1, 4}, {0, 2}}}};
}

inline TileSchedulerParams varlen_params(const VarlenBatch& batch, int32_t* workspace, int heads,
                                         bool last_block_first) {
  const int size = static_cast<int>(batch.size());
  TileSchedulerParams params = make_params(HeadGroups::of(8, size * heads, 2, 9), last_block_first);
  params.last_group_tiles = 9;
  params.varlen = {workspace, size};
  return params;
}

// A run has the order of a dense batch of its sequences.
inline void check_varlen_order(Result& result) {
  constexpr int kHeads = 6;
  for (const VarlenCase& c : varlen_cases()) {
    std::vector<int32_t> workspace = schedule_of(c.batch);
    for (const bool last_first : {false, true}) {
      const TileSchedulerParams params =
          varlen_params(c.batch, workspace.data(), kHeads, last_first);
      std::vector<TileCoord> wanted;
      for (const std::vector<int>& run : c.runs) {
        const int heads = kHeads * static_cast<int>(run.size());
        for (TileCoord tile :
             tiles_of(HeadGroups::of(c.batch[run[0]].blocks, heads, 2, 9), last_first)) {
          const int sequence = run[tile.batch_head_idx / kHeads];
          wanted.push_back({tile.block, sequence * kHeads + tile.batch_head_idx % kHeads});
        }
      }
      check_tiles(result, params, wanted);
    }
  }
}

// The kernel against a sort on the host: few and many sequences, alike and not, without queries,
// with too few, or past the end of the tensor.
inline void check_prepare(Result& result) {
  constexpr int kBlock = 64, kTotal = 40000, kMinQueries = 3;
  std::mt19937 random(1);
  for (const int batch : {1, 7, 255, 256, 1500}) {
    for (const int longest : {0, 1, 40, 700}) {
      std::vector<int32_t> edges{0};
      for (int i = 0; i < batch; ++i) edges.push_back(edges.back() + random() % (longest + 1));
      varlen::Arguments args{};
      Array<int32_t> table(edges);
      args.seqlens = {table.device(), nullptr, longest, kTotal};
      args.other_seqlens = {table.device(), nullptr, longest, kTotal};
      args.batch = batch;
      args.shape = {.rows = kBlock};
      args.min_tokens = kMinQueries;
      Array<int32_t> words(std::vector<int32_t>(varlen_schedule_bytes(batch) / 4, -1));
      Array<int32_t> semaphore(std::vector<int32_t>(1, 7));
      args.schedule = {words.device(), batch};
      args.semaphore = semaphore.device();
      const int ctas_of_sequence = 1 + batch % 3;
      launch(varlen::prepare, ctas_of_sequence * (batch + 1), varlen::kThreads, 0, args);
      VarlenBatch extents;
      for (int i = 0; i < batch; ++i) {
        const int length = find_sequence({edges.data(), nullptr, longest, kTotal}, i).length;
        extents.push_back({length, length < kMinQueries ? 0 : (length + kBlock - 1) / kBlock});
      }
      std::vector<int32_t> wanted = schedule_of(extents), found = words.download();
      const VarlenSchedule places{wanted.data(), batch};
      const int count = places.places()[-1].num_blocks;
      const auto compare = [&](int begin, int end) {
        for (int i = begin; i < end; ++i) result.equal(wanted[i], found[i], "word", i, batch);
      };
      compare(0, 2);
      compare(4, 4 + 4 * count);
      compare(4 + 4 * batch, 4 + 4 * batch + count);
      result.equal(0, semaphore.download()[0], "semaphore", batch);
    }
  }
}

// visits[index]: how often a tile was drawn.
__global__ void draw_tiles(TileSchedulerParams params, int32_t* visits) {
  TileScheduler scheduler(params);
  while (!scheduler.done()) {
    atomicAdd(visits + scheduler.index(), 1);
    scheduler.request();
    scheduler.advance();
  }
  scheduler.reset();
}

// Each tile is drawn once, the tile counter is 0 afterwards, and the tile semaphore has counted all
// draws: those of tiles, and the last of each CTA, which finds none.
inline void check_draws(Result& result) {
  enum Order { kStatic, kCounter, kSemaphore };
  for (const Order order : {kStatic, kCounter, kSemaphore}) {
    for (const int num_ctas : {1, 7, 40}) {
      for (const int num_tiles : {1, 7, 39, 40, 41, 123}) {
        const std::vector<int32_t> zeros(num_tiles + num_ctas);
        Array<int32_t> visits(zeros), counters(std::vector<int32_t>(3));
        TileSchedulerParams params = make_params({num_tiles, 1, 1, 1}, false);
        if (order == kCounter) params.tile_counter = counters.device();
        if (order == kSemaphore) params.tile_semaphore = counters.device() + 2;
        launch(draw_tiles, num_ctas, 1, 0, params, visits.device());
        const std::string name = std::string("visits, ") +
                                 (order == kStatic    ? "static"
                                  : order == kCounter ? "counter"
                                                      : "semaphore") +
                                 ", " + std::to_string(num_ctas) + " CTAs";
        for (int i = 0; i < num_tiles; ++i) result.equal(1, visits.download()[i], name, i);
        for (int i = num_tiles; i < num_tiles + num_ctas; ++i) {
          result.equal(0, visits.download()[i], name + " past the end", i);
        }
        for (int i = 0; i < 2; ++i) result.equal(0, counters.download()[i], name + ", reset", i);
        const int drawn = order == kSemaphore ? num_tiles + num_ctas : 0;
        result.equal(drawn, counters.download()[2], name + ", semaphore");
      }
    }
  }
}

static const Tests kTests = {
    {"attention/tile_scheduler: order", Where::kHost, check_order},
    {"attention/tile_scheduler: head groups", Where::kHost, check_groups},
    {"attention/tile_scheduler: varlen order", Where::kHost, check_varlen_order},
    {"attention/tile_scheduler: prepared order", Where::kGpu, check_prepare},
    {"attention/tile_scheduler: draws", Where::kGpu, check_draws}};

}  // namespace unit::tile_scheduler
