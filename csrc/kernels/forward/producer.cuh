// The thread that loads: walks through the CTA's tiles, tells the consumers which one comes, and
// keeps Q, K and V coming by TMA as far ahead as there is room.
//
// Order of the loads of a tile with n blocks of keys: K0, K1, V0, K2, V1, ..., K(n-1), V(n-2),
// V(n-1). A consumer may wait for K(j+1) while it still holds V(j-1) (consumer.cuh). Everything
// before K(j+1) in this order can then be loaded: K(j+1) and V(j-1) need at most the stages of
// K(j-1) and V(j-3), which it gave back before. So no wait closes a circle, with two stages or
// more. The next tile's Q comes between these: with a second buffer, whose last tile the consumers
// have stored when they are in the second step of this one, early; with one buffer at the end.
#pragma once

#include "blocks/sequence.cuh"
#include "blocks/slot_order.h"
#include "blocks/tile_load.cuh"
#include "blocks/tile_order.cuh"
#include "kernels/forward/arguments.h"
#include "kernels/forward/config.cuh"
#include "kernels/forward/tails.cuh"

namespace flashattn3 {

template <ForwardRow kRow>
class ForwardProducer {
  using Config = ForwardConfig<kRow>;
  // Blocks of keys before the end of a tile at which the next one is asked for, and its Q: so late
  // that whoever is ready first takes it, so early that nobody waits for the answer or for Q.
  static constexpr int kRequestBlocks = 5;
  static constexpr int kLookBlocks = 4;

 public:
  __device__ __forceinline__ ForwardProducer(const ForwardArguments& args, uint8_t* shared)
      : args_(args),
        control_(*reinterpret_cast<ForwardControlOf<kRow>*>(shared)),
        shared_(shared),
        tiles_(args.order) {}

  __device__ __forceinline__ void run() {
    Load load, next;
    bool more = find(load);
    if (more) load_queries(load);
    while (more) {
      announce(load.tile);
      const int num_blocks = load.tile.keys.end - load.tile.keys.begin;
      const int request_at = max(0, num_blocks - kRequestBlocks);
      // A second buffer for Q is free once the consumers are in this tile, which the first stage
      // used again says.
      const int look_at =
          Config::kQBuffers == 2 ? max(Config::kStages, num_blocks - kLookBlocks) : num_blocks;
      for (int i = 0; i < num_blocks; ++i) {
        if (i == request_at) tiles_.request();
        if (i == 0) load_keys(load, 0);
        if (i + 1 < num_blocks) load_keys(load, i + 1);
        load_values(load, i);
        if (i == look_at) more = look(next);
      }
      if (num_blocks == 0) tiles_.request();
      if (look_at >= num_blocks) more = look(next);
      load = next;
    }
    RowTile end{};
    end.first_row = -1;
    announce(end);
    tiles_.finish();
  }

 private:
  // Where the rows of a tile and its last block of keys lie in the tensors.
  struct Load {
    RowTile tile;
    int q_row, kv_row, kv_head, kv_entry;
    int kv_offset;  // of the sequence in k and v
  };

  __device__ __forceinline__ Load describe(int index) const {
    const TilePlace place = args_.order.ragged.room != nullptr
                                ? locate_ragged_tile(args_.order, index)
                                : locate_tile(args_.order, index);
    const int entry = place.head_total / args_.num_heads_q;
    const Sequence rows = find_sequence(args_.rows, entry);
    const Sequence keys = find_sequence(args_.keys, entry);
    Load load;
    load.tile.first_row = place.row_block * Config::kBlockM;
    load.tile.head = place.head_total - entry * args_.num_heads_q;
    load.tile.entry = args_.rows.cu_seqlens != nullptr ? 0 : entry;
    load.tile.row_offset = rows.offset;
    load.tile.num_rows = rows.length;
    load.tile.num_keys = keys.length;
    const int last_row = min(load.tile.first_row + Config::kBlockM, rows.length) - 1;
    load.tile.keys = Visibility::of(rows.length, keys.length, args_.window_left, args_.window_right)
                         .template blocks<Config::kBlockN>(load.tile.first_row, last_row);
    load.q_row = rows.offset + load.tile.first_row;
    load.kv_row = keys.offset + (load.tile.keys.end - 1) * Config::kBlockN;
    load.kv_head = load.tile.head / args_.heads_per_kv;
    load.kv_entry = args_.keys.cu_seqlens != nullptr ? 0 : entry;
    load.kv_offset = keys.offset;
    load.tile.sequence = entry;
    return load;
  }

