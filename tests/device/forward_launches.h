// The launches of the kernel configs of forward_configs.h, by their index.
#pragma once

#include <utility>
#include <vector>

#include "forward_configs.h"

using Launch = void (*)(const flashattn3::ForwardParams&, cudaStream_t);
using CachedLaunch = void (*)(const flashattn3::DecodeParams&, cudaStream_t);

template <size_t... kIndex>
static std::vector<Launch> launches(std::index_sequence<kIndex...>) {
  return {&flashattn3::launch_check_config<kIndex>...};
}
template <size_t... kIndex>
static std::vector<CachedLaunch> cached_launches(std::index_sequence<kIndex...>) {
  return {&flashattn3::launch_cached_check_config<kIndex>...};
}

static const std::make_index_sequence<flashattn3::kNumCheckConfigs> kAllConfigs;
static const std::vector<Launch> kLaunch = launches(kAllConfigs);
static const std::vector<CachedLaunch> kCachedLaunch = cached_launches(kAllConfigs);
