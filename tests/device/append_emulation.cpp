// Runs the append kernel on the CPU (emulation/emulation.h) on random problems and compares every
// element of the caches and of the rotated q with fp64; all others keep their bits.
//   append_emulation [count [first]]
//       count: of problems (300), with seeds from `first` on
// Exit code 0: all correct, 1: wrong values, a deadlock, or no case.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string>

#include "append/kernel.cuh"
#include "command_line.h"
#include "launch/append_arguments.h"
#include "run_grid.h"
#include "tensors.h"

using namespace flashattn3;

alignas(1024) static uint8_t shared[emulation::kSharedBytes];

// A tensor (batch, seq, heads, columns) with its axes in some order, with gaps, between guards.
struct Strided {
  static constexpr int kGuard = 64;
  int size[4];
  int64_t stride[3];
  int64_t offset;
  std::vector<uint16_t> bits;

  template <class Random>
  void make(Random&& random, const std::array<int, 4>& sizes, bool aligned, bool fp16) {
    std::copy(sizes.begin(), sizes.end(), size);
    const int unit = aligned ? 8 : 1;
    offset = kGuard + (aligned ? 0 : random() % 8);
    int64_t next = (size[3] + unit - 1) / unit * unit;
    int axes[3] = {2, 1, 0};
    std::shuffle(axes, axes + 3, random);
    for (const int axis : axes) {
      next += random() % 3 * unit;
      stride[axis] = size[axis] == 1 ? 0 : next;
      next *= std::max(size[axis], 1);
    }
    bits.resize(next + 2 * kGuard);
    for (uint16_t& x : bits) {
      x = to_bits(static_cast<float>(random() % 20001) / 5000.f - 2.f, fp16);
    }
  }
  uint16_t* data() { return bits.data() + offset; }
  int64_t at(int b, int s, int h, int column) const {
    return offset + b * stride[0] + s * stride[1] + h * stride[2] + column;
  }
  Strides strides() const { return {stride[0], stride[1], stride[2]}; }
};

// The wanted contents of a buffer. Nothing: the bits from before.
using Wanted = std::vector<std::optional<double>>;

struct Problem {
  std::mt19937 random;
  bool fp16, paged, ragged, ragged_q, has_q;
  int batch, heads_kv, heads_q, dim, dim_v, half, page_size, capacity, caches, pages;
  int tokens, tokens_q;  // of all sequences
  Strided k, v, q, k_cache, v_cache, q_out;
  std::vector<int32_t> table, lengths, cache_idx, edges, edges_q, offsets;
  std::vector<float> cos, sin, k_descale, v_descale;
  std::vector<uint16_t> cos_bits, sin_bits;
  int64_t table_stride = 0, angle_stride = 1;
  AppendParams params{};

  int below(int bound) { return static_cast<int>(random() % bound); }
  bool one_in(int n) { return below(n) == 0; }
  int one_of(std::initializer_list<int> values) {
    return values.begin()[below(static_cast<int>(values.size()))];
  }

  explicit Problem(uint32_t seed) : random(seed) {
    fp16 = one_in(2), paged = one_in(2), ragged = one_in(3), ragged_q = one_in(3);
    batch = one_in(20) ? 0 : 1 + below(6);
    heads_kv = one_in(4) ? 1 + below(9) : 1 + below(3);
    dim = one_of({8, 16, 24, 64, 64, 128, 128, 256, 36, 10});
    dim_v = one_in(2) ? dim : one_of({8, 40, 128, 17});
    page_size = one_of({1, 3, 8, 16});
    const int width = 1 + below(6);
    capacity = paged ? width * page_size : 1 + below(60);
    caches = batch + below(3);
    pages = paged ? caches * width + below(3) : 0;
    half = one_in(3) ? 0 : one_of({dim / 2, dim / 2, 1 + below(dim / 2), dim / 4});
    if (one_in(2) && half > 8) half = half / 8 * 8;
    has_q = half > 0 && !one_in(3);
    heads_q = has_q ? heads_kv * (1 + below(4)) : 0;
    make_edges(edges, tokens, ragged, params.k.seqlen);
    make_edges(edges_q, tokens_q, ragged_q, params.q.seqlen);
    make_tensors();
    make_tables();
    fill_params();
  }

  void make_edges(std::vector<int32_t>& edges, int& tokens, bool ragged, int& seqlen) {
    const int longest = one_in(10) ? 0 : 1 + below(12);
    tokens = seqlen = longest;
    if (!ragged) {
      tokens *= batch;
      return;
    }
    edges.push_back(one_in(8) ? below(3) : 0);
    for (int b = 0; b < batch; ++b) edges.push_back(edges.back() + below(longest + 1));
    tokens = std::max(edges.back() + (one_in(4) ? below(4) : 0) - (one_in(8) ? 2 : 0), 0);
    if (one_in(8) && batch > 1) edges[1 + below(batch)] = one_of({-5, INT_MIN, INT_MAX, 3});
    seqlen = tokens;
  }

