// The arguments of a decode kernel.
#pragma once

#include "launch/byte_decode_params.h"
#include "launch/decode_arguments.h"
#include "launch/prefix_arguments.h"
#include "launch/tree_arguments.h"

namespace flashattn3 {

inline decode::KeyDescales key_descales(const KeyDescaleParams& params) {
  return {.data = params.data,
          .page = params.stride.batch,
          .slot = params.stride.seq,
          .head = params.stride.head};
}

inline void set_byte_arguments(const ByteDecodeParams& params, decode::Arguments& args) {
  args.is_int8 = params.is_int8;
  args.k_key_descales = key_descales(params.k_key_descale);
  args.v_key_descales = key_descales(params.v_key_descale);
  const bool of_keys = args.k_key_descales.data != nullptr || args.v_key_descales.data != nullptr;
  // int8 has no NaN, so a descale makes scores NaN where a table may be wrong.
  const bool may_lose = params.page_table != nullptr || params.cache_batch_idx != nullptr;
  args.has_key_descales = of_keys || (params.is_int8 && may_lose);
}

// The arguments that a decode kernel takes whatever the dtype of its cache is.
template <decode::Config kConfig>
auto arguments_without_bytes(const DecodeParams& params, const DecodeGrid& grid, int block_n) {
  if constexpr (kConfig.tree) {
    return decode::TreeArguments{make_decode_arguments(params, grid, block_n),
                                 tree_mask_of(params)};
  } else if constexpr (kConfig.prefix) {
    return make_prefix_arguments(params, grid, block_n);
  } else {
    return make_decode_arguments(params, grid, block_n);
  }
}

// The arguments of a decode kernel, whose cache has 8 bits or q's dtype.
template <decode::Config kConfig>
auto arguments_of(const DecodeParams& params, const DecodeGrid& grid,
                  int block_n = kConfig.block_n) {
  if constexpr (decode::has_bytes(kConfig)) {
    auto args = arguments_without_bytes<kConfig>(params, grid, block_n);
    set_byte_arguments(static_cast<const ByteDecodeParams&>(params), args);
    return args;
  } else {
    return arguments_without_bytes<kConfig>(params, grid, block_n);
  }
}

}  // namespace flashattn3
