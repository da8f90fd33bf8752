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
  using Arguments =
      std::conditional_t<kConfig.listed, forward::ListedArguments, forward::Arguments>;

  static __device__ __forceinline__ void init(uint8_t* shared) {
    constexpr int kBoxes = Traits::kStages * (Traits::kBlockN / Traits::kBoxKeys);
    for (int box = 0; box < kBoxes; ++box) {
      zero_row_sum_columns<Traits::kBoxKeys>(shared + Traits::kVOffset + box * Traits::kBoxBytes +
                                             Traits::kRowSumOffset);
    }
    if constexpr (Traits::kInteger) {
      write_bias_tile(reinterpret_cast<Storage*>(shared)->bias_tile);
    }
  }

  static __device__ __forceinline__ void run_producer(const Arguments& args, uint8_t* shared,
                                                      int warp) {
    run_producer_warp<kConfig, DescaleLoader<kConfig>>(args, shared, warp);
  }
};

}  // namespace flashattn3::forward
