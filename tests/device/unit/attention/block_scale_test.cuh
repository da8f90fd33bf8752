// attention/block_scale.cuh: exponents from scores with a factor and a shift for each group of
// keys, of floats and of integers; softcap.
#pragma once

#include "../unit.cuh"
#include "attention/block_scale.cuh"
#include "tile/gemm_int8.cuh"

namespace unit::block_scale {

using namespace flashattn3;

constexpr int kN = 128, kGroups = 4, kGroupKeys = 32, kCount = kN / 2;
constexpr int kBias = kInt8Bias<128>;

// Every lane's column of a register is in the group.
constexpr bool groups_hold_all_lanes() {
  for (int i = 0; i < kCount; ++i) {
    for (int lane = 0; lane < 32; ++lane) {
      const int column = thread_column(lane) + register_column(i);
      if (key_group<kGroupKeys>(i) != column / kGroupKeys) return false;
    }
  }
  return true;
}
static_assert(groups_hold_all_lanes());

inline void check_groups(Result& result) {
  for (int i = 0; i < kCount; ++i) {
    result.equal(register_column(i) / kGroupKeys, key_group<kGroupKeys>(i), "key_group", i);
  }
}

// Of one thread's registers: exponents and capped scores. Of the first and the last key of each
// group: factor and shift. Whether the tile is special; of each group sums_apart and is_negative.
struct Found {
  float exponents[kCount], factors[2 * kGroups], shifts[2 * kGroups], capped[kCount];
  int special[1 + 2 * kGroups];
};

// scores: integers as well as floats.
template <bool kInteger>
__global__ void store_exponents(const float* scores, KvDescales<kGroups> keys, float q_factor,
                                float cap, Found* found) {
  using Scale = BlockScale<kGroups, kGroupKeys, kInteger ? kBias : 0>;
  Scale scale(keys);
  scale.complete(kInteger ? q_factor * kBias : q_factor);
  ScoreAccumulator<kInteger ? ElementType::kInt8 : ElementType::kE4m3> s[kCount];
  for (int i = 0; i < kCount; ++i) {
    set(s[i], Scale::score(scores[i]));
    const float exponent = scale.exponent(get(s[i]), i, 0.f);
    found->exponents[i] = kInteger ? from_denormal(exponent) : exponent;
  }
  for (int i = 0; i < 2 * kGroups; ++i) {
    const int key = i / 2 * kGroupKeys + i % 2 * (kGroupKeys - 1);
    found->factors[i] = scale.factor_of(key);
    found->shifts[i] = scale.shift_of(key);
  }
  found->special[0] = scale.is_special();
  for (int g = 0; g < kGroups; ++g) {
    found->special[1 + 2 * g] = scale.sums_apart(g);
    found->special[2 + 2 * g] = scale.is_negative(g);
  }
  cap_scores(s, scale, 1.f / cap);
  for (int i = 0; i < kCount; ++i) found->capped[i] = Scale::number(get(s[i]));
}

template <bool kInteger>
void check_blocks(Result& result) {
  constexpr float kK[kGroups] = {0.011f, 0.5f, 0.03f, 0.002f}, kQFactor = 0.04f, kCap = 30.f;
  constexpr float kShift[kGroups] = {0.f, 3.25f, -11.5f, 100.f};
  KvDescales<kGroups> keys{};
  for (int g = 0; g < kGroups; ++g) {
    keys.k[g] = kK[g], keys.shift[g] = kInteger ? kShift[g] / kBias : kShift[g];
  }
  keys.special = 1u << 2 | 1u << (kGroups + 1);
  std::vector<float> scores(kCount);
  for (int i = 0; i < kCount; ++i) scores[i] = static_cast<float>((i * 7919) % 40001 - 20000);
  Array<float> given(scores);
  const Found at = results_of<Found>(1, store_exponents<kInteger>, 1, 1, 0, given.device(), keys,
                                     kQFactor, kCap)[0];
  const std::string type = kInteger ? "integers, " : "floats, ";
  for (int i = 0; i < kCount; ++i) {
    const int g = key_group<kGroupKeys>(i);
    const double product = static_cast<double>(scores[i]) * kK[g] * kQFactor;
    // Of integers the factor is off by up to a code over the bias, the sum by half a code.
    const double bound = kInteger ? 1.01 * std::abs(scores[i]) / kBias + 0.51
                                  : 1e-6 * (std::abs(product) + std::abs(kShift[g]));
    result.compare(product + kShift[g], at.exponents[i], bound, type + "exponent", i, g);
    // The instruction's tanh has a relative error of 2^-11; the capped integer is one again.
    const double ratio = static_cast<double>(kK[g]) * kQFactor / kCap;
    const double capped = std::tanh(scores[i] * ratio) / ratio;
    const double off = kInteger ? 0.51 + std::abs(capped) * 1.1 / (kBias * kK[g] * kQFactor) : 1e-9;
    result.compare(capped, at.capped[i], std::abs(capped) * 0x1p-10 + off, type + "capped", i, g);
  }
  for (int i = 0; i < 2 * kGroups; ++i) {
    const int g = i / 2;
    const double factor = static_cast<double>(kK[g]) * kQFactor;
    result.compare(factor, at.factors[i], kInteger ? 1.01 / kBias : factor * 1e-6, type + "factor",
                   i);
    result.compare(kShift[g], at.shifts[i], kInteger ? 2e-2 : 0., type + "shift", i);
  }
  result.equal(1, at.special[0], type + "is_special");
  for (int g = 0; g < kGroups; ++g) {
    result.equal(g == 2, at.special[1 + 2 * g], type + "sums_apart", g);
    result.equal(g == 1, at.special[2 + 2 * g], type + "is_negative", g);
  }
}

__global__ void store_inverses(float* found) {
  found[0] = inverse_or_0(0.f), found[1] = inverse_or_0(4.f), found[2] = inverse_or_0(-0.5f);
}

inline void check_inverse(Result& result) {
  const auto found = results_of<float>(3, store_inverses, 1, 1, 0);
  result.equal(0., found[0], "inverse_or_0 of 0");
  result.equal(0.25, found[1], "inverse_or_0 of 4");
  result.equal(-2., found[2], "inverse_or_0 of -0.5");
}

static const Tests kTests = {{"attention/block_scale: groups of keys", Where::kHost, check_groups},
                             {"attention/block_scale: inverse", Where::kGpu, check_inverse},
                             {"attention/block_scale: floats", Where::kGpu, check_blocks<false>},
                             {"attention/block_scale: integers", Where::kGpu, check_blocks<true>}};

}  // namespace unit::block_scale
