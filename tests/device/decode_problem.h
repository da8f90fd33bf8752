// One cached call of decode_check and decode_emulation: tensors, tables, and the fp64 reference, on
// the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "cache_bytes.h"
#include "case_table.h"
#include "launch/byte_decode_params.h"
#include "results.h"
#include "tensors.h"

struct DecodeCase {
  std::string name;
  bool fp16 = false;
  int batch = 1, seqlen_q = 1, heads_q = 4, heads_kv = 1, head_dim = 128, head_dim_v = 0;
  int capacity = 1000, page_size = 0;  // 0: dense
  std::vector<int> seqlens;            // cache_seqlens; empty: the capacity
  std::vector<int> cu_q, cu_new;
  int seqlen_new = 0;
  std::vector<int> leftpad, cache_idx;
  int left = -1, right = -1;
  float softcap = 0.f, scale = 0.f;  // 0: head_dim ^ -0.5
  bool sinks = false, descales = false;
  bool head_major = false;          // memory order (pages, heads, slots)
  int padding = 0;                  // NaN elements after each head's columns
  bool grows = false;               // scores grow towards the last key
  bool lost_page = false;           // the second page of sequence 0 does not exist
  bool e4m3 = false, int8 = false;  // of the cache, whose rows begin at multiples of 16 elements
  int spans = 0;                    // split_tokens; 0: none
  bool page_descales = false, token_descales = false;
  bool tree = false;  // bits say which new tokens a query sees; at most 64 queries
  int prefix = -1;    // keys in front of those of every sequence; -1: none. Of a paged cache

  bool has_bytes() const { return e4m3 || int8; }
};

inline void set(DecodeCase& c, Field& field) {
  const bool known =
      read_mask(field, c.left, c.right) || field.read("fp16", c.fp16) ||
      field.read("batch", c.batch) || field.read("q", c.seqlen_q) ||
      field.read("heads", c.heads_q, c.heads_kv) || field.read("d", c.head_dim, c.head_dim_v) ||
      field.read("capacity", c.capacity) || field.read("page", c.page_size) ||
      field.read("seqlens", c.seqlens) || field.read("cu_q", c.cu_q) ||
      field.read("cu_new", c.cu_new) || field.read("new", c.seqlen_new) ||
      field.read("leftpad", c.leftpad) || field.read("cache_idx", c.cache_idx) ||
      field.read("softcap", c.softcap) || field.read("scale", c.scale) ||
      field.read("sinks", c.sinks) || field.read("descales", c.descales) ||
      field.read("head_major", c.head_major) || field.read("padding", c.padding) ||
      field.read("grows", c.grows) || field.read("lost_page", c.lost_page) ||
      field.read("e4m3", c.e4m3) || field.read("int8", c.int8) ||
      field.read("page_descales", c.page_descales) ||
      field.read("token_descales", c.token_descales) || field.read("spans", c.spans) ||
      field.read("tree", c.tree) || field.read("prefix", c.prefix);
  if (!known) field.refuse();
}

// Keys and queries of a sequence, by the definition in launch/decode_params.h.
struct DecodeSequence {
  int cache_idx, offset, num_queries, num_keys, first_key;
};

struct DecodeProblem {
  const DecodeCase& c;
  int total_q, num_caches, max_pages, num_pages;
  std::vector<int> table;  // (num_caches, max_pages)
  Tensor q, k, v, out;
  std::vector<float> lse, sinks, q_descale, k_descale, v_descale;
  std::vector<float> k_key_descale, v_key_descale;  // (num_pages, tokens of one or 1, heads_kv)
  std::vector<uint8_t> k_bytes, v_bytes;  // with 8 bits: the elements of k and v, which are numbers
  static constexpr int kTreeStride = 3;   // from a query's words to those of the next one
  std::vector<int> tree;
  std::vector<int> prefix_pages;  // one more than the keys of the prefix need

