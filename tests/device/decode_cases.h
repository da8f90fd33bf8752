// The problems that decode_check runs.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "decode_problem.h"

constexpr const char* kDecodeCases = R"(
one key | capacity 1
one KV block | capacity 64
one key more | capacity 65
three KV blocks | capacity 190, seqlens 190
no keys | capacity 64, seqlens 0
one sequence | capacity 5000, seqlens 4321
one KV head, long | heads 8, capacity 40000, seqlens 39999
two levels of groups | heads 8 2, capacity 2500
two full levels | heads 8 2, capacity 30000
32/8 heads | heads 32 8, capacity 1024
32/32 heads | heads 32 32, capacity 300
qheads 5 | q 3, heads 10 2, causal
qheads 7, 20 queries | q 20, heads 7, causal
qheads 16 | heads 16, capacity 700
qheads 64 | heads 64, capacity 700
qheads 80 | heads 80, capacity 700
qheads 128, two KV heads | heads 256 2, capacity 333
ragged lengths | batch 7, heads 8 2, capacity 3000, seqlens 0 1 64 65 2999 3000 777
one long, many short | batch 33, heads 8 2, capacity 9000,
    seqlens 40 40 40 40 40 40 40 40 40 40 40 40 40 40 40 40 9000 40 40 40 40 40 40 40 40 40 40 40 40 40 40 40 40
one long of 32 | batch 32, heads 8, capacity 9000,
    seqlens 40 40 40 40 40 40 40 40 40 40 40 40 40 40 0 40 40 40 40 40 40 40 40 40 40 9000 40 40 40 40 40 40
9 query heads | heads 9, capacity 700
12 short work tiles | batch 6, heads 4 2, capacity 130, seqlens 130 65 129 128 100 70
400 sequences | batch 400, heads 2, capacity 130,
    seqlens 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129 129
