// Producer threads of a CTA of a 2-CTA cluster: one loads K and V, and Q and dO as stages become
// free; one sends each step's dS to the other CTA; one counts the tile when all of its additions to
// dQ are in memory, and if deterministic orders them together with another one, in place of which a
// warp may zero dq_accum.
#pragma once

#include "backward/arguments.h"
#include "backward/cluster2/traits.cuh"
#include "backward/copy_floats.cuh"
#include "backward/dq_semaphore.cuh"
#include "backward/work_tile.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::backward::cluster2 {

template <Config kConfig>
__device__ __forceinline__ void load(const Arguments& args,
                                     const typename KernelTraits<kConfig>::Tile& tile,
                                     uint8_t* shared, int num_steps, int rank) {
  using Traits = KernelTraits<kConfig>;
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(shared);
  constexpr int kHalfAtoms = Traits::kAtoms / 2;
  const int first = tile.key_offset + tile.first_key;
  storage.keys_full.arrive_and_expect(2 * Traits::kNBlockBytes + Traits::kNBlockBytes / 2);
  copy_tile<Traits::kBlockN, Traits::kAtoms, 64>(
      shared + Traits::kKOffset, &args.k, storage.keys_full, kReadAgain,
      first + rank * Traits::kBlockN, kv_head(args, tile), tile.batch_coord);
  copy_tile<Traits::kBlockN, Traits::kAtoms, 64>(
      shared + Traits::kVOffset, &args.v, storage.keys_full, kReadOnce,
      first + rank * Traits::kBlockN, kv_head(args, tile), tile.batch_coord);
  copy_tile<Traits::kBlockN, kHalfAtoms, 64>(
      shared + Traits::kOtherKOffset, &args.k, storage.keys_full, kReadAgain,
      first + (1 - rank) * Traits::kBlockN, kv_head(args, tile), tile.batch_coord,
      rank * kHalfAtoms);
  constexpr uint32_t kBytes = Traits::kMBlockBytes + kBlockM * sizeof(float);
  const int batch_coord = args.seqlens_q.cu_seqlens != nullptr ? 0 : tile.batch_idx;
  PipelineState<2> q{1};
  PipelineState<1> dout{1};
  const BlockOrder order = BlockOrder::of(tile);
  int head = tile.head * args.qhead_per_kvhead, position = tile.start;
  for (int i = 0; i < num_steps; ++i) {
    const int block = tile.block(position);
    const int row = tile.row_offset + block * kBlockM;
    const int at = static_cast<int>(workspace_row(args, tile, head, block));
    // Sync: every consumer warp has released the buffer.
    storage.q_empty[q.index()].wait(q.phase());
    Barrier& q_full = storage.q_full[q.index()];
    if constexpr (kConfig.term == ScoreTerm::kSlopes) {
      storage.slopes[q.index()] = args.slopes.at(tile.batch_idx, head);
    }
    q_full.arrive_and_expect(kBytes);
    copy_tile<kBlockM, Traits::kAtoms, 64>(
        shared + Traits::kQOffset + q.index() * Traits::kMBlockBytes, &args.q, q_full, kReadAgain,
        row, head, batch_coord);
    copy_floats(storage.lse[q.index()], &args.lse_delta, q_full, kReadAgain, at, 0);
    storage.dout_empty.wait(dout.phase());  // Sync: as above.
    storage.dout_full.arrive_and_expect(kBytes);
    copy_tile<kBlockM, Traits::kAtoms, 64>(shared + Traits::kDoutOffset, &args.dout,
                                           storage.dout_full, kReadAgain, row, head, batch_coord);
    copy_floats(storage.minus_delta, &args.lse_delta, storage.dout_full, kReadAgain, at, 1);
    q.advance();
    dout.advance();
    position = order.next(position);
    if (position == tile.start) ++head;
  }
}

// Copies dS of each step to the other CTA. peer: the other CTA's rank.
template <class Traits>
__device__ __forceinline__ void exchange_ds(uint8_t* shared, int num_steps, uint32_t peer) {
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(shared);
  const uint32_t base = cute::cast_smem_ptr_to_uint(shared);
  PipelineState<2> at{0};
  for (int i = 0; i < num_steps; ++i) {
    const uint32_t b = at.index();
    // Sync: all consumer warps have written dS. Before that they waited until the other CTA had
    // received and read the dS that was last sent from this buffer.
    storage.ds_full[b].wait(at.phase());
    storage.other_full[b].arrive_and_expect(Traits::kDsBytes);
    copy_to_peer(base + Traits::kOtherDsOffset + b * Traits::kDsBytes,
                 base + Traits::kDsOffset + b * Traits::kDsBytes, storage.other_full[b],
                 Traits::kDsBytes, peer);
    at.advance();
  }
}