  explicit DecodeProblem(const DecodeCase& c)
      : c(c),
        total_q(c.cu_q.empty() ? c.seqlen_q : c.cu_q.back()),
        num_caches(c.cache_idx.empty() ? c.batch : c.batch + 2),
        max_pages(c.page_size ? (c.capacity + c.page_size - 1) / c.page_size : 1),
        num_pages(c.page_size ? num_caches * max_pages + 3 + pages_of_prefix(c) : num_caches),
        q(c.cu_q.empty() ? c.batch : 1, total_q, c.heads_q, c.head_dim, false, c.padding),
        k(num_pages, c.page_size ? c.page_size : c.capacity, c.heads_kv, c.head_dim, c.head_major,
          c.padding),
        v(num_pages, k.seq, c.heads_kv, c.head_dim_v ? c.head_dim_v : c.head_dim, c.head_major,
          c.padding),
        out(q.batch, q.seq, c.heads_q, v.dim, false, c.padding),
        lse(static_cast<size_t>(q.batch) * c.heads_q * total_q) {
    std::mt19937 random(4321);
    std::normal_distribution<float> normal;
    std::vector<int> pages(num_pages);
    for (int i = 0; i < num_pages; ++i) pages[i] = i;
    std::shuffle(pages.begin(), pages.end(), random);
    if (c.page_size) table.assign(pages.begin(), pages.begin() + num_caches * max_pages);
    prefix_pages.assign(pages.end() - pages_of_prefix(c), pages.end());
    // Near the scores, far below and above them; one of +inf leaves the keys nothing.
    constexpr float kSinks[] = {0.f, 1.5f, -200.f, 200.f, -INFINITY, INFINITY, -0.5f};
    for (int h = 0; h < c.heads_q && c.sinks; ++h) sinks.push_back(kSinks[h % 7]);
    for (int i = 0; i < c.batch * c.heads_kv && c.descales; ++i) {
      q_descale.push_back(0.5f + i % 3);
      k_descale.push_back(i % 5 == 4 ? 0.f : 0.5f + i % 2 / 4.f);
      v_descale.push_back(i % 4 - 1.5f);
    }
    std::vector<float> direction(c.head_dim);
    for (float& x : direction) x = random() % 2 ? 1.f : -1.f;
    for (int b = 0; b < q.batch; ++b) {
      for (int s = 0; s < q.seq; ++s) {
        for (int h = 0; h < c.heads_q; ++h) {
          uint16_t* at = q.row(b, s, h);
          for (int i = 0; i < c.head_dim; ++i) {
            at[i] = to_bits(c.grows ? direction[i] : normal(random), c.fp16);
          }
        }
      }
    }
    for (int b = 0; b < c.batch; ++b) {
      const DecodeSequence s = sequence(b);
      if (s.cache_idx < 0) continue;
      for (int key = s.first_key; key < s.num_keys; ++key) {
        const auto [page, slot] = place(s.cache_idx, key);
        const float way = 20.f * key / std::max(1, s.num_keys);
        for (int h = 0; h < c.heads_kv; ++h) {
          uint16_t *keys = k.row(page, slot, h), *values = v.row(page, slot, h);
          for (int i = 0; i < k.dim; ++i) {
            const float x = normal(random);
            keys[i] = stored(c.grows ? way * direction[i] + 0.1f * x : x);
          }
          for (int i = 0; i < v.dim; ++i) values[i] = stored(normal(random));
        }
      }
    }
    for (int key = 0; key < c.prefix; ++key) {
      for (int h = 0; h < c.heads_kv; ++h) {
        const auto [page, slot] = place(kPrefix, key);
        for (Tensor* of : {&k, &v}) {
          uint16_t* const at = of->row(page, slot, h);
          for (int i = 0; i < of->dim; ++i) at[i] = stored(normal(random));
        }
      }
    }
    // Entries that no call may use, and one that makes rows NaN.
    for (int entry = 0; entry < num_caches && c.page_size; ++entry) {
      int keys = 0;
      for (int b = 0; b < c.batch; ++b) {
        const DecodeSequence s = sequence(b);
        if (s.cache_idx == entry) keys = std::max(keys, s.num_keys);
      }
      for (int page = (keys + c.page_size - 1) / c.page_size; page < max_pages; ++page) {
        table[entry * max_pages + page] = page % 2 ? -1 : 1 << 30;
      }
    }
    if (c.lost_page) table[sequence(0).cache_idx * max_pages + 1] = num_pages;
    if (c.has_bytes()) k_bytes = bytes_of(k), v_bytes = bytes_of(v);
    for (int i = 0; i < q.batch * total_q * kTreeStride && c.tree; ++i) {
      // Some rows see no new token, others all, and mostly not themselves.
      const auto kind = random() % 8;
      tree.push_back(static_cast<int>(kind == 0 ? 0 : kind == 1 ? -1 : random()));
    }
    if (!c.page_descales && !c.token_descales) return;
    for (int i = 0; i < num_pages * descales_of_page() * c.heads_kv; ++i) {
      k_key_descale.push_back(0.25f * std::exp(normal(random)));
      v_key_descale.push_back(0.01f * normal(random) * std::exp(3 * normal(random)));
    }
  }

