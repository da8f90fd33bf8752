// Emulation of the address of shared memory: an offset.
#pragma once

#include <cstdint>

#include "emulation.h"

namespace cute {

inline uint32_t cast_smem_ptr_to_uint(const void* at) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(at) - emulation::shared_memory);
}

}  // namespace cute
