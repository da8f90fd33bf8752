// A TMA descriptor as plain numbers, in the place of the driver's.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstring>

namespace emulation {

// Of 16-bit elements. bytes: strides of all dimensions but the innermost one.
struct TensorMap {
  const uint8_t* address;
  int64_t extent[5], bytes[4];
  int box[5];

  CUtensorMap pack() const {
    static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));
    CUtensorMap map{};
    std::memcpy(&map, this, sizeof(*this));
    return map;
  }
  static TensorMap unpack(const void* map) {
    TensorMap unpacked;
    std::memcpy(&unpacked, map, sizeof(unpacked));
    return unpacked;
  }

  // An element at these coordinates; null: outside.
  const uint8_t* find(const int (&at)[5]) const {
    const uint8_t* found = address + at[0] * 2;
    for (int i = 0; i < 5; ++i) {
      if (at[i] < 0 || at[i] >= extent[i]) return nullptr;
      if (i > 0) found += at[i] * bytes[i - 1];
    }
    return found;
  }
};

// Of a dense matrix of floats; a box is part of a row.
struct FloatMap {
  const float* address;
  int64_t columns, rows;
  int box;

  CUtensorMap pack() const {
    CUtensorMap map{};
    std::memcpy(&map, this, sizeof(*this));
    return map;
  }
  static FloatMap unpack(const void* map) {
    FloatMap unpacked;
    std::memcpy(&unpacked, map, sizeof(unpacked));
    return unpacked;
  }
};

}  // namespace emulation
