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

  const uint16_t* out_of(const RowReference& r) const {
    const Rows rows = queries(r.b);
    return out.row(rows.batch_coord, rows.offset + r.row, r.h);
  }
  float lse_of(const RowReference& r) const { return lse[row_index(queries(r.b), r.row, r.h)]; }

  explicit Problem(const Case& c)
      : Inputs(c),
        out(q.batch, q.seq, c.heads_q, c.head_dim_v, c.head_major, c.pitch_padding),
        lse(num_rows()) {}
};

// P and out are rounded to 16 bits: 2 rounding errors of sum |p v|. The error of fp32 scores grows
// with the scores.
inline void compute_fp64_reference(Problem& problem, RowReference& truth) {
  const Case& c = problem.c;
  const Rows rows = problem.queries(truth.b), cols = problem.keys(truth.b);
  const int kv = truth.h / (c.heads_q / c.heads_kv);
  int begin, end;
  problem.visible(truth.b, truth.row, begin, end);
  const uint16_t* q = problem.q.row(rows.batch_coord, rows.offset + truth.row, truth.h);
  std::vector<double> p(std::max(0, end - begin));
  double largest = 0;
  for (int j = begin; j < end; ++j) {
    const uint16_t* k = problem.k.row(cols.batch_coord, cols.offset + j, kv);
    double x = c.scale * dot(q, k, c.head_dim, c.fp16);
    largest = std::max(largest, std::fabs(x));
    if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
    x += problem.term(truth.b, truth.h, truth.row, j);
    if (x != -INFINITY) largest = std::max(largest, std::fabs(x));
    p[j - begin] = x;
  }
  truth.lse = softmax(p, problem.sink(truth.h));
  truth.sum(p, c.head_dim_v, [&](int j) {
    const uint16_t* v = problem.v.row(cols.batch_coord, cols.offset + begin + j, kv);
    return [&c, v](int i) { return to_float(v[i], c.fp16); };
  });
  for (double& x : truth.bound)
    x = x * (1.5 * problem.rounding + 2 * problem.score_error * largest) + 1e-6;
  double squares = 0, sum = 0;
  for (double x : p) squares += x * x, sum += x;
  truth.lse_bound =
      problem.lse_error + problem.score_error * largest +
      std::min(0.085, sum == 0 ? 0 : 6 * problem.lse_rounding * std::sqrt(squares) / sum);
}