  // The bits of a number of the cache, and the number.
  uint16_t stored(float x) const {
    if (c.e4m3) return e4m3_of(x);
    if (c.int8) return int8_of(4 * x);
    return to_bits(x, c.fp16);
  }
  float cached(uint16_t bits) const {
    if (c.e4m3) return of_e4m3(static_cast<uint8_t>(bits));
    if (c.int8) return static_cast<int8_t>(bits);
    return to_float(bits, c.fp16);
  }
  int descales_of_page() const { return c.token_descales ? k.seq : 1; }
  double key_descale(const std::vector<float>& of, int page, int slot, int head) const {
    if (of.empty()) return 1;
    const int tokens = descales_of_page();
    return of[(int64_t{page} * tokens + (tokens > 1 ? slot : 0)) * c.heads_kv + head];
  }

  // k_descale is (heads_kv, batch) in memory, the others are (batch, heads_kv). Beside a prefix the
  // first number is that of all.
  flashattn3::DescaleStrides stride_of(const std::vector<float>& descale) const {
    if (c.prefix >= 0) return {};
    if (&descale == &k_descale) return {.batch = 1, .head = c.batch};
    return {.batch = c.heads_kv, .head = 1};
  }
  float head_descale(const std::vector<float>& of, int b, int head) const {
    const flashattn3::DescaleStrides stride = stride_of(of);
    return of.empty() ? 1.f : of[b * stride.batch + head * stride.head];
  }

  DecodeSequence sequence(int b) const {
    DecodeSequence s{};
    s.cache_idx = c.cache_idx.empty() ? b : c.cache_idx[b];
    if (s.cache_idx < 0 || s.cache_idx >= num_caches) s.cache_idx = -1;
    s.offset = c.cu_q.empty() ? 0 : c.cu_q[b];
    s.num_queries = c.cu_q.empty() ? c.seqlen_q : std::min(c.seqlen_q, c.cu_q[b + 1] - c.cu_q[b]);
    const int cached = c.seqlens.empty() ? c.capacity : std::clamp(c.seqlens[b], 0, c.capacity);
    const int64_t num_new =
        c.cu_new.empty() ? c.seqlen_new : int64_t{c.cu_new[b + 1]} - c.cu_new[b];
    s.num_keys =
        static_cast<int>(std::min<int64_t>(cached + std::max<int64_t>(num_new, 0), c.capacity));
    s.first_key = visible(b, 0, s).first;
    return s;
  }

  // Keys that a query of a sequence sees: first, and one past the last.
  std::pair<int, int> visible(int b, int query, const DecodeSequence& s) const {
    const int position = s.num_keys - s.num_queries + query;
    int begin = c.leftpad.empty() ? 0 : c.leftpad[b], end = s.num_keys;
    if (c.left >= 0) begin = std::max(begin, position - c.left);
    if (c.right >= 0) end = std::min(end, position + c.right + 1);
    return {std::min(std::max(begin, 0), s.num_keys), end};
  }

  int tree_words() const { return c.tree ? (c.seqlen_q + 31) / 32 : 0; }

  // Whether the tree shows a key to a query.
  bool shows(int b, int query, const DecodeSequence& s, int key) const {
    const int token = key - (s.num_keys - s.num_queries);
    if (!c.tree || token < 0) return true;
    const int row = (c.cu_q.empty() ? b * total_q : 0) + s.offset + query;
    return tree[row * kTreeStride + token / 32] >> token % 32 & 1;
  }

  static constexpr int kPrefix = -2;  // in place of an entry of the page table
  static int pages_of_prefix(const DecodeCase& c) {
    return c.prefix < 0 ? 0 : c.prefix / c.page_size + 1;
  }

  std::pair<int, int> place(int cache_idx, int key) const {
    if (cache_idx == kPrefix) return {prefix_pages[key / c.page_size], key % c.page_size};
    if (!c.page_size) return {cache_idx, key};
    return {table[cache_idx * max_pages + key / c.page_size], key % c.page_size};
  }

