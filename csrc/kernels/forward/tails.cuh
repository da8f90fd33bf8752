// Zeros over V behind the end of a sequence. What lies there may belong to another sequence, or to
// nobody, and hold NaN, which probability 0 does not stop. The copy of such a tile completes
// tail_full; a warp of the loading warpgroup then writes the zeros and arrives at v_full, so that
// consumers see V as it should be.
#pragma once

#include "blocks/clear_tail.cuh"
#include "kernels/forward/arguments.h"
#include "kernels/forward/config.cuh"

namespace flashattn3 {

// Whether zeros are to be written into a V tile behind its keys, which end the sequence. TMA writes
// them past the end of a tensor, but not of a sequence in it.
template <class Config>
__device__ __forceinline__ bool wants_zeros(const ForwardArguments& args, int keys) {
  return keys < Config::kBlockN &&
         (Config::kQuantized || args.keys.cu_seqlens != nullptr || args.keys.seqused != nullptr);
}

template <ForwardRow kRow>
class ForwardTails {
  using Config = ForwardConfig<kRow>;

 public:
  __device__ __forceinline__ ForwardTails(const ForwardArguments& args, uint8_t* shared)
      : args_(args),
        control_(*reinterpret_cast<ForwardControlOf<kRow>*>(shared)),
        shared_(shared) {}

  // Of rows that have no other warp to do it: follows the tiles that the producer announces. Waits
  // for these and for copies under way alone, and so for nobody who waits for it.
  __device__ __forceinline__ void run() {
    RingPosition<2> at(0);
    int stage = 0;
    while (true) {
      // Sync: as a consumer's.
      control_.tile_full[at.stage()].wait(at.parity());
      const RowTile& tile = control_.tile[at.stage()];
      if (uniform(tile.first_row) < 0) return;
      const int num_blocks = uniform(tile.keys.end - tile.keys.begin);
      if (num_blocks > 0) complete(stage, tile);
      control_.tile_empty[at.stage()].arrive();
      at.advance();
      stage = (stage + num_blocks) % Config::kStages;
    }
  }

  // By a warp, for every row tile: the V tile that comes first for it, in this stage.
  __device__ __forceinline__ void complete(int stage, const RowTile& tile) {
    const int keys = uniform(tile.num_keys - (tile.keys.end - 1) * Config::kBlockN);
    if (!wants_zeros<Config>(args_, keys)) return;
    control_.tail_full[stage].wait(parities_ >> stage & 1);  // Sync: the copy has come.
    parities_ ^= 1u << stage;
    const int lane = threadIdx.x % 32;
    uint8_t* values = shared_ + Config::kVOffset + stage * Config::kVBytes;
    if constexpr (Config::kQuantized) {
      clear_slots<Config::kBlockN, Config::kHeadDim>(values, keys, lane, 32);
    } else {
      clear_rows<Config::kBlockN, Config::kChunks>(values, keys, lane, 32);
    }
    fence_async_proxy();
    __syncwarp();
    control_.v_full[stage].arrive_warp();  // Sync: every lane has written its zeros and fenced.
  }

 private:
  const ForwardArguments& args_;
  ForwardControlOf<kRow>& control_;
  uint8_t* shared_;
  uint32_t parities_ = 0;  // of tail_full, a bit for each stage
};

}  // namespace flashattn3
