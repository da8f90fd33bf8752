// The problems that backward_check runs.
#pragma once

#include <string>
#include <vector>

#include "cases.h"

constexpr const char* kBackwardCases = R"(
bias | q 200, k 264, d 64, bias 1 1
bias of each sequence | batch 2, q 130, k 129, heads 2, d 64, bias 2 1
bias of each head, causal | batch 2, q 150, k 260, heads 2 1, d 64, causal, bias 1 2, dlse
bias, window | q 200, k 200, heads 2, d 40, window 33 47, bias 1 2
bias d128 | batch 3, q 190, k 200, heads 2, bias 1 2, dlse
bias d128, causal | batch 2, q 257, k 257, heads 4 2, causal, bias 1 1
bias d128, fp16 | fp16, batch 2, q 70, k 300, heads 2, d 96, bias 2 2
bias, one tile | q 60, k 70, d 64, bias 1 1
bias of each head, one tile, causal | q 40, k 64, heads 2 1, d 64, causal, bias 1 2
bias d128, one tile | q 33, k 50, heads 2, bias 1 1
window 33, 47, one tile | q 100, k 120, d 64, window 33 47
window left only, one tile | q 60, k 100, d 64, window 20 -1
window right only, one tile, d128 | q 100, k 60, window -1 9
slopes, window, one tile | q 70, k 120, heads 2, d 64, window 30 20, slopes
softcap, one tile | q 60, k 60, d 64, softcap 5
window 100, 0 | q 700, k 700, window 100 0
window 33, 47 | q 400, k 600, window 33 47
window 0, 0 | q 300, k 300, window 0 0
window 3, 2, more keys | q 100, k 700, window 3 2
window 3, 2, more queries | q 700, k 150, d 64, window 3 2
window left only | q 300, k 640, window 250 -1
window right only | q 400, k 333, window -1 70
window right only, more queries | q 500, k 129, d 64, window -1 5
window d96 | batch 2, q 333, k 444, heads 2, d 96, window 64 128
gqa 4 | batch 2, q 200, k 260, heads 8 2, d 64
gqa 4, causal | batch 2, q 257, k 257, heads 8 2, causal
gqa 3, window | q 300, k 300, heads 6 2, window 40 20
mqa | q 200, k 300, heads 6
mqa causal, more queries | q 300, k 140, heads 5, d 96, causal
head dim 8 | q 150, k 250, heads 2 2, d 8, padding 8
head dim 40, values 64 | q 150, k 250, heads 2 2, d 40 64, causal
head dim 72, values 8 | batch 2, q 150, k 250, d 72 8, padding 8
head dim 80, values 40 | batch 2, q 150, k 250, heads 2 2, d 80 40, causal, head_major, padding 8
head dim 104, values 72 | q 150, k 250, heads 2, d 104 72, padding 16
head dim 64, values 128 | q 150, k 250, d 64 128, causal
head dim 20, values 12 | q 150, k 250, heads 2, d 20 12, causal
heads first, padded pitch | batch 2, q 150, k 250, heads 2 2, causal, head_major, padding 8
gradients strided otherwise | batch 2, q 150, k 250, heads 4 2, causal, dlse, other_strides
gradients heads last | batch 2, q 170, k 130, heads 4 2, d 64, head_major, padding 8, dlse,
    other_strides
dlse | q 200, k 333, heads 2, dlse
dlse causal, more queries | q 333, k 200, heads 2, d 64, causal, dlse
softcap | q 200, k 333, softcap 15
softcap causal | q 333, k 333, heads 2, d 64, causal, softcap 3, dlse
softcap, few rows | q 70, k 30, causal, softcap 1
softcap, large scores | q 200, k 300, causal, softcap 10, data large
negative scale | q 200, k 333, causal, scale -0.11
negative scale, softcap | q 200, k 333, d 64, causal, softcap 5, scale -0.2
scale 0 | q 100, k 150, causal, scale 0
scale 0, softcap | q 100, k 150, d 64, softcap 5, scale 0
scale 1e-30 | q 100, k 150, causal, scale 1e-30
large scores | q 256, k 512, causal, data large
large scores full | q 256, k 300, d 64, data large
scores grow to the first key | q 200, k 700, data grows_to_first
scores grow to the last key, causal | q 500, k 500, causal, data grows_to_last
one outlier | q 200, k 600, data outlier
constant | q 200, k 500, data constant
constant causal d64 | q 500, k 500, d 64, causal, data constant
d256 | q 300, k 333, heads 2, d 256
d256, one query, one key | q 1, k 1, d 256
d256 causal, gqa | batch 2, q 260, k 260, heads 4 2, d 256, causal, dlse, other_strides
d256 causal, more queries | q 400, k 200, d 256, causal
d256 window | q 400, k 500, d 256, window 3 70
# A query sees so many keys that preprocess writes the zeros of dq_accum.
d256, many keys | q 130, k 2177, d 256
d192, many keys | q 130, k 2177, d 192
d192 | q 300, k 333, heads 2, d 192
d192, one query, one key | q 1, k 1, d 192
d192, two steps | q 65, d 192
d192 causal, gqa | batch 2, q 260, k 260, heads 4 2, d 192, causal, dlse, other_strides
d192 causal, more queries | q 400, k 200, d 192, causal
d192 window, fp16 | fp16, q 400, k 500, d 192, window 3 70
varlen d192 | batch 4, q 200, k 333, heads 2, d 192 128, causal, cu_q 0 200 201 333 333,
    cu_k 0 333 400 401 500, used_k 300 67 1 99, total 333 500
