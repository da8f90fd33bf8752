// The cached calls that forward_check runs.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "decode_cases.h"

// Lengths at the edges of pages and of KV blocks, for every kernel config and page size; 0: dense.
inline std::vector<DecodeCase> page_cases() {
  std::vector<DecodeCase> cases;
  for (const bool fp16 : {false, true}) {
    for (const int head_dim : {64, 128, 256}) {
      for (const int page : {0, 1, 2, 3, 8, 16, 24, 48, 64, 96, 128, 256}) {
        const int near = page == 0 ? 64 : page,
                  capacity = page == 0 ? 777 : (777 / page + 1) * page;
        DecodeCase c{.name = "page " + std::to_string(page) + " d" + std::to_string(head_dim),
                     .fp16 = fp16,
                     .seqlen_q = 200,
                     .heads_q = 2,
                     .head_dim = head_dim,
                     .capacity = capacity,
                     .page_size = page,
                     .seqlens = {0, 1, near - 1, near, near + 1, capacity - 1, capacity, 500, 129},
                     .right = 0};
        c.batch = static_cast<int>(c.seqlens.size());
        cases.push_back(c);
      }
    }
  }
  return cases;
}

constexpr const char* kCachedCases = R"(
one key | capacity 1
one query, one KV block | capacity 64
no keys | q 100, capacity 64, seqlens 0
two KV blocks, not causal | q 192, capacity 128
one chunk | q 192, capacity 5000, seqlens 4321, causal
chunk of a prompt, 8/2 heads | batch 2, q 700, heads 8 2, capacity 3000, page 16, seqlens 2999 1400,
    causal
the whole prompt | batch 2, q 900, heads 2, capacity 1024, page 64, seqlens 900 1000, causal
more queries than keys | batch 3, q 500, heads 2, capacity 800, page 16, seqlens 33 499 129, causal
many work tiles | batch 9, q 260, heads 32 8, capacity 640, page 16,
    seqlens 640 1 300 0 639 64 65 260 261, causal
window | batch 2, q 400, heads 2, capacity 2000, page 16, seqlens 2000 777, window 128 0
window in one KV block | batch 2, q 10, heads 2, capacity 2000, page 16, seqlens 1983 770,
    window 20 0
window of one key | q 300, capacity 2000, window 0 0
window, both sides | q 300, heads 2, capacity 500, window 20 5
window left only, page 8 | q 300, capacity 1500, page 8, window 250 -1
varlen queries | batch 5, q 333, heads 8 2, page 16, seqlens 999 1000 5 300 700,
    cu_q 0 1 334 334 340 600, causal
varlen queries, dense | batch 4, q 200, heads 2, seqlens 999 1000 5 300, cu_q 0 200 210 210 400,
    causal
new tokens | batch 2, q 200, seqlens 100 950, new 200, causal
new tokens, varlen | batch 3, q 300, page 16, seqlens 100 999 64, cu_q 0 100 100 400,
    cu_new 0 100 100 400, causal
left padding | batch 4, q 200, seqlens 700 10 300 250, leftpad 300 20 64 249, causal
left padding, page 16, window | batch 3, q 200, page 16, seqlens 700 450 300, leftpad 690 20 127,
    window 100 0
left padding, not causal | batch 2, q 70, leftpad 999 1000
cache_batch_idx, dense | batch 3, q 200, seqlens 700 210 333, cache_idx 4 0 2, causal
cache_batch_idx, page 16 | batch 3, q 200, page 16, seqlens 700 210 333, cache_idx 4 0 2, causal
an entry that does not exist | batch 2, q 100, seqlens 700 170, cache_idx 5 0, causal
hostile lengths | batch 2, q 100, capacity 90, seqlens max min
a lost page | batch 2, q 200, page 64, lost_page
a lost page of 16 | batch 2, q 300, page 16, causal, lost_page
a lost page of 1 | q 300, capacity 400, page 1, causal, lost_page
a lost page before the window | q 200, page 64, window 100 0, lost_page
a lost page before the window, in its KV block | q 200, capacity 350, page 16, window 110 0,
    lost_page
tree, one word | batch 3, q 30, heads 8 2, seqlens 700 5 64, tree
tree, two words, page 16 | batch 4, q 64, heads 8 2, capacity 600, page 16, seqlens 576 64 65 599, tree
tree, 33 queries, varlen | batch 5, q 33, heads 8 2, page 3, seqlens 399 500 5 300 40,
    cu_q 0 1 34 34 40 73, tree
tree, one query | heads 4, capacity 200, tree
tree, more queries than keys | batch 2, q 60, heads 4, capacity 100, seqlens 33 0, tree
tree, left padding, softcap, sinks | batch 3, q 40, heads 8 2, seqlens 700 50 333,
    leftpad 300 20 330, softcap 5, sinks, tree
tree, window | batch 2, q 50, heads 4, seqlens 700 97, window 15 -1, tree
tree, a lost page | batch 2, q 50, heads 4, page 64, lost_page, tree
tree, scores grow | q 64, heads 4, capacity 500, grows, tree
tree, d64 | batch 2, q 50, heads 8 2, d 64, page 16, seqlens 900 130, tree
tree, d64, aligned | fp16, batch 2, q 64, heads 8 2, d 64, seqlens 896 128, tree
tree, d40, values 24, new tokens | q 60, heads 4, d 40 24, seqlens 600, new 60, tree
softcap | q 200, heads 2, causal, softcap 5
scores grow | q 300, heads 2, capacity 3000, page 16, causal, grows
negative scale | q 200, heads 2, scale -0.1
page 64, heads first | batch 2, q 200, heads 8 2, page 64, seqlens 999 265, causal, head_major
page 256, padded rows | batch 2, q 200, heads 8 2, page 256, seqlens 999 257, causal, padding 8
d40, values 24 | q 200, heads 2, d 40 24, causal, padding 8
d80, values 72 | q 200, heads 2, d 80 72, page 16, causal
d192, values 128 | q 200, heads 2, d 192 128, page 16, causal
long, page 16 | q 200, heads 2, capacity 20000, page 16, causal
long, d64 | q 200, heads 2, d 64, capacity 20000, page 16, causal
long, d256 | q 200, heads 2, d 256, capacity 20000, page 16, causal
)";

inline std::vector<DecodeCase> cached_cases() {
  std::vector<DecodeCase> cases = read_cases<DecodeCase>(kCachedCases);
  for (const DecodeCase& c : page_cases()) cases.push_back(c);
  return cases;
}

// A random problem of decode_check with more queries, without sinks and descales.
inline DecodeCase random_cached_case(uint32_t seed) {
  DecodeCase c = random_decode_case(seed, 5000);
  std::mt19937 random(seed + 1000000);
  const int lengths[] = {1, 63, 64, 65, 100, 191, 193, 300, 450};
  c.seqlen_q = c.tree ? 1 + static_cast<int>(random() % 64) : lengths[random() % 9];
  c.heads_kv = 1 + static_cast<int>(random() % 2);
  c.heads_q = c.heads_kv * (1 + static_cast<int>(random() % 4));
  for (size_t b = 1; b < c.cu_q.size(); ++b) {
    c.cu_q[b] = c.cu_q[b - 1] + static_cast<int>(random() % (c.seqlen_q + 1));
  }
  if (!c.cu_q.empty() && c.cu_q.back() == 0) c.cu_q.clear();
  c.sinks = c.descales = c.page_descales = c.token_descales = c.e4m3 = c.int8 = false;
  c.spans = 0, c.prefix = -1;
  return c;
}
