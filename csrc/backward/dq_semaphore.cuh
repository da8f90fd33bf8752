// Synchronisation of work tiles, across CTAs, that add to the same memory: an m_block of dq_accum,
// or sums of parts (reduce_parts.cuh).
#pragma once

#include <cstdint>

#include "attention/block_list.cuh"
#include "backward/arguments.h"
#include "backward/work_tile.cuh"
#include "ptx/global_memory.cuh"

namespace flashattn3::backward {

// States of such memory. The first tile stores and the others add once that is done, so that it
// need not be zeroed beforehand.
constexpr int32_t kNobody = 0, kStoring = 1, kStored = 2;

// True: the caller is the first; it must store and then set kStored. False: it may add.
__device__ __forceinline__ bool claim_dq_accum(int32_t* state) {
  int32_t found = exchange_if(state, kNobody, kStoring);
  if (found == kNobody) return true;
  while (found != kStored) found = load_acquire(state);
  return false;
}

// The same for a whole warp. The vote shows ptxas that all lanes leave the loop together; else it
// would keep no value of the warp's in uniform registers, in no step.
__device__ __forceinline__ bool warp_claims(int32_t* state) {
  int32_t found = 0;
  if (threadIdx.x % 32 == 0) found = exchange_if(state, kNobody, kStoring);
  found = __shfl_sync(~0u, found, 0);
  if (found == kNobody) return true;
  while (__any_sync(~0u, found != kStored)) found = load_acquire(state);
  __syncwarp();  // all lanes see what the first warp has stored
  return false;
}

// Deterministic: number of work tiles (kBlockN keys) that add to the m_block at a position before
// this one.
template <int kBlockN>
__device__ __forceinline__ int tiles_before(const Arguments&, const ListedWorkTile& tile,
                                            int position) {
  return __ldg(tile.turns + position);
}
template <int kBlockN>
__device__ __forceinline__ int tiles_before(const Arguments& args, const WorkTile& tile,
                                            int position) {
  const int block = tile.m_blocks.block(position);
  const int index = tile.first_key / kBlockN;
  if (args.traversal == Traversal::kAscending) return index;
  const int last_row = min((block + 1) * kBlockM, tile.num_rows) - 1;
  const BlockRange tiles = Mask::of(tile.num_rows, tile.num_keys, args.window)
                               .template n_blocks<kBlockN>(block * kBlockM, last_row);
  return tile.descending ? index - tiles.begin : tiles.end - 1 - index;
}

}  // namespace flashattn3::backward
