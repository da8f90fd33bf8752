// The warp that brings the descales of K and V, of quantized rows: follows the tiles that the
// producer announces, and for each K tile lays down what the consumers' softmax needs, for each V
// tile what its keys count in the rows' sums. The full barriers wait for it as for the copies. It
// also writes the zeros behind the end of a sequence in V (tails.cuh). All in the order of the
// loads, K0, K1, V0, K2, ...: so it holds nothing back that the producer could have brought.
#pragma once

#include "blocks/row_references.cuh"
#include "blocks/row_sums.cuh"
#include "kernels/forward/arguments.h"
#include "kernels/forward/config.cuh"
#include "kernels/forward/tails.cuh"

namespace flashattn3 {

template <ForwardRow kRow>
class ForwardDescales {
  using Config = ForwardConfig<kRow>;
  static constexpr int kGroups = Config::kScaleGroups;
  static constexpr int kBlocksAtOnce = 32 / kGroups;  // a lane for each group of each block
  // log2 of a scale so far below the tile's that its values do not count.
  static constexpr float kLowest = -30.f;
  // Of values that are all 0.
  static constexpr float kNothing = 0x1p-100f;
  // WGMMA cuts off up to 1.2 % of out until it is promoted, where V's values have one sign, and
  // nothing where they have both or where few keys count. Out is multiplied by a little, so that no
  // row is off by 1 %; and by what the sums are (code_softmax.cuh).
  static constexpr float kAgainstLoss = 1.003f * kSumsAgainstLoss;

 public:
  __device__ __forceinline__ ForwardDescales(const ForwardArguments& args, uint8_t* shared)
      : args_(args),
        control_(*reinterpret_cast<ForwardControlOf<kRow>*>(shared)),
        shared_(shared),
        tails_(args, shared) {}

  __device__ __forceinline__ void run() {
    while (true) {
      // Sync: as a consumer's.
      control_.tile_full[tile_.stage()].wait(tile_.parity());
      const RowTile& tile = control_.tile[tile_.stage()];
      if (tile.first_row < 0) return;
      bring(tile);
      __syncwarp();
      control_.tile_empty[tile_.stage()].arrive();
      tile_.advance();
    }
  }

 private:
  __device__ __forceinline__ void bring(const RowTile& tile) {
    const Descale &k_scales = args_.quantized.k, &v_scales = args_.quantized.v;
    const int lane = threadIdx.x % 32, head = tile.head / args_.heads_per_kv;
    const float* k_of_head = k_scales.of(tile.sequence, head);
    const float* v_of_head = v_scales.of(tile.sequence, head);
    const int num_blocks = tile.keys.end - tile.keys.begin;
    float v_scale = 1.f;
    int highest = 0;            // log2 of V's scale so far over v_scale, rounded up
    bool any = false;           // whether a descale of V so far is not 0, the same in all lanes
    uint32_t last_weights = 0;  // of the lane's keys in the tile before
    for (int first = 0; first < num_blocks; first += kBlocksAtOnce) {
      // A lane for each group of the next blocks. Keys past the end are hidden, and others not
      // asked for; their descales may not exist.
      const int block = tile.keys.end - 1 - min(first + lane / kGroups, num_blocks - 1);
      const int key =
          min(block * Config::kBlockN + lane % kGroups * Config::kScaleKeys, tile.num_keys - 1);
      const float k = k_scales.at(k_of_head, key), v = v_scales.at(v_of_head, key);
      any = any || __any_sync(~0u, !(fabsf(v) < kNothing));
      if (first == 0) v_scale = first_scale(v);
      // The consumers read it behind the last V. Where every descale is 0, so is out, whatever V's
      // bytes are.
      const bool last = first + kBlocksAtOnce >= num_blocks;
      if (lane == 0 && (first == 0 || last)) {
        control_.v_scale[tile_.stage()] = last && !any ? 0.f : v_scale * kAgainstLoss;
      }
      const float ratio = __fdividef(v, v_scale);
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
        control_.k_empty[k_.stage()].wait(k_.parity());
        const int group = lane - j * kGroups;
        if (group >= 0 && group < kGroups) {
          KeyScales<kGroups>& scales = control_.key_scales[k_.stage()];
          scales.k[group] = k;
          scales.shift[group] = shift * (Config::kUnits / Config::kShiftUnit);
          constexpr uint32_t kMask = (1u << kGroups) - 1;
          if (group == 0) {
            scales.special = (exacts >> lane & kMask) | (negatives >> lane & kMask) << kGroups;
          }
        }
        __syncwarp();
        control_.k_full[k_.stage()].arrive_lanes();  // Sync: every lane has written.
        k_.advance();
        if (j == 0) {  // late: K waits
          weights = weight_columns(exact ? 0.f : copysignf(exp2_approx(-shift), ratio));
        }
        if (first + j > 0) bring_weights(k_.before(2), tile, last_weights, first + j == 1);
        last_weights =
            __shfl_sync(~0u, weights, j * kGroups + weight_key(lane) / Config::kScaleKeys);
      }
    }
    if (num_blocks > 0) bring_weights(k_.before(1), tile, last_weights, num_blocks == 1);
  }

  // Of V at this position; is_first: for the row tile.
  __device__ __forceinline__ void bring_weights(RingPosition<Config::kStages> at,
                                                const RowTile& tile, uint32_t weights,
                                                bool is_first) {
    if (is_first) tails_.complete(at.stage(), tile);
    // Sync: every consumer warp is done with what lay there.
    control_.v_empty[at.stage()].wait(at.parity());
    write_weights<Config::kBlockN>(
        shared_ + Config::kVOffset + at.stage() * Config::kVBytes + Config::kWeightsInV, weights,
        threadIdx.x % 32);
    fence_async_proxy();
    __syncwarp();
    control_.v_full[at.stage()].arrive_lanes();  // Sync: every lane has written and fenced.
  }

  // The first of the lanes' that is not of nothing: relative to it the others go into the
  // probabilities. Any will do; one of nothing would leave the others no room.
  static __device__ __forceinline__ float first_scale(float v) {
    const uint32_t something = __ballot_sync(~0u, !(fabsf(v) < kNothing));
    const float first = __shfl_sync(~0u, v, something == 0 ? 0 : __ffs(something) - 1);
    return something == 0 ? 1.f : first;
  }

  const ForwardArguments& args_;
  ForwardControlOf<kRow>& control_;
  uint8_t* shared_;
  ForwardTails<kRow> tails_;
  RingPosition<2> tile_{0};
  RingPosition<Config::kStages> k_{1};
};

}  // namespace flashattn3
