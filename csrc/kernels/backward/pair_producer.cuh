// The single threads of a pair's CTA: one loads K and V, and Q and dO as long as there is room; one
// sends each step's dS to the other CTA; one watches where sums are added up in order.
#pragma once

#include "blocks/tile_load.cuh"
#include "kernels/backward/arguments.h"
#include "kernels/backward/arrivals.cuh"
#include "kernels/backward/key_tile.cuh"
#include "kernels/backward/pair_config.cuh"

namespace flashattn3 {

template <BackwardRow kRow>
__device__ __forceinline__ void load_pair(const BackwardArguments& args, const KeyTile& tile,
                                          uint8_t* shared, int num_steps, int rank) {
  using Config = PairConfig<kRow>;
  PairControl& control = *reinterpret_cast<PairControl*>(shared);
  constexpr int kHalfChunks = Config::kChunks / 2;
  const int first = tile.key_offset + tile.first_key;
  control.keys_full.arrive_and_expect(2 * Config::kKeyBytes + Config::kKeyBytes / 2);
  copy_tile<Config::kKeys, Config::kChunks, 64>(
      shared + Config::kKOffset, &args.k, control.keys_full, kReadAgain,
      first + rank * Config::kKeys, tile.head, tile.entry);
  copy_tile<Config::kKeys, Config::kChunks, 64>(
      shared + Config::kVOffset, &args.v, control.keys_full, kReadOnce,
      first + rank * Config::kKeys, tile.head, tile.entry);
  copy_tile<Config::kKeys, kHalfChunks, 64>(
      shared + Config::kOtherKOffset, &args.k, control.keys_full, kReadAgain,
      first + (1 - rank) * Config::kKeys, tile.head, tile.entry, rank * kHalfChunks);
  constexpr uint32_t kBytes = Config::kRowBytes + kBackwardRows * sizeof(float);
  const int entry = args.rows.cu_seqlens != nullptr ? 0 : tile.sequence;
  RingPosition<2> q{1};
  RingPosition<1> dout{1};
  int head = tile.head * args.heads_per_kv, block = tile.start;
  for (int i = 0; i < num_steps; ++i) {
    const int row = tile.row_offset + block * kBackwardRows;
    const int at = static_cast<int>(room_row(args, tile, head, block));
    // Sync: every consumer warp gave the buffer back.
    control.q_empty[q.stage()].wait(q.parity());
    Barrier& q_full = control.q_full[q.stage()];
    q_full.arrive_and_expect(kBytes);
    copy_tile<kBackwardRows, Config::kChunks, 64>(
        shared + Config::kQOffset + q.stage() * Config::kRowBytes, &args.q, q_full, kReadAgain, row,
        head, entry);
    copy_floats(control.lse[q.stage()], &args.statistics, q_full, kReadAgain, at, 0);
    control.dout_empty.wait(dout.parity());  // Sync: as above.
    control.dout_full.arrive_and_expect(kBytes);
    copy_tile<kBackwardRows, Config::kChunks, 64>(shared + Config::kDoutOffset, &args.dout,
                                                  control.dout_full, kReadAgain, row, head, entry);
    copy_floats(control.minus_delta, &args.statistics, control.dout_full, kReadAgain, at, 1);
    q.advance();
    dout.advance();
    block = next_block(tile.rows, block);
    if (block == tile.start) ++head;
  }
}

// peer: the other CTA's rank.
template <BackwardRow kRow>
__device__ __forceinline__ void send_to_peer(uint8_t* shared, int num_steps, uint32_t peer) {
  using Config = PairConfig<kRow>;
  PairControl& control = *reinterpret_cast<PairControl*>(shared);
  const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
  RingPosition<2> at{0};
  for (int i = 0; i < num_steps; ++i) {
    const uint32_t b = at.stage();
    // Sync: all consumer warps have written. They waited until the other CTA had read what was sent
    // from here, and it received, before.
    control.ds_full[b].wait(at.parity());
    control.other_full[b].arrive_and_expect(Config::kScoreBytes);
    copy_to_peer(base + Config::kOtherDsOffset + b * Config::kScoreBytes,
                 base + Config::kDsOffset + b * Config::kScoreBytes, control.other_full[b],
                 Config::kScoreBytes, peer);
    at.advance();
  }
}

// In order: tells the consumers when it is this tile's turn to add to the sums of a step.
template <BackwardRow kRow>
__device__ __forceinline__ void watch_turns(const BackwardArguments& args, const KeyTile& tile,
                                            uint8_t* shared, int num_steps, int rank) {
  PairControl& control = *reinterpret_cast<PairControl*>(shared);
  constexpr int kWarps = 4;  // that add a quarter of the sums, and count by themselves
  RingPosition<2> at{0};
  int head = tile.head * args.heads_per_kv, block = tile.start;
  for (int i = 0; i < num_steps; ++i) {
    // Sync: dS of the step is written, and so the consumers know of their turn two steps before.
    control.ds_full[at.stage()].wait(at.parity());
    const int64_t row = room_row(args, tile, head, block);
    const int32_t* arrivals = args.room.arrivals + row / kBackwardRows * 4 + rank * 2;
    const int before = kWarps * tiles_before<backward_keys(kRow)>(args, tile, block);
    while (load_acquire(arrivals) < before || load_acquire(arrivals + 1) < before) {
    }
    control.turn[at.stage()].arrive();
    at.advance();
    block = next_block(tile.rows, block);
    if (block == tile.start) ++head;
  }
}

}  // namespace flashattn3
