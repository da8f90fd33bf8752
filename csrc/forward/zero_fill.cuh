// Zero fill of V past the end of a sequence. The bytes there may belong to another sequence or to
// none and may be NaN, and 0 * NaN is NaN. The copy of such a tile completes v_unfilled_full; a
// warp of the producer warpgroup then writes the zeros and arrives at v_full.
#pragma once

#include "forward/arguments.h"
#include "forward/traits.cuh"
#include "tile/zero_fill.cuh"

namespace flashattn3::forward {

// Whether the V tile with the sequence's last `keys` keys needs zero fill. TMA writes zeros past
// the end of a tensor, but not past the end of a sequence in it.
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

  // Loop of the zero fill warp in 16-bit kernel configs, over the published work tiles. It waits
  // only for these and for copies in flight, never for a thread that waits for it.
  __device__ __forceinline__ void run() {
    PipelineState<2> at(0);
    int stage = 0;
    while (true) {
      // Sync: the producer has written the WorkTile, as for the consumers.
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

  // Fills the work tile's first V tile, which is in this stage. Called by a warp, once per work
  // tile with keys.
  __device__ __forceinline__ void fill(int stage, const WorkTile& tile) {
    const int keys = uniform(tile.num_keys - (tile.n_blocks.end - 1) * Traits::kBlockN);
    if (!needs_zero_fill<Traits>(args_, keys)) return;
    storage_.v_unfilled_full[stage].wait(phases_ >> stage & 1);  // Sync: V is loaded.
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
  uint32_t phases_ = 0;  // of v_unfilled_full, one bit per stage
};

}  // namespace flashattn3::forward
