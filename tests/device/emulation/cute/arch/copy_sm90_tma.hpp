// Emulation of TMA loads in the 128-byte swizzle, which follows from the address in shared memory:
// bits 4 to 6 are XORed with bits 7 to 9. Each box arrives late, on its own.
#pragma once

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

struct SM90_TMA_LOAD_4D {
  static void copy(const void* tensor_map, uint64_t* barrier, uint64_t, void* to, int column,
                   int row, int head, int batch) {
    const auto map = emulation::TensorMap::unpack(tensor_map);
    const uint32_t begin = cast_smem_ptr_to_uint(to);
    const uint32_t size = static_cast<uint32_t>(map.box[0] * map.box[1] * 2);
    if (begin % 128 != 0 || begin + size > emulation::kSharedBytes) {
      std::printf("a box of %u bytes at %u of shared memory\n", size, begin);
      std::abort();
    }
    std::memset(to, 0xff, size);  // NaN until the copy is complete
    auto* const full = reinterpret_cast<flashattn3::Barrier*>(barrier);
    const auto complete = [=] {
      for (int y = 0; y < map.box[1]; ++y) {
        for (int x = 0; x < map.box[0]; ++x) {
          const uint32_t at = begin + y * 128 + x * 2;
          const uint8_t* from = map.find({column + x, row + y, head, batch});
          uint16_t bits = 0;
          if (from != nullptr) std::memcpy(&bits, from, 2);
          std::memcpy(emulation::shared_memory + (at ^ (at >> 7 & 7) << 4), &bits, 2);
        }
      }
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
