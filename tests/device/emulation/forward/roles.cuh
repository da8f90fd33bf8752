// The roles of cached kernel configs, the only ones that are emulated.
#pragma once

#include <cstdint>

#include "forward/kernel_cached.cuh"

namespace flashattn3::forward {

template <Config kConfig>
using RolesOf = CachedRoles<kConfig>;

constexpr int64_t promoted_bytes(const Config&, int, int) { return 0; }

}  // namespace flashattn3::forward
