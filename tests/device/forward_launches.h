// The launches of the kernel configs of forward_configs.h, by their index.
#pragma once

#include <vector>

#include "forward_configs.h"

using Launch = void (*)(const flashattn3::ForwardParams&, cudaStream_t);
using CachedLaunch = void (*)(const flashattn3::DecodeParams&, cudaStream_t);

static const std::vector<Launch> kLaunch = for_configs<flashattn3::kNumCheckConfigs>(
    []<size_t kIndex>() -> Launch { return &flashattn3::launch_check_config<kIndex>; });
static const std::vector<CachedLaunch> kCachedLaunch =
    for_configs<flashattn3::kNumCheckConfigs>([]<size_t kIndex>() -> CachedLaunch {
      return &flashattn3::launch_cached_check_config<kIndex>;
    });
