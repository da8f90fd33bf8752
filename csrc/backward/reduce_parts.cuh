// Sums dK and dV, in float32, over the parts into which the query heads of a KV head are divided:
// a pairwise reduction across the work tiles of the parts.
//
// The parts are the leaves of a binary tree. Of the two warps that reach a node, the first one
// stores its partial sums in the workspace and is done; the second one adds them to its own and
// goes on to the parent. The result does not depend on which warp is first, because a + b = b + a;
// so no warp waits for a certain part, and the bits are the same in every run. The warp that passes
// the root has the sums over all parts.
#pragma once

#include "backward/arguments.h"
#include "backward/dq_semaphore.cuh"
#include "backward/work_tile.cuh"
#include "ptx/global_memory.cuh"

namespace flashattn3::backward {

// Each access of a warp is to 32 consecutive groups of four accumulators.
template <int kFloats>
__device__ __forceinline__ void store_partial(float4* to, const float (&sums)[kFloats]) {
#pragma unroll
  for (int i = 0; i < kFloats; i += 4) {
    to[i * 8] = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
  }
}
template <int kFloats>
__device__ __forceinline__ void add_partial(float (&sums)[kFloats], const float4* from) {
#pragma unroll
  for (int i = 0; i < kFloats; i += 4) {
    const float4 other = __ldcg(from + i * 8);  // L1 may hold what another SM has overwritten
    sums[i] += other.x, sums[i + 1] += other.y, sums[i + 2] += other.z, sums[i + 3] += other.w;
  }
}

// Returns whether this warp has the sums over all parts and must store them; then dk and dv, its
// accumulators of the work tile, are these sums. Always true if the heads are not divided. warp: of
// the consumer warps of the tile, in both CTAs of a cluster. A warp with only one of the gradients
// passes its halves.
template <Config kConfig, int kKeyFloats, int kValueFloats>
__device__ __forceinline__ bool reduce_parts(const Arguments& args, const WorkTile& tile, int warp,
                                             float (&dk)[kKeyFloats], float (&dv)[kValueFloats]) {
  constexpr int kFloats = kKeyFloats + kValueFloats;
  static_assert(kFloats == reduced_floats(kConfig));
  const PartialSums& sums = args.partial_sums;
  constexpr int kBlockN = block_n(kConfig), kWarps = warps_of_tile(kConfig);
  const int num_parts = args.head_parts, lane = threadIdx.x % 32;
  if (num_parts == 1) return true;
  int head, part;
  args.head_parts(head, part, tile.head);
  const int num_heads = args.num_heads_kv / num_parts;
  const int64_t number = int64_t{tile.batch_idx} * sums.tiles_of_sequence +
                         tile.key_offset / kBlockN + tile.first_key / kBlockN;
  const int64_t before = ((number * num_heads + head) * kWarps + warp) * (num_parts - 1);
  // The parts are nodes num_parts to 2 * num_parts - 1, and node 1 is the root.
  for (int node = (num_parts + part) / 2; node > 0; node /= 2) {
    const int64_t index = before + node - 1;
    float4* memory = sums.sums + index * (kFloats / 4 * 32) + lane;
    // Sync: if another warp was the first, it has stored its partial sums.
    if (warp_claims(sums.states + index)) {
      store_partial(memory, dk);
      store_partial(memory + kKeyFloats * 8, dv);
      __syncwarp();
      // Sync: all lanes have stored.
      if (lane == 0) add_release(sums.states + index, kStored - kStoring);
      return false;
    }
    add_partial(dk, memory);
    add_partial(dv, memory + kKeyFloats * 8);
  }
  return true;
}

}  // namespace flashattn3::backward