// Calls visit(at, number, position) for each step. number: of the m_block in the workspace.
template <class Tile, class Visit>
__device__ __forceinline__ void for_each_m_block(const Arguments& args, const Tile& tile,
                                                 int num_steps, Visit visit) {
  PipelineState<2> at{0};
  const BlockOrder order = BlockOrder::of(tile);
  int head = tile.head * args.qhead_per_kvhead, position = tile.start;
  for (int i = 0; i < num_steps; ++i) {
    const int block = tile.block(position);
    visit(at, workspace_row(args, tile, head, block) / kBlockM, position);
    at.advance();
    position = order.next(position);
    if (position == tile.start) ++head;
  }
}

// Each CTA of a cluster has its own for an m_block. Deterministic: it counts the tiles whose
// additions are in memory.
__device__ __forceinline__ int32_t* dq_semaphore_of(const Arguments& args, int64_t number,
                                                    int rank) {
  return args.workspace.dq_semaphore + number * 2 + rank;
}

// Writes zeros to this CTA's columns of an m_block of dq_accum. They are then in L2, where zeros
// that the preprocess kernel writes are not. All lanes of a warp call it; lane 0 may then publish
// them.
template <class Traits>
__device__ __forceinline__ void write_zeros(const Arguments& args, int64_t number, int rank) {
  constexpr int kVectors = 2 * Traits::kQuarter * kBlockM / 4;
  float4* const zeros =
      reinterpret_cast<float4*>(args.workspace.dq_accum) + (number * 2 + rank) * kVectors;
  for (int i = threadIdx.x % 32; i < kVectors; i += 32) zeros[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  __syncwarp();
}

// Deterministic: tells the consumers when this tile may add a step's dQ to dq_accum, to which the
// first tile writes zeros if Arguments::zeroes_dq. A warp calls it.
template <class Traits>
__device__ __forceinline__ void poll_dq_semaphore(const Arguments& args,
                                                  const typename Traits::Tile& tile,
                                                  uint8_t* shared, int num_steps, int rank) {
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(shared);
  const bool polls = threadIdx.x % 32 == 0;
  const auto visit = [&](const PipelineState<2>& at, int64_t number, int position) {
    const int before = tiles_before<block_n(Traits::kConfig)>(args, tile, position);
    // Sync: the additions of two steps before are released.
    storage.dq_released[at.index()].wait(at.phase() ^ 1);
    if (before == 0 && args.zeroes_dq) write_zeros<Traits>(args, number, rank);
    if (polls) {
      while (load_acquire(dq_semaphore_of(args, number, rank)) < before) {
      }
      storage.dq_ready[at.index()].arrive();
    }
    __syncwarp();  // no lane waits for a phase that others have left behind
  };
  for_each_m_block(args, tile, num_steps, visit);
}

// Deterministic: increments dq_semaphore for each step. The increment waits until the CTA's
// additions are in memory, which no consumer warp should wait for.
template <class Traits>
__device__ __forceinline__ void release_dq_semaphore(const Arguments& args,
                                                     const typename Traits::Tile& tile,
                                                     uint8_t* shared, int num_steps, int rank) {
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(shared);
  const auto visit = [&](const PipelineState<2>& at, int64_t number, int) {
    storage.dq_added[at.index()].wait(at.phase());  // Sync: every consumer warp has added.
    add_release(dq_semaphore_of(args, number, rank), 1);
    storage.dq_released[at.index()].arrive();
  };
  for_each_m_block(args, tile, num_steps, visit);
}

// Not deterministic, with Arguments::zeroes_dq: writes the zeros of each m_block of dq_accum that
// no tile has claimed, and tells the consumers when they may add to it. No tile waits for another
// one's additions, only for zeros, which do not wait. A warp calls it.
template <class Traits>
__device__ __forceinline__ void zero_dq_accum(const Arguments& args,
                                              const typename Traits::Tile& tile, uint8_t* shared,
                                              int num_steps, int rank) {
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(shared);
  const bool claims = threadIdx.x % 32 == 0;
  const auto visit = [&](const PipelineState<2>& at, int64_t number, int) {
    // Sync: dS of the step is written, so every consumer warp has waited for dq_ready of two steps
    // before, which may be reused.
    storage.ds_full[at.index()].wait(at.phase());
    int32_t* const state = dq_semaphore_of(args, number, rank);
    if (uniform(claims && claim_dq_accum(state))) {
      write_zeros<Traits>(args, number, rank);
      if (claims) add_release(state, kStored - kStoring);  // Sync: others may add.
    }
    if (claims) storage.dq_ready[at.index()].arrive();
  };
  for_each_m_block(args, tile, num_steps, visit);
}

// Increments tiles_done once this CTA's additions are in memory: the heads whose tiles are all done
// are converted while other tiles run (postprocess.cuh).
template <class Traits>
__device__ __forceinline__ void count_tile(const Arguments& args, const WorkTile& tile,
                                           uint8_t* shared, int num_steps) {
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(shared);
  // Sync: every consumer warp has added.
  if (!args.deterministic && num_steps > 0) storage.dq_added[0].wait(0);
  add_release(args.workspace.tiles_done + tile.batch_idx * args.num_heads_kv + tile.head, 1);
}

}  // namespace flashattn3::backward::cluster2
