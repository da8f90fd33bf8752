// Producer thread: loads K and V, and Q and dO as stages become free.
#pragma once

#include "backward/arguments.h"
#include "backward/copy_floats.cuh"
#include "backward/specialized/traits.cuh"
#include "backward/work_tile.cuh"
#include "tile/tma_load.cuh"

namespace flashattn3::backward::specialized {

template <Config kConfig>
__device__ __forceinline__ void load(const Arguments& args, const WorkTile& tile, uint8_t* shared,
                                     int num_steps, int rank) {
  using Traits = KernelTraits<kConfig>;
  auto& storage = *reinterpret_cast<typename Traits::Storage*>(shared);
  constexpr int kTileBytes = Traits::kTileBytes;
  constexpr uint32_t kFloats = kBlockM * sizeof(float);
  const int mine = tile.key_offset + tile.first_key + rank * Traits::kBlockN;
  const int others = tile.key_offset + tile.first_key + (1 - rank) * Traits::kBlockN;
  storage.keys_full.arrive_and_expect(2 * kTileBytes + 4 * Traits::kAtomBytes);
  copy_tile<Traits::kBlockN, Traits::kAtoms, 64>(shared + Traits::kKOffset, &args.k,
                                                 storage.keys_full, kReadAgain, mine,
                                                 kv_head(args, tile), tile.batch_coord);
  copy_tile<Traits::kBlockN, Traits::kAtoms, 64>(shared + Traits::kVOffset, &args.v,
                                                 storage.keys_full, kReadOnce, mine,
                                                 kv_head(args, tile), tile.batch_coord);
  copy_tile<Traits::kBlockN, 2, Traits::kQuarter>(shared + Traits::kDqKOffset, &args.k,
                                                  storage.keys_full, kReadAgain, mine,
                                                  kv_head(args, tile), tile.batch_coord, rank * 2);
  copy_tile<Traits::kBlockN, 2, Traits::kQuarter>(shared + Traits::kOtherKOffset, &args.k,
                                                  storage.keys_full, kReadAgain, others,
                                                  kv_head(args, tile), tile.batch_coord, rank * 2);
  const int batch_coord = args.seqlens_q.cu_seqlens != nullptr ? 0 : tile.batch_idx;
  PipelineState<2> at{1};
  const BlockOrder order = BlockOrder::of(tile);
  int head = tile.head * args.qhead_per_kvhead, position = tile.start;
  for (int i = 0; i < num_steps; ++i) {
    const int block = tile.m_blocks.block(position);
    const int row = tile.row_offset + block * kBlockM;
    const int column = static_cast<int>(workspace_row(args, tile, head, block));
    const uint32_t b = at.index();
    storage.q_empty[b].wait(at.phase());  // Sync: every score warp has released the buffer.
    storage.q_full[b].arrive_and_expect(kTileBytes + kFloats);
    copy_tile<kBlockM, Traits::kAtoms, 64>(shared + Traits::kQOffset + b * kTileBytes, &args.q,
                                           storage.q_full[b], kReadAgain, row, head, batch_coord);
    copy_floats(storage.lse[b], &args.lse_delta, storage.q_full[b], kReadAgain, column, 0);
    storage.dout_empty[b].wait(at.phase());  // Sync: every gradient warp has released the buffer.
    storage.dout_full[b].arrive_and_expect(kTileBytes + kFloats);
    copy_tile<kBlockM, Traits::kAtoms, 64>(shared + Traits::kDoutOffset + b * kTileBytes,
                                           &args.dout, storage.dout_full[b], kReadAgain, row, head,
                                           batch_coord);
    copy_floats(storage.minus_delta[b], &args.lse_delta, storage.dout_full[b], kReadAgain, column,
                1);
    at.advance();
    position = order.next(position);
    if (position == tile.start) ++head;
  }
}

}  // namespace flashattn3::backward::specialized