causal, 4 queries | q 4, heads 8 2, causal
causal, 64 queries | q 64, heads 4 2, causal
causal, 300 queries | q 300, heads 4 2, causal
more queries than keys | q 70, heads 2, capacity 100, seqlens 33, causal
window | q 3, heads 8, capacity 2000, window 128 0
window of one key | heads 8, capacity 2000, window 0 0
window, both sides | q 40, heads 2, capacity 500, window 20 5
varlen queries | batch 4, q 33, heads 8 2, seqlens 999 1000 5 300, cu_q 0 1 34 34 40, causal
new tokens | batch 2, seqlens 100 999, new 3, causal
new tokens, varlen | batch 3, seqlens 100 999 64, cu_new 0 1 1 9
new tokens, hostile lengths | batch 6, capacity 90, seqlens 9 80 -1 min max 5, cu_new 0 5 100 90 max 5 6
new tokens, fewer than none | capacity 90, seqlens 70, new -3
new tokens, too many | batch 2, capacity 90, seqlens 70 0, new max
left padding | batch 2, seqlens 700 10, leftpad 300 20
cache_batch_idx | batch 3, seqlens 700 10 333, cache_idx 4 0 2
an entry that does not exist | batch 2, seqlens 700 70, cache_idx 5 0
hostile lengths | batch 2, capacity 90, seqlens max min
softcap | heads 8, softcap 5
sinks | heads 8 2, capacity 2000, sinks
sinks, no keys | heads 8, seqlens 0, sinks
descales | batch 3, heads 8 2, descales
descales, softcap | batch 3, heads 8 2, softcap 3, descales
scores grow | heads 8, capacity 3000, grows
negative scale | heads 8, scale -0.1
page 1 | batch 2, heads 8, page 1, seqlens 999 65
page 3 | batch 2, heads 8, page 3, seqlens 999 65
page 16 | batch 2, heads 8, page 16, seqlens 999 65
page 64, heads first | batch 2, heads 8 2, page 64, seqlens 999 65, head_major
page 256, padded rows | batch 2, heads 8 2, page 256, seqlens 999 257, padding 8
page 16, window | page 16, window 100 0
a lost page | batch 2, page 64, lost_page
a lost page before the window | page 64, window 100 0, lost_page
d64 | batch 2, heads 64 8, d 64
d64, window, sinks, page 16 | heads 64 8, d 64, page 16, window 127 0, sinks
d64, window, sinks, one sequence | heads 64 8, d 64, capacity 3000, window 127 0, sinks
d256, page 3 | heads 8, d 256, page 3, seqlens 999
d40, values 24 | heads 8, d 40 24, padding 8
d80, values 72 | heads 8, d 80 72, page 16
d192, values 128 | heads 8, d 192 128
d256 | batch 2, heads 8, d 256, capacity 800
d256, 51 queries | q 51, heads 8, d 256, capacity 851
d256, page 16, long | heads 8, d 256, capacity 20000, page 16
spans | batch 3, heads 4, capacity 1500, seqlens 1500 129 700, spans 128
spans, one sequence | heads 8, capacity 3000, spans 256
spans, a chunk | batch 2, q 70, heads 4, capacity 500, seqlens 500 300, causal, spans 128
spans, window | q 40, heads 4, capacity 900, window 200 0, spans 128
spans, varlen | batch 4, q 33, heads 4, capacity 500, seqlens 399 500 5 300, cu_q 0 1 34 34 40, causal, spans 128
spans, more tiles than SMs | q 400, heads 1, capacity 600, causal, spans 128
spans, options | batch 3, q 3, heads 8 2, page 16, causal, sinks, softcap 5, descales, spans 256
spans, d256 | q 5, heads 8, d 256, capacity 900, seqlens 890, leftpad 33, causal, spans 128
spans, fp16 d64 | fp16, batch 2, q 9, heads 16 2, d 64, page 3, seqlens 900 30, causal, spans 128
tree, one word | batch 3, q 7, heads 8 2, seqlens 700 5 64, tree
tree, two words | batch 2, q 64, heads 4 2, capacity 500, page 16, seqlens 480 64, tree
tree, 33 queries, varlen | batch 4, q 33, heads 4, capacity 500, seqlens 399 500 5 300, cu_q 0 1 34 34 40, tree
tree, one query | heads 8, capacity 300, tree
tree, more queries than keys | q 40, heads 4, capacity 100, seqlens 33, tree
tree, options | batch 3, q 12, heads 8 2, seqlens 700 10 333, leftpad 300 20 330, sinks, softcap 5,
    descales, tree
tree, window | batch 2, q 20, heads 4, seqlens 700 97, window 15 -1, tree
tree, d64 | batch 2, q 40, heads 8 2, d 64, capacity 300, page 3, seqlens 290 130, tree
tree, d40, values 24, new tokens | q 9, heads 8, d 40 24, seqlens 600, new 9, tree
prefix | batch 5, heads 8 2, capacity 112, page 16, seqlens 100 1 64 65 0, prefix 200
prefix, page 64 | batch 3, heads 8 2, capacity 256, page 64, seqlens 100 256 64, prefix 321
prefix, no key of it | batch 3, heads 8 2, capacity 64, page 16, seqlens 60 1 0, prefix 0
prefix, no other key | batch 2, heads 8 2, capacity 64, page 3, seqlens 0 0, prefix 65
prefix, many rows | batch 40, heads 8, capacity 16, page 16, prefix 130
prefix, a chunk | batch 3, q 5, heads 8 2, capacity 192, page 16, seqlens 180 3 64, prefix 70, causal
prefix, more queries than keys | q 40, heads 4, capacity 64, page 16, seqlens 33, prefix 20, causal
prefix, varlen, options | batch 4, q 33, heads 8 2, capacity 128, page 16, seqlens 99 128 5 60,
    cu_q 0 1 34 34 40, causal, sinks, softcap 5, prefix 100
prefix, 72 heads, sinks | batch 3, heads 72, capacity 64, page 16, seqlens 60 1 0, sinks, prefix 100
prefix, tables | batch 3, q 2, heads 8 2, capacity 128, page 17, seqlens 90 10 120, leftpad 30 20 0,
    cache_idx 4 0 2, new 2, causal, prefix 99
