// Tensors, inputs and the fp64 reference of one case of backward_check, all on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "inputs.h"
#include "results.h"

// fp64 values of each sequence: (batch, heads, longest, dim), initially 0.
struct Grid {
  int heads, longest, dim;
  std::vector<double> data;

  Grid(int batch, int heads, int longest, int dim)
      : heads(heads),
        longest(longest),
        dim(dim),
        data(static_cast<size_t>(batch) * heads * longest * dim) {}
  double* row(int b, int h, int s) {
    return data.data() + ((static_cast<int64_t>(b) * heads + h) * longest + s) * dim;
  }
};

// The expected gradient, and the error bound of each element.
struct Gradient {
  const char* name;
  Grid wanted, bound;
  Gradient(const char* name, int batch, int heads, int longest, int dim)
      : name(name), wanted(batch, heads, longest, dim), bound(batch, heads, longest, dim) {}
};

// Computes everything in fp64 from the 16-bit inputs.
//
// Bounds: P and dS are rounded to 16 bits once, with independent relative errors u = 2^-8 or 2^-11
// (and 2^-25 absolute where fp16 is subnormal). The bound of a sum of n such errors, each at most
// e_i, is kSpread * sqrt(sum e_i^2): up to 16 errors cannot exceed it, and for more it is over 6
// standard deviations. The result is rounded once more, and if all P are equal, so are their
// errors: 2 u of the result. fp32 errors of scores, of score - lse and of dP - delta are systematic
// and are added up. The kernel's out and lse are inputs here, so their rounding is not an error.
struct BackwardReference {
  static constexpr double kSpread = 4;
  static constexpr double kSingle = 1e-6;  // fp32 sums, relative to the terms' magnitudes

  const Inputs& inputs;
  const Case& c;
  double rounding, tiny;  // of 16-bit elements: relative error; least absolute error
  Grid q, k, v, dout, out, lse, dlse;
  Gradient dq, dk, dv, dbias;
  // (batch, heads_q, longest query sequence, longest key sequence).
  Grid p, ds;
  std::vector<float> p_off, ds_off;          // systematic errors
  std::vector<double> dsinks, dsinks_bound;  // of the query heads, if they have sinks

  explicit BackwardReference(const Inputs& inputs)
      : inputs(inputs),
        c(inputs.c),
        rounding(c.fp16 ? 0x1p-11 : 0x1p-8),
        tiny(c.fp16 ? 0x1p-25 : 0),
        q(c.batch, c.heads_q, c.seqlen_q, c.head_dim),
        k(c.batch, c.heads_kv, c.seqlen_k, c.head_dim),
        v(c.batch, c.heads_kv, c.seqlen_k, c.head_dim_v),
        dout(c.batch, c.heads_q, c.seqlen_q, c.head_dim_v),
        out(dout),
        lse(c.batch, c.heads_q, c.seqlen_q, 1),
        dlse(lse),
        dq("dq", c.batch, c.heads_q, c.seqlen_q, c.head_dim),
        dk("dk", c.batch, c.heads_kv, c.seqlen_k, c.head_dim),
        dv("dv", c.batch, c.heads_kv, c.seqlen_k, c.head_dim_v),
        dbias("dbias", c.bias_batch, c.bias_heads, c.seqlen_q, c.seqlen_k),
        p(c.batch, c.heads_q, c.seqlen_q, c.seqlen_k),
        ds(p),
        p_off(p.data.size()),
        ds_off(p.data.size()) {}

  int kv_head(int h) const { return h / (c.heads_q / c.heads_kv); }

  // Calls work(b, h, s) for all query rows, or for all keys of the KV heads.
  template <class Work>
  void for_all(bool keys, Work work) const {
    const int heads = keys ? c.heads_kv : c.heads_q, longest = keys ? c.seqlen_k : c.seqlen_q;
    in_parallel(int64_t{c.batch} * heads * longest, [&](int64_t i) {
      const int s = i % longest, h = i / longest % heads, b = i / longest / heads;
      if (s < (keys ? inputs.keys(b) : inputs.queries(b)).length) work(b, h, s);
    });
  }

