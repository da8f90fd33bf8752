// attention/tile_scheduler.cuh: the order of work tiles against nested loops, and that the CTAs
// draw each tile once.
#pragma once

#include "../unit.cuh"
#include "attention/tile_scheduler.cuh"

namespace unit::tile_scheduler {

using namespace flashattn3;

inline TileSchedulerParams make_params(int num_blocks, int heads, int group, int last_group,
                                       bool last_block_first) {
  return {.num_tiles = num_blocks * heads,
          .num_blocks = num_blocks,
          .num_batch_heads = heads,
          .l2_group_heads = group,
          .last_l2_group_heads = last_group,
          .last_block_first = last_block_first,
          .varlen = {nullptr, 0},
          .tile_counter = nullptr};
}

inline void check_order(Result& result) {
  struct Heads {
    int heads, group, last_group;
  };
  for (const int num_blocks : {1, 3, 8}) {
    for (const Heads h : {Heads{1, 1, 1}, {8, 2, 4}, {12, 4, 4}, {7, 7, 7}, {32, 4, 24}}) {
      for (const bool last_first : {false, true}) {
        const TileSchedulerParams params =
            make_params(num_blocks, h.heads, h.group, h.last_group, last_first);
        int index = 0;
        for (int first = 0; first < h.heads;) {
          const int heads = first == h.heads - h.last_group ? h.last_group : h.group;
          for (int block = 0; block < num_blocks; ++block) {
            for (int head = first; head < first + heads; ++head, ++index) {
              const TileCoord found = tile_coord(params, index);
              result.equal(last_first ? num_blocks - 1 - block : block, found.block, "block", index,
                           h.heads);
              result.equal(head, found.batch_head_idx, "batch_head_idx", index, h.heads);
            }
          }
          first += heads;
        }
        result.equal(index, count_tiles(params), "count_tiles");
      }
    }
  }
}

// Sequences of a varlen batch, in the order of their number of blocks, which may be 0.
struct VarlenBatch {
  std::vector<int> batch_indices, num_blocks;

  // The workspace of VarlenSchedule.
  std::vector<int32_t> workspace() const {
    std::vector<int32_t> words(batch_indices.begin(), batch_indices.end());
    int first = 0;
    words.push_back(0);
    for (const int blocks : num_blocks) words.push_back(first += blocks);
    return words;
  }
};

inline std::vector<VarlenBatch> varlen_batches() {
  return {{{0}, {0}},
          {{0}, {5}},
          {{2, 0, 1}, {4, 2, 1}},
          {{3, 1, 0, 2}, {3, 3, 0, 0}},
          {{1, 0, 2, 3, 4}, {0, 0, 1, 0, 7}}};
}

inline TileSchedulerParams varlen_params(const VarlenBatch& batch, int32_t* workspace, int heads,
                                         bool last_block_first) {
  const int size = static_cast<int>(batch.batch_indices.size());
  TileSchedulerParams params = make_params(8, size * heads, 1, 1, last_block_first);
  params.varlen = {workspace, size};
  return params;
}

inline void check_varlen_order(Result& result) {
  constexpr int kHeads = 3;
  for (const VarlenBatch& batch : varlen_batches()) {
    std::vector<int32_t> workspace = batch.workspace();
    for (const bool last_first : {false, true}) {
      const TileSchedulerParams params = varlen_params(batch, workspace.data(), kHeads, last_first);
      int index = 0;
      for (size_t i = 0; i < batch.batch_indices.size(); ++i) {
        const int blocks = batch.num_blocks[i];
        for (int head = 0; head < kHeads; ++head) {
          for (int block = 0; block < blocks; ++block, ++index) {
            const TileCoord found = find_tile(params, index);
            result.equal(last_first ? blocks - 1 - block : block, found.block, "block", index);
            result.equal(head + kHeads * batch.batch_indices[i], found.batch_head_idx,
                         "batch_head_idx", index);
          }
        }
      }
      result.equal(index, count_tiles(params), "count_tiles");
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
        TileSchedulerParams params = make_params(num_tiles, 1, 1, 1, false);
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

inline void check_varlen_draws(Result& result) {
  constexpr int kHeads = 3, kCtas = 5;
  for (const VarlenBatch& batch : varlen_batches()) {
    Array<int32_t> workspace(batch.workspace());
    Array<int32_t> visits(std::vector<int32_t>(8 * batch.batch_indices.size() * kHeads));
    const TileSchedulerParams params = varlen_params(batch, workspace.device(), kHeads, true);
    launch(draw_tiles, kCtas, 1, 0, params, visits.device());
    int num_tiles = 0;
    for (const int blocks : batch.num_blocks) num_tiles += blocks * kHeads;
    for (int i = 0; i < static_cast<int>(visits.download().size()); ++i) {
      result.equal(i < num_tiles, visits.download()[i], "visits, varlen", i);
    }
  }
}

static const Tests kTests = {
    {"attention/tile_scheduler: order", Where::kHost, check_order},
    {"attention/tile_scheduler: varlen order", Where::kHost, check_varlen_order},
    {"attention/tile_scheduler: draws", Where::kGpu, check_draws},
    {"attention/tile_scheduler: varlen draws", Where::kGpu, check_varlen_draws}};

}  // namespace unit::tile_scheduler
