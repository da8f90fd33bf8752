// Emulation of TMA loads in the 128-byte swizzle, which follows from the address in shared memory:
// bits 4 to 6 are XORed with bits 7 to 9. Each box arrives late, on its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cute/arch/util.hpp"
#include "emulation.h"
#include "ptx/mbarrier.cuh"
#include "tensor_map.h"

namespace cute {

namespace TMA {
enum class CacheHintSm90 : uint64_t { EVICT_NORMAL, EVICT_FIRST, EVICT_LAST };
}

template <class Map>
void prefetch_tma_descriptor(const Map*) {}

struct SM90_TMA_LOAD_5D {
  // at: coordinates of the box, innermost first.
  static void copy(const void* tensor_map, uint64_t* barrier, uint64_t, void* to, int at0, int at1,
                   int at2, int at3, int at4) {
    const auto map = emulation::TensorMap::unpack(tensor_map);
    const uint32_t begin = cast_smem_ptr_to_uint(to);
    const int rows = map.box[1] * map.box[2] * map.box[3] * map.box[4];  // of 128 bytes
    const uint32_t size = static_cast<uint32_t>(map.box[0] * rows * 2);
    if (begin % 128 != 0 || begin + size > emulation::kSharedBytes) {
      std::printf("a box of %u bytes at %u of shared memory\n", size, begin);
      std::abort();
    }
    std::memset(to, 0xff, size);  // NaN until the copy is complete
    auto* const full = reinterpret_cast<flashattn3::Barrier*>(barrier);
    const auto complete = [=] {
      for (int y = 0; y < rows; ++y) {
        const int row[4] = {y % map.box[1], y / map.box[1] % map.box[2],
                            y / map.box[1] / map.box[2] % map.box[3],
                            y / map.box[1] / map.box[2] / map.box[3]};
        for (int x = 0; x < map.box[0]; x += 8) {
          const uint32_t at = begin + y * 128 + x * 2;
          const uint8_t* from =
              map.find({at0 + x, at1 + row[0], at2 + row[1], at3 + row[2], at4 + row[3]});
          uint16_t unit[8] = {};
          const int64_t inside = std::min<int64_t>(8, map.extent[0] - at0 - x);
          if (from != nullptr) std::memcpy(unit, from, 2 * inside);
          std::memcpy(emulation::shared_memory + (at ^ (at >> 7 & 7) << 4), unit, sizeof(unit));
        }
      }
      full->complete_bytes(size);
    };
    emulation::running->in_flight.push_back(
        {complete,
         emulation::running->round + emulation::random_delay(emulation::running->random)});
  }
};

struct SM90_TMA_LOAD_4D {
  static void copy(const void* tensor_map, uint64_t* barrier, uint64_t hint, void* to, int column,
                   int row, int head, int batch) {
    SM90_TMA_LOAD_5D::copy(tensor_map, barrier, hint, to, column, row, head, batch, 0);
  }
};

// Consecutive bytes.
struct SM90_BULK_COPY_G2S {
  static void copy(const void* from, uint64_t* barrier, void* to, int32_t size) {
    std::memset(to, 0xff, size);
    auto* const full = reinterpret_cast<flashattn3::Barrier*>(barrier);
    const auto complete = [=] {
      std::memcpy(to, from, size);
      full->complete_bytes(size);
    };
    emulation::running->in_flight.push_back(
        {complete,
         emulation::running->round + emulation::random_delay(emulation::running->random)});
  }
};

// Floats, without a swizzle.
struct SM90_TMA_LOAD_2D {
  static void copy(const void* tensor_map, uint64_t* barrier, uint64_t, void* to, int column,
                   int row) {
    const auto map = emulation::FloatMap::unpack(tensor_map);
    const uint32_t size = static_cast<uint32_t>(map.box * sizeof(float));
    std::memset(to, 0xff, size);  // NaN until the copy is complete
    auto* const full = reinterpret_cast<flashattn3::Barrier*>(barrier);
    const auto complete = [=] {
      for (int x = 0; x < map.box; ++x) {
        const bool inside = column + x < map.columns && row < map.rows;
        static_cast<float*>(to)[x] = inside ? map.address[row * map.columns + column + x] : 0.f;
      }
      full->complete_bytes(size);
    };
    emulation::running->in_flight.push_back(
        {complete,
         emulation::running->round + emulation::random_delay(emulation::running->random)});
  }
};

}  // namespace cute
