// Zeros over V behind the end of a sequence. What lies there may belong to another sequence, or to
// nobody, and hold NaN, which probability 0 does not stop. The copy of such a tile completes
// v_unfilled_full; a warp of the loading warpgroup then writes the zeros and arrives at v_full, so
// that consumers see V as it should be.
#pragma once

#include "forward/arguments.h"
#include "forward/traits.cuh"
#include "tile/zero_fill.cuh"

namespace flashattn3::forward {

// Whether zeros are to be written into a V tile behind its keys, which end the sequence. TMA writes
// them past the end of a tensor, but not of a sequence in it.
template <class Traits>
__device__ __forceinline__ bool needs_zero_fill(const Arguments& args, int keys) {
  return keys < Traits::kBlockN && (Traits::kQuantized || args.seqlens_k.cu_seqlens != nullptr ||
                                    args.seqlens_k.seqused != nullptr);
}

template <Config kConfig>
class ZeroFill {
  using Traits = KernelTraits<kConfig>;

 public:
  __device__ __forceinline__ ZeroFill(const Arguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared) {}

  // Of rows that have no other warp to do it: follows the tiles that the producer announces. Waits
  // for these and for copies under way alone, and so for nobody who waits for it.
  __device__ __forceinline__ void run() {
    PipelineState<2> at(0);
    int stage = 0;
    while (true) {
      // Sync: as a consumer's.
      storage_.tile_full[at.index()].wait(at.phase());
      const WorkTile& tile = storage_.tile[at.index()];
      if (uniform(tile.first_row) < 0) return;
      const int num_blocks = uniform(tile.n_blocks.end - tile.n_blocks.begin);
      if (num_blocks > 0) fill(stage, tile);
      storage_.tile_empty[at.index()].arrive();
      at.advance();
      stage = (stage + num_blocks) % Traits::kStages;
    }
  }

  // By a warp, for every work tile: the V tile that comes first for it, in this stage.
  __device__ __forceinline__ void fill(int stage, const WorkTile& tile) {
    const int keys = uniform(tile.num_keys - (tile.n_blocks.end - 1) * Traits::kBlockN);
    if (!needs_zero_fill<Traits>(args_, keys)) return;
    storage_.v_unfilled_full[stage].wait(phases_ >> stage & 1);  // Sync: the copy has come.
    phases_ ^= 1u << stage;
    const int lane = threadIdx.x % 32;
    uint8_t* values = shared_ + Traits::kVOffset + stage * Traits::kVBytes;
    if constexpr (Traits::kQuantized) {
      zero_fill_permuted_v<Traits::kBlockN, Traits::kHeadDim>(values, keys, lane, 32);
    } else {
      zero_fill_rows<Traits::kBlockN, Traits::kAtoms>(values, keys, lane, 32);
    }
    fence_async_proxy();
    __syncwarp();
    storage_.v_full[stage].arrive_warp();  // Sync: every lane has written its zeros and fenced.
  }

 private:
  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  uint32_t phases_ = 0;  // of v_unfilled_full, a bit for each stage
};

}  // namespace flashattn3::forward