d192, softcap | q 150, k 260, d 192, causal, softcap 5
d192, values 128, softcap, fp16 | fp16, q 130, k 200, d 192 128, causal, softcap 3
d192, softcap 0.5 | q 260, k 150, d 192 128, softcap 0.5, data large
d192, large scores | q 256, k 300, d 192, data large
head dim 160, padded pitch | batch 2, q 150, k 250, heads 2 2, d 160, causal, head_major, padding 8
head dim 136, values 8 | q 150, k 250, d 136 8
head dim 72, values 184 | q 150, k 250, d 72 184
many tiles d192, causal | batch 2, q 200, k 200, heads 70 70, d 192, causal
many tiles d192, causal, values 128 | batch 2, q 200, k 200, heads 70 35, d 192 128, causal
many steps d192, values 128 | q 900, k 200, heads 2, d 192 128
head dim 192, values 128 | q 300, k 400, heads 2 2, d 192 128, causal
head dim 64, values 200 | q 150, k 250, d 64 200, padding 8
# Scores far below 0, where 2^(0 - lse) of keys past the end is infinite.
one key, large scores | q 70, k 1, d 64, data large
one key, large scores, fp16 | fp16, q 70, k 1, data large
one key, large scores, fp16, d192 | fp16, q 70, k 1, d 192, data large
one key, large scores, fp16, d192, values 128 | fp16, q 70, k 1, d 192 128, data large
one key, large scores, fp16, d256 | fp16, q 70, k 1, d 256, data large
varlen d256 | batch 4, q 200, k 333, heads 2, d 256, causal, cu_q 0 200 201 333 333,
    cu_k 0 333 400 401 500, used_k 300 67 1 99, total 333 500
d256, softcap | q 150, k 260, d 256, causal, softcap 5
d256, softcap 0.5 | q 150, k 260, d 256, softcap 0.5, data large
head dim 64, values 200, fp16, softcap 1 | fp16, q 150, k 250, d 64 200, softcap 1
softcap 1e8 | q 150, k 260, softcap 1e+08
d256, softcap 1e8 | q 150, k 260, d 256, causal, softcap 1e+08
many tiles d256, causal | batch 2, q 200, k 200, heads 70 70, d 256, causal
fp16 | fp16, q 300, k 400, heads 2
fp16 causal | fp16, q 400, k 400, heads 2 2, causal, dlse
fp16 d64 causal | fp16, q 400, k 500, heads 2 2, d 64, causal
fp16 d64 window, softcap | fp16, q 400, k 500, d 64, window 100 30, softcap 4
fp16 head dim 80, values 96 | fp16, q 200, k 300, d 80 96
fp16 growing | fp16, q 400, k 400, causal, data grows_to_first
fp16 growing d192, values 128 | fp16, q 400, k 400, d 192 128, causal, data grows_to_first
fp16 growing d192 | fp16, q 400, k 400, d 192, causal, data grows_to_first
fp16 growing d256 | fp16, q 400, k 400, d 256, causal, data grows_to_first
varlen | batch 4, q 300, k 310, heads 2 2, cu_q 0 5 305 305 400, cu_k 0 17 117 200 510,
    total 400 510
varlen causal gqa | batch 4, q 300, k 310, heads 4 2, causal, cu_q 0 5 305 305 400,
    cu_k 0 17 117 200 510, total 400 510, dlse
varlen, sequences without keys or queries | batch 5, q 200, k 300, heads 2, d 64,
    cu_q 0 0 100 100 300 300, cu_k 0 200 200 200 500 577, total 300 577
varlen with gaps and seqused | batch 3, q 200, k 200, heads 2 2, causal, cu_q 7 207 300 450,
    cu_k 3 203 350 500, used_q 150 93 0, used_k 199 1 100, total 500 600, dlse
varlen window d96 | batch 3, q 333, k 400, heads 2, d 96, window 20 50, cu_q 0 333 400 600,
    cu_k 0 100 500 700, total 600 700, other_strides
