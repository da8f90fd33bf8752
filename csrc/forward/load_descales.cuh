// The warp that brings the descales of K and V, of 8-bit kernel configs: follows the tiles that the
// producer announces, and for each K tile lays down what the consumers' softmax needs, for each V
// tile what its keys count in the rows' sums. The full barriers wait for it as for the copies. It
// also writes the zeros behind the end of a sequence in V (zero_fill.cuh). All in the order of the
// loads, K0, K1, V0, K2, ...: so it holds nothing back that the producer could have brought.
#pragma once

#include "attention/softmax_state.cuh"
#include "forward/arguments.h"
#include "forward/traits.cuh"
#include "forward/zero_fill.cuh"
#include "tile/row_sum_columns.cuh"

namespace flashattn3::forward {

template <Config kConfig>
class DescaleLoader {
  using Traits = KernelTraits<kConfig>;
  static constexpr int kGroups = Traits::kDescaleGroups;
  static constexpr int kBlocksAtOnce = 32 / kGroups;  // a lane for each group of each block
  // log2 of a scale so far below the tile's that its values do not count.
  static constexpr float kLowest = -30.f;
  // Of values that are all 0.
  static constexpr float kNothing = 0x1p-100f;
  // WGMMA cuts off up to 1.2 % of out until it is promoted, where V's values have one sign, and
  // nothing where they have both or where few keys count. Out is multiplied by a little, so that no
  // row is off by 1 %; and by what the sums are (softmax_e4m3.cuh).
  static constexpr float kOutCorrection = 1.003f * kRowSumCorrection;

 public:
  __device__ __forceinline__ DescaleLoader(const Arguments& args, uint8_t* shared)
      : args_(args),
        storage_(*reinterpret_cast<SharedStorageOf<kConfig>*>(shared)),
        shared_(shared),
        zero_fill_(args, shared) {}

  __device__ __forceinline__ void run() {
    while (true) {
      // Sync: as a consumer's.
      storage_.tile_full[tile_.index()].wait(tile_.phase());
      const WorkTile& tile = storage_.tile[tile_.index()];
      if (tile.first_row < 0) return;
      load(tile);
      __syncwarp();
      storage_.tile_empty[tile_.index()].arrive();
      tile_.advance();
    }
  }

 private:
  __device__ __forceinline__ void load(const WorkTile& tile) {
    const Descale &k_descales = args_.quantized.k, &v_descales = args_.quantized.v;
    const int lane = threadIdx.x % 32, head = tile.head / args_.qhead_per_kvhead;
    const float* k_of_head = k_descales.of(tile.batch_idx, head);
    const float* v_of_head = v_descales.of(tile.batch_idx, head);
    const int num_blocks = tile.n_blocks.end - tile.n_blocks.begin;
    float out_scale = 1.f;
    int highest = 0;   // log2 of V's scale so far over v_scale, rounded up
    bool any = false;  // whether a descale of V so far is not 0, the same in all lanes
    uint32_t last_row_sum_bytes = 0;  // of the lane's keys in the tile before
    for (int first = 0; first < num_blocks; first += kBlocksAtOnce) {
      // A lane for each group of the next blocks. Keys past the end are hidden, and others not
      // asked for; their descales may not exist.
      const int block = tile.n_blocks.end - 1 - min(first + lane / kGroups, num_blocks - 1);
      const int key = min(block * Traits::kBlockN + lane % kGroups * Traits::kKeysPerDescale,
                          tile.num_keys - 1);
      const float k = k_descales.at(k_of_head, key), v = v_descales.at(v_of_head, key);
      any = any || __any_sync(~0u, !(fabsf(v) < kNothing));
      if (first == 0) out_scale = first_descale(v);
      // The consumers read it behind the last V. Where every descale is 0, so is out, whatever V's
      // bytes are.
      const bool last = first + kBlocksAtOnce >= num_blocks;
      if (lane == 0 && (first == 0 || last)) {
        storage_.out_scale[tile_.index()] = last && !any ? 0.f : out_scale * kOutCorrection;
      }
      const float ratio = __fdividef(v, out_scale);
      const float relative = __log2f(fabsf(ratio));
      const float shift = relative < kLowest ? kLowest : relative;  // NaN stays
      highest = __reduce_max_sync(~0u, max(highest, __float2int_ru(shift)));
      // Where V is so much smaller than it was before in the tile, so are the probabilities.
      const bool exact = shift < highest + kLeastFactor || shift > kGreatestFactor;
      const uint32_t exacts = __ballot_sync(~0u, exact),
                     negatives = __ballot_sync(~0u, ratio < 0.f);
      uint32_t weights = 0;
      const int count = min(kBlocksAtOnce, num_blocks - first);
#pragma unroll 1
      for (int j = 0; j < count; ++j) {
        // Sync: every consumer warp is done with what lay there.
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
        if (j == 0) {  // late: K waits
          weights = row_sum_column_bytes(exact ? 0.f : copysignf(exp2_approx(-shift), ratio));
        }
        if (first + j > 0)
          load_row_sum_columns(k_.before(2), tile, last_row_sum_bytes, first + j == 1);
        last_row_sum_bytes =
            __shfl_sync(~0u, weights, j * kGroups + row_sum_key(lane) / Traits::kKeysPerDescale);
      }
    }
    if (num_blocks > 0)
      load_row_sum_columns(k_.before(1), tile, last_row_sum_bytes, num_blocks == 1);
  }

  // Of V at this position; is_first: for the work tile.
  __device__ __forceinline__ void load_row_sum_columns(PipelineState<Traits::kStages> at,
                                                       const WorkTile& tile, uint32_t weights,
                                                       bool is_first) {
    if (is_first) zero_fill_.fill(at.index(), tile);
    // Sync: every consumer warp is done with what lay there.
    storage_.v_empty[at.index()].wait(at.phase());
    write_row_sum_columns<Traits::kBlockN>(
        shared_ + Traits::kVOffset + at.index() * Traits::kVBytes + Traits::kRowSumOffset, weights,
        threadIdx.x % 32);
    fence_async_proxy();
    __syncwarp();
    storage_.v_full[at.index()].arrive_lanes();  // Sync: every lane has written and fenced.
  }

  // The first of the lanes' that is not of nothing: relative to it the others go into the
  // probabilities. Any will do; one of nothing would leave the others no room.
  static __device__ __forceinline__ float first_descale(float v) {
    const uint32_t something = __ballot_sync(~0u, !(fabsf(v) < kNothing));
    const float first = __shfl_sync(~0u, v, something == 0 ? 0 : __ffs(something) - 1);
    return something == 0 ? 1.f : first;
  }

  const Arguments& args_;
  SharedStorageOf<kConfig>& storage_;
  uint8_t* shared_;
  ZeroFill<kConfig> zero_fill_;
  PipelineState<2> tile_{0};
  PipelineState<Traits::kStages> k_{1};
};

}  // namespace flashattn3::forward