prefix, a lost page | batch 2, capacity 128, page 64, lost_page, prefix 70
prefix, descales, softcap | batch 3, heads 8 2, capacity 64, page 16, seqlens 60 1 0, softcap 3,
    sinks, descales, prefix 100
prefix, d64 | batch 9, heads 16 2, d 64, capacity 64, page 16, prefix 300
prefix, d40, values 24 | batch 2, q 3, heads 8 2, d 40 24, padding 8, capacity 64, page 3, prefix 70
fp16 | fp16, batch 2, heads 8 2, capacity 3000
fp16 d64 | fp16, heads 8, d 64, page 16
fp16 d256 | fp16, heads 8, d 256, capacity 3000
e4m3 | e4m3, heads 8 2, capacity 300
e4m3, 32/8 heads | e4m3, heads 32 8, capacity 600
e4m3, one key | e4m3, capacity 1
e4m3, no keys | e4m3, capacity 64, seqlens 0
e4m3, long | e4m3, heads 8, capacity 40000, seqlens 39999
e4m3, ragged | e4m3, batch 7, heads 8 2, capacity 3000, seqlens 0 1 64 65 2999 3000 777
e4m3, 12 short work tiles | e4m3, batch 6, heads 4 2, capacity 130, seqlens 130 65 129 128 100 70
e4m3, 60 short work tiles | e4m3, batch 30, heads 4 2, capacity 64, token_descales
e4m3, 16 rows | e4m3, batch 7, q 2, heads 16 2, capacity 400, seqlens 0 1 64 65 399 400 77, causal
e4m3, 16 rows, one sequence | e4m3, q 4, heads 8 2, capacity 3000, causal, token_descales
e4m3, 9 rows, page 16 | e4m3, batch 5, q 3, heads 6 2, capacity 320, page 16, token_descales, window 70 0
int8, 15 rows, d64, page 3 | int8, batch 4, q 3, heads 10 2, d 64, capacity 300, page 3, causal, softcap 3, sinks
int8, 12 rows, d96, values 48 | int8, q 12, capacity 900, d 96 48, padding 16, causal, descales
e4m3, causal, 64 queries | e4m3, q 64, heads 4 2, causal
e4m3, window, softcap, sinks, descales |
    e4m3, fp16, heads 8 2, window 128 0, softcap 3, sinks, descales
e4m3, descales | e4m3, batch 3, heads 8 2, descales
e4m3, descales of pages | e4m3, batch 2, heads 8 2, page 64, seqlens 999 65, page_descales
e4m3, descales of tokens | e4m3, batch 2, heads 8 2, seqlens 999 65, token_descales
e4m3, descales of tokens, page 16 |
    e4m3, batch 2, heads 8 2, page 16, seqlens 999 65, token_descales, head_major
e4m3, page 1 | e4m3, batch 2, heads 8, page 1, seqlens 999 65
e4m3, page 3, d64 | e4m3, batch 2, heads 8 2, d 64, page 3, seqlens 999 65, token_descales
e4m3, d64 | e4m3, batch 2, heads 64 8, d 64, seqlens 200 300
e4m3, d256 | e4m3, batch 2, heads 8, d 256, capacity 800
e4m3, d256, more parts than the queue holds | e4m3, batch 20, heads 8, d 256, capacity 300
e4m3, d256, 20 queries, page 16 |
    e4m3, q 20, heads 8, d 256, capacity 851, page 16, token_descales, causal
e4m3, d96, values 48 | e4m3, heads 8, d 96 48, padding 16
e4m3, a lost page | e4m3, batch 2, page 64, lost_page
e4m3, a lost page of 16, descales of tokens | e4m3, batch 2, page 16, lost_page, token_descales
e4m3, an entry that does not exist | e4m3, batch 2, seqlens 700 70, cache_idx 5 0
e4m3, new tokens, hostile lengths | e4m3, batch 6, capacity 90, seqlens 9 80 -1 min max 5,
    cu_new 0 5 100 90 max 5 6
int8, fewer new tokens than none, left padding | int8, batch 2, capacity 90, seqlens 70 80, new -3,
    leftpad 3 99
