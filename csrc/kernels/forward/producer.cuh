// The thread that loads: walks through the CTA's tiles, tells the consumers which one comes, and
// keeps Q, K and V coming by TMA as far ahead as there is room.
//
// Order of the loads of a tile with n blocks of keys: Q, K0, K1, V0, K2, V1, ..., K(n-1), V(n-2),
// V(n-1). A consumer may wait for K(j+1) while it still holds V(j-1) (consumer.cuh). Everything
// before K(j+1) in this order can then be loaded: K(j+1) and V(j-1) need at most the stages of
// K(j-1) and V(j-3), which it gave back before. So no wait closes a circle, with two stages or
// more.
#pragma once

#include "blocks/sequence.cuh"
#include "blocks/tile_load.cuh"
#include "blocks/tile_order.cuh"
#include "kernels/forward/arguments.h"
#include "kernels/forward/config.cuh"

namespace flashattn3 {

template <ForwardRow kRow>
class ForwardProducer {
  using Config = ForwardConfig<kRow>;

 public:
  __device__ __forceinline__ ForwardProducer(const ForwardArguments& args, uint8_t* shared)
      : args_(args),
        control_(*reinterpret_cast<ForwardControlOf<kRow>*>(shared)),
        shared_(shared) {}

  __device__ __forceinline__ void run() {
    TileSequence tiles(args_.order);
    while (!tiles.done()) {
      const TilePlace place = locate_tile(args_.order, tiles.index());
      tiles.prefetch();
      const int entry = place.head_total / args_.num_heads_q;
      const int head = place.head_total - entry * args_.num_heads_q;
      const Sequence rows = find_sequence(args_.rows, entry);
      const Sequence keys = find_sequence(args_.keys, entry);
      RowTile tile;
      tile.first_row = place.row_block * Config::kBlockM;
      tile.head = head;
      tile.entry = args_.rows.cu_seqlens != nullptr ? 0 : entry;
      tile.row_offset = rows.offset;
      tile.num_rows = rows.length;
      tile.num_keys = keys.length;
      const Visibility visibility =
          Visibility::of(rows.length, keys.length, args_.window_left, args_.window_right);
      const int last_row = min(tile.first_row + Config::kBlockM, rows.length) - 1;
      tile.keys = visibility.blocks<Config::kBlockN>(tile.first_row, last_row);
      if (tile.first_row < rows.length) {  // else past the end of a shorter sequence
        announce(tile);
        load(tile, keys.offset, args_.keys.cu_seqlens != nullptr ? 0 : entry);
      }
      tiles.advance();
    }
    RowTile end{};
    end.first_row = -1;
    announce(end);
    tiles.finish();
  }

 private:
  // Sync: the slot is free once every consumer warp has read the tile before last.
  __device__ __forceinline__ void announce(const RowTile& tile) {
    control_.tile_empty[tile_.stage()].wait(tile_.parity());
    control_.tile[tile_.stage()] = tile;
    control_.tile_full[tile_.stage()].arrive();
    tile_.advance();
  }

  __device__ __forceinline__ void load(const RowTile& tile, int key_offset, int key_entry) {
    if (tile.keys.begin == tile.keys.end) return;
    // Sync: every consumer warp is done with this buffer's last scores.
    control_.q_empty[q_.stage()].wait(q_.parity());
    load_tile<Config::kBlockM, Config::kChunks>(
        shared_ + Config::kQOffset + q_.stage() * Config::kQBytes, &args_.q,
        control_.q_full[q_.stage()], kReadOnce, tile.row_offset + tile.first_row, tile.head,
        tile.entry);
    q_.advance();
    const int kv_head = tile.head / args_.heads_per_kv;
    int row = key_offset + (tile.keys.end - 1) * Config::kBlockN;
    load_keys(row, kv_head, key_entry);
    for (int block = tile.keys.end - 1; block >= tile.keys.begin; --block) {
      if (block > tile.keys.begin) load_keys(row - Config::kBlockN, kv_head, key_entry);
      load_values(row, kv_head, key_entry);
      row -= Config::kBlockN;
    }
  }

  __device__ __forceinline__ void load_keys(int row, int head, int entry) {
    control_.k_empty[k_.stage()].wait(
        k_.parity());  // Sync: every consumer warp gave the stage back.
    load_tile<Config::kBlockN, Config::kChunks>(
        shared_ + Config::kKOffset + k_.stage() * Config::kKvBytes, &args_.k,
        control_.k_full[k_.stage()], kReadAgain, row, head, entry);
    k_.advance();
  }

  __device__ __forceinline__ void load_values(int row, int head, int entry) {
    control_.v_empty[v_.stage()].wait(v_.parity());  // Sync: as for the keys.
    load_tile<Config::kBlockN, Config::kChunks>(
        shared_ + Config::kVOffset + v_.stage() * Config::kKvBytes, &args_.v,
        control_.v_full[v_.stage()], kReadAgain, row, head, entry);
    v_.advance();
  }

  const ForwardArguments& args_;
  ForwardControlOf<kRow>& control_;
  uint8_t* shared_;
  RingPosition<2> tile_{1};
  RingPosition<Config::kQBuffers> q_{1};
  RingPosition<Config::kStages> k_{1};
  RingPosition<Config::kStages> v_{1};
};

}  // namespace flashattn3
