// Backward kernel for more than 128 columns: one 2-CTA cluster per n_block. Each CTA has two
// consumer warpgroups (cluster2/mainloop.cuh; specialized/roles.cuh) and a producer warpgroup
// (cluster2/load.cuh): one thread loads, one sends dS to the other CTA, one counts the tile. If
// deterministic, that thread and a warp order the additions to dQ; the warp may also zero dq_accum.
#pragma once

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>

#include "backward/arguments.h"
#include "backward/cluster2/load.cuh"
#include "backward/cluster2/mainloop.cuh"
#include "backward/cluster2/traits.cuh"
#include "backward/specialized/load.cuh"
#include "backward/specialized/roles.cuh"
#include "backward/work_tile.cuh"
#include "ptx/cluster.cuh"
#include "ptx/pdl.cuh"

namespace flashattn3::backward::cluster2 {

// Deterministic: draws the cluster's tile index, because tiles wait for earlier tiles and clusters
// may start in any order. All threads of both CTAs call it; the first thread of each CTA gets the
// index, the others 0. A cluster barrier must follow.
template <class Storage>
__device__ __forceinline__ int draw_tile(const Arguments& args, Storage& storage) {
  if (cluster_rank() == 0 && threadIdx.x == 0)
    storage.tile_index = atomicAdd(args.scheduler.tile_semaphore, 1);
  cluster_arrive_release();
  cluster_wait();  // Sync: the first CTA has drawn.
  return threadIdx.x == 0 ? load_from_cta(storage.tile_index, 0) : 0;
}

// The template argument is a type and not a Config, as for forward::attention_kernel.
template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) __cluster_dims__(2, 1, 1)
    attention_kernel(const __grid_constant__ typename Traits::Arguments args) {
  constexpr Config kConfig = Traits::kConfig;
  using Storage = typename Traits::Storage;
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(Storage) <= kSharedStorageBytes);

  Storage& storage = *reinterpret_cast<Storage*>(shared);
  const int rank = static_cast<int>(cluster_rank());
  griddepcontrol_wait();
  launch_dependents();  // after the wait: dependents see preprocess's tiles_done
  const int index =
      args.deterministic ? draw_tile(args, storage) : static_cast<int>(cluster_index());
  if (threadIdx.x == 0) {
    storage.init();
    if (index < count_tiles(args.scheduler)) {
      storage.tile =
          describe_work_tile<2 * Traits::kBlockN, false, typename Traits::Tile>(args, index);
    } else {
      storage.tile.first_key = storage.tile.num_keys = 0;  // varlen: fewer tiles than clusters
    }
  }
  cluster_arrive();
  // Sync: no thread touches a barrier of this CTA before it is initialised.
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x % 128 / 32);
  // The loads touch no other CTA's memory and start at once.
  const bool loads = warpgroup == Traits::kConsumers && warp == 0;
  if (!loads) cluster_wait();  // Sync: the other CTA's barriers are initialised.

  const typename Traits::Tile& tile = storage.tile;
  // Both CTAs have the same tile, so both return here or neither does.
  if (tile.first_key >= tile.num_keys) return;
  const int num_steps = tile.m_blocks.count() * args.qhead_per_kvhead;
  if (warpgroup == Traits::kConsumers) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (warp == 2) {
      if (args.deterministic) {
        poll_dq_semaphore<Traits>(args, tile, shared, num_steps, rank);
      } else if (args.zeroes_dq) {
        zero_dq_accum<Traits>(args, tile, shared, num_steps, rank);
      }
    } else if (cute::elect_one_sync()) {
      if (warp == 3) {
        if (args.deterministic) release_dq_semaphore<Traits>(args, tile, shared, num_steps, rank);
        count_tile<Traits>(args, tile, shared, num_steps);
      } else if (warp == 1) {
        exchange_ds<Traits>(shared, num_steps, 1 - rank);
      } else if (num_steps > 0) {
        if constexpr (is_specialized(kConfig)) {
          specialized::load<kConfig>(args, tile, shared, num_steps, rank);
        } else {
          load<kConfig>(args, tile, shared, num_steps, rank);
        }
      }
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    if constexpr (is_specialized(kConfig)) {
      specialized::consume<kConfig>(args, tile, shared, warpgroup, rank);
    } else {
      Consumer<kConfig>(args, tile, shared, warpgroup, rank).run();
    }
  }
  if (loads) cluster_wait();
  // Sync: until it is done, the other CTA arrives at this CTA's barriers and sends to it.
  cluster_arrive();
  cluster_wait();
}

}  // namespace flashattn3::backward::cluster2
