// Rows of 8-bit inputs that see one key. Their softmax is 1, so out is V of this key times its
// descale. O is P V with one P, an e4m3 number that the row sum gives to within 1 %: rounding makes
// it exact. So the factor of such a row becomes exact, without the corrections of many keys
// (row_sum_columns.cuh, load_descales.cuh) and the rounding of weights.
//
// The code is short, because short sequences run from the instruction cache, which the kernel
// fills: 500 instructions here, two copies of 240, took 9 % of 512 tokens (H100).
#pragma once

#include <type_traits>

#include "attention/block_list.cuh"
#include "attention/mask_lists.cuh"
#include "forward/option_arguments.h"
#include "ptx/convert_fp8.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/fragment.h"

namespace flashattn3::forward {

// Factor of O for a row with a single key. descale: of its V. inverse: the factor with corrections.
// A template, because the emulation of 16-bit kernels on a CPU lacks the instructions of 8 bits.
template <class Float>
__device__ __forceinline__ Float factor_of_single_key(Float descale, Float inverse) {
  const Float probability = rounded_to_e4m3(__fdividef(descale, inverse));
  return fabsf(probability) > 0.f ? __fdividef(descale, probability) : inverse;  // NaN stays
}

// The keys that the rows of a warp see under a causal mask or a window.
struct SeenInterval {
  Mask mask;

  template <class Tile>
  __device__ __forceinline__ SeenInterval(const Arguments& args, const Tile& tile, int)
      : mask(Mask::of(uniform(tile.num_rows), uniform(tile.num_keys), args.variant.window)) {}
  __device__ __forceinline__ int count(int row) const { return mask.end(row) - mask.begin(row); }
  __device__ __forceinline__ int first_key(int row) const { return max(mask.begin(row), 0); }
  // Over the rows the number of keys first rises and then falls: an end of the warp has the
  // fewest.
  __device__ __forceinline__ bool all_see_more_than_one(int first_row) const {
    return min(count(first_row), count(first_row + kRowsOfWarp - 1)) > 1;
  }
};

// The same with lists, of the lane's row: the bits of its blocks are counted until all rows of the
// warp have seen two keys.
struct SeenBits {
  int num_seen = 2, key = 0;

  template <class Tile>
  __device__ __forceinline__ SeenBits(const Arguments& args, const Tile& tile, int first_row) {
    if (uniform(tile.blocks.num_full) > 0) return;
    const MaskLists& lists = static_cast<const ListedArguments&>(args).lists;
    const int lane = threadIdx.x % 32;
    const int row = first_row + thread_row(lane) + kRowStride * (lane % 2);
    if (row < tile.num_rows) num_seen = 0;
    const int num_blocks = uniform(tile.blocks.num_blocks);
    for (int i = 0; i < num_blocks && __any_sync(~0u, num_seen < 2); ++i) {
      const uint8_t* bits = lists.tile(tile.blocks.first_tile + i);
      const auto seen =
          __ldg(reinterpret_cast<const unsigned long long*>(bits) + row - tile.first_row);
      if (seen != 0) key = __ldg(tile.blocks.entries + i) * kListColumns + __ffsll(seen) - 1;
      num_seen += __popcll(seen);
    }
  }
  __device__ __forceinline__ int count(int) const { return num_seen; }
  __device__ __forceinline__ int first_key(int) const { return max(key, 0); }
  __device__ __forceinline__ bool all_see_more_than_one(int) const {
    return !__any_sync(~0u, num_seen == 1);
  }
};

// inverse: factors of O for this thread's two rows; exact on return where a row sees a single key.
// first_row: of the warp, in the sequence. scale: of out. All lanes of the warp call it. 16-bit
// inputs need none of it.
template <class Traits, class Tile>
__device__ __forceinline__ void correct_single_keys(const Arguments& args, const Tile& tile,
                                                    int first_row, float scale,
                                                    float (&inverse)[2]) {
  if constexpr (Traits::kQuantized && !Traits::kMasked) {
    if (uniform(tile.num_keys) != 1) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) inverse[r] = factor_of_single_key(scale, inverse[r]);
  } else if constexpr (Traits::kQuantized) {
    const std::conditional_t<Traits::kListed, SeenBits, SeenInterval> seen(args, tile, first_row);
    if (seen.all_see_more_than_one(first_row)) return;
    // Half of the lanes take the thread's first row, half the second.
    const int lane = threadIdx.x % 32, r = lane % 2;
    const int row = first_row + thread_row(lane) + kRowStride * r;
    const Descale& v = args.quantized.v;
    const float descale =
        v.at(v.of(tile.batch_idx, tile.head / args.qhead_per_kvhead), seen.first_key(row));
    float factor = r == 0 ? inverse[0] : inverse[1];
    // Descales of 0 or near it have no weights in the sum of the row.
    const bool is_weighed = fabsf(descale) >= 0x1p-100f && fabsf(descale) < INFINITY;
    if (seen.count(row) == 1 && is_weighed) factor = factor_of_single_key(descale, factor);
    inverse[0] = __shfl_sync(~0u, factor, lane & ~1);
    inverse[1] = __shfl_sync(~0u, factor, lane | 1);
  }
}

}  // namespace flashattn3::forward
