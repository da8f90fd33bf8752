// Rows of 8-bit inputs that see one key. Their softmax is 1, so out is V of this key, an e4m3
// number times its descale. O over the sum of the row is near it, but for the corrections of many
// keys (row_sum_columns.cuh, load_descales.cuh) and the rounding of weights; here it becomes exact.
#pragma once

#include "attention/block_list.cuh"
#include "forward/arguments.h"
#include "ptx/convert_fp8.cuh"
#include "tile/fragment.h"

namespace flashattn3::forward {

// The one key that a row sees; -1: it sees none or several. row: of the sequence.
template <class Tile>
__device__ __forceinline__ int single_key(const Arguments& args, const Tile& tile, int row) {
  const Mask mask = Mask::of(tile.num_rows, tile.num_keys, args.variant.window);
  const int key = max(0, mask.begin(row));
  return mask.end(row) - key == 1 ? key : -1;
}

// inverse: factor of o; on return of rows with a single key the descale of V, and their o is V.
// first_row: of the warp, in the sequence. All lanes of the warp call it.
template <class Tile, int kCount>
__device__ __forceinline__ void take_single_keys(const Arguments& args, const Tile& tile,
                                                 int first_row, float (&o)[kCount],
                                                 float (&inverse)[2]) {
  const int row = first_row + thread_row(threadIdx.x % 32);
  const int keys[2] = {single_key(args, tile, row), single_key(args, tile, row + kRowStride)};
  if (__all_sync(~0u, max(keys[0], keys[1]) < 0)) return;
  const Descale& v = args.quantized.v;
  const float* descales = v.of(tile.batch_idx, tile.head / args.qhead_per_kvhead);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float descale = v.at(descales, max(keys[r], 0));
    // Descales of 0 or near it have no weights in the sum of the row.
    if (keys[r] < 0 || !(fabsf(descale) >= 0x1p-100f) || descale - descale != 0.f) continue;
    const float to_v = inverse[r] / descale;
    inverse[r] = descale;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (row_of(i) == r) o[i] = rounded_to_e4m3(o[i] * to_v);
    }
  }
}

}  // namespace flashattn3::forward