  void make_tensors() {
    const auto make = [&](Strided& x, std::array<int, 4> sizes) {
      x.make(random, sizes, !one_in(5), fp16);
    };
    const auto rows = [&](bool ragged, int tokens, int seqlen, int heads, int columns) {
      return ragged ? std::array{1, tokens, heads, columns}
                    : std::array{batch, seqlen, heads, columns};
    };
    make(k, rows(ragged, tokens, params.k.seqlen, heads_kv, dim));
    make(v, rows(ragged, tokens, params.k.seqlen, heads_kv, dim_v));
    make(q, rows(ragged_q, tokens_q, params.q.seqlen, heads_q, dim));
    make(q_out, rows(ragged_q, tokens_q, params.q.seqlen, heads_q, dim));
    const int places = paged ? pages : caches, slots = paged ? page_size : capacity;
    make(k_cache, {places, slots, heads_kv, dim});
    make(v_cache, {places, slots, heads_kv, dim_v});
  }

  void make_tables() {
    if (paged) {
      const int width = capacity / page_size;
      table_stride = width + below(3);
      table.assign(caches * table_stride, -9);
      std::vector<int32_t> order(pages);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (int c = 0; c < caches; ++c) {
        for (int i = 0; i < width; ++i) {
          table[c * table_stride + i] =
              one_in(10) ? one_of({-1, pages, INT_MAX, INT_MIN}) : order[c * width + i];
        }
      }
    }
    if (!one_in(4)) {
      for (int b = 0; b < batch; ++b) {
        lengths.push_back(one_in(6) ? one_of({-3, INT_MAX, INT_MIN, capacity, capacity + 1})
                                    : below(capacity + 1));
      }
    }
    if (one_in(2)) {
      std::vector<int32_t> order(caches);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      cache_idx.assign(order.begin(), order.begin() + batch);
      for (int32_t& index : cache_idx) {
        if (one_in(10)) index = one_of({-1, caches, INT_MAX, INT_MIN});
      }
    }
    if (half == 0) return;
    if (one_in(3)) {
      for (int b = 0; b < batch; ++b) {
        offsets.push_back(one_in(8) ? one_of({-2, INT_MAX, INT_MIN}) : below(50));
      }
    }
    params.num_positions = one_in(4) ? below(20) : 80;
    angle_stride = half + below(2) * below(9);
    for (int64_t i = 0; i < params.num_positions * angle_stride + 8; ++i) {
      const double angle = below(1000) / 150.0;
      cos_bits.push_back(to_bits(static_cast<float>(std::cos(angle)), fp16));
      sin_bits.push_back(to_bits(static_cast<float>(std::sin(angle)), fp16));
      cos.push_back(static_cast<float>(std::cos(angle)));
      sin.push_back(static_cast<float>(std::sin(angle)));
    }
    params.rotary_is_fp32 = one_in(2);
    if (!params.rotary_is_fp32) {
      for (size_t i = 0; i < cos.size(); ++i) {
        cos[i] = static_cast<float>(to_float(cos_bits[i], fp16));
        sin[i] = static_cast<float>(to_float(sin_bits[i], fp16));
      }
    }
  }

  AppendTensor tensor(Strided& from, Strided& to, int seqlen, const std::vector<int32_t>& edges,
                      const std::vector<float>& descale) {
    return {.from = from.data(),
            .to = to.data(),
            .from_stride = from.strides(),
            .to_stride = to.strides(),
            .seqlen = seqlen,
            .num_heads = from.size[2],
            .head_dim = from.size[3],
            .cu_seqlens = edges.empty() ? nullptr : edges.data(),
            .descale = descale.empty() ? nullptr : descale.data(),
            .descale_batch = 1,
            .descale_head = std::max(batch, 1)};
  }