varlen d64, unsorted | batch 6, q 200, k 333, heads 2 2, d 64, causal,
    cu_q 0 200 201 333 340 468 540, cu_k 0 333 400 401 600 731 900, used_k 5 67 1 199 130 0,
    total 540 900
seqused on dense tensors | batch 3, q 130, k 400, heads 2 2, used_k 399 0 81
seqused of queries on dense tensors, causal | batch 4, q 200, k 300, heads 2, d 64, causal,
    used_q 1 130 0 199, used_k 300 129 70 40, dlse
hostile tables | batch 3, q 200, k 200, heads 2 2, cu_q -50 100 100 max, cu_k min 100 1000 50,
    used_k max -3 7, total 200 200
varlen in parts, two sequences | batch 2, q 1, k 2, heads 2, d 64, cu_q 0 1 2, cu_k 1 3 4, total 2 5
varlen in parts, hostile tables | batch 3, q 60, k 150, heads 4 2, cu_q -50 100 100 max,
    cu_k min 100 1000 50, used_k max -3 7, total 200 200
varlen in parts, columns past a multiple of 8, fp16 | fp16, batch 3, q 20, k 100, heads 6 2,
    d 20 12, causal, cu_q 0 20 20 37, cu_k 0 33 133 150, used_k 33 70 17, total 37 150,
    other_strides
many tiles, causal | batch 3, q 200, k 260, heads 64 64, d 64, causal
many tiles d128 | batch 4, q 129, k 129, heads 50 50
many tiles, gqa, window | batch 4, q 150, k 150, heads 100 50, d 64, window 70 10
many sequences | q 160, k 160, heads 4 2, d 64, causal
long causal | q 1500, k 1500, heads 2, causal
long d64 | q 1100, k 2000, heads 2, d 64
# Sinks and slopes: of the heads, in inputs.h.
sinks | batch 2, q 300, k 333, heads 14 7, sinks, dlse
sinks, causal, empty rows | batch 2, q 200, k 129, heads 7 7, causal, sinks, dlse
sinks, fp16, d64, window | fp16, q 300, k 300, heads 7 7, d 64, window 100 0, sinks
sinks, d192 | fp16, q 130, k 200, heads 7 7, d 192, sinks
sinks, varlen | batch 4, q 300, k 310, heads 7 7, d 64, causal, sinks, cu_q 0 5 305 305 400,
    cu_k 0 17 117 200 510, total 400 510
slopes | batch 2, q 200, k 333, heads 6 3, slopes
slopes, causal | batch 2, q 333, k 333, heads 6 2, causal, slopes
slopes, more queries | q 400, k 200, heads 6 6, slopes, dlse
slopes, d64 | batch 2, q 320, k 320, heads 6 6, d 64, slopes
slopes, d64, causal, fp16 | fp16, q 333, k 333, heads 6 3, d 64, causal, slopes
slopes, d64, window, sinks | q 300, k 400, heads 6 6, d 64, window 130 70, slopes, sinks
slopes, d64, softcap | q 200, k 300, heads 6 6, d 64, softcap 5, slopes
slopes, d256, softcap | q 150, k 200, heads 6 6, d 256, softcap 15, slopes
slopes, d256, fp16, causal | fp16, q 200, k 333, heads 6 2, d 256, causal, slopes
slopes, varlen | batch 4, q 300, k 310, heads 6 6, d 64, slopes, cu_q 0 5 305 305 400,
    cu_k 0 17 117 200 510, total 400 510
# Masks as lists: listed_mask.h.
lists | q 200, k 300, heads 2 2, lists 1 1, dlse
lists of each sequence and head, gqa | batch 2, q 130, k 150, heads 4 2, d 64, lists 2 4
lists of heads, gqa | q 200, k 260, heads 3, lists 1 3
lists of sequences, fp16, d64 | fp16, batch 3, q 129, k 257, d 64, lists 3 1, dlse
lists, one query, one key | q 1, k 1, heads 2, lists 1 2
lists, sinks, softcap | q 70, k 130, heads 7 7, d 64, softcap 5, lists 1 7, sinks
lists, many queries | q 700, k 129, d 64, lists 1 1
lists, many keys, fp16 | fp16, q 150, k 2200, d 64, lists 1 1
lists, d40, other strides | q 200, k 200, heads 2, d 40, head_major, padding 8, other_strides,
    lists 1 1
lists, long | batch 2, q 1500, k 1500, heads 8 4, lists 2 8
lists, many tiles, d64 | batch 4, q 800, k 800, heads 16 16, d 64, lists 1 16
lists of heads, d192, values 128 | q 200, k 300, heads 2, d 192 128, lists 1 2, dlse
lists of each sequence and head, gqa, d192, values 128 | batch 2, q 130, k 150, heads 4 2,
    d 192 128, lists 2 4