  struct Score {
    double value, slope, tanh, magnitude;  // value: with softcap and bias; slope: softcap's there
  };
  Score score(int b, int h, int s, int key) {
    const double *a = q.row(b, h, s), *x = k.row(b, kv_head(h), key);
    double sum = 0, magnitude = 0;
    for (int i = 0; i < c.head_dim; ++i) {
      const double term = a[i] * x[i];
      sum += term;
      magnitude += std::fabs(term);
    }
    sum *= c.scale, magnitude *= std::fabs(c.scale);
    const double term = inputs.term(b, h, s, key);
    if (c.softcap <= 0) return {sum + term, 1, 0, magnitude};
    const double tanh = std::tanh(sum / c.softcap);
    return {c.softcap * tanh + term, 1 - tanh * tanh, tanh, magnitude};
  }
  // A row that sees no key has out 0, and lse -inf or its sink.
  void forward() {
    for_all(false, [&](int b, int h, int s) {
      int begin, end;
      inputs.visible(b, s, begin, end);
      std::vector<double> p;
      for (int j = begin; j < end; ++j) p.push_back(score(b, h, s, j).value);
      *lse.row(b, h, s) = softmax(p, inputs.sink(h));
      double* to = out.row(b, h, s);
      std::fill_n(to, c.head_dim_v, 0.0);
      for (int j = begin; j < end; ++j) {
        const double* values = v.row(b, kv_head(h), j);
        for (int i = 0; i < c.head_dim_v; ++i) to[i] += p[j - begin] * values[i];
      }
    });
  }

  void backward() {
    for_all(false, [&](int b, int h, int s) { query_gradient(b, h, s); });
    for_all(true, [&](int b, int h, int s) { key_gradients(b, h, s); });
    bias_gradient();
    for (int h = 0; !inputs.sinks.empty() && h < c.heads_q; ++h) sink_gradient(h);
  }

 private:
  double final_bound(double spread, double systematic, double wanted) const {
    return kSpread * std::sqrt(spread) + systematic + 2 * rounding * std::fabs(wanted) + 2 * tiny +
           1e-30;
  }

  // Delta of a row, and the sum of its terms' magnitudes.
  std::pair<double, double> delta_of(int b, int h, int s) {
    double delta = -*dlse.row(b, h, s), magnitude = std::fabs(delta);
    for (int i = 0; i < c.head_dim_v; ++i) {
      const double term = dout.row(b, h, s)[i] * out.row(b, h, s)[i];
      delta += term, magnitude += std::fabs(term);
    }
    return {delta, magnitude};
  }

  // The sum of the rows' probabilities of the sink times minus delta.
  void sink_gradient(int h) {
    double sum = 0, bound = 0;
    for (int b = 0; b < c.batch; ++b) {
      for (int s = 0; s < inputs.queries(b).length; ++s) {
        const auto [delta, magnitude] = delta_of(b, h, s);
        const double log_sum = *lse.row(b, h, s);
        if (std::isinf(log_sum)) continue;
        const double prob = std::exp(inputs.sink(h) - log_sum);
        const double exponent_off = kSingle * (std::fabs(log_sum) + 1);
        sum -= prob * delta;
        bound += prob * (kSingle * magnitude + std::fabs(delta) * std::expm1(exponent_off));
      }
    }
    dsinks.push_back(sum), dsinks_bound.push_back(bound + 1e-30);
  }

