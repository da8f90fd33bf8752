// Tensors, inputs and the fp64 reference of one case of forward_check, all on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "inputs.h"
#include "results.h"

struct Problem : Inputs {
  Tensor out;
  std::vector<float> lse;
  BlockLists lists{mask, false};
  // Relative rounding error of P: of 16-bit elements, or of e4m3 codes, at most 0.085.
  double rounding = c.fp16 ? 0x1p-11 : 0x1p-8;
  // Error of scores, relative to the largest: fp32, or the 13-bit accumulators of e4m3.
  double score_error = 2e-6;
  double lse_error = 1e-4;
  // RMS error of each probability in a row sum. 0: the probabilities are summed in fp32.
  double lse_rounding = 0;

  // Of each head, the largest score of all rows, and the error of the scores; see find_largest.
  std::vector<double> largest, largest_error;
  std::vector<float> first_largest;  // of a kernel

  void find_largest() {
    largest.assign(c.heads_q, -INFINITY), largest_error.assign(c.heads_q, 0);
    in_parallel(c.heads_q, [&](int64_t h) {
      const int kv = static_cast<int>(h) / (c.heads_q / c.heads_kv);
      for (int b = 0; b < c.batch; ++b) {
        const Rows rows = queries(b), cols = keys(b);
        for (int s = 0; s < rows.length; ++s) {
          int begin, end;
          visible(b, s, begin, end);
          const uint16_t* a = q.row(rows.batch_coord, rows.offset + s, h);
          for (int j = begin; j < end; ++j) {
            const uint16_t* x = k.row(cols.batch_coord, cols.offset + j, kv);
            double sum = c.scale * dot(a, x, c.head_dim, c.fp16);
            largest_error[h] = std::max(largest_error[h], 1e-6 + score_error * std::fabs(sum));
            if (c.softcap > 0) sum = c.softcap * std::tanh(sum / c.softcap);
            largest[h] = std::max(largest[h], sum + term(b, h, s, j));
          }
        }
      }
    });
  }

  explicit Problem(const Case& c)
      : Inputs(c),
        out(q.batch, q.seq, c.heads_q, c.head_dim_v, c.head_major, c.pitch_padding),
        lse(num_rows()) {}
};

// Expected values of one row and their bounds. P and out are rounded to 16 bits: 2 rounding errors
// of sum |p v|. The error of fp32 scores grows with the scores.
struct Fp64Reference {
  int b, h, s;
  std::vector<double> out, out_bound;
  double lse, lse_bound;
};

inline void compute_fp64_reference(Problem& problem, Fp64Reference& truth) {
  const Case& c = problem.c;
  const Rows rows = problem.queries(truth.b), cols = problem.keys(truth.b);
  const int kv = truth.h / (c.heads_q / c.heads_kv);
  int begin, end;
  problem.visible(truth.b, truth.s, begin, end);
  const uint16_t* q = problem.q.row(rows.batch_coord, rows.offset + truth.s, truth.h);
  std::vector<double> p(std::max(0, end - begin));
  double largest = 0;
  for (int j = begin; j < end; ++j) {
    const uint16_t* k = problem.k.row(cols.batch_coord, cols.offset + j, kv);
    double x = c.scale * dot(q, k, c.head_dim, c.fp16);
    largest = std::max(largest, std::fabs(x));
    if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
    x += problem.term(truth.b, truth.h, truth.s, j);
    if (x != -INFINITY) largest = std::max(largest, std::fabs(x));
    p[j - begin] = x;
  }
  truth.lse = softmax(p, problem.sink(truth.h));
  truth.out.assign(c.head_dim_v, 0.0);
  truth.out_bound.assign(c.head_dim_v, 0.0);
  for (int j = begin; j < end; ++j) {
    const uint16_t* v = problem.v.row(cols.batch_coord, cols.offset + j, kv);
    for (int i = 0; i < c.head_dim_v; ++i) {
      const double pv = p[j - begin] * to_float(v[i], c.fp16);
      truth.out[i] += pv;
      truth.out_bound[i] += std::fabs(pv);
    }
  }
  for (double& x : truth.out_bound)
    x = x * (1.5 * problem.rounding + 2 * problem.score_error * largest) + 1e-6;
  double squares = 0, sum = 0;
  for (double x : p) squares += x * x, sum += x;
  truth.lse_bound =
      problem.lse_error + problem.score_error * largest +
      std::min(0.085, sum == 0 ? 0 : 6 * problem.lse_rounding * std::sqrt(squares) / sum);
}

inline Worst compare(Problem& problem, const std::vector<Fp64Reference>& references) {
  Worst worst;
  for (const Fp64Reference& t : references) {
    const Rows rows = problem.queries(t.b);
    const uint16_t* out = problem.out.row(rows.batch_coord, rows.offset + t.s, t.h);
    const double lse = problem.lse[problem.row_index(rows, t.s, t.h)];
    worst.consider(t.b, t.h, t.s, -1, t.lse, lse, t.lse_bound);
    for (int i = 0; i < problem.c.head_dim_v; ++i) {
      worst.consider(t.b, t.h, t.s, i, t.out[i], to_float(out[i], problem.c.fp16), t.out_bound[i]);
    }
  }
  return worst;
}
