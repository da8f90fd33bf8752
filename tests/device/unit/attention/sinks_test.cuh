// attention/sinks.cuh: sinks of three types, and their gradients.
#pragma once

#include "../unit.cuh"
#include "attention/sinks.cuh"

namespace unit::sinks {

using namespace flashattn3;

__global__ void copy(Sinks sinks, void* to, int count, float* found) {
  for (int i = 0; i < count; ++i) {
    found[i] = sinks.at(i);
    store_sink(to, sinks.type, i, found[i]);
  }
}

// All values that a type has survive a round trip; there are none without a tensor.
inline void check_types(Result& result) {
  const std::vector<float> values = {0.f, -1.5f, 0.0078125f, -60.f, INFINITY, -INFINITY};
  const int count = static_cast<int>(values.size());
  for (const SinkType type : {SinkType::kFloat32, SinkType::kFloat16, SinkType::kBFloat16}) {
    const bool fp16 = type == SinkType::kFloat16, wide = type == SinkType::kFloat32;
    std::vector<float> bytes = values;
    auto* const narrow = reinterpret_cast<uint16_t*>(bytes.data());
    for (int i = 0; i < count && !wide; ++i) narrow[i] = to_bits(values[i], fp16);
    Array<float> given(bytes), stored(count), found(count);
    const Sinks sinks{given.device(), type};
    launch(copy, 1, 1, 0, sinks, static_cast<void*>(stored.device()), count, found.device());
    const std::vector<float>&at = found.download(), &back = stored.download();
    for (int i = 0; i < count; ++i) {
      const auto* const bits = reinterpret_cast<const uint16_t*>(back.data());
      result.equal(values[i], at[i], "sink", static_cast<int>(type), i);
      result.equal(values[i], wide ? back[i] : to_float(bits[i], fp16), "stored", i);
    }
  }
}

static const Tests kTests = {{"attention/sinks: types", Where::kGpu, check_types}};

}  // namespace unit::sinks