  void query_gradient(int b, int h, int s) {
    int begin, end;
    inputs.visible(b, s, begin, end);
    // dq and its bound are 0 without a key, and with a sink of +inf.
    if (begin >= end || std::isinf(*lse.row(b, h, s))) return;
    const double* gradient = dout.row(b, h, s);
    const auto [delta, delta_magnitude] = delta_of(b, h, s);
    const double log_sum = *lse.row(b, h, s);
    std::vector<double> spread(c.head_dim), systematic(c.head_dim);
    double *wanted = dq.wanted.row(b, h, s), *bound = dq.bound.row(b, h, s);
    std::fill_n(wanted, c.head_dim, 0.0);
    const int64_t pairs = p.row(b, h, s) - p.data.data();
    for (int j = begin; j < end; ++j) {
      const Score x = score(b, h, s, j);
      if (x.value == -INFINITY) continue;
      const double prob = std::exp(x.value - log_sum);
      const double* values = v.row(b, kv_head(h), j);
      double dp = 0, magnitude = delta_magnitude;
      for (int i = 0; i < c.head_dim_v; ++i) {
        const double term = gradient[i] * values[i];
        dp += term;
        magnitude += std::fabs(term);
      }
      // Absolute error of the exponent: a relative error of P.
      const double exponent_off =
          kSingle * (x.magnitude + std::fabs(log_sum) + 1 + 2 * std::fabs(x.value));
      // The kernel recomputes tanh from P and lse.
      const double tanh_off =
          c.softcap > 0 ? 2 * kSingle + kSingle * (1 + std::fabs(log_sum)) / c.softcap : 0;
      const double slope_off = 2 * std::fabs(x.tanh) * tanh_off + tanh_off * tanh_off;
      const double score_gradient = prob * (dp - delta) * x.slope;
      const double off = std::fabs(score_gradient) * std::expm1(exponent_off) +
                         prob * x.slope * kSingle * magnitude +
                         prob * std::fabs(dp - delta) * slope_off;
      p.data[pairs + j] = prob;
      p_off[pairs + j] = prob * std::expm1(exponent_off);
      ds.data[pairs + j] = score_gradient;
      ds_off[pairs + j] = off;
      add(k.row(b, kv_head(h), j), score_gradient, off, c.head_dim, wanted, spread, systematic);
    }
    finish(c.scale, spread, systematic, c.head_dim, wanted, bound);
  }

  void key_gradients(int b, int h, int s) {
    const int group = c.heads_q / c.heads_kv, rows = inputs.queries(b).length;
    std::vector<double> k_spread(c.head_dim), k_systematic(c.head_dim);
    std::vector<double> v_spread(c.head_dim_v), v_systematic(c.head_dim_v);
    double *k_wanted = dk.wanted.row(b, h, s), *v_wanted = dv.wanted.row(b, h, s);
    std::fill_n(k_wanted, c.head_dim, 0.0);
    std::fill_n(v_wanted, c.head_dim_v, 0.0);
    bool seen = false;
    for (int head = h * group; head < (h + 1) * group; ++head) {
      for (int i = 0; i < rows; ++i) {
        const int64_t pair = p.row(b, head, i) - p.data.data() + s;
        if (p.data[pair] == 0) continue;
        seen = true;
        add(q.row(b, head, i), ds.data[pair], ds_off[pair], c.head_dim, k_wanted, k_spread,
            k_systematic);
        add(dout.row(b, head, i), p.data[pair], p_off[pair], c.head_dim_v, v_wanted, v_spread,
            v_systematic);
      }
    }
    if (!seen) return;  // dk, dv and their bounds are 0
    finish(c.scale, k_spread, k_systematic, c.head_dim, k_wanted, dk.bound.row(b, h, s));
    finish(1, v_spread, v_systematic, c.head_dim_v, v_wanted, dv.bound.row(b, h, s));
  }

  // Each dS is rounded, and their sum over the sequences and heads that share the bias.
  void bias_gradient() {
    const Tensor& bias = inputs.bias;
    for (int b = 0; b < c.batch && bias.heads > 0; ++b) {
      for (int h = 0; h < c.heads_q; ++h) {
        const int of[] = {bias.batch == 1 ? 0 : b, bias.heads == 1 ? 0 : h};
        for (int s = 0; s < bias.seq; ++s) {
          const int64_t pairs = ds.row(b, h, s) - ds.data.data();
          for (int j = 0; j < bias.dim; ++j) {
            const double term = ds.data[pairs + j];
            dbias.wanted.row(of[0], of[1], s)[j] += term;
            if (p.data[pairs + j] != 0) {
              dbias.bound.row(of[0], of[1], s)[j] +=
                  1.01 * (2 * rounding * std::fabs(term) + ds_off[pairs + j] + 2 * tiny);
            }
          }
        }
      }
    }
  }