  // Whether there is a next tile; asks for its Q.
  __device__ __forceinline__ bool look(Load& next) {
    tiles_.advance();
    if (!find(next)) return false;
    load_queries(next);
    return true;
  }

  // The first tile from here on that has rows, which in a batch of unequal lengths not all have;
  // false: none.
  __device__ __forceinline__ bool find(Load& load) {
    while (!tiles_.done()) {
      load = describe(tiles_.index());
      if (load.tile.first_row < load.tile.num_rows) return true;
      tiles_.request();
      tiles_.advance();
    }
    return false;
  }

  // Sync: the slot is free once every consumer warp has read the tile before last.
  __device__ __forceinline__ void announce(const RowTile& tile) {
    control_.tile_empty[tile_.stage()].wait(tile_.parity());
    control_.tile[tile_.stage()] = tile;
    control_.tile_full[tile_.stage()].arrive();
    tile_.advance();
  }

  __device__ __forceinline__ void load_queries(const Load& load) {
    if (load.tile.keys.begin == load.tile.keys.end) return;
    // Sync: every consumer warp is done with what lay in this buffer.
    control_.q_empty[q_.stage()].wait(q_.parity());
    load_tile<Config::kBlockM, Config::kChunks, Config::kChunkColumns>(
        shared_ + Config::kQOffset + q_.stage() * Config::kQBytes, &args_.q,
        control_.q_full[q_.stage()], kReadOnce, load.q_row, load.tile.head, load.tile.entry);
    q_.advance();
  }

  __device__ __forceinline__ void load_keys(const Load& load, int i) {
    // Sync: every consumer warp gave the stage back.
    control_.k_empty[k_.stage()].wait(k_.parity());
    load_tile<Config::kBlockN, Config::kChunks, Config::kChunkColumns>(
        shared_ + Config::kKOffset + k_.stage() * Config::kKBytes, &args_.k,
        control_.k_full[k_.stage()], kReadAgain, load.kv_row - i * Config::kBlockN, load.kv_head,
        load.kv_entry);
    k_.advance();
  }

  __device__ __forceinline__ void load_values(const Load& load, int i) {
    control_.v_empty[v_.stage()].wait(v_.parity());  // Sync: as for the keys.
    uint8_t* stage = shared_ + Config::kVOffset + v_.stage() * Config::kVBytes;
    const int first_key = (load.tile.keys.end - 1 - i) * Config::kBlockN;
    const int keys = load.tile.num_keys - first_key;
    // Sync: v_full, or what the warp that writes zeros waits for before it arrives there.
    Barrier& full = wants_zeros<Config>(args_, keys) ? control_.tail_full[v_.stage()]
                                                     : control_.v_full[v_.stage()];
    if constexpr (Config::kQuantized) {
      const int head = load.kv_entry * args_.num_heads_kv + load.kv_head;
      int slot = first_key;
      if (args_.keys.cu_seqlens != nullptr) {
        slot += static_cast<int>(first_slot(load.kv_offset, load.tile.sequence));
      }
      load_slots<Config::kBlockN, Config::kHeadDim>(stage, &args_.v, full, kReadAgain, slot, head);
    } else {
      load_tile<Config::kBlockN, Config::kChunks, Config::kChunkColumns>(
          stage, &args_.v, full, kReadAgain, load.kv_row - i * Config::kBlockN, load.kv_head,
          load.kv_entry);
    }
    v_.advance();
  }

  const ForwardArguments& args_;
  ForwardControlOf<kRow>& control_;
  uint8_t* shared_;
  TileSequence tiles_;
  RingPosition<2> tile_{1};
  RingPosition<Config::kQBuffers> q_{1};
  RingPosition<Config::kStages> k_{1};
  RingPosition<Config::kStages> v_{1};
};

}  // namespace flashattn3
