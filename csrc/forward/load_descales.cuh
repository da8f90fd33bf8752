// The DescaleLoader warp of 8-bit kernel configs. For each K tile of a published work tile it
// writes KvDescales for the consumers' softmax; for each V tile it writes the row sum columns, the
// weights of its keys. k_full and v_full also count its arrivals. It also writes V's zero fill
// (ZeroFill). It follows the order of the loads, K0, K1, V0, K2, ..., so that it delays no
// load that the producer could issue.
#pragma once

#include "forward/arguments.h"
#include "forward/load.cuh"
#include "forward/traits_fp8.cuh"
#include "ptx/approximations.cuh"
#include "ptx/pdl.cuh"
#include "tile/row_sum_columns.cuh"

namespace flashattn3::forward {

template <Config kConfig>
class DescaleLoader {
  using Traits = QuantizedTraits<kConfig>;
  using Tile = typename QuantizedStorageOf<kConfig>::Tile;
  static constexpr int kGroups = Traits::kDescaleGroups;
  static constexpr int kBlocksAtOnce = 32 / kGroups;  // one lane per scale group of each block
  // Lower bound on log2(descale_v / out_scale); values scaled below it are negligible.
  static constexpr float kLowest = -30.f;
  // Descales below this belong to groups whose values are all 0.
  static constexpr float kNothing = 0x1p-100f;
  // Until O is promoted, WGMMA truncates up to 1.2 % of it where V's values have one sign, and
  // nothing where they have both or where few keys have weight. The factor 1.003 keeps the error of
  // every row below 1 %; the other factor is that of the row sums (softmax_e4m3.cuh).
  static constexpr float kOutCorrection = 1.003f * kRowSumCorrection;

 public:
  __device__ __forceinline__ DescaleLoader(const Arguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<QuantizedStorageOf<kConfig>*>(shared)),
        shared_(shared),
        zero_fill_(args, shared) {}

  __device__ __forceinline__ void run() {
    griddepcontrol_wait();
    while (true) {
      // Sync: the producer has written the WorkTile, as for the consumers.
      storage_.tile_full[tile_.index()].wait(tile_.phase());
      const Tile& tile = storage_.tile[tile_.index()];
      if (tile.first_row < 0) return;
      load(tile);
      __syncwarp();
      storage_.tile_empty[tile_.index()].arrive();
      tile_.advance();
    }
  }

 private:
  __device__ __forceinline__ void load(const Tile& tile) {
    const Descale &k_descales = args_.quantized.k, &v_descales = args_.quantized.v;
    const int lane = threadIdx.x % 32, head = tile.head / args_.qhead_per_kvhead;
    const float* k_of_head = k_descales.of(tile.batch_idx, head);
    const float* v_of_head = v_descales.of(tile.batch_idx, head);
    const int num_blocks = tile.n_blocks.count();
    float out_scale = 1.f;
    int highest = 0;   // largest log2(descale_v / out_scale) so far, rounded up
    bool any = false;  // whether any V descale so far is not 0, the same in all lanes
    uint32_t last_row_sum_bytes = 0;  // for the lane's keys of the block before
    for (int first = 0; first < num_blocks; first += kBlocksAtOnce) {
      // One lane per scale group of the next blocks. Keys past the end are masked and blocks past
      // the last are unused; their descales may not exist, so the indices are clamped.
      const int key = min(key_of(tile, num_blocks, first, lane), tile.num_keys - 1);
      const float k = k_descales.at(k_of_head, key), v = v_descales.at(v_of_head, key);
      any = any || __any_sync(~0u, !(fabsf(v) < kNothing));
      if (first == 0) out_scale = first_descale(v);
      // The consumers read out_scale after the last V tile. If every V descale is 0, out is 0,
      // whatever V's bytes are.
      const bool last = first + kBlocksAtOnce >= num_blocks;
      if (lane == 0 && (first == 0 || last)) {
        const float correction = tile.num_keys == 1 ? 1.f : kOutCorrection;
        storage_.out_scale[tile_.index()] = last && !any ? 0.f : out_scale * correction;
      }
      const float ratio = __fdividef(v, out_scale);
      const float relative = __log2f(fabsf(ratio));
      const float shift = relative < kLowest ? kLowest : relative;  // NaN stays
      highest = __reduce_max_sync(~0u, max(highest, __float2int_ru(shift)));
      // A V descale far below earlier ones makes P too small for a weight: softmax sums P itself.
      const bool exact = shift < highest + kLeastFactor || shift > kGreatestFactor;
      const uint32_t exacts = __ballot_sync(~0u, exact),
                     negatives = __ballot_sync(~0u, ratio < 0.f);
      uint32_t weights = 0;
      const int count = min(kBlocksAtOnce, num_blocks - first);
#pragma unroll 1
      for (int j = 0; j < count; ++j) {
        // Sync: every consumer warp has released the stage.
        storage_.k_empty[k_.index()].wait(k_.phase());
        const int group = lane - j * kGroups;
        if (group >= 0 && group < kGroups) {
          KvDescales<kGroups>& scales = storage_.kv_descales[k_.index()];
          scales.k[group] = k;
          scales.shift[group] = shift * (Traits::kExponentUnit / Traits::kShiftUnit);
          constexpr uint32_t kMask = (1u << kGroups) - 1;
          if (group == 0) {
            scales.special = (exacts >> lane & kMask) | (negatives >> lane & kMask) << kGroups;
          }
        }
        __syncwarp();
        storage_.k_full[k_.index()].arrive_lanes();  // Sync: every lane has written.
        k_.advance();
        if (j == 0) {  // after the arrival, because K waits for it
          weights = row_sum_column_bytes(exact ? 0.f : copysignf(exp2_approx(-shift), ratio));
        }
        if (first + j > 0)
          load_row_sum_columns(k_.before(2), tile, last_row_sum_bytes, first + j - 1);
        last_row_sum_bytes =
            __shfl_sync(~0u, weights, j * kGroups + row_sum_key(lane) / Traits::kKeysPerDescale);
      }
    }
    if (num_blocks > 0)
      load_row_sum_columns(k_.before(1), tile, last_row_sum_bytes, num_blocks - 1);
  }