  // weight is rounded to 16 bits. off: its error before that.
  void add(const double* row, double weight, double off, int dim, double* sum,
           std::vector<double>& spread, std::vector<double>& systematic) const {
    const double once = std::fabs(weight) * rounding + tiny;
    const double always = off + kSingle * std::fabs(weight);
    for (int i = 0; i < dim; ++i) {
      sum[i] += weight * row[i];
      spread[i] += once * once * row[i] * row[i];
      systematic[i] += always * std::fabs(row[i]);
    }
  }

  void finish(double scale, const std::vector<double>& spread,
              const std::vector<double>& systematic, int dim, double* wanted, double* bound) const {
    const double factor = std::fabs(scale);
    for (int i = 0; i < dim; ++i) {
      wanted[i] *= scale;
      bound[i] = final_bound(factor * factor * spread[i], factor * systematic[i], wanted[i]);
    }
  }
};

struct BackwardProblem : Inputs {
  Tensor out, dout, dq, dk, dv;
  Tensor ds, dbias;              // ds: of each sequence and head, dense, as dbias, which may share
  std::vector<float> lse, dlse;  // of the rows; initially NaN
  std::vector<float> dsinks, first_dsinks;
  std::vector<int32_t> schedule;  // of a varlen batch
  BlockLists lists{mask, true};
  BackwardReference reference;

  explicit BackwardProblem(const Case& c)
      : Inputs(c),
        out(q.batch, q.seq, c.heads_q, c.head_dim_v, c.head_major, c.pitch_padding),
        dout(q.batch, q.seq, c.heads_q, c.head_dim_v, other_order(), other_padding()),
        dq(q.batch, q.seq, c.heads_q, c.head_dim, other_order(), other_padding()),
        dk(k.batch, k.seq, c.heads_kv, c.head_dim, other_order(), other_padding()),
        dv(k.batch, k.seq, c.heads_kv, c.head_dim_v, other_order(), other_padding()),
        ds(c.bias_heads == 0 ? 0 : c.batch, c.seqlen_q, c.heads_q, c.seqlen_k, true, 0),
        dbias(c.bias_batch, c.seqlen_q, c.bias_heads, c.seqlen_k, true, 0),
        lse(num_rows(), NAN),
        dlse(num_rows(), NAN),
        dsinks(sinks.size()),
        reference(*this) {
    std::mt19937 random(4321);
    std::normal_distribution<float> normal;
    BackwardReference& r = reference;
    for (int b = 0; b < c.batch; ++b) {
      const Rows rows = queries(b), cols = keys(b);
      for (int h = 0; h < c.heads_q; ++h) {
        for (int s = 0; s < rows.length; ++s) {
          uint16_t* at = dout.row(rows.batch_coord, rows.offset + s, h);
          for (int i = 0; i < c.head_dim_v; ++i) {
            float x = normal(random);
            if (c.data == Data::kOpposite) x = h < c.heads_q / 2 ? 2e4f : -2e4f;
            at[i] = to_bits(x, c.fp16);
          }
          read(dout, rows, h, s, r.dout.row(b, h, s));
          read(q, rows, h, s, r.q.row(b, h, s));
          if (c.dlse) *r.dlse.row(b, h, s) = dlse[dlse_index(rows, s, h)] = normal(random);
        }
      }
      for (int h = 0; h < c.heads_kv; ++h) {
        for (int s = 0; s < cols.length; ++s) {
          read(k, cols, h, s, r.k.row(b, h, s));
          read(v, cols, h, s, r.v.row(b, h, s));
        }
      }
    }
    r.forward();
    for (int b = 0; b < c.batch; ++b) {
      const Rows rows = queries(b);
      for (int h = 0; h < c.heads_q; ++h) {
        for (int s = 0; s < rows.length; ++s) {
          const double* from = r.out.row(b, h, s);
          uint16_t* at = out.row(rows.batch_coord, rows.offset + s, h);
          for (int i = 0; i < c.head_dim_v; ++i) at[i] = to_bits(from[i], c.fp16);
          float& log_sum = lse[row_index(rows, s, h)];
          log_sum = *r.lse.row(b, h, s);
          read(out, rows, h, s, r.out.row(b, h, s));
          *r.lse.row(b, h, s) = log_sum;
        }
      }
    }
    r.backward();
  }

