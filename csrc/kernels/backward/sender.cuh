// The threads that send dQ to memory, one for each warpgroup: a step's 64 rows in fp32, which are
// added up over the tiles of keys that see them.
#pragma once

#include <cute/arch/util.hpp>

#include "kernels/backward/arguments.h"
#include "kernels/backward/arrivals.cuh"
#include "kernels/backward/config.cuh"

namespace flashattn3 {

template <BackwardRow kRow>
class BackwardSender {
  using Config = BackwardConfig<kRow>;

 public:
  __device__ __forceinline__ BackwardSender(const BackwardArguments& args, uint8_t* shared,
                                            int warpgroup)
      : args_(args),
        control_(*reinterpret_cast<BackwardControlOf<kRow>*>(shared)),
        sums_(cute::cast_smem_ptr_to_uint(shared) + Config::kSumOffset +
              warpgroup * Config::kSumBytes),
        warpgroup_(warpgroup) {}

  __device__ __forceinline__ void run() {
    while (true) {
      // Sync: the producer has written the tile's description.
      control_.tile_full[tile_.stage()].wait(tile_.parity());
      const KeyTile tile = control_.tile[tile_.stage()];
      control_.tile_empty[tile_.stage()].arrive();  // Sync: this thread has read it.
      tile_.advance();
      if (tile.first_key < 0) return;
      TileSteps steps(args_, tile.rows, tile.start);
      const int count = steps.count();
      for (int i = 0; i < count; ++i, steps.advance()) {
        if (turn_ == warpgroup_) send(tile, steps.head(tile), steps.block());
        turn_ = turn_ + 1 == Config::kConsumers ? 0 : turn_ + 1;
      }
      wait_for_memory();
      // Sync: this thread's part of the tile is through.
      add_release(args_.room.tiles_through + tile.sequence * args_.num_heads_kv + tile.head, 1);
    }
  }

 private:
  // A block of queries of a head.
  __device__ __forceinline__ void send(const KeyTile& tile, int head, int block) {
    const int64_t row = room_row(args_, tile, head, block);
    int32_t* arrivals = args_.room.arrivals + row / kBackwardRows;
    const int before = args_.ordered ? tiles_before<Config::kKeys>(args_, tile, block) : 0;
    // Sync: all tiles before this one have added.
    while (before > 0 && load_acquire(arrivals) < before) {
    }
    control_.sum_full[warpgroup_].wait(sum_.parity());  // Sync: all four warps have written.
    // Sync: if another tile was the first, it has stored.
    const bool first = args_.ordered ? before == 0 : claim_sums(arrivals);
    fence_global_proxies();
    float* sums = args_.room.sums + row * Config::kHeadDim;
    if (first) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(sums),
                   "r"(sums_), "r"(Config::kSumBytes)
                   : "memory");
    } else {
      asm volatile(
          "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(sums),
          "r"(sums_), "r"(Config::kSumBytes)
          : "memory");
    }
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    control_.sum_empty[warpgroup_].arrive();  // Sync: the room may be written again.
    sum_.advance();
    if (first || args_.ordered) {
      wait_for_memory();
      add_release(arrivals, args_.ordered ? 1 : kStored - kStoring);  // Sync: others may add to it.
    }
  }

  // Until what was sent is in memory.
  __device__ __forceinline__ static void wait_for_memory() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    fence_global_proxies();
  }

  const BackwardArguments& args_;
  BackwardControlOf<kRow>& control_;
  uint32_t sums_;
  int warpgroup_;
  int turn_ = 0;  // the warpgroup whose step it is
  RingPosition<2> tile_{0};
  RingPosition<1> sum_{0};
};

}  // namespace flashattn3
