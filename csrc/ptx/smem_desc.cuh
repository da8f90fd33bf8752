// Matrix descriptors of WGMMA: where the parts of a tile in shared memory are.
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

// Low word of an smem matrix descriptor: address and stride between 64-column atoms (used by
// MN-major operands only), both in units of 16 bytes. Steps through a tile are added to it. In a
// cluster the address holds the CTA's rank above 2^24.
__host__ __device__ __forceinline__ constexpr uint32_t smem_desc_low(uint32_t address,
                                                                     int atom_stride) {
  return ((address >> 4) & 0x3fff) + (static_cast<uint32_t>(atom_stride >> 4) << 16);
}

// The high word has the stride between groups of 8 rows and the 128-byte swizzle.
constexpr uint32_t smem_desc_high(uint32_t group_stride) { return group_stride | 1u << 30; }
__device__ __forceinline__ uint64_t smem_desc(uint32_t low, uint32_t group_stride = 1024 / 16) {
  return static_cast<uint64_t>(smem_desc_high(group_stride)) << 32 | low;
}

// Offset of step `step` (32 bytes of columns, four steps per atom) in a tile with so many units of
// 16 bytes from one atom to the next, in these units.
__device__ __forceinline__ constexpr uint32_t score_step(int step, uint32_t atom_stride) {
  return step / 4 * atom_stride + step % 4 * 2;
}

}  // namespace flashattn3
