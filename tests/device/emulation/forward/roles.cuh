// The roles of the kernel configs that are emulated: cached and listed ones.
#pragma once

#include <cstdint>
#include <type_traits>

#include "forward/kernel_cached.cuh"

namespace flashattn3::forward {

template <Config kConfig>
struct ListedRoles : Roles<kConfig> {
  using Arguments = ListedArguments;
};

template <Config kConfig>
using RolesOf = std::conditional_t<kConfig.cached, CachedRoles<kConfig>, ListedRoles<kConfig>>;

constexpr int64_t promoted_bytes(const Config&, int, int) { return 0; }

}  // namespace flashattn3::forward
