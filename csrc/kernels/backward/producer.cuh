// The thread that loads: walks through the CTA's tiles of keys, tells the others which one comes,
// and keeps Q and dO, with their rows' statistics, coming as far ahead as there is room.
//
// Order of the loads of a tile with n steps: Q0, K, dO0, V, Q1, dO1, ... Of the next tile the first
// Q and dO find room as soon as a step of this one is through; K and V have to wait for its end.
#pragma once

#include "blocks/tile_load.cuh"
#include "blocks/tile_order.cuh"
#include "kernels/backward/arguments.h"
#include "kernels/backward/config.cuh"

namespace flashattn3 {

template <BackwardRow kRow>
class BackwardProducer {
  using Config = BackwardConfig<kRow>;
  // Steps before the end of a tile at which the next one is asked for.
  static constexpr int kRequestSteps = 3;

 public:
  __device__ __forceinline__ BackwardProducer(const BackwardArguments& args, uint8_t* shared)
      : args_(args),
        control_(*reinterpret_cast<BackwardControlOf<kRow>*>(shared)),
        shared_(shared),
        tiles_(args.order) {}

  __device__ __forceinline__ void run() {
    KeyTile tile;
    while (find(tile)) {
      announce(tile);
      TileSteps steps(args_, tile.rows, tile.start);
      const int count = steps.count(), request_at = max(0, count - kRequestSteps);
      for (int i = 0; i < count; ++i, steps.advance()) {
        if (i == request_at) tiles_.request();
        load_rows(tile, steps.head(tile), steps.block(), i == 0);
      }
      if (count == 0) tiles_.request();
      tiles_.advance();
    }
    tile.first_key = -1;
    announce(tile);
  }

 private:
  // The first tile from here on that has keys, which in a batch of unequal lengths not all have;
  // false: none.
  __device__ __forceinline__ bool find(KeyTile& tile) {
    while (!tiles_.done()) {
      tile = describe_key_tile<Config::kKeys>(args_, tiles_.index());
      if (tile.first_key < tile.num_keys) return true;
      tiles_.request();
      tiles_.advance();
    }
    return false;
  }

  // Sync: the slot is free once everybody has read the tile before last.
  __device__ __forceinline__ void announce(const KeyTile& tile) {
    control_.tile_empty[tile_.stage()].wait(tile_.parity());
    control_.tile[tile_.stage()] = tile;
    control_.tile_full[tile_.stage()].arrive();
    tile_.advance();
  }

  // K and V too where a tile begins.
  __device__ __forceinline__ void load_rows(const KeyTile& tile, int head, int block, bool begins) {
    const uint32_t stage = rows_.stage();
    const int row = tile.row_offset + block * kBackwardRows;
    const int at = static_cast<int>(room_row(args_, tile, head, block));
    const int q_entry = args_.rows.cu_seqlens != nullptr ? 0 : tile.sequence;
    // Sync: every consumer warp gave the stage back.
    control_.q_empty[stage].wait(rows_.parity());
    load_with_statistic(shared_ + Config::kQOffset + stage * Config::kRowBytes, &args_.q,
                        control_.q_full[stage], control_.lse[stage], at, 0, row, head, q_entry);
    if (begins) load_keys(Config::kKOffset, &args_.k, control_.k_full, control_.k_empty, tile);
    control_.dout_empty[stage].wait(rows_.parity());  // Sync: as for Q.
    load_with_statistic(shared_ + Config::kDoutOffset + stage * Config::kRowBytes, &args_.dout,
                        control_.dout_full[stage], control_.minus_delta[stage], at, 1, row, head,
                        q_entry);
    if (begins) {
      load_keys(Config::kVOffset, &args_.v, control_.v_full, control_.v_empty, tile);
      keys_parity_ ^= 1;
    }
    rows_.advance();
  }

  __device__ __forceinline__ void load_with_statistic(uint8_t* to, const CUtensorMap* map,
                                                      Barrier& full, float* statistic, int at,
                                                      int which, int row, int head, int entry) {
    constexpr uint32_t kStatisticBytes = kBackwardRows * sizeof(float);
    full.arrive_and_expect(Config::kRowBytes + kStatisticBytes);
    copy_tile<kBackwardRows, Config::kChunks, 64>(to, map, full, kReadAgain, row, head, entry);
    copy_floats(statistic, &args_.statistics, full, kReadAgain, at, which);
  }

  __device__ __forceinline__ void load_keys(int offset, const CUtensorMap* map, Barrier& full,
                                            Barrier& empty, const KeyTile& tile) {
    // Sync: every consumer warp is done with the tile before.
    empty.wait(keys_parity_);
    full.arrive_and_expect(Config::kKeyBytes);
    copy_tile<Config::kKeys, Config::kChunks, 64>(shared_ + offset, map, full, kReadOnce,
                                                  tile.key_offset + tile.first_key, tile.head,
                                                  tile.entry);
  }

  const BackwardArguments& args_;
  BackwardControlOf<kRow>& control_;
  uint8_t* shared_;
  TileSequence tiles_;
  RingPosition<2> tile_{1};
  RingPosition<Config::kStages> rows_{1};
  uint32_t keys_parity_ = 1;
};

}  // namespace flashattn3
