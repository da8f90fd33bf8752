// The problems that forward_check runs.
#pragma once

#include <vector>

#include "cases.h"

constexpr const char* kForwardCases = R"(
smallest | q 64, k 80
one block of keys, ragged | q 64, k 17
one query, one key | q 1, k 1
two steps | q 192, k 160
many steps | q 192, k 1280
several tiles | batch 2, q 640, k 640, heads 3 3
odd lengths | batch 3, q 333, k 517, heads 2 2
causal square | q 512, k 512, heads 2 2, causal
causal, more keys | q 113, k 511, causal
causal, more queries: empty rows | q 500, k 129, causal
causal, gqa 4 | batch 2, q 257, k 257, heads 8 2, causal
mqa | q 200, k 300, heads 6
window 100, 0 | q 700, k 700, window 100 0
window 33, 47 | q 400, k 600, window 33 47
window 0, 0 | q 300, k 300, window 0 0
window left only | q 300, k 900, window 250 -1
softcap | q 200, k 333, softcap 15
softcap causal | q 333, k 333, causal, softcap 3
negative scale | q 200, k 333, causal, scale -0.11
scale 0 | q 100, k 100, causal, scale 1e-30
large scores | q 256, k 512, causal, data large
large scores full | q 256, k 512, data large
scores grow to the first key | q 200, k 2000, data grows_to_first
the same, causal | q 900, k 900, causal, data grows_to_first
scores grow to the last key | q 200, k 2000, data grows_to_last
one outlier | q 200, k 1111, data outlier
constant | q 200, k 500, data constant
no keys | q 100, k 0
long d64 | q 100, k 13001, d 64
long d128 | q 300, k 10000, causal
long d256 | q 100, k 9000, d 256
long, grows | q 100, k 9000, causal, data grows_to_first
heads first, padded pitch | batch 2, q 150, k 250, heads 2 2, causal, head_major, padding 8
head dim 80, values 40 | q 150, k 250, heads 2 2, d 80 40, causal, padding 8
head dim 104, values 72 | q 150, k 250, d 104 72, padding 16
d64 | batch 2, q 500, k 777, heads 2 2, d 64
d64 causal | batch 2, q 777, k 777, heads 4 2, d 64, causal
d64 window | q 777, k 777, d 64, window 129 64
d96 | q 300, k 555, heads 2 2, d 96
d96 causal | q 555, k 555, heads 2, d 96, causal
d192 | q 300, k 555, d 192
d192 causal, values 128 | q 555, k 555, d 192 128, causal
d192, values 128 | batch 2, q 300, k 555, heads 4 2, d 192 128
d192, values 128, one query, one key | q 1, k 1, d 192 128
d192, values 128, window, softcap, fp16 | fp16, q 400, k 600, d 192 128, window 33 47, softcap 5
d192, values 128, scores grow to the first key | q 600, k 900, d 192 128, data grows_to_first
d192, values 128, fp16, large scores | fp16, q 256, k 512, d 192 128, causal, data large
# fp16, since TMA does not read this pitch in 8 bits.
d160, values 72, padded pitch | fp16, batch 2, q 257, k 257, heads 4 2, d 160 72, causal,
    head_major, padding 8
varlen d192, values 128 | batch 4, q 200, k 333, heads 2, d 192 128, cu_q 0 200 201 333 333,
    cu_k 0 333 400 401 500, used_k 300 67 1 99, total 333 500
varlen d192 causal, values 128 | batch 3, q 200, k 333, heads 2, d 192 128, causal,
    cu_q 0 200 201 333, cu_k 0 333 400 401, total 333 401
d192, many tiles, causal, values 128 | batch 2, q 400, k 400, heads 50 50, d 192 128, causal
d256 | q 300, k 555, heads 2 2, d 256
d256 causal | q 700, k 700, heads 2 2, d 256, causal
fp16 | fp16, q 300, k 600, heads 2 2
fp16 causal | fp16, q 600, k 600, heads 2 2, causal
fp16 growing | fp16, q 600, k 600, causal, data grows_to_first
fp16 d64 causal | fp16, q 600, k 600, d 64, causal
fp16 d256 causal | fp16, q 600, k 600, d 256, causal
varlen | batch 4, q 300, k 310, heads 2 2, cu_q 0 5 305 305 400, cu_k 0 17 117 200 510,
    total 400 510
varlen causal gqa | batch 4, q 300, k 310, heads 4 2, causal, cu_q 0 5 305 305 400,
    cu_k 0 17 117 200 510, total 400 510