  // A key of a lane's scale group, counted from the first-th of num_blocks blocks, or of groups of
  // listed blocks, on. Past the end of a list it is one of the last block's.
  static __device__ __forceinline__ int key_of(const Tile& tile, int num_blocks, int first,
                                               int lane) {
    if constexpr (Traits::kListed) {
      const int key = first * Traits::kBlockN + lane * Traits::kKeysPerDescale;
      const int entry = min(key / kListColumns, tile.blocks.num_blocks - 1);
      const int block = max(__ldg(tile.blocks.entries + entry), 0);
      return block * kListColumns + key % kListColumns;
    } else {
      const int block =
          tile.n_blocks.block(tile.n_blocks.end - 1 - min(first + lane / kGroups, num_blocks - 1));
      return block * Traits::kBlockN + lane % kGroups * Traits::kKeysPerDescale;
    }
  }

  // For the work tile's i-th V tile, at this stage.
  __device__ __forceinline__ void load_row_sum_columns(PipelineState<Traits::kStages> at,
                                                       const Tile& tile, uint32_t weights, int i) {
    if constexpr (Traits::kListed) {
      zero_fill_.fill_group(at.index(), group_of<Traits>(tile, i), tile.num_keys);
    } else {
      if (i == 0) zero_fill_.fill(at.index(), tile);
    }
    // Sync: every consumer warp has released the stage.
    storage_.v_empty[at.index()].wait(at.phase());
    write_row_sum_columns<Traits::kBlockN, Traits::kBoxKeys, Traits::kBoxBytes>(
        shared_ + Traits::kVOffset + at.index() * Traits::kVBytes + Traits::kRowSumOffset, weights,
        threadIdx.x % 32);
    fence_async_proxy();
    __syncwarp();
    storage_.v_full[at.index()].arrive_lanes();  // Sync: every lane has written and fenced.
  }

  // The first of the lanes' V descales that is at least kNothing, or 1. O is kept in its units; the
  // ratio of the others to it goes into P. Any would do; one near 0 would leave them no range.
  static __device__ __forceinline__ float first_descale(float v) {
    const uint32_t something = __ballot_sync(~0u, !(fabsf(v) < kNothing));
    const float first = __shfl_sync(~0u, v, something == 0 ? 0 : __ffs(something) - 1);
    return something == 0 ? 1.f : first;
  }

  const Arguments& args_;
  QuantizedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  ZeroFill<kConfig> zero_fill_;
  PipelineState<QuantizedStorageOf<kConfig>::kTileBuffers> tile_{0};
  PipelineState<Traits::kStages> k_{1};
};

}  // namespace flashattn3::forward
