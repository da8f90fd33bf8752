// Where the parts of a tile in shared memory are.
//
// A tile of rows x columns is stored as atoms of 128 bytes of columns, in groups of 8 rows: 1024
// bytes in the 128-byte swizzle that TMA writes. Atom-major tiles hold all groups of an atom, then
// those of the next one; K and V tiles of a cache may hold all atoms of a group before the next
// group.
#pragma once

#include <cstdint>

namespace flashattn3 {

// From one atom, or group, to the next, in units of 16 bytes.
struct TileStrides {
  uint32_t atom, group;
};

// Those of an atom-major tile, known at compile time.
template <int kRows>
struct AtomMajor {
  static constexpr uint32_t atom = kRows * 128 / 16, group = 1024 / 16;
};

}  // namespace flashattn3
