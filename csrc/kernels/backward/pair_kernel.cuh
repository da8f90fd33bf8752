// The backward kernel for more than 128 columns: a cluster of two CTAs for each tile of keys. Two
// warpgroups of each multiply (pair_consumer.cuh); of the third one thread loads, one sends dS to
// the other CTA, and with a fixed order of additions one watches it (pair_producer.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "blocks/cluster.cuh"
#include "blocks/grid_dependency.cuh"
#include "kernels/backward/arguments.h"
#include "kernels/backward/key_tile.cuh"
#include "kernels/backward/pair_config.cuh"
#include "kernels/backward/pair_consumer.cuh"
#include "kernels/backward/pair_producer.cuh"

namespace flashattn3 {

// The number of the cluster's tile where tiles wait for those before them: clusters may begin in
// any order. All threads of both CTAs; the number in the first thread of each. A barrier of the
// cluster has to follow.
__device__ __forceinline__ int draw_tile(const BackwardArguments& args, PairControl& control) {
  if (cluster_rank() == 0 && threadIdx.x == 0) control.ticket = atomicAdd(args.order.tickets, 1);
  cluster_arrive_release();
  cluster_wait();  // Sync: the first CTA has drawn.
  return threadIdx.x == 0 ? load_from_cta(control.ticket, 0) : 0;
}

// A type and not a row as argument, as for forward_attention.
template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) __cluster_dims__(2, 1, 1)
    backward_attention_in_pairs(const __grid_constant__ BackwardArguments args) {
  constexpr BackwardRow kRow = Config::kRow;
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(PairControl) <= kBackwardControlBytes);

  PairControl& control = *reinterpret_cast<PairControl*>(shared);
  const int rank = static_cast<int>(cluster_rank());
  // The next kernel's CTAs find no room before the last of these are done.
  allow_dependents();
  wait_for_earlier_kernels();
  const int index = args.ordered ? draw_tile(args, control) : static_cast<int>(cluster_index());
  if (threadIdx.x == 0) {
    control.init();
    if (index < count_tiles(args.order)) {
      control.tile = describe_key_tile<2 * Config::kKeys>(args, index);
    } else {
      control.tile.first_key = control.tile.num_keys = 0;  // a ragged order has fewer tiles
    }
  }
  // Sync: no thread of either CTA touches a barrier before it is initialised.
  cluster_arrive();
  cluster_wait();
  __syncthreads();

  const KeyTile& tile = control.tile;
  // Both CTAs see the same tile, so both leave here or neither.
  if (tile.first_key >= tile.num_keys) return;
  const int num_steps = (tile.rows.end - tile.rows.begin) * args.heads_per_kv;
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Config::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x % 128 / 32);
    if (num_steps > 0 && warp < 3 && cute::elect_one_sync()) {
      if (warp == 2) {
        if (args.ordered) watch_turns<kRow>(args, tile, shared, num_steps, rank);
      } else if (warp == 0) {
        load_pair<kRow>(args, tile, shared, num_steps, rank);
      } else {
        send_to_peer<kRow>(shared, num_steps, 1 - rank);
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
    PairConsumer<kRow>(args, tile, shared, warpgroup, rank).run();
  }
  // Sync: the other CTA still arrives at this one's barriers, and sends to it, until it is done.
  cluster_arrive();
  cluster_wait();
}

}  // namespace flashattn3
