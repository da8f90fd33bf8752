// backward_check --self: compares the reference with finite differences of the loss, and shows that
// the bounds accept a kernel's rounding and nothing else. Needs no GPU.
#pragma once

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "backward_problem.h"

// Sum of out * dout and lse * dlse.
inline double loss(BackwardReference& r) {
  r.forward();
  double sum = 0;
  for (size_t i = 0; i < r.out.data.size(); ++i) sum += r.out.data[i] * r.dout.data[i];
  for (size_t i = 0; i < r.lse.data.size(); ++i) {
    if (r.dlse.data[i] != 0 && std::isfinite(r.lse.data[i])) sum += r.lse.data[i] * r.dlse.data[i];
  }
  return sum;
}

// Largest difference of a gradient and its finite difference, relative to the largest gradient.
inline double difference_error(const Case& c) {
  BackwardProblem problem(c, true);
  BackwardReference& r = problem.reference;
  std::mt19937 random(5);
  double worst = 0;
  const auto probe = [&](Grid& input, const Gradient& g) {
    double largest = 1e-6;
    for (double x : g.wanted.data) largest = std::max(largest, std::fabs(x));
    for (int i = 0; i < 12; ++i) {
      double& x = input.data[random() % input.data.size()];
      const double kept = x, wanted = g.wanted.data[&x - input.data.data()], step = 1e-5;
      x = kept + step;
      double difference = loss(r);
      x = kept - step;
      difference = (difference - loss(r)) / (2 * step);
      x = kept;
      worst = std::max(worst, std::fabs(difference - wanted) / largest);
    }
  };
  probe(r.q, r.dq), probe(r.k, r.dk), probe(r.v, r.dv);
  return worst;
}

enum class Defect { kNone, kBlock, kTwice, kDiagonal, kDelta, kScale, kSlope };

// Fills the gradients like a kernel that rounds P and dS and has a defect: it skips a block of 64
// queries x 64 keys or adds it to dq twice, masks the last key of each row, omits delta, has a
// scale 3 % too large, or omits the slope of softcap.
inline void imitate(BackwardProblem& problem, Defect defect) {
  BackwardReference& r = problem.reference;
  const Case& c = problem.c;
  const auto rounded = [&](double x) { return to_float(to_bits(x, c.fp16), c.fp16); };
  for (Tensor* t : {&problem.dq, &problem.dk, &problem.dv}) {
    std::fill(t->host.begin(), t->host.end(), kNaN);
  }
  const double scale = c.scale * (defect == Defect::kScale ? 1.03 : 1);
  for (int b = 0; b < c.batch; ++b) {
    const Rows rows = problem.queries(b), cols = problem.keys(b);
    Grid dk(1, c.heads_kv, cols.length, c.head_dim), dv(1, c.heads_kv, cols.length, c.head_dim_v);
    for (int h = 0; h < c.heads_q; ++h) {
      for (int s = 0; s < rows.length; ++s) {
        int begin, end;
        problem.visible(b, s, begin, end);
        std::vector<double> dq(c.head_dim);
        double delta = 0;
        for (int i = 0; i < c.head_dim_v; ++i)
          delta += r.out.row(b, h, s)[i] * r.dout.row(b, h, s)[i];
        for (int j = begin; j < end; ++j) {
          const bool block = s / 64 == 1 && j / 64 == 1;
          double p = r.p.row(b, h, s)[j], ds = r.ds.row(b, h, s)[j], times = 1;
          if (defect == Defect::kBlock && block) p = ds = 0;
          if (defect == Defect::kTwice && block) times = 2;
          if (defect == Defect::kDiagonal && j == end - 1) p = ds = 0;
          const double slope = r.score(b, h, s, j).slope;
          if (defect == Defect::kDelta) ds += p * delta * slope;
          if (defect == Defect::kSlope) ds /= slope;
          p = rounded(p), ds = rounded(ds);
          const int kv = r.kv_head(h);
          for (int i = 0; i < c.head_dim; ++i) {
            dq[i] += times * ds * r.k.row(b, kv, j)[i];
            dk.row(0, kv, j)[i] += ds * r.q.row(b, h, s)[i];
          }
          for (int i = 0; i < c.head_dim_v; ++i) dv.row(0, kv, j)[i] += p * r.dout.row(b, h, s)[i];
        }
        uint16_t* to = problem.dq.row(rows.batch_coord, rows.offset + s, h);
        for (int i = 0; i < c.head_dim; ++i) to[i] = to_bits(scale * dq[i], c.fp16);
      }
    }
    for (int h = 0; h < c.heads_kv; ++h) {
      for (int s = 0; s < cols.length; ++s) {
        uint16_t* to_k = problem.dk.row(cols.batch_coord, cols.offset + s, h);
        uint16_t* to_v = problem.dv.row(cols.batch_coord, cols.offset + s, h);
        for (int i = 0; i < c.head_dim; ++i) to_k[i] = to_bits(scale * dk.row(0, h, s)[i], c.fp16);
        for (int i = 0; i < c.head_dim_v; ++i) to_v[i] = to_bits(dv.row(0, h, s)[i], c.fp16);
      }
    }
  }
}

inline bool test_self(const std::vector<Case>& cases, const char* part) {
  bool good = true;
  for (const Case& c : cases) {
    if (part != nullptr && c.name.find(part) == std::string::npos) continue;
    const int64_t pairs = int64_t{c.batch} * c.heads_q * c.seqlen_q * c.seqlen_k;
    if (pairs > 400000) continue;
    BackwardProblem problem(c);
    BackwardReference& r = problem.reference;
    const auto ratios = [&](Defect defect) {
      imitate(problem, defect);
      std::vector<double> all;
      for (Gradient* g : {&r.dq, &r.dk, &r.dv}) all.push_back(compare(problem, *g).ratio);
      return all;
    };
    // Finite differences are meaningless for large scores.
    const double error = pairs <= 40000 && c.data != Data::kLarge ? difference_error(c) : 0;
    const std::vector<double> none = ratios(Defect::kNone);
    bool right = error < 1e-6 && none[0] <= 1 && none[1] <= 1 && none[2] <= 1;
    std::printf("%s  %-44s differences %.1e; rounded dq %.2f dk %.2f dv %.2f",
                right ? "PASS" : "FAIL", c.name.c_str(), error, none[0], none[1], none[2]);
    const char* names[] = {"", "block", "twice", "diagonal", "delta", "scale", "slope"};
    for (const Defect defect : {Defect::kBlock, Defect::kTwice, Defect::kDiagonal, Defect::kDelta,
                                Defect::kScale, Defect::kSlope}) {
      const std::vector<double> found = ratios(defect);
      std::printf("; %s %.3g %.3g %.3g", names[static_cast<int>(defect)], found[0], found[1],
                  found[2]);
    }
    std::printf("\n");
    good = good && right;
  }
  return good;
}
