// Choices among the kernel configs that a program checks.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

// A value for each of the kernel configs: of<0>(), of<1>(), ...
template <size_t kCount, class Of>
auto for_configs(Of of) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    return std::vector{of.template operator()<kIndex>()...};
  }(std::make_index_sequence<kCount>());
}

// Indices of the kernel configs that fit and have the smallest sufficient head dim.
template <class Config, size_t kCount, class Fits>
std::vector<int> smallest_configs(const Config (&configs)[kCount], int head_dim, Fits fits) {
  std::vector<int> found;
  for (int i = 0; i < static_cast<int>(kCount); ++i) {
    if (configs[i].head_dim < head_dim || !fits(configs[i])) continue;
    if (!found.empty() && configs[i].head_dim < configs[found[0]].head_dim) found.clear();
    if (found.empty() || configs[i].head_dim == configs[found[0]].head_dim) found.push_back(i);
  }
  return found;
}
inline int first_or_none(const std::vector<int>& configs) {
  return configs.empty() ? -1 : configs[0];
}