varlen with gaps and seqused | batch 3, q 200, k 200, heads 2 2, causal, cu_q 7 207 300 450,
    cu_k 3 203 350 500, used_q 150 93 0, used_k 199 1 100, total 500 600
seqused on dense tensors | batch 3, q 130, k 400, heads 2 2, used_k 399 0 81
varlen d64 | batch 3, q 200, k 333, d 64, cu_q 0 200 201 333, cu_k 0 333 400 401, total 333 401
varlen d256 causal | batch 3, q 200, k 333, d 256, causal, cu_q 0 200 201 333, cu_k 0 333 400 401,
    total 333 401
hostile tables | batch 3, q 200, k 200, heads 2 2, cu_q -50 100 100 max, cu_k min 100 1000 50,
    used_k max -3 7, total 200 200
long | q 1024, k 8192, heads 4 2
long causal | q 4096, k 4096, heads 8 8, causal
long causal d64 | q 4096, k 4096, heads 8 8, d 64, causal
long causal d256 | q 4096, k 4096, heads 4 4, d 256, causal
# Sinks and slopes: of the heads, in inputs.h.
sinks | batch 2, q 300, k 333, heads 14 7, sinks
sinks, causal, empty rows | batch 2, q 400, k 129, heads 7 7, causal, sinks
sinks, fp16, d64, window | fp16, q 500, k 500, heads 7 7, d 64, window 100 0, sinks
sinks, no keys | q 100, k 0, heads 7 7, sinks
sinks, d256, large scores | q 256, k 512, heads 7 7, d 256, data large, sinks
sinks, one key | q 1, k 1, heads 7 7, sinks
sinks, one key, causal | q 70, k 70, heads 7 7, d 64, causal, sinks
sinks, varlen | batch 4, q 300, k 310, heads 7 7, d 64, causal, sinks, cu_q 0 5 305 305 400,
    cu_k 0 17 117 200 510, total 400 510
slopes | batch 2, q 300, k 777, heads 6 3, slopes
slopes, causal | batch 2, q 777, k 777, heads 6 2, causal, slopes
slopes, more queries | q 700, k 300, heads 6 6, slopes
slopes, d64 | batch 2, q 640, k 640, heads 6 6, d 64, slopes
slopes, d64, causal, fp16 | fp16, q 777, k 777, heads 6 6, d 64, causal, slopes
slopes, d64, window, sinks | q 500, k 600, heads 6 6, d 64, window 130 70, slopes, sinks
slopes, d256, softcap | q 300, k 555, heads 6 6, d 256, softcap 15, slopes
slopes, d96, fp16, large scores | fp16, q 256, k 512, heads 6 6, d 96, data large, slopes
slopes, long | q 200, k 9000, heads 6 6, d 64, data grows_to_first, slopes
slopes, long, causal | q 3000, k 3000, heads 6 6, causal, data grows_to_last, slopes
slopes, varlen | batch 4, q 300, k 310, heads 6 6, d 64, slopes, cu_q 0 5 305 305 400,
    cu_k 0 17 117 200 510, total 400 510
# Masks as lists: listed_mask.h.
lists | q 300, k 400, heads 2 2, lists 1 1
lists of each sequence and head, gqa | batch 2, q 200, k 333, heads 4 2, lists 2 4
lists of heads, d64 | batch 2, q 260, k 700, heads 3, d 64, lists 1 3
lists of sequences, d64, fp16 | fp16, batch 3, q 129, k 257, d 64, lists 3 1
lists, one query, one key, sinks | q 1, k 1, heads 7 7, lists 1 7, sinks
lists, no keys, sinks | q 100, k 0, heads 7 7, lists 1 1, sinks
lists, sinks, softcap | q 150, k 300, heads 7 7, softcap 5, lists 1 1, sinks
lists, large scores | q 640, k 333, data large, lists 1 1
lists, scores grow to the first key | fp16, q 140, k 900, data grows_to_first, lists 1 1
lists, d40, padded pitch | q 150, k 250, heads 2 2, d 40, head_major, padding 8, lists 1 2
lists, d192, values 128 | q 300, k 400, heads 2, d 192 128, lists 1 2
lists, d256 | fp16, q 260, k 300, heads 2 2, d 256, lists 1 1
lists, long | batch 2, q 2048, k 2100, heads 8 4, lists 2 8
lists, many tiles, d64 | batch 4, q 1000, k 1000, heads 16 16, d 64, lists 1 16
)";

inline std::vector<Case> forward_cases() { return with_defaults(read_cases<Case>(kForwardCases)); }