e4m3, scores grow | e4m3, heads 8, capacity 3000, grows
int8 | int8, heads 8 2, capacity 300
int8, fp16 | int8, fp16, batch 2, heads 8 2, capacity 700, token_descales
int8, d64 | int8, heads 64 8, d 64, page 16, window 127 0, sinks
int8, d256 | int8, batch 2, heads 8, d 256, capacity 800, token_descales
int8, a lost page | int8, batch 2, page 64, lost_page
int8, a lost page of 3 | int8, batch 2, page 3, lost_page
int8, an entry that does not exist | int8, batch 2, seqlens 700 70, cache_idx 5 0
e4m3, prefix | e4m3, batch 5, heads 8 2, capacity 112, page 16, seqlens 100 1 64 65 0, prefix 200
e4m3, prefix, descales of tokens | e4m3, batch 3, q 5, heads 8 2, capacity 128, page 17,
    seqlens 90 10 120, causal, token_descales, prefix 99
e4m3, prefix, page 64, descales of pages | e4m3, fp16, batch 3, heads 8 2, capacity 128, page 64,
    seqlens 100 128 64, page_descales, prefix 321
e4m3, prefix, options | e4m3, batch 4, q 33, heads 8 2, capacity 128, page 16, seqlens 99 128 5 60,
    cu_q 0 1 34 34 40, causal, sinks, softcap 5, descales, prefix 100
e4m3, prefix, d64, many rows | e4m3, batch 40, heads 8, d 64, capacity 16, page 16, prefix 130
e4m3, prefix, a lost page | e4m3, batch 2, capacity 128, page 64, lost_page, prefix 70
int8, prefix, no key of it | int8, batch 3, heads 8 2, capacity 64, page 16, seqlens 60 1 0, prefix 0
int8, prefix, no other key | int8, batch 2, heads 8 2, capacity 64, page 3, seqlens 0 0, prefix 65
int8, prefix, a lost page, descales of tokens | int8, batch 2, capacity 128, page 16, lost_page,
    token_descales, prefix 70
int8, prefix, d48, values 32 |
    int8, batch 2, q 3, heads 8 2, d 48 32, padding 16, capacity 64, page 3, descales, prefix 70
int8, left padding, new tokens |
    int8, batch 2, seqlens 700 10, leftpad 300 20, new 3, causal
)";

inline std::vector<DecodeCase> decode_cases() { return read_cases<DecodeCase>(kDecodeCases); }

// Gives a problem a tree, if there are kernels for it.
inline void make_tree(DecodeCase& c) {
  if (c.seqlen_q > 64 || std::max(c.head_dim, c.head_dim_v) > 128) return;
  c.tree = true, c.right = -1, c.spans = 0;
}

// Gives a problem a prefix, if there are kernels for it.
inline void make_prefix(DecodeCase& c, int keys) {
  if (c.page_size == 0 || c.spans > 0 || std::max(c.head_dim, c.head_dim_v) > 128) return;
  c.prefix = keys, c.left = -1;
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
    if (one_in(3)) c.spans = pick({128, 128, 256, 384});
    c.lost_page = c.page_size > 0 && pages > 1 && c.cache_idx.empty() && one_in(6);
    if (const int bytes = below(4); bytes < 2) {
      (bytes == 0 ? c.e4m3 : c.int8) = true, c.spans = 0;
      c.page_descales = one_in(3), c.token_descales = !c.page_descales && one_in(2);
      c.head_dim = (c.head_dim + 15) / 16 * 16, c.head_dim_v = (c.head_dim_v + 15) / 16 * 16;
      c.padding *= 2;
    }
    const int tiles = (c.seqlen_q * (c.heads_q / c.heads_kv) + 63) / 64;
    const int blocks = (c.capacity + 63) / 64 * c.batch * c.heads_kv * tiles;
    if (blocks > most) continue;
    std::mt19937 of_tree(seed + 2000000);
    if (!c.has_bytes() && of_tree() % 3 == 0) make_tree(c);
    const int keys = static_cast<int>(of_tree() % 200);
    if (!c.tree && of_tree() % 2 == 0) make_prefix(c, keys);
    return c;
  }
}
