// Parameters of a cached call whose cache has 8 bits. The launch of a kernel for such caches
// expects them behind its reference to DecodeParams; CacheParams then has strides of bytes.
#pragma once

#include <cstring>

#include "launch/decode_params.h"

namespace flashattn3 {

// Descales of keys, float32 (num_pages or num_caches, tokens of one or 1, num_heads_kv) of any
// strides, in place of k_descale or v_descale; null: none.
struct KeyDescaleParams {
  const float* data = nullptr;
  Strides stride = {};  // in elements; seq: 0 where the tokens of a page share one
};

struct ByteDecodeParams : DecodeParams {
  KeyDescaleParams k_key_descale, v_key_descale;
  bool is_int8 = false;  // else e4m3
};

// Whether a decode kernel reads caches of 8 bits, by its name in kernel_configs.py.
inline bool reads_bytes(const char* kernel_name) {
  return std::strstr(kernel_name, "_bytes_") != nullptr;
}

}  // namespace flashattn3
