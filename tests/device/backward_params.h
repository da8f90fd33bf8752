// What backward_check and backward_emulation share: the parameters of a problem's launch, and
// checks of its results besides their values.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "backward_configs.h"
#include "backward_problem.h"
#include "launch/params.h"

// Rows and sequences of a problem, where the kernels can read them; null: none.
struct RowMemory {
  float *lse, *dlse;
  flashattn3::Strides lse_stride, dlse_stride;
  const int *cu_q, *cu_k, *used_q, *used_k;
};

// address: returns that of a tensor's first element.
template <class Address>
flashattn3::BackwardParams make_params(BackwardProblem& p, const RowMemory& rows, Address address) {
  const Case& c = p.c;
  flashattn3::BackwardParams params{};
  flashattn3::ForwardParams& f = params.forward;
  f.q = address(p.q), f.k = address(p.k), f.v = address(p.v), f.out = address(p.out);
  f.lse = rows.lse;
  f.q_stride = p.q.stride, f.k_stride = p.k.stride, f.v_stride = p.v.stride;
  f.out_stride = p.out.stride, f.lse_stride = rows.lse_stride;
  f.batch = c.batch, f.seqlen_q = c.seqlen_q, f.seqlen_k = c.seqlen_k;
  f.total_q = c.total_q, f.total_k = c.total_k;
  f.num_heads_q = c.heads_q, f.num_heads_kv = c.heads_kv;
  f.head_dim = c.head_dim, f.head_dim_v = c.head_dim_v;
  f.varlen = !c.cu_q.empty();
  f.positions_q = {rows.cu_q, rows.used_q}, f.positions_k = {rows.cu_k, rows.used_k};
  if (c.bias_heads != 0) {
    f.bias = {address(p.bias), p.bias.stride, c.bias_batch == 1, c.bias_heads == 1};
    params.dbias = address(p.dbias);
    if (num_bias_terms(f) > 2) params.ds = address(p.ds);
  }
  f.softmax_scale = c.scale, f.softcap = c.softcap;
  f.window_left = c.left, f.window_right = c.right;
  f.alibi_batch = c.heads_q;
  params.dout = address(p.dout), params.dlse = c.dlse ? rows.dlse : nullptr;
  params.dq = address(p.dq), params.dk = address(p.dk), params.dv = address(p.dv);
  params.dout_stride = p.dout.stride, params.dlse_stride = rows.dlse_stride;
  params.dq_stride = p.dq.stride, params.dk_stride = p.dk.stride, params.dv_stride = p.dv.stride;
  return params;
}

// Indices of the kernel configs of a case's dtype with the smallest sufficient head dim.
inline std::vector<int> configs_of(const Case& c) {
  using flashattn3::kCheckConfigs;
  const auto fits = [&](const flashattn3::backward::Config& config) {
    const bool has_slopes = config.term == flashattn3::ScoreTerm::kSlopes;
    return (config.dtype == flashattn3::kFp16) == c.fp16 && has_slopes == c.slopes &&
           has_bias(config) == (c.bias_heads != 0) && config.listed == (c.lists_heads != 0) &&
           config.head_dim >= c.head_dim && config.head_dim_v >= c.head_dim_v;
  };
  int head_dim = 1 << 30;
  for (const auto& config : kCheckConfigs) {
    if (fits(config)) head_dim = std::min(head_dim, config.head_dim);
  }
  std::vector<int> found;
  for (int i = 0; i < flashattn3::kNumCheckConfigs; ++i) {
    if (fits(kCheckConfigs[i]) && kCheckConfigs[i].head_dim == head_dim) found.push_back(i);
  }
  return found;
}

// The owner of a gradient's element: nothing, no sequence of a varlen batch, a sequence, or the
// padding columns of a sequence up to a multiple of 8.
enum Owner : uint8_t { kOutside, kNoSequence, kSequence, kPadding };

inline std::vector<uint8_t> owners_of(BackwardProblem& p, const Gradient& g) {
  Tensor& tensor = p.tensor(g);
  std::vector<uint8_t> owners(tensor.host.size(), kOutside);
  const auto mark = [&](int batch_coord, int row, int columns, Owner as) {
    for (int h = 0; h < tensor.heads; ++h) {
      const int64_t at = tensor.row(batch_coord, row, h) - tensor.host.data();
      std::fill_n(owners.begin() + at, columns, as);
    }
  };
  if (!p.c.cu_q.empty()) {
    for (int row = 0; row < tensor.seq; ++row) mark(0, row, tensor.dim, kNoSequence);
  }
  for (int b = 0; b < p.batch_of(g); ++b) {
    const Rows rows = p.rows_of(g, b);
    for (int row = rows.offset; row < rows.offset + rows.length; ++row) {
      mark(rows.batch_coord, row, (tensor.dim + 7) / 8 * 8, kPadding);
      mark(rows.batch_coord, row, tensor.dim, kSequence);
    }
  }
  return owners;
}

// Checks that the rows of sequences are written, with cu_seqlens those between them cleared, and
// nothing else written except padding. Returns an error message, or "".
inline std::string check_coverage(BackwardProblem& p, const Gradient& g) {
  const std::vector<uint8_t> owners = owners_of(p, g);
  int64_t missing = 0, dirty = 0, outside = 0;
  for (size_t i = 0; i < owners.size(); ++i) {
    const uint16_t found = p.tensor(g).host[i];
    if (owners[i] == kSequence && !std::isfinite(to_float(found, p.c.fp16))) ++missing;
    if (owners[i] == kNoSequence && found != 0) ++dirty;
    if (owners[i] == kOutside && found != kNaN) ++outside;
  }
  if (missing == 0 && dirty == 0 && outside == 0) return "";
  return std::string(g.name) + ": " + std::to_string(missing) + " elements not finite, " +
         std::to_string(dirty) + " not cleared, " + std::to_string(outside) + " written outside";
}

// Describes how two results differ; "" if they do not.
inline std::string difference(const char* what, const Gradient& g, const Tensor& tensor,
                              const std::vector<uint16_t>& first, bool fp16) {
  if (first == tensor.host) return "";
  int64_t count = 0, where = -1;
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i] == tensor.host[i]) continue;
    ++count;
    if (where < 0) where = i;
  }
  const int64_t at = where - kGuard;
  const int64_t in_entry = at % tensor.stride.batch;
  const bool head_major = tensor.stride.head > tensor.stride.seq;
  const int64_t outer = head_major ? tensor.stride.head : tensor.stride.seq;
  const int64_t inner = head_major ? tensor.stride.seq : tensor.stride.head;
  const int64_t i = in_entry / outer, j = in_entry % outer / inner;
  char text[320];
  std::snprintf(
      text, sizeof(text),
      "%s: %lld elements of %s differ, the first at (entry %lld, head %lld, row %lld, "
      "column %lld): %g, here %g",
      what, static_cast<long long>(count), g.name, static_cast<long long>(at / tensor.stride.batch),
      static_cast<long long>(head_major ? i : j), static_cast<long long>(head_major ? j : i),
      static_cast<long long>(in_entry % inner), to_float(first[where], fp16),
      to_float(tensor.host[where], fp16));
  return text;
}
