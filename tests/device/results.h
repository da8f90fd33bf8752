// The programs share these checks of results: the softmax of a row, the worst element, and which
// elements may be written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "tensors.h"

// Turns the scores of a row, -inf if hidden, into probabilities. Returns lse. A sink of +inf leaves
// the keys nothing.
inline double softmax(std::vector<double>& scores, double sink) {
  double top = sink;
  for (const double x : scores) top = std::max(top, x);
  if (top == INFINITY) {
    std::fill(scores.begin(), scores.end(), 0.);
    return INFINITY;
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
