// Emulation of csrc/ptx/bulk_copy.cuh. Bulk copies of floats read shared memory when their thread
// waits for that, and write global memory when it waits until they are stored. TMA stores of a box
// are complete when their thread waits, those of out and gradients (tile/tma_store.cuh) at once.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "emulation.h"
#include "ptx/convert_16bit.cuh"
#include "tensor_map.h"

namespace flashattn3 {

inline void copy_floats_out(float* to, uint32_t from, uint32_t bytes, bool add) {
  emulation::self().reads.push_back([=] {
    std::vector<float> values(bytes / sizeof(float));
    std::memcpy(values.data(), emulation::shared_memory + from, bytes);
    emulation::self().writes.push_back([=, values = std::move(values)] {
      for (size_t i = 0; i < values.size(); ++i) to[i] = add ? to[i] + values[i] : values[i];
    });
  });
}
inline void store_floats(float* to, uint32_t from, uint32_t bytes) {
  copy_floats_out(to, from, bytes, false);
}
inline void add_floats(float* to, uint32_t from, uint32_t bytes) {
  copy_floats_out(to, from, bytes, true);
}
template <class Copy>
void copy_box(const void* tensor_map, const uint8_t* tile, const int (&at)[4], Copy copy) {
  const auto map = emulation::TensorMap::unpack(tensor_map);
  emulation::self().reads.push_back([=, column = at[0], row = at[1], head = at[2], batch = at[3]] {
    for (int y = 0; y < map.box[1]; ++y) {
      for (int x = 0; x < map.box[0]; ++x) {
        const uint8_t* from = tile + y * 128 + (x / 8 ^ y % 8) * 16 + x % 8 * 2;
        auto* to = const_cast<uint8_t*>(map.find({column + x, row + y, head, batch}));
        if (to != nullptr) copy(to, from);
      }
    }
  });
}
inline void start_store(const void* tensor_map, const uint8_t* tile, int column, int row, int head,
                        int batch_coord) {
  copy_box(tensor_map, tile, {column, row, head, batch_coord},
           [](uint8_t* to, const uint8_t* from) { std::memcpy(to, from, 2); });
}
template <ElementType kElement>
void start_add(const void* tensor_map, const uint8_t* tile, int column, int row, int head,
               int batch_coord) {
  copy_box(tensor_map, tile, {column, row, head, batch_coord},
           [](uint8_t* to, const uint8_t* from) {
             uint16_t both[2];
             std::memcpy(&both[0], to, 2), std::memcpy(&both[1], from, 2);
             const float sum = element_of<kElement>(both[0]) + element_of<kElement>(both[1]);
             const auto bits = static_cast<uint16_t>(pack<kElement>(sum, 0.f));
             std::memcpy(to, &bits, 2);
           });
}
inline void commit_stores() {}
inline void wait_for_stores() {
  for (const auto& read : emulation::self().reads) read();
  emulation::self().reads.clear();
}
inline void wait_until_stored() {
  wait_for_stores();
  for (const auto& write : emulation::self().writes) write();
  emulation::self().writes.clear();
}

}  // namespace flashattn3
