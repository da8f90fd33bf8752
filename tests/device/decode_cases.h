// The problems that decode_check runs.
#pragma once

#include <climits>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "decode_problem.h"

inline std::vector<DecodeCase> decode_cases() {
  return {
      {.name = "one key", .capacity = 1},
      {.name = "one KV block", .capacity = 64},
      {.name = "one key more", .capacity = 65},
      {.name = "three KV blocks", .capacity = 190, .seqlens = {190}},
      {.name = "no keys", .capacity = 64, .seqlens = {0}},
      {.name = "one sequence", .capacity = 5000, .seqlens = {4321}},
      {.name = "one KV head, long", .heads_q = 8, .capacity = 40000, .seqlens = {39999}},
      {.name = "two levels of groups", .heads_q = 8, .heads_kv = 2, .capacity = 2500},
      {.name = "two full levels", .heads_q = 8, .heads_kv = 2, .capacity = 30000},
      {.name = "32/8 heads", .heads_q = 32, .heads_kv = 8, .capacity = 1024},
      {.name = "32/32 heads", .heads_q = 32, .heads_kv = 32, .capacity = 300},
      {.name = "qheads 5", .seqlen_q = 3, .heads_q = 10, .heads_kv = 2, .right = 0},
      {.name = "qheads 7, 20 queries", .seqlen_q = 20, .heads_q = 7, .right = 0},
      {.name = "qheads 16", .heads_q = 16, .capacity = 700},
      {.name = "qheads 64", .heads_q = 64, .capacity = 700},
      {.name = "qheads 80", .heads_q = 80, .capacity = 700},
      {.name = "qheads 128, two KV heads", .heads_q = 256, .heads_kv = 2, .capacity = 333},
      {.name = "ragged lengths",
       .batch = 7,
       .heads_q = 8,
       .heads_kv = 2,
       .capacity = 3000,
       .seqlens = {0, 1, 64, 65, 2999, 3000, 777}},
      {.name = "one long, many short",
       .batch = 33,
       .heads_q = 8,
       .heads_kv = 2,
       .capacity = 9000,
       .seqlens = {40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 9000,
                   40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40, 40}},
      {.name = "one long of 32",
       .batch = 32,
       .heads_q = 8,
       .capacity = 9000,
       .seqlens = {40, 40, 40, 40, 40, 40, 40, 40, 40, 40,   40, 40, 40, 40, 0,  40,
                   40, 40, 40, 40, 40, 40, 40, 40, 40, 9000, 40, 40, 40, 40, 40, 40}},
      {.name = "9 query heads", .heads_q = 9, .capacity = 700},
      {.name = "12 short work tiles",
       .batch = 6,
       .heads_q = 4,
       .heads_kv = 2,
       .capacity = 130,
       .seqlens = {130, 65, 129, 128, 100, 70}},
      {.name = "400 sequences",
       .batch = 400,
       .heads_q = 2,
       .capacity = 130,
       .seqlens = std::vector<int>(400, 129)},
      {.name = "causal, 4 queries", .seqlen_q = 4, .heads_q = 8, .heads_kv = 2, .right = 0},
      {.name = "causal, 64 queries", .seqlen_q = 64, .heads_q = 4, .heads_kv = 2, .right = 0},
      {.name = "causal, 300 queries", .seqlen_q = 300, .heads_q = 4, .heads_kv = 2, .right = 0},
      {.name = "more queries than keys",
       .seqlen_q = 70,
       .heads_q = 2,
       .capacity = 100,
       .seqlens = {33},
       .right = 0},
      {.name = "window", .seqlen_q = 3, .heads_q = 8, .capacity = 2000, .left = 128, .right = 0},
      {.name = "window of one key", .heads_q = 8, .capacity = 2000, .left = 0, .right = 0},
      {.name = "window, both sides",
       .seqlen_q = 40,
       .heads_q = 2,
       .capacity = 500,
       .left = 20,
       .right = 5},
      {.name = "varlen queries",
       .batch = 4,
       .seqlen_q = 33,
       .heads_q = 8,
       .heads_kv = 2,
       .seqlens = {999, 1000, 5, 300},
       .cu_q = {0, 1, 34, 34, 40},
       .right = 0},
      {.name = "new tokens",
       .batch = 2,
       .heads_q = 4,
       .seqlens = {100, 999},
       .seqlen_new = 3,
       .right = 0},
      {.name = "new tokens, varlen",
       .batch = 3,
       .heads_q = 4,
       .seqlens = {100, 999, 64},
       .cu_new = {0, 1, 1, 9}},
      {.name = "left padding", .batch = 2, .seqlens = {700, 10}, .leftpad = {300, 20}},
      {.name = "cache_batch_idx", .batch = 3, .seqlens = {700, 10, 333}, .cache_idx = {4, 0, 2}},
      {.name = "an entry that does not exist",
       .batch = 2,
       .seqlens = {700, 70},
       .cache_idx = {5, 0}},
      {.name = "hostile lengths", .batch = 2, .capacity = 90, .seqlens = {INT_MAX, INT_MIN}},
      {.name = "softcap", .heads_q = 8, .softcap = 5.f},
      {.name = "sinks", .heads_q = 8, .heads_kv = 2, .capacity = 2000, .sinks = true},
      {.name = "sinks, no keys", .heads_q = 8, .seqlens = {0}, .sinks = true},
      {.name = "descales", .batch = 3, .heads_q = 8, .heads_kv = 2, .descales = true},
      {.name = "descales, softcap",
       .batch = 3,
       .heads_q = 8,
       .heads_kv = 2,
       .softcap = 3.f,
       .descales = true},
      {.name = "scores grow", .heads_q = 8, .capacity = 3000, .grows = true},
      {.name = "negative scale", .heads_q = 8, .scale = -0.1f},
      {.name = "page 1", .batch = 2, .heads_q = 8, .page_size = 1, .seqlens = {999, 65}},
      {.name = "page 3", .batch = 2, .heads_q = 8, .page_size = 3, .seqlens = {999, 65}},
      {.name = "page 16", .batch = 2, .heads_q = 8, .page_size = 16, .seqlens = {999, 65}},
      {.name = "page 64, heads first",
       .batch = 2,
       .heads_q = 8,
       .heads_kv = 2,
       .page_size = 64,
       .seqlens = {999, 65},
       .head_major = true},
      {.name = "page 256, padded rows",
       .batch = 2,
       .heads_q = 8,
       .heads_kv = 2,
       .page_size = 256,
       .seqlens = {999, 257},
       .padding = 8},
      {.name = "page 16, window", .page_size = 16, .left = 100, .right = 0},
      {.name = "a lost page", .batch = 2, .page_size = 64, .lost_page = true},
      {.name = "a lost page before the window",
       .page_size = 64,
       .left = 100,
       .right = 0,
       .lost_page = true},
      {.name = "d64", .batch = 2, .heads_q = 64, .heads_kv = 8, .head_dim = 64},
      {.name = "d64, window, sinks, page 16",
       .heads_q = 64,
       .heads_kv = 8,
       .head_dim = 64,
       .page_size = 16,
       .left = 127,
       .right = 0,
       .sinks = true},
      {.name = "d64, window, sinks, one sequence",
       .heads_q = 64,
       .heads_kv = 8,
       .head_dim = 64,
       .capacity = 3000,
       .left = 127,
       .right = 0,
       .sinks = true},
      {.name = "d256, page 3", .heads_q = 8, .head_dim = 256, .page_size = 3, .seqlens = {999}},
      {.name = "d40, values 24", .heads_q = 8, .head_dim = 40, .head_dim_v = 24, .padding = 8},
      {.name = "d80, values 72", .heads_q = 8, .head_dim = 80, .head_dim_v = 72, .page_size = 16},
      {.name = "d192, values 128", .heads_q = 8, .head_dim = 192, .head_dim_v = 128},
      {.name = "d256", .batch = 2, .heads_q = 8, .head_dim = 256, .capacity = 800},
      {.name = "d256, 51 queries", .seqlen_q = 51, .heads_q = 8, .head_dim = 256, .capacity = 851},
      {.name = "d256, page 16, long",
       .heads_q = 8,
       .head_dim = 256,
       .capacity = 20000,
       .page_size = 16},
      {.name = "fp16", .fp16 = true, .batch = 2, .heads_q = 8, .heads_kv = 2, .capacity = 3000},
      {.name = "fp16 d64", .fp16 = true, .heads_q = 8, .head_dim = 64, .page_size = 16},
      {.name = "fp16 d256", .fp16 = true, .heads_q = 8, .head_dim = 256, .capacity = 3000},
  };
}