lists, softcap, sinks, fp16, d192, values 128 | fp16, q 70, k 130, heads 2 2, d 192 128, softcap 5,
    lists 1 2, sinks
lists, many tiles, d192, values 128 | batch 2, q 700, k 800, heads 16 8, d 192 128, lists 2 16
lists of heads, d256 | q 200, k 300, heads 2, d 256, lists 1 2, dlse
lists of each sequence and head, gqa, d256 | batch 2, q 130, k 150, heads 4 2, d 256, lists 2 4
lists, softcap, sinks, fp16, d256 | fp16, q 70, k 130, heads 2 2, d 256, softcap 5, lists 1 2, sinks
lists, one query, one key, d256 | q 1, k 1, heads 2, d 256, lists 1 2
lists, many keys, d256 | q 150, k 2100, d 256, lists 1 1
lists, one key, large scores | q 200, k 1, d 64, data large, lists 1 1
lists, one key, large scores, fp16 | fp16, q 200, k 1, data large, lists 1 1
lists, one key, large scores, fp16, d192, values 128 | fp16, q 200, k 1, d 192 128, data large,
    lists 1 1
lists, one key, large scores, fp16, d256 | fp16, q 200, k 1, d 256, data large, lists 1 1
lists, many tiles, d256 | batch 2, q 700, k 800, heads 16 8, d 256, lists 2 16
)";

inline std::vector<Case> backward_cases() {
  std::vector<Case> cases;
  // Around the edges of blocks of 64 queries and 128 keys.
  for (const int length : {1, 63, 64, 65, 127, 128, 129, 200, 300, 512}) {
    for (const bool causal : {false, true}) {
      for (const int head_dim : {64, 128}) {
        cases.push_back({.name = std::to_string(length) + (causal ? " causal" : "") + " d" +
                                 std::to_string(head_dim),
                         .seqlen_q = length,
                         .seqlen_k = length,
                         .heads_q = 2,
                         .heads_kv = 2,
                         .head_dim = head_dim,
                         .right = causal ? 0 : -1});
      }
    }
  }
  const int pairs[][2] = {{1, 300},  {300, 1},   {63, 200},  {200, 63},  {64, 129},
                          {129, 64}, {65, 512},  {512, 65},  {127, 300}, {300, 128},
                          {512, 64}, {100, 400}, {260, 640}, {700, 200}};
  for (const auto& [rows, keys] : pairs) {
    for (const bool causal : {false, true}) {
      cases.push_back(
          {.name = std::to_string(rows) + " on " + std::to_string(keys) + (causal ? " causal" : ""),
           .seqlen_q = rows,
           .seqlen_k = keys,
           .heads_q = 2,
           .heads_kv = 1,
           .head_dim = keys % 3 == 0   ? 96
                       : keys % 2 == 0 ? 64
                                       : 128,
           .right = causal ? 0 : -1});
    }
  }
  const std::vector<Case> others = read_cases<Case>(kBackwardCases);
  cases.insert(cases.end(), others.begin(), others.end());
  // Query heads are divided. Rows of k before the first sequence, after the last, past used lengths
  // and past seqlen_k belong to no sequence; sequences without keys or without queries.
  for (const int head_dim : {64, 128, 192, 256}) {
    for (const bool causal : {false, true}) {
      cases.push_back({.name = "varlen in parts" + std::string(causal ? " causal" : "") + " d" +
                               std::to_string(head_dim),
                       .batch = 7,
                       .seqlen_q = 66,
                       .seqlen_k = 130,
                       .heads_q = 4,
                       .heads_kv = head_dim == 128 ? 2 : 1,
                       .head_dim = head_dim,
                       .head_dim_v = head_dim == 192 && causal ? 128 : head_dim,
                       .right = causal ? 0 : -1,
                       .cu_q = {3, 20, 20, 86, 86, 95, 96, 140},
                       .cu_k = {5, 70, 70, 210, 240, 240, 300, 331},
                       .used_q = {17, 0, 66, 0, 9, 1, 30},
                       .used_k = {65, 0, 200, 30, 0, 41, 30},
                       .total_q = 150,
                       .total_k = 340,
                       .dlse = causal,
                       .other_strides = head_dim == 64});
    }
  }
  for (Case& c : cases) {
    if (c.name != "many sequences") continue;
    c.batch = 40, c.cu_q.assign(41, 0), c.cu_k.assign(41, 0);
    for (int b = 0; b < c.batch; ++b) {
      c.cu_q[b + 1] = c.cu_q[b] + b * 37 % 161;
      c.cu_k[b + 1] = c.cu_k[b] + b * 53 % 161;
    }
    c.total_q = c.cu_q.back(), c.total_k = c.cu_k.back();
  }
  return with_defaults(cases);
}
