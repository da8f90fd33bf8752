// The backward kernel for more than 128 columns: a cluster of two CTAs for each tile of keys. Two
// warpgroups of each multiply (cluster2/mainloop.cuh); of the third one thread loads, one sends dS
// to the other CTA, and with a fixed order of additions one watches it (cluster2/load.cuh).
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "backward/arguments.h"
#include "backward/cluster2/load.cuh"
#include "backward/cluster2/mainloop.cuh"
#include "backward/cluster2/traits.cuh"
#include "backward/work_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"

namespace flashattn3::backward::cluster2 {

// The number of the cluster's tile where tiles wait for those before them: clusters may begin in
// any order. All threads of both CTAs; the number in the first thread of each. A barrier of the
// cluster has to follow.
__device__ __forceinline__ int draw_tile(const Arguments& args, SharedStorage& storage) {
  if (cluster_rank() == 0 && threadIdx.x == 0)
    storage.tile_index = atomicAdd(args.scheduler.tile_semaphore, 1);
  cluster_arrive_release();
  cluster_wait();  // Sync: the first CTA has drawn.
  return threadIdx.x == 0 ? load_from_cta(storage.tile_index, 0) : 0;
}

// A type and not a row as argument, as for forward::attention_kernel.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) __cluster_dims__(2, 1, 1)
    attention_kernel(const __grid_constant__ Arguments args) {
  constexpr Config kConfig = Traits::kConfig;
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(SharedStorage) <= kSharedStorageBytes);

  SharedStorage& storage = *reinterpret_cast<SharedStorage*>(shared);
  const int rank = static_cast<int>(cluster_rank());
  // The next kernel's CTAs find no room before the last of these are done.
  launch_dependents();
  griddepcontrol_wait();
  const int index =
      args.deterministic ? draw_tile(args, storage) : static_cast<int>(cluster_index());
  if (threadIdx.x == 0) {
    storage.init();
    if (index < count_tiles(args.scheduler)) {
      storage.tile = describe_work_tile<2 * Traits::kBlockN>(args, index);
    } else {
      storage.tile.first_key = storage.tile.num_keys = 0;  // a varlen order has fewer tiles
    }
  }
  // Sync: no thread of either CTA touches a barrier before it is initialised.
  cluster_arrive();
  cluster_wait();
  __syncthreads();

  const WorkTile& tile = storage.tile;
  // Both CTAs see the same tile, so both leave here or neither.
  if (tile.first_key >= tile.num_keys) return;
  const int num_steps = (tile.m_blocks.end - tile.m_blocks.begin) * args.qhead_per_kvhead;
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    const int warp = uniform(threadIdx.x % 128 / 32);
    if (num_steps > 0 && warp < 3 && cute::elect_one_sync()) {
      if (warp == 2) {
        if (args.deterministic) poll_dq_semaphore<kConfig>(args, tile, shared, num_steps, rank);
      } else if (warp == 0) {
        load<kConfig>(args, tile, shared, num_steps, rank);
      } else {
        exchange_ds<kConfig>(shared, num_steps, 1 - rank);
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    Consumer<kConfig>(args, tile, shared, warpgroup, rank).run();
  }
  // Sync: the other CTA still arrives at this one's barriers, and sends to it, until it is done.
  cluster_arrive();
  cluster_wait();
}

}  // namespace flashattn3::backward::cluster2