// A problem with every option at random, alone and with others. It has at most `most` KV blocks of
// work tiles, so that the emulation computes it in seconds.
inline DecodeCase random_decode_case(uint32_t seed, int most) {
  std::mt19937 random(seed);
  const auto below = [&](int bound) { return static_cast<int>(random() % bound); };
  const auto pick = [&](std::initializer_list<int> of) { return of.begin()[below(of.size())]; };
  const auto one_in = [&](int n) { return below(n) == 0; };
  while (true) {
    DecodeCase c{.name = "random " + std::to_string(seed), .fp16 = one_in(2)};
    c.batch = 1 + below(5), c.heads_kv = 1 + below(3);
    c.heads_q = c.heads_kv * pick({1, 2, 3, 4, 5, 7, 8, 16, 64, 72});
    c.head_dim = one_in(2) ? pick({64, 128, 256}) : 8 * (1 + below(32));
    c.head_dim_v = one_in(2) ? c.head_dim : 8 * (1 + below(c.head_dim / 8));
    c.seqlen_q = pick({1, 1, 1, 2, 3, 5, 17, 64});
    c.page_size = pick({0, 0, 1, 2, 3, 8, 16, 17, 64, 100, 128});
    const int pages = 1 + below(700) / std::max(1, c.page_size);
    c.capacity = c.page_size ? pages * c.page_size : 1 + below(700);
    for (int b = 0; b < c.batch && !one_in(5); ++b) c.seqlens.push_back(below(c.capacity + 9) - 4);
    if (static_cast<int>(c.seqlens.size()) != c.batch) c.seqlens.clear();
    if (one_in(3)) {
      c.cu_q.push_back(0);
      for (int b = 0; b < c.batch; ++b) c.cu_q.push_back(c.cu_q.back() + below(c.seqlen_q + 1));
      if (c.cu_q.back() == 0) continue;
    }
    if (one_in(4)) c.seqlen_new = below(4);
    if (one_in(4)) {
      c.cu_new.push_back(0);
      for (int b = 0; b < c.batch; ++b) c.cu_new.push_back(c.cu_new.back() + below(4));
    }
    for (int b = 0, given = one_in(4); b < c.batch * given; ++b) {
      c.leftpad.push_back(below(c.capacity));
    }
    for (int b = 0, given = one_in(4); b < c.batch * given; ++b) {
      c.cache_idx.push_back(below(c.batch + 3));  // the last entry does not exist
    }
    if (one_in(3)) c.left = below(c.capacity + 5);
    if (one_in(2)) c.right = one_in(3) ? below(9) : 0;
    if (one_in(4)) c.softcap = 1.f + below(20);
    if (one_in(4)) c.scale = 0.01f * (below(61) - 30.5f);
    c.sinks = one_in(4), c.descales = one_in(4), c.head_major = one_in(3), c.grows = one_in(6);
    c.padding = 8 * one_in(3);
    c.lost_page = c.page_size > 0 && pages > 1 && c.cache_idx.empty() && one_in(6);
    const int tiles = (c.seqlen_q * (c.heads_q / c.heads_kv) + 63) / 64;
    const int blocks = (c.capacity + 63) / 64 * c.batch * c.heads_kv * tiles;
    if (blocks <= most) return c;
  }
}
