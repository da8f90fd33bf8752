// What forward_check and forward_emulation share: the parameters of a problem's launch, and checks
// of its results.
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "forward_configs.h"
#include "forward_problem.h"
#include "launch/params.h"

// memory: returns where the kernels can read a vector or a tensor. Without a varlen_schedule.
template <class Memory>
flashattn3::ForwardParams make_params(Problem& p, float* lse, Memory& memory) {
  flashattn3::ForwardParams params = p.params(p.out, memory);
  params.lse = lse;
  if (p.mask.heads != 0) params.lists = p.lists.params(memory);
  return params;
}

// Returns an error message, or "".
inline std::string check_coverage(Problem& p) {
  const auto queries = [&](int b) { return p.queries(b); };
  const bool varlen = !p.c.cu_q.empty();
  return check_coverage("out", p.out, owners_of(p.out, p.c.batch, queries, varlen), p.c.fp16);
}

// fp64 references of rows at the edges of tiles and of 12 random rows per head.
inline std::vector<RowReference> compute_fp64_references(Problem& p) {
  const Case& c = p.c;
  std::mt19937 random(99);
  std::vector<RowReference> references;
  for (int b = 0; b < c.batch; ++b) {
    const int length = p.queries(b).length;
    for (int h = 0; h < c.heads_q; ++h) {
      std::vector<int> rows = {0,   1,   15,  16,  63,  64,  65,         127,        128,
                               129, 191, 192, 193, 255, 256, length - 1, length - 2, length / 2};
      for (int i = 0; i < 12; ++i) rows.push_back(static_cast<int>(random() % std::max(1, length)));
      for (int s : rows) {
        if (s >= 0 && s < length) references.push_back({b, h, s, {}, {}, 0, 0});
      }
    }
  }
  in_parallel(references.size(), [&](int64_t i) { compute_fp64_reference(p, references[i]); });
  return references;
}

// Indices of the kernel configs with lists of a case's dtype with the smallest sufficient head dim
// and a sufficient one of V.
inline std::vector<int> listed_configs(const Case& c) {
  const auto type = c.fp16 ? flashattn3::kFp16 : flashattn3::kBf16;
  return smallest_configs(flashattn3::kCheckConfigs, c.head_dim, [&](const auto& r) {
    return r.listed && r.dtype == type && r.head_dim_v >= c.head_dim_v;
  });
}