  const uint16_t* out_of(const RowReference& r) const {
    return out.row(c.cu_q.empty() ? r.b : 0, sequence(r.b).offset + r.row, r.h);
  }
  float lse_of(const RowReference& r) const {
    return lse[lse_index(r.b, sequence(r.b), r.row, r.h)];
  }
  int64_t lse_index(int b, const DecodeSequence& s, int query, int h) const {
    const int64_t batch_coord = c.cu_q.empty() ? b : 0;
    return (batch_coord * c.heads_q + h) * total_q + s.offset + query;
  }
};

// The bounds are the errors of rounding P and out to 16 bits, and of fp32 scores, which grow with
// the scores.
inline void compute_row(DecodeProblem& problem, RowReference& row) {
  const DecodeCase& c = problem.c;
  const DecodeSequence s = problem.sequence(row.b);
  const auto [begin, end] = problem.visible(row.b, row.row, s);
  const int kv = row.h / (c.heads_q / c.heads_kv);
  const auto value = [&](const std::vector<float>& x) {
    return double{problem.head_descale(x, row.b, kv)};
  };
  const double scale = (c.scale != 0.f ? c.scale : 1 / std::sqrt(double(c.head_dim))) *
                       value(problem.q_descale) * value(problem.k_descale);
  const uint16_t* q = problem.q.row(c.cu_q.empty() ? row.b : 0, s.offset + row.row, row.h);
  // The row's keys: those of the prefix come first.
  const int of_prefix = std::max(0, c.prefix), count = of_prefix + std::max(0, end - begin);
  const auto place = [&, first = begin](int i) {
    if (i < of_prefix) return problem.place(problem.kPrefix, i);
    return problem.place(s.cache_idx, first + i - of_prefix);
  };
  std::vector<double> p(count);
  double largest = 0;
  for (int i_key = 0; i_key < count; ++i_key) {
    double x = std::numeric_limits<double>::quiet_NaN();
    if (s.cache_idx >= 0 || i_key < of_prefix) {
      const auto [page, slot] = place(i_key);
      if (page < problem.num_pages) {
        const uint16_t* k = problem.k.row(page, slot, kv);
        x = 0;
        for (int i = 0; i < c.head_dim; ++i) {
          x += double{to_float(q[i], c.fp16)} * problem.cached(k[i]);
        }
        x *= problem.key_descale(problem.k_key_descale, page, slot, kv);
      }
    }
    x *= scale;
    largest = std::max(largest, std::fabs(x));
    if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
    if (!problem.shows(row.b, row.row, s, begin + i_key - of_prefix)) x = -INFINITY;
    p[i_key] = x;
  }
  row.lse = softmax(p, problem.sinks.empty() ? -INFINITY : problem.sinks[row.h]);
  row.sum(p, problem.v.dim, [&](int i_key) {
    const auto [page, slot] = place(i_key);
    const double descale =
        value(problem.v_descale) * problem.key_descale(problem.v_key_descale, page, slot, kv);
    return [&problem, descale, v = problem.v.row(page, slot, kv)](int i) {
      return descale * problem.cached(v[i]);
    };
  });
  const double of_out = c.fp16 ? 0x1p-11 : 0x1p-8, of_p = c.has_bytes() ? 0x1p-11 : of_out;
  const double score_error = 2e-6;
  for (size_t i = 0; i < row.bound.size(); ++i) {
    const double& sum = row.bound[i];                                    // of |p v|
    const double rounded = of_p * sum + of_out * std::fabs(row.out[i]);  // each P, then out
    row.bound[i] = rounded + 2 * score_error * largest * sum + 1e-6;
  }
  row.lse_bound = 1e-4 + score_error * largest;
}

// How many elements of out a launch wrote that no row has: an error message, or "".
inline std::string check_coverage(DecodeProblem& p) {
  const auto rows_of = [&](int b) -> Rows {
    const DecodeSequence s = p.sequence(b);
    return {p.c.cu_q.empty() ? b : 0, s.offset, s.num_queries};
  };
  const std::vector<uint8_t> owners = owners_of(p.out, p.c.batch, rows_of, false);
  int64_t stray = 0;
  for (size_t i = 0; i < owners.size(); ++i) stray += !owners[i] && p.out.host[i] != kNaN;
  return stray == 0 ? "" : " " + std::to_string(stray) + " elements written outside;";
}

