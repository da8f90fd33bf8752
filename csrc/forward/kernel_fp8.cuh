// The roles of the forward kernel for 8-bit inputs.
#pragma once

#include <type_traits>

#include "forward/kernel.cuh"
#include "forward/load_descales.cuh"
#include "forward/mainloop_fp8.cuh"
#include "forward/traits_fp8.cuh"
#include "tile/gemm_int8.cuh"
#include "tile/row_sum_columns.cuh"

namespace flashattn3::forward {

template <Config kConfig>
struct QuantizedRoles {
  using Traits = QuantizedTraits<kConfig>;
  using Storage = QuantizedStorageOf<kConfig>;
  using Mainloop = MainloopFp8<kConfig>;
  using SecondWarp = DescaleLoader<kConfig>;

  static __device__ __forceinline__ void init(uint8_t* shared) {
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      zero_row_sum_columns<Traits::kBlockN>(shared + Traits::kVOffset + stage * Traits::kVBytes +
                                            Traits::kRowSumOffset);
    }
    if constexpr (Traits::kInteger) {
      write_bias_tile(reinterpret_cast<Storage*>(shared)->bias_tile);
    }
  }
};

template <Config kConfig>
using RolesOf =
    std::conditional_t<is_quantized(kConfig.dtype), QuantizedRoles<kConfig>, Roles<kConfig>>;

}  // namespace flashattn3::forward