  bool other_order() const { return c.head_major != c.other_strides; }
  int other_padding() const { return c.pitch_padding + (c.other_strides ? 16 : 0); }
  // dlse is (batch, heads, seq), as lse, or (batch, seq, heads).
  flashattn3::Strides dlse_stride() const {
    const int64_t heads = c.heads_q, seq = q.seq;
    if (c.other_strides) return {seq * heads, heads, 1};
    return {seq * heads, 1, seq};
  }
  int64_t dlse_index(const Rows& rows, int s, int h) const {
    const flashattn3::Strides stride = dlse_stride();
    return rows.batch_coord * stride.batch + (rows.offset + s) * stride.seq + h * stride.head;
  }
  void clear_results() {
    for (Tensor* t : {&dq, &dk, &dv, &ds, &dbias}) std::fill(t->host.begin(), t->host.end(), kNaN);
    std::fill(dsinks.begin(), dsinks.end(), NAN);
    if (!c.cu_q.empty()) schedule.assign(flashattn3::varlen_schedule_bytes(c.batch) / 4, -1);
  }
  // A gradient's tensor, and the rows of its sequences.
  Tensor& tensor(const Gradient& g) {
    return &g == &reference.dq      ? dq
           : &g == &reference.dk    ? dk
           : &g == &reference.dbias ? dbias
                                    : dv;
  }
  int batch_of(const Gradient& g) const { return &g == &reference.dbias ? c.bias_batch : c.batch; }
  Rows rows_of(const Gradient& g, int b) const {
    return &g == &reference.dq || &g == &reference.dbias ? queries(b) : keys(b);
  }

 private:
  void read(Tensor& from, const Rows& rows, int h, int s, double* to) const {
    const uint16_t* at = from.row(rows.batch_coord, rows.offset + s, h);
    for (int i = 0; i < from.dim; ++i) to[i] = to_float(at[i], c.fp16);
  }
};

// first: of another run, whose bits are wanted instead.
inline Worst compare(BackwardProblem& problem, Gradient& g,
                     const std::vector<uint16_t>* first = nullptr) {
  Worst worst;
  Tensor& tensor = problem.tensor(g);
  for (int b = 0; b < problem.batch_of(g); ++b) {
    const Rows rows = problem.rows_of(g, b);
    for (int h = 0; h < g.wanted.heads; ++h) {
      for (int s = 0; s < rows.length; ++s) {
        const uint16_t* at = tensor.row(rows.batch_coord, rows.offset + s, h);
        const double *wanted = g.wanted.row(b, h, s), *bound = g.bound.row(b, h, s);
        const uint16_t* same = first ? first->data() + (at - tensor.host.data()) : nullptr;
        for (int i = 0; i < g.wanted.dim; ++i) {
          const auto value = [&](const uint16_t* of) { return to_float(of[i], problem.c.fp16); };
          worst.consider(b, h, s, i, same ? value(same) : wanted[i], value(at),
                         same ? 0 : bound[i]);
        }
      }
    }
  }
  return worst;
}

// Checks the gradient of the sinks, which has the same bits in every run. Returns an error message,
// or "".
inline std::string check_sinks(BackwardProblem& p) {
  if (p.first_dsinks.empty()) p.first_dsinks = p.dsinks;
  for (size_t h = 0; h < p.dsinks.size(); ++h) {
    const double wanted = p.reference.dsinks[h];
    const bool near = std::fabs(p.dsinks[h] - wanted) <= p.reference.dsinks_bound[h];
    if (near && p.dsinks[h] == p.first_dsinks[h]) continue;
    return "the sink of head " + std::to_string(h) + " has gradient " +
           std::to_string(p.dsinks[h]) + ", wanted " + std::to_string(wanted) + ", first " +
           std::to_string(p.first_dsinks[h]);
  }
  return "";
}