inline std::vector<RowReference> reference_rows(DecodeProblem& p) {
  std::vector<RowReference> rows;
  for (int b = 0; b < p.c.batch; b += p.c.batch > 50 ? 13 : 1) {
    const int queries = p.sequence(b).num_queries;
    for (int query = 0; query < queries; query += queries > 20 ? 7 : 1) {
      for (int h = 0; h < p.c.heads_q; h += p.c.heads_q > 32 ? 5 : 1) {
        rows.push_back({b, h, query, {}, {}, 0, 0});
      }
    }
  }
  in_parallel(rows.size(), [&](int64_t i) { compute_row(p, rows[i]); });
  return rows;
}

// The parameters of a problem. memory(tensor), memory(table): where the kernel finds it.
template <class Memory>
flashattn3::ByteDecodeParams make_params(DecodeProblem& p, Memory&& memory, float* lse) {
  const DecodeCase& c = p.c;
  const auto data = [&](Tensor& tensor, const std::vector<uint8_t>& bytes) {
    return c.has_bytes() ? static_cast<const void*>(memory(bytes) + kGuard)
                         : static_cast<const void*>(memory(tensor));
  };
  const auto key_descale = [&](const std::vector<float>& of) -> flashattn3::KeyDescaleParams {
    const int tokens = p.descales_of_page();
    const flashattn3::Strides stride{int64_t{tokens} * c.heads_kv, tokens > 1 ? c.heads_kv : 0, 1};
    return {of.empty() ? nullptr : memory(of), stride};
  };
  flashattn3::Strides q_stride = p.q.stride;
  if (c.batch == 1) q_stride.batch = -8;  // which no kernel may need
  return {{.q = memory(p.q),
           .out = memory(p.out),
           .lse = lse,
           .q_stride = q_stride,
           .out_stride = p.out.stride,
           .lse_stride = {int64_t{p.total_q} * c.heads_q, 1, p.total_q},
           .k = {data(p.k, p.k_bytes), p.k.stride},
           .v = {data(p.v, p.v_bytes), p.v.stride},
           .page_table = memory(p.table),
           .cache_seqlens = memory(c.seqlens),
           .cu_seqlens_q = memory(c.cu_q),
           .cu_seqlens_k_new = memory(c.cu_new),
           .cache_leftpad = memory(c.leftpad),
           .cache_batch_idx = memory(c.cache_idx),
           .page_table_stride = p.max_pages,
           .q_descale = memory(p.q_descale),
           .k_descale = memory(p.k_descale),
           .v_descale = memory(p.v_descale),
           .sinks = memory(p.sinks),
           .batch = c.batch,
           .seqlen_q = c.seqlen_q,
           .total_q = p.total_q,
           .seqlen_k = c.capacity,
           .seqlen_new = c.seqlen_new,
           .num_heads_q = c.heads_q,
           .num_heads_kv = c.heads_kv,
           .head_dim = c.head_dim,
           .head_dim_v = p.v.dim,
           .num_caches = p.num_caches,
           .num_pages = p.num_pages,
           .page_size = c.page_size,
           .capacity = c.capacity,
           .softmax_scale = c.scale != 0.f ? c.scale : 1.f / std::sqrt(float(c.head_dim)),
           .softcap = c.softcap,
           .window_left = c.left,
           .window_right = c.right,
           .split_tokens = c.spans,
           .whole_tiles = false,
           .num_sms = 0,
           .workspace = nullptr,
           .counters = nullptr,
           .pdl = false,
           .q_descale_stride = p.stride_of(p.q_descale),
           .k_descale_stride = p.stride_of(p.k_descale),
           .v_descale_stride = p.stride_of(p.v_descale),
           .tree_mask = memory(p.tree),
           .tree_words = p.tree_words(),
           .tree_stride = {int64_t{p.total_q} * p.kTreeStride, p.kTreeStride, 0},
           .prefix_pages = memory(p.prefix_pages),
           .prefix_len = c.prefix,
           .prefix_capacity = static_cast<int>(p.prefix_pages.size()) * c.page_size},
          key_descale(p.k_key_descale),
          key_descale(p.v_key_descale),
          c.int8};
}