  void fill_params() {
    for (std::vector<float>* descale : {&k_descale, &v_descale}) {
      if (!one_in(3)) continue;
      for (int i = 0; i < std::max(batch, 1) * heads_kv; ++i) {
        descale->push_back(one_in(4) ? 1.f : 0.5f + below(100) / 100.f);
      }
    }
    params.dtype = fp16 ? ElementType::kFloat16 : ElementType::kBFloat16;
    params.k = tensor(k, k_cache, params.k.seqlen, edges, k_descale);
    params.v = tensor(v, v_cache, params.k.seqlen, edges, v_descale);
    params.q = tensor(q, q_out, params.q.seqlen, edges_q, {});
    params.batch = batch;
    const auto indices = [](const std::vector<int32_t>& x) {
      return x.empty() ? nullptr : x.data();
    };
    params.page_table = indices(table);
    params.cache_seqlens = indices(lengths);
    params.cache_batch_idx = indices(cache_idx);
    params.rotary_seqlens = indices(offsets);
    params.page_table_stride = table_stride;
    params.page_size = page_size, params.num_pages = pages;
    params.num_caches = caches, params.capacity = capacity;
    params.seqlen_k = one_in(3) ? capacity + 1 : below(capacity + 1);
    if (half > 0) {
      params.rotary_cos = params.rotary_is_fp32 ? static_cast<void*>(cos.data()) : cos_bits.data();
      params.rotary_sin = params.rotary_is_fp32 ? static_cast<void*>(sin.data()) : sin_bits.data();
      params.rotary_stride = angle_stride;
      params.rotary_dim = 2 * half;
      params.rotary_interleaved = one_in(2);
      params.one_q_position = one_in(3);
    }
  }

  // Sequence and index of a token; -1: none.
  static std::pair<int, int> owner(const std::vector<int32_t>& edges, int seqlen, int token) {
    if (edges.empty()) return {token / seqlen, token % seqlen};
    for (size_t b = 0; b + 1 < edges.size(); ++b) {
      const int64_t begin = edges[b], end = edges[b + 1];
      if (begin >= 0 && begin <= token && token < end) {
        return {static_cast<int>(b), static_cast<int>(token - begin)};
      }
    }
    return {-1, 0};
  }

  int cached(int b) const {
    const int given = lengths.empty() ? params.seqlen_k : lengths[b];
    return std::clamp(given, 0, capacity);
  }

  // Columns of a head, as they are written. position_shift: of the token in its sequence.
  std::vector<double> turned(const Strided& x, int b, int s, int h, int sequence, int shift,
                             bool rotates) const {
    std::vector<double> columns;
    for (int i = 0; i < x.size[3]; ++i) columns.push_back(to_float(x.bits[x.at(b, s, h, i)], fp16));
    if (!rotates) return columns;
    const int64_t position =
        int64_t{offsets.empty() ? cached(sequence) : offsets[sequence]} + shift;
    const bool known = position >= 0 && position < params.num_positions;
    for (int pair = 0; pair < half; ++pair) {
      const int first = params.rotary_interleaved ? 2 * pair : pair;
      const int second = params.rotary_interleaved ? first + 1 : pair + half;
      const double c = known ? cos[position * angle_stride + pair] : NAN;
      const double s = known ? sin[position * angle_stride + pair] : NAN;
      const double low = columns[first], high = columns[second];
      columns[first] = low * c - high * s, columns[second] = low * s + high * c;
    }
    return columns;
  }

  void expect_cache(Strided& from, Strided& cache, const std::vector<float>& descale, bool rotates,
                    Wanted& wanted) const {
    for (int token = 0; token < tokens; ++token) {
      const auto [b, i] = owner(edges, params.k.seqlen, token);
      if (b < 0) continue;
      const int64_t key = int64_t{cached(b)} + i;
      if (key >= capacity) continue;
      int place = cache_idx.empty() ? b : cache_idx[b], slot = static_cast<int>(key);
      if (place < 0 || place >= caches) continue;
      if (paged) {
        place = table[place * table_stride + key / page_size], slot = key % page_size;
        if (place < 0 || place >= pages) continue;
      }
      for (int h = 0; h < heads_kv; ++h) {
        const std::vector<double> columns =
            turned(from, ragged ? 0 : b, ragged ? token : i, h, b, i, rotates && half > 0);
        const double scale = descale.empty() ? 1 : descale[h * std::max(batch, 1) + b];
        for (size_t c = 0; c < columns.size(); ++c) {
          wanted[cache.at(place, slot, h, static_cast<int>(c))] = columns[c] / scale;
        }
      }
    }
  }

  void expect_queries(Wanted& wanted) const {
    for (int token = 0; token < tokens_q && has_q; ++token) {
      const auto [b, i] = owner(edges_q, params.q.seqlen, token);
      const int at_b = ragged_q ? 0 : b, at_s = ragged_q ? token : i;
      for (int h = 0; h < heads_q; ++h) {
        const std::vector<double> columns =
            turned(q, at_b, at_s, h, b, params.one_q_position ? 0 : i, b >= 0);
        for (int c = 0; c < dim; ++c) wanted[q_out.at(at_b, at_s, h, c)] = columns[c];
      }
    }
  }

