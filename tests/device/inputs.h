// q, k and v of one case, on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "cases.h"
#include "listed_mask.h"
#include "tensors.h"

struct Inputs {
  const Case& c;
  Tensor q, k, v;
  Tensor bias;  // (batch, queries, heads, keys), head-major
  // Of the heads, far below, near and far above the scores; none without c.sinks.
  std::vector<float> sinks;
  // Of ALiBi: (batch, heads), some of them negative or 0; none without c.slopes.
  std::vector<float> slopes;
  RandomMask mask;

  explicit Inputs(const Case& c)
      : c(c),
        q(c.cu_q.empty() ? c.batch : 1, c.cu_q.empty() ? c.seqlen_q : c.total_q, c.heads_q,
          c.head_dim, c.head_major, c.pitch_padding),
        k(c.cu_k.empty() ? c.batch : 1, c.cu_k.empty() ? c.seqlen_k : c.total_k, c.heads_kv,
          c.head_dim, c.head_major, c.pitch_padding),
        v(k.batch, k.seq, c.heads_kv, c.head_dim_v, c.head_major, c.pitch_padding),
        bias(c.bias_batch, c.seqlen_q, c.bias_heads, c.seqlen_k, true, 0),
        mask(c.lists_batch, c.lists_heads, c.seqlen_q, c.seqlen_k) {
    constexpr float kSinks[] = {1.5f, 9.f, -40.f, 60.f, -INFINITY, INFINITY, 0.f};
    constexpr float kSlopes[] = {0.5f, 0.0625f, -0.03125f, 0.0078125f, 0.f, 1.f};
    for (int h = 0; c.sinks && h < c.heads_q; ++h) sinks.push_back(kSinks[h % 7]);
    for (int i = 0; c.slopes && i < c.batch * c.heads_q; ++i) slopes.push_back(kSlopes[i % 6]);
    std::mt19937 random(1234);
    std::normal_distribution<float> normal;
    std::vector<float> direction(c.head_dim);
    for (float& x : direction) x = random() % 2 ? 1.f : -1.f;
    for (int b = 0; b < c.batch; ++b) {
      const Rows rows = queries(b), cols = keys(b);
      for (int s = 0; s < rows.length; ++s) {
        for (int h = 0; h < c.heads_q; ++h) {
          uint16_t* at = q.row(rows.batch_coord, rows.offset + s, h);
          for (int i = 0; i < c.head_dim; ++i) {
            float x = normal(random);
            if (c.data >= Data::kGrowsToFirst && c.data <= Data::kOutlier)
              x = direction[i] + 0.1f * x;
            if (c.data == Data::kConstant) x = 0.5f;
            if (c.data == Data::kLarge) x *= 30.f;
            if (c.data == Data::kOpposite) x *= 0.1f;
            at[i] = to_bits(x, c.fp16);
          }
        }
      }
      for (int s = 0; s < cols.length; ++s) {
        for (int h = 0; h < c.heads_kv; ++h) {
          uint16_t* at = k.row(cols.batch_coord, cols.offset + s, h);
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
          uint16_t* values = v.row(cols.batch_coord, cols.offset + s, h);
          const float size = c.data == Data::kOpposite ? 1e-3f : 1.f;
          for (int i = 0; i < c.head_dim_v; ++i) values[i] = to_bits(normal(random) * size, c.fp16);
        }
      }
    }
    fill_bias(random);
  }

  // -inf in some elements, in the last 70 keys of every third row, in all keys of every 17th.
  template <class Random>
  void fill_bias(Random& random) {
    std::normal_distribution<float> normal;
    for (int b = 0; b < bias.batch; ++b) {
      for (int h = 0; h < bias.heads; ++h) {
        for (int s = 0; s < bias.seq; ++s) {
          for (int j = 0; j < bias.dim; ++j) {
            const bool hidden =
                random() % 16 == 0 || (s % 3 == 1 && j >= bias.dim - 70) || s % 17 == 5;
            bias.row(b, s, h)[j] = to_bits(hidden ? -INFINITY : 2 * normal(random), c.fp16);
          }
        }
      }
    }
  }
  // What is added to the score of a query and a key; -inf: hidden.
  double term(int b, int h, int s, int key) const {
    if (mask.heads != 0) return mask.sees(b, h, s, key) ? 0 : -INFINITY;
    if (!slopes.empty()) {
      const int position = s + keys(b).length - queries(b).length;
      return -slopes[b * c.heads_q + h] * std::fabs(static_cast<double>(position - key));
    }
    if (bias.heads == 0) return 0;
    return to_float(bias.row(bias.batch == 1 ? 0 : b, s, bias.heads == 1 ? 0 : h)[key], c.fp16);
  }

  Rows queries(int b) const { return find_rows(c.cu_q, c.used_q, c.seqlen_q, c.total_q, b); }
  Rows keys(int b) const { return find_rows(c.cu_k, c.used_k, c.seqlen_k, c.total_k, b); }
  // Index into an array of one float per row: (batch, heads, seq), with cu_q (heads, total).
  int64_t row_index(const Rows& rows, int s, int h) const {
    return (static_cast<int64_t>(rows.batch_coord) * c.heads_q + h) * q.seq + rows.offset + s;
  }
  size_t num_rows() const { return static_cast<size_t>(q.batch) * q.seq * c.heads_q; }
  double sink(int h) const { return sinks.empty() ? -INFINITY : sinks[h]; }
  // A query sees the keys from begin to end - 1.
  void visible(int b, int s, int& begin, int& end) const {
    const Rows rows = queries(b), cols = keys(b);
    const int shift = cols.length - rows.length;
    begin = c.left < 0 ? 0 : std::max(0, s + shift - c.left);
    end = c.right < 0 ? cols.length : std::min(cols.length, s + shift + c.right + 1);
  }

  // The parameters of a forward pass, without lse, lists and a schedule. memory: returns where the
  // kernels can read a vector or a tensor.
  template <class Memory>
  flashattn3::ForwardParams params(Tensor& out, Memory& memory) {
    flashattn3::ForwardParams params{};
    params.q = memory(q), params.k = memory(k), params.v = memory(v), params.out = memory(out);
    params.q_stride = q.stride, params.k_stride = k.stride, params.v_stride = v.stride;
    params.out_stride = out.stride;
    params.lse_stride = {static_cast<int64_t>(q.seq) * c.heads_q, 1, q.seq};
    params.batch = c.batch, params.seqlen_q = c.seqlen_q, params.seqlen_k = c.seqlen_k;
    params.total_q = c.total_q, params.total_k = c.total_k;
    params.num_heads_q = c.heads_q, params.num_heads_kv = c.heads_kv;
    params.head_dim = c.head_dim, params.head_dim_v = c.head_dim_v;
    params.varlen = !c.cu_q.empty();
    params.positions_q = {memory(c.cu_q), memory(c.used_q)};
    params.positions_k = {memory(c.cu_k), memory(c.used_k)};
    params.softmax_scale = c.scale, params.softcap = c.softcap;
    params.window_left = c.left, params.window_right = c.right;
    params.sinks = memory(sinks);
    params.alibi_slopes = memory(slopes), params.alibi_batch = c.heads_q;
    return params;
  }
};
