// Tensors, inputs and the fp64 reference of one case of forward_check, all on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "forward_cases.h"
#include "host/params.h"

constexpr uint16_t kNaN = 0x7fff;  // in both element types
constexpr int64_t kGuard = 4096;   // NaN elements before and after each tensor

inline float to_float(uint16_t bits, bool fp16) {
  if (fp16) return __half2float(__ushort_as_half(bits));
  return __bfloat162float(__ushort_as_bfloat16(bits));
}
inline uint16_t to_bits(float x, bool fp16) {
  return fp16 ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// (batch, seq, heads, dim), everything NaN at first.
struct Tensor {
  int batch, seq, heads, dim;
  flashattn3::Strides stride;
  std::vector<uint16_t> host;
  uint16_t* device = nullptr;

  Tensor(int b, int s, int h, int d, bool heads_first, int padding)
      : batch(b), seq(s), heads(h), dim(d) {
    const int64_t pitch = (d + padding + 7) / 8 * 8;
    stride.batch = pitch * h * s;
    stride.seq = heads_first ? pitch : pitch * h;
    stride.head = heads_first ? pitch * s : pitch;
    host.assign(stride.batch * b + 2 * kGuard, kNaN);
    cudaMalloc(&device, host.size() * 2);
  }
  ~Tensor() { cudaFree(device); }
  Tensor(const Tensor&) = delete;

  uint16_t* row(int b, int s, int h) {
    return host.data() + kGuard + b * stride.batch + s * stride.seq + h * stride.head;
  }
  uint16_t* data() { return device + kGuard; }
  void upload() { cudaMemcpy(device, host.data(), host.size() * 2, cudaMemcpyHostToDevice); }
  void download() { cudaMemcpy(host.data(), device, host.size() * 2, cudaMemcpyDeviceToHost); }
};

struct Rows {
  int entry;   // of the tensor
  int offset;  // first row
  int length;
};

// The kernel's rule for what a table means, written once more.
inline Rows find_rows(const std::vector<int>& cu, const std::vector<int>& used, int longest,
                      int total, int b) {
  Rows rows{b, 0, longest};
  if (!cu.empty()) {
    const int begin = std::clamp(cu[b], 0, total), end = std::clamp(cu[b + 1], begin, total);
    rows = {0, begin, std::min(end - begin, longest)};
  }
  if (!used.empty()) rows.length = std::clamp(used[b], 0, rows.length);
  return rows;
}

struct Problem {
  const Case& c;
  Tensor q, k, v, out;
  std::vector<float> lse;  // (batch, heads, seq), with cu_q (heads, total)
  // What P is rounded to, relative: 16-bit elements, or e4m3's 2^-4 with what it cannot hold.
  double rounding = c.fp16 ? 0x1p-11 : 0x1p-8;
  // What scores are off by, relative to the largest: fp32, or e4m3's accumulators of 13 bits.
  double score_error = 2e-6;
  double lse_error = 1e-4;

  explicit Problem(const Case& c)
      : c(c),
        q(c.cu_q.empty() ? c.batch : 1, c.cu_q.empty() ? c.seqlen_q : c.total_q, c.heads_q,
          c.head_dim, c.heads_first, c.pitch_padding),
        k(c.cu_k.empty() ? c.batch : 1, c.cu_k.empty() ? c.seqlen_k : c.total_k, c.heads_kv,
          c.head_dim, c.heads_first, c.pitch_padding),
        v(k.batch, k.seq, c.heads_kv, c.head_dim_v, c.heads_first, c.pitch_padding),
        out(q.batch, q.seq, c.heads_q, c.head_dim_v, c.heads_first, c.pitch_padding),
        lse(static_cast<size_t>(q.batch) * q.seq * c.heads_q) {
    std::mt19937 random(1234);
    std::normal_distribution<float> normal;
    std::vector<float> direction(c.head_dim);
    for (float& x : direction) x = random() % 2 ? 1.f : -1.f;
    for (int b = 0; b < c.batch; ++b) {
      const Rows rows = queries(b), cols = keys(b);
      for (int s = 0; s < rows.length; ++s) {
        for (int h = 0; h < c.heads_q; ++h) {
          uint16_t* at = q.row(rows.entry, rows.offset + s, h);
          for (int i = 0; i < c.head_dim; ++i) {
            float x = normal(random);
            if (c.data >= Data::kGrowsToFirst && c.data <= Data::kOutlier)
              x = direction[i] + 0.1f * x;
            if (c.data == Data::kConstant) x = 0.5f;
            if (c.data == Data::kLarge) x *= 30.f;
            at[i] = to_bits(x, c.fp16);
          }
        }
      }
      for (int s = 0; s < cols.length; ++s) {
        for (int h = 0; h < c.heads_kv; ++h) {
          uint16_t* at = k.row(cols.entry, cols.offset + s, h);
          const float way = static_cast<float>(s) / cols.length;
          for (int i = 0; i < c.head_dim; ++i) {
            float x = normal(random);
            if (c.data == Data::kGrowsToFirst) x = 20.f * (1.f - way) * direction[i] + 0.1f * x;
            if (c.data == Data::kGrowsToLast) x = 20.f * way * direction[i] + 0.1f * x;
            if (c.data == Data::kOutlier && s == cols.length / 3) x = 40.f * direction[i];
            if (c.data == Data::kConstant) x = 0.25f;
            if (c.data == Data::kLarge) x *= 30.f;
            at[i] = to_bits(x, c.fp16);
          }
          uint16_t* values = v.row(cols.entry, cols.offset + s, h);
          for (int i = 0; i < c.head_dim_v; ++i) values[i] = to_bits(normal(random), c.fp16);
        }
      }
    }
    q.upload(), k.upload(), v.upload();
  }

  Rows queries(int b) const { return find_rows(c.cu_q, c.used_q, c.seqlen_q, c.total_q, b); }
  Rows keys(int b) const { return find_rows(c.cu_k, c.used_k, c.seqlen_k, c.total_k, b); }
  float& lse_at(const Rows& rows, int s, int h) {
    return lse[(static_cast<size_t>(rows.entry) * c.heads_q + h) * q.seq + rows.offset + s];
  }
};

// What one row should be, and how far off it may be: P and out are rounded to 16 bits, so 2
// roundings of sum |p v|; and fp32 scores, whose error grows with them.
struct Truth {
  int b, h, s;
  std::vector<double> out, out_bound;
  double lse, lse_bound;
};

inline void find_truth(Problem& problem, Truth& truth) {
  const Case& c = problem.c;
  const Rows rows = problem.queries(truth.b), cols = problem.keys(truth.b);
  const int kv = truth.h / (c.heads_q / c.heads_kv), shift = cols.length - rows.length;
  const int begin = c.left < 0 ? 0 : std::max(0, truth.s + shift - c.left);
  const int end = c.right < 0 ? cols.length : std::min(cols.length, truth.s + shift + c.right + 1);
  const uint16_t* q = problem.q.row(rows.entry, rows.offset + truth.s, truth.h);
  std::vector<double> p(std::max(0, end - begin));
  double top = -INFINITY, sum = 0, largest = 0;
  for (int j = begin; j < end; ++j) {
    const uint16_t* k = problem.k.row(cols.entry, cols.offset + j, kv);
    double x = 0;
    for (int i = 0; i < c.head_dim; ++i) {
      x += static_cast<double>(to_float(q[i], c.fp16)) * to_float(k[i], c.fp16);
    }
    x *= c.scale;
    largest = std::max(largest, std::fabs(x));
    if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
    p[j - begin] = x;
    top = std::max(top, x);
  }
  for (double& x : p) sum += x = std::exp(x - top);
  truth.out.assign(c.head_dim_v, 0.0);
  truth.out_bound.assign(c.head_dim_v, 0.0);
  for (int j = begin; j < end; ++j) {
    const uint16_t* v = problem.v.row(cols.entry, cols.offset + j, kv);
    for (int i = 0; i < c.head_dim_v; ++i) {
      const double pv = p[j - begin] / sum * to_float(v[i], c.fp16);
      truth.out[i] += pv;
      truth.out_bound[i] += std::fabs(pv);
    }
  }
  for (double& x : truth.out_bound)
    x = x * (1.5 * problem.rounding + 2 * problem.score_error * largest) + 1e-6;
  truth.lse = p.empty() ? -INFINITY : top + std::log(sum);
  truth.lse_bound = problem.lse_error + problem.score_error * largest;
}

struct RowError {
  double ratio = -1;  // to the bound; infinite for NaN
  int b = -1, h = -1, s = -1, column = -1;
  double wanted = 0, found = 0, wanted_lse = 0, found_lse = 0;
};

// The worst of the rows, with its worst element; column -1: the log-sum-exp.
inline RowError compare(Problem& problem, const std::vector<Truth>& truths) {
  RowError worst;
  for (const Truth& t : truths) {
    const Rows rows = problem.queries(t.b);
    const uint16_t* out = problem.out.row(rows.entry, rows.offset + t.s, t.h);
    const double lse = problem.lse_at(rows, t.s, t.h);
    const auto consider = [&](int column, double wanted, double found, double bound) {
      const double off = wanted == found ? 0 : std::fabs(wanted - found) / bound;
      const double ratio = std::isnan(off) ? INFINITY : off;
      if (ratio > worst.ratio) worst = {ratio, t.b, t.h, t.s, column, wanted, found, t.lse, lse};
    };
    consider(-1, t.lse, lse, t.lse_bound);
    for (int i = 0; i < problem.c.head_dim_v; ++i) {
      consider(i, t.out[i], to_float(out[i], problem.c.fp16), t.out_bound[i]);
    }
  }
  return worst;
}