  // Elements of a tensor, without the gaps between them.
  static std::vector<bool> elements(const Strided& x) {
    std::vector<bool> inside(x.bits.size());
    for (int64_t i = 0; i < int64_t{x.size[0]} * x.size[1] * x.size[2] * x.size[3]; ++i) {
      const int64_t token = i / x.size[3] / x.size[2];
      inside[x.at(static_cast<int>(token / x.size[1]), static_cast<int>(token % x.size[1]),
                  static_cast<int>(i / x.size[3] % x.size[2]), static_cast<int>(i % x.size[3]))] =
          true;
    }
    return inside;
  }

  // Returns an error message, or "". Edges that do not ascend may write any element of the tensor.
  std::string compare(const char* name, const Strided& found, const std::vector<uint16_t>& before,
                      const Wanted& wanted, bool ascends) const {
    const double unit = fp16 ? 0x1p-11 : 0x1p-8;
    const std::vector<bool> free = ascends ? std::vector<bool>(wanted.size()) : elements(found);
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (free[i]) continue;
      const double x = to_float(found.bits[i], fp16);
      if (!wanted[i]) {
        if (found.bits[i] == before[i]) continue;
        return std::string(name) + ": an element that is not new was written, " + std::to_string(i);
      }
      if (std::isnan(*wanted[i])
              ? std::isnan(x)
              : std::abs(x - *wanted[i]) <= std::abs(*wanted[i]) * unit + 0x1p-20) {
        continue;
      }
      return std::string(name) + ": wanted " + std::to_string(*wanted[i]) + " found " +
             std::to_string(x) + " at " + std::to_string(i);
    }
    return "";
  }

  std::string run() {
    append::Arguments args = make_append_arguments(params);
    for (append::Tensor& tensor : args.tensors) {  // as with many tokens
      if (tensor.num_ctas == 0 || one_in(3)) continue;
      const int groups = append::kThreads / tensor.items.divisor;
      const int head_groups = 1 + below(std::min(groups, tensor.num_heads));
      tensor.head_groups = cutlass::FastDivmod(head_groups);
      tensor.tokens_per_cta = one_in(2) ? groups / head_groups : 1 + below(groups / head_groups);
      tensor.num_ctas = (tensor.num_tokens + tensor.tokens_per_cta - 1) / tensor.tokens_per_cta;
    }
    const std::vector<uint16_t> before[] = {k_cache.bits, v_cache.bits, q_out.bits};
    const auto kernel = [&] {
      if (fp16) {
        append::append_kernel<ElementType::kFloat16>(args);
      } else {
        append::append_kernel<ElementType::kBFloat16>(args);
      }
    };
    const emulation::Grid grid{num_append_ctas(args), append::kThreads};
    if (!emulation::run(kernel, grid, 1)) return "deadlock";
    Wanted wanted[] = {Wanted(k_cache.bits.size()), Wanted(v_cache.bits.size()),
                       Wanted(q_out.bits.size())};
    expect_cache(k, k_cache, k_descale, true, wanted[0]);
    expect_cache(v, v_cache, v_descale, false, wanted[1]);
    expect_queries(wanted[2]);
    const bool ascends = std::is_sorted(edges.begin(), edges.end());
    const bool ascends_q = std::is_sorted(edges_q.begin(), edges_q.end());
    std::string wrong = compare("k_cache", k_cache, before[0], wanted[0], ascends);
    if (wrong.empty()) wrong = compare("v_cache", v_cache, before[1], wanted[1], ascends);
    if (wrong.empty()) wrong = compare("q", q_out, before[2], wanted[2], ascends_q);
    return wrong;
  }

  void print() const {
    std::printf("%s batch %d heads %d/%d dim %d/%d half %d%s %s%s%s tokens %d/%d capacity %d%s%s%s",
                fp16 ? "fp16" : "bf16", batch, heads_q, heads_kv, dim, dim_v, half,
                params.rotary_interleaved ? " interleaved" : "", paged ? "paged " : "dense ",
                ragged ? "ragged " : "", ragged_q ? "ragged q " : "", tokens, tokens_q, capacity,
                k_descale.empty() ? "" : " k_descale", v_descale.empty() ? "" : " v_descale",
                offsets.empty() ? "" : " offsets");
  }
};

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 300, first = argc > 2 ? std::atoi(argv[2]) : 0;
  emulation::shared_memory = shared;
  int vectors = 0;
  Tally tally;
  for (int i = 0; i < count; ++i) {
    Problem problem(first + i);
    const append::Arguments args = make_append_arguments(problem.params);
    vectors += args.tensors[append::kK].vectors;
    const std::string wrong = problem.run();
    std::printf("%s  %5d  ", wrong.empty() ? "PASS" : "FAIL", first + i);
    problem.print();
    std::printf("%s%s\n", wrong.empty() ? "" : "\n     ", wrong.c_str());
    std::fflush(stdout);
    tally.add(wrong.empty());
  }
  std::printf("%d with vectors of K\n", vectors);
  return tally.finish();
}
