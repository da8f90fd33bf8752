// attention/descale.cuh: which descale a token of a head has.
#pragma once

#include "../unit.cuh"
#include "attention/descale.cuh"

namespace unit::descale {

using namespace flashattn3;

// Descales whose value is their own index: (batch 2, heads 3, blocks 4), of 64 tokens each, each
// for 2 neighbouring heads.
inline void check_indices(Result& result) {
  constexpr int kHeads = 3, kBlocks = 4;
  std::vector<float> values(2 * kHeads * kBlocks);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const Descale descale{values.data(), kHeads * kBlocks, kBlocks, 1, 6, kBlocks - 1, 2};
  for (int batch = 0; batch < 2; ++batch) {
    for (int head = 0; head < 2 * kHeads; ++head) {
      const float* of_head = descale.of(batch, head);
      // Tokens past the last block share its descale.
      for (const int token : {0, 1, 63, 64, 127, 128, 191, 192, 255, 256, 1000}) {
        const int block = token >= 192 ? 3 : token / 64;
        result.equal((batch * kHeads + head / 2) * kBlocks + block, descale.at(of_head, token),
                     "descale", head, token);
      }
    }
  }
}

inline void check_broadcast(Result& result) {
  const float values[2] = {3.f, 5.f};
  const Descale of_batch{values, 1, 0, 0, 7, 0, 1};  // one for each sequence, strides 0
  const Descale absent{nullptr, 1, 1, 1, 7, 5, 1};
  for (int batch = 0; batch < 2; ++batch) {
    for (const int token : {0, 127, 128, 5000}) {
      result.equal(values[batch], of_batch.at(of_batch.of(batch, 4), token), "one of a sequence",
                   batch, token);
      result.equal(1, absent.at(absent.of(batch, 4), token), "no descale", batch, token);
    }
  }
}

static const Tests kTests = {{"attention/descale: indices", Where::kHost, check_indices},
                             {"attention/descale: broadcast", Where::kHost, check_broadcast}};

}  // namespace unit::descale
