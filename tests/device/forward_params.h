// What forward_check and forward_emulation share: the parameters of a problem's launch, and checks
// of its results.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "forward_configs.h"
#include "forward_problem.h"
#include "launch/params.h"

// memory: returns where the kernels can read a vector or a tensor. Without a varlen_schedule.
template <class Memory>
flashattn3::ForwardParams make_params(Problem& p, float* lse, Memory& memory) {
  const Case& c = p.c;
  flashattn3::ForwardParams params{};
  params.q = memory(p.q), params.k = memory(p.k), params.v = memory(p.v);
  params.out = memory(p.out);
  params.lse = lse;
  params.q_stride = p.q.stride, params.k_stride = p.k.stride, params.v_stride = p.v.stride;
  params.out_stride = p.out.stride;
  params.lse_stride = {static_cast<int64_t>(p.q.seq) * c.heads_q, 1, p.q.seq};
  params.batch = c.batch, params.seqlen_q = c.seqlen_q, params.seqlen_k = c.seqlen_k;
  params.total_q = c.total_q, params.total_k = c.total_k;
  params.num_heads_q = c.heads_q, params.num_heads_kv = c.heads_kv;
  params.head_dim = c.head_dim, params.head_dim_v = c.head_dim_v;
  params.varlen = !c.cu_q.empty();
  params.positions_q = {memory(c.cu_q), memory(c.used_q)};
  params.positions_k = {memory(c.cu_k), memory(c.used_k)};
  params.softmax_scale = c.scale, params.softcap = c.softcap;
  params.window_left = c.left, params.window_right = c.right;
  params.sinks = memory(p.sinks);
  params.alibi_slopes = memory(p.slopes), params.alibi_batch = c.heads_q;
  if (p.mask.heads != 0) params.lists = p.lists.params(memory);
  return params;
}

// Checks that the rows of sequences are written, with cu_seqlens the rows between them cleared, and
// nothing else written. Returns an error message, or "".
inline std::string check_coverage(Problem& p) {
  const Case& c = p.c;
  enum : uint8_t { kOutside, kCleared, kOwned };
  std::vector<uint8_t> state(p.out.host.size(), kOutside);
  const auto mark = [&](int batch_coord, int row, uint8_t as) {
    for (int h = 0; h < c.heads_q; ++h) {
      const int64_t at = p.out.row(batch_coord, row, h) - p.out.host.data();
      std::fill_n(state.begin() + at, c.head_dim_v, as);
    }
  };
  if (!c.cu_q.empty()) {
    for (int row = 0; row < c.total_q; ++row) mark(0, row, kCleared);
  }
  for (int b = 0; b < c.batch; ++b) {
    const Rows rows = p.queries(b);
    for (int s = 0; s < rows.length; ++s) mark(rows.batch_coord, rows.offset + s, kOwned);
  }
  int64_t missing = 0, dirty = 0, outside = 0;
  for (size_t i = 0; i < state.size(); ++i) {
    const uint16_t found = p.out.host[i];
    if (state[i] == kOwned && !std::isfinite(to_float(found, c.fp16))) ++missing;
    if (state[i] == kCleared && found != 0) ++dirty;
    if (state[i] == kOutside && found != kNaN) ++outside;
  }
  if (missing == 0 && dirty == 0 && outside == 0) return "";
  return std::to_string(missing) + " elements not finite, " + std::to_string(dirty) +
         " not cleared, " + std::to_string(outside) + " written outside";
}

// fp64 references of rows at the edges of tiles and of 12 random rows per head.
inline std::vector<Fp64Reference> compute_fp64_references(Problem& p) {
  const Case& c = p.c;
  std::mt19937 random(99);
  std::vector<Fp64Reference> references;
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
  using flashattn3::kCheckConfigs;
  std::vector<int> found;
  for (int i = 0; i < flashattn3::kNumCheckConfigs; ++i) {
    const flashattn3::forward::Config& r = kCheckConfigs[i];
    if (!r.listed || r.dtype != (c.fp16 ? flashattn3::kFp16 : flashattn3::kBf16)) continue;
    if (r.head_dim < c.head_dim || r.head_dim_v < c.head_dim_v) continue;
    if (!found.empty() && r.head_dim < kCheckConfigs[found[0]].head_dim) found.clear();
    if (found.empty() || r.head_dim == kCheckConfigs[found[0]].head_dim) found.push_back(i);
  }
  return found;
}
