// The programs share these checks of results: the softmax of a row, the worst element, the bits of
// launches, and which elements may be written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tensors.h"

// Turns the scores of a row, -inf if hidden, into probabilities. Returns lse. A sink of +inf leaves
// the keys nothing; a score of NaN makes all NaN.
inline double softmax(std::vector<double>& scores, double sink) {
  double top = sink;
  for (const double x : scores) top = std::max(top, x);
  if (top == INFINITY) {
    const bool lost = std::any_of(scores.begin(), scores.end(), [](double x) { return x != x; });
    std::fill(scores.begin(), scores.end(), lost ? NAN : 0.);
    return lost ? NAN : INFINITY;
  }
  if (top == -INFINITY) top = 0;
  double sum = std::exp(sink - top);
  for (double& x : scores) sum += x = std::exp(x - top);
  for (double& x : scores) x = sum == 0 ? 0 : x / sum;
  return top + std::log(sum);
}

// The worst of the elements that were compared, and the number of wrong ones.
struct Worst {
  double ratio = 0;  // error / bound; infinite for NaN
  double wanted = 0, found = 0;
  int b = -1, h = -1, row = -1, column = -1;  // column -1: lse
  int64_t wrong = 0, of = 0;

  void consider(int in_b, int in_h, int in_row, int in_column, double is_wanted, double is_found,
                double bound) {
    const bool same = is_wanted == is_found || (std::isnan(is_wanted) && std::isnan(is_found));
    const double off = same ? 0 : std::fabs(is_wanted - is_found) / bound;
    const double this_ratio = std::isnan(off) ? INFINITY : off;
    ++of, wrong += this_ratio > 1;
    if (this_ratio <= ratio) return;
    ratio = this_ratio, wanted = is_wanted, found = is_found;
    b = in_b, h = in_h, row = in_row, column = in_column;
  }

  std::string describe() const {
    char text[240];
    std::snprintf(text, sizeof(text),
                  "%lld of %lld wrong; worst at (batch %d, head %d, row %d) column %d: wanted %g "
                  "found %g, %.3g of the bound",
                  static_cast<long long>(wrong), static_cast<long long>(of), b, h, row, column,
                  wanted, found, ratio);
    return text;
  }
};

// A row's expected values and their bounds.
struct RowReference {
  int b, h, row;
  std::vector<double> out, bound;
  double lse, lse_bound;

  // Sets out and the sums of magnitudes in `bound` from probabilities. value_of(j): the function
  // that gives the elements of key j's value; it is not called for a probability of 0 or NaN.
  template <class ValueOf>
  void sum(const std::vector<double>& p, int dim, ValueOf value_of) {
    out.assign(dim, 0.), bound.assign(dim, 0.);
    for (size_t j = 0; j < p.size(); ++j) {
      if (p[j] == 0) continue;
      if (std::isnan(p[j])) return out.assign(dim, p[j]);
      const auto value = value_of(static_cast<int>(j));
      for (int i = 0; i < dim; ++i) {
        const double x = p[j] * value(i);
        out[i] += x, bound[i] += std::fabs(x);
      }
    }
  }
};

// problem.out_of(row), problem.lse_of(row): where its results are.
template <class AnyProblem>
Worst compare(AnyProblem& problem, const std::vector<RowReference>& rows) {
  Worst worst;
  for (const RowReference& r : rows) {
    const uint16_t* out = problem.out_of(r);
    worst.consider(r.b, r.h, r.row, -1, r.lse, problem.lse_of(r), r.lse_bound);
    for (int i = 0; i < static_cast<int>(r.out.size()); ++i) {
      worst.consider(r.b, r.h, r.row, i, r.out[i], to_float(out[i], problem.c.fp16), r.bound[i]);
    }
  }
  return worst;
}

// The results of a case's first launch, whose bits others must have.
struct FirstResults {
  std::vector<uint16_t> out;
  std::vector<float> lse;

  // Keeps the first. Returns an error message, or "".
  template <class AnyProblem>
  std::string compare(const AnyProblem& p) {
    if (out.empty()) out = p.out.host, lse = p.lse;
    const bool same = out == p.out.host && !std::memcmp(lse.data(), p.lse.data(), lse.size() * 4);
    return same ? "" : " other bits than before;";
  }
};

// Prints what became of a launch. Returns whether it is right.
inline bool report(const std::string& launch, const std::string& wrong, const Worst& w) {
  const bool pass = wrong.empty() && w.ratio <= 1;
  std::printf("%s  %s worst %.3f of the bound", pass ? "PASS" : "FAIL", launch.c_str(), w.ratio);
  std::printf(pass ? "\n" : "\n     %s %s\n", wrong.c_str(), w.describe().c_str());
  std::fflush(stdout);
  return pass;
}

// The owner of a result's element: nothing, no sequence of a varlen batch, a sequence, or the
// padding columns of a sequence up to a multiple of 8.
enum Owner : uint8_t { kOutside, kNoSequence, kSequence, kPadding };

// rows_of(b): rows of sequence b. varlen: rows between the sequences are cleared.
template <class RowsOf>
std::vector<uint8_t> owners_of(Tensor& tensor, int batch, RowsOf rows_of, bool varlen,
                               bool padded = false) {
  std::vector<uint8_t> owners(tensor.host.size(), kOutside);
  const auto mark = [&](int batch_coord, int row, int columns, Owner as) {
    for (int h = 0; h < tensor.heads; ++h) {
      const int64_t at = tensor.row(batch_coord, row, h) - tensor.host.data();
      std::fill_n(owners.begin() + at, columns, as);
    }
  };
  for (int row = 0; varlen && row < tensor.seq; ++row) mark(0, row, tensor.dim, kNoSequence);
  for (int b = 0; b < batch; ++b) {
    const Rows rows = rows_of(b);
    for (int row = rows.offset; row < rows.offset + rows.length; ++row) {
      if (padded) mark(rows.batch_coord, row, (tensor.dim + 7) / 8 * 8, kPadding);
      mark(rows.batch_coord, row, tensor.dim, kSequence);
    }
  }
  return owners;
}

// Checks that the rows of sequences are written, those between them cleared, and nothing else is
// written except padding. Returns an error message, or "".
inline std::string check_coverage(const char* name, const Tensor& tensor,
                                  const std::vector<uint8_t>& owners, bool fp16) {
  int64_t missing = 0, dirty = 0, outside = 0;
  for (size_t i = 0; i < owners.size(); ++i) {
    const uint16_t found = tensor.host[i];
    missing += owners[i] == kSequence && !std::isfinite(to_float(found, fp16));
    dirty += owners[i] == kNoSequence && found != 0;
    outside += owners[i] == kOutside && found != kNaN;
  }
  if (missing == 0 && dirty == 0 && outside == 0) return "";
  return std::string(name) + ": " + std::to_string(missing) + " elements not finite, " +
         std::to_string(dirty) + " not cleared, " + std::to_string(outside) + " written outside";
}
