// The roles of the warps of each kernel config.
#pragma once

#include <type_traits>

#include "forward/kernel_cached.cuh"
#include "forward/kernel_fp8.cuh"

namespace flashattn3::forward {

template <Config kConfig>
struct BiasRoles : Roles<kConfig> {
  using Arguments = BiasArguments;
};

template <Config kConfig>
struct ListedRoles : Roles<kConfig> {
  using Arguments = ListedArguments;
};

template <Config kConfig>
using PlainRoles = std::conditional_t<
    kConfig.listed, ListedRoles<kConfig>,
    std::conditional_t<kConfig.term == ScoreTerm::kBias, BiasRoles<kConfig>, Roles<kConfig>>>;

template <Config kConfig>
using RolesOf = std::conditional_t<
    is_quantized(kConfig.dtype), QuantizedRoles<kConfig>,
    std::conditional_t<kConfig.cached, CachedRoles<kConfig>, PlainRoles<kConfig>>>;

}  // namespace flashattn3::forward
