// Producer thread: publishes the CTA's work tiles and loads K, V, Q with lse, and dO with delta as
// soon as stages are free.
//
// Order of the loads of a tile: Q0, K, dO0, V, Q1, dO1, ... The next tile's first Q and dO are
// loaded as soon as a step of this tile has released its stage; K and V wait for the tile's end.
#pragma once

#include "attention/tile_scheduler.cuh"
#include "backward/arguments.h"
#include "backward/copy_floats.cuh"
#include "backward/traits.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::backward {

template <Config kConfig>
class Producer {
  using Traits = KernelTraits<kConfig>;
  using Tile = typename SharedStorageOf<kConfig>::Tile;
  // Number of steps before the end of a tile at which the next tile is requested.
  static constexpr int kRequestSteps = 3;

 public:
  __device__ __forceinline__ Producer(const Arguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared),
        tiles_(args.scheduler) {}

  __device__ __forceinline__ void run() {
    Tile tile;
    while (next_valid_tile(tile)) {
      publish(tile);
      WorkTileSteps steps(args_, tile);
      const int count = WorkTileSteps::count(args_, tile);
      int request_at = max(0, count - kRequestSteps);
      if (kConfig.listed && args_.deterministic) request_at = -1;
      for (int i = 0; i < count; ++i, steps.advance()) {
        if (i == request_at) tiles_.request();
        load_rows(tile, steps.head(tile), steps.block(tile), i == 0);
      }
      if (request_at < 0) wait_for_additions();
      if (count == 0 || request_at < 0) tiles_.request();
      tiles_.advance();
    }
    tile.first_key = -1;
    publish(tile);
  }

 private:
  // Finds the next tile that has keys (with varlen some have none); false: no tile is left.
  __device__ __forceinline__ bool next_valid_tile(Tile& tile) {
    while (!tiles_.done()) {
      tile = describe_work_tile<Traits::kBlockN, Traits::kBias, Tile>(args_, tiles_.index());
      if (tile.first_key < tile.num_keys) return true;
      tiles_.request();
      tiles_.advance();
    }
    return false;
  }

  // Sync: the slot is free once all readers have released the tile before last.
  __device__ __forceinline__ void publish(const Tile& tile) {
    storage_.tile_empty[tile_.index()].wait(tile_.phase());
    storage_.tile[tile_.index()] = tile;
    storage_.tile_full[tile_.index()].arrive();
    tile_.advance();
  }

  // Deterministic with lists: tiles of a wave wait for each other, so no CTA may hold two of them.
  // Sync: the tile's readers have released it, the dQ writers after their last additions.
  __device__ __forceinline__ void wait_for_additions() {
    PipelineState<2> released = tile_;
    released.advance();
    storage_.tile_empty[released.index()].wait(released.phase());
  }

  // Loads Q, lse, dO and delta of a step, and K and V if the step begins a tile.
  __device__ __forceinline__ void load_rows(const WorkTile& tile, int head, int block,
                                            bool begins) {
    const uint32_t stage = rows_.index();
    const int row = tile.row_offset + block * kBlockM;
    const int at = static_cast<int>(workspace_row(args_, tile, head, block));
    const int q_batch_coord = args_.seqlens_q.cu_seqlens != nullptr ? 0 : tile.batch_idx;
    Barrier& full = storage_.q_dout_full[stage];
    // Sync: every consumer warp has released the stage.
    storage_.q_dout_empty[stage].wait(rows_.phase());
    if constexpr (Traits::kConfig.term == ScoreTerm::kSlopes) {
      storage_.slopes[stage] = args_.slopes.at(tile.batch_idx, head);
    }
    load_with_lse_or_delta<Traits::kAtoms>(shared_ + Traits::kQOffset + stage * Traits::kQBytes,
                                           &args_.q, full, storage_.lse[stage], at, 0, row, head,
                                           q_batch_coord);
    if (begins) {
      load_k_or_v<Traits::kAtoms>(Traits::kKOffset, &args_.k, storage_.k_full, storage_.k_empty,
                                  tile);
    }
    load_with_lse_or_delta<Traits::kAtomsV>(
        shared_ + Traits::kDoutOffset + stage * Traits::kDoutBytes, &args_.dout, full,
        storage_.minus_delta[stage], at, 1, row, head, q_batch_coord);
    if (begins) {
      load_k_or_v<Traits::kAtomsV>(Traits::kVOffset, &args_.v, storage_.v_full, storage_.v_empty,
                                   tile);
      kv_phase_ ^= 1;
    }
    if constexpr (Traits::kBias) load_bias(tile, head, block, full);
    rows_.advance();
  }

  // Loads the bias of a step.
  __device__ __forceinline__ void load_bias(const WorkTile& tile, int head, int block,
                                            Barrier& full) {
    const auto& args = static_cast<const BiasArguments&>(args_);
    const uint32_t stage = rows_.index();
    // Sync: every warpgroup has released its part.
    storage_.bias_empty[stage].wait(rows_.phase());
    storage_.place[stage] = {block * kBlockM, head};
    full.arrive_and_expect(Traits::kBiasBytes);
    copy_tile<kBlockM, Traits::kConsumers, 64>(
        shared_ + Traits::kBiasOffset + stage * Traits::kBiasBytes, &args.bias, full, kReadNormally,
        block * kBlockM, head * args.heads_differ, tile.batch_idx * args.sequences_differ,
        tile.first_key / 64);
  }

  template <int kAtoms>
  __device__ __forceinline__ void load_with_lse_or_delta(uint8_t* to, const CUtensorMap* map,
                                                         Barrier& full, float* lse_or_delta, int at,
                                                         int which, int row, int head,
                                                         int batch_coord) {
    constexpr uint32_t kLseBytes = kBlockM * sizeof(float);
    full.arrive_and_expect(kBlockM * kAtoms * 128 + kLseBytes);
    copy_tile<kBlockM, kAtoms, 64>(to, map, full, kReadAgain, row, head, batch_coord);
    copy_floats(lse_or_delta, &args_.lse_delta, full, kReadAgain, at, which);
  }

  // Loads K or V of the tile.
  template <int kAtoms>
  __device__ __forceinline__ void load_k_or_v(int offset, const CUtensorMap* map, Barrier& full,
                                              Barrier& empty, const WorkTile& tile) {
    // Sync: every consumer warp has released the previous tile's buffer.
    empty.wait(kv_phase_);
    full.arrive_and_expect(Traits::kBlockN * kAtoms * 128);
    copy_tile<Traits::kBlockN, kAtoms, 64>(shared_ + offset, map, full, kReadOnce,
                                           tile.key_offset + tile.first_key, kv_head(args_, tile),
                                           tile.batch_coord);
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  TileScheduler tiles_;
  PipelineState<2> tile_{1};
  PipelineState<Traits::kStages> rows_{1};
  uint32_t kv_phase_ = 1;
};

}  // namespace flashattn3::backward
