// A token of a cached call with spans as a call of its own: one sequence and one query, in a cache
// of another capacity and page size. Its bits must be the same.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <random>
#include <string>

#include "decode_problem.h"

// The call of query `query` of sequence b alone. Its window is bounded to the right at the query,
// or on neither side.
inline DecodeCase case_alone(const DecodeProblem& p, int b, int query, std::mt19937& random) {
  const DecodeSequence s = p.sequence(b);
  const int keys = p.visible(b, query, s).second;
  const int page = std::array{0, 1, 16, 64, 100}[random() % 5];
  const int capacity = std::max(1, keys) + static_cast<int>(random() % 300);
  DecodeCase alone = p.c;
  alone.batch = alone.seqlen_q = 1;
  alone.page_size = page, alone.capacity = page ? (capacity + page - 1) / page * page : capacity;
  alone.seqlens = {std::max(0, keys)};
  alone.cu_q.clear(), alone.cu_new.clear(), alone.cache_idx.clear();
  alone.seqlen_new = 0, alone.head_major = random() % 2;
  if (!p.c.leftpad.empty()) alone.leftpad = {p.c.leftpad[b]};
  return alone;
}

// Copies the query, its keys and values, the sinks and the sequence's descales.
inline void copy_token(DecodeProblem& to, DecodeProblem& from, int b, int query) {
  const DecodeSequence s = from.sequence(b);
  const auto copy = [](Tensor& x, const uint16_t* row, uint16_t* at) {
    std::memcpy(at, row, x.dim * sizeof(uint16_t));
  };
  const int at = from.c.cu_q.empty() ? b : 0;
  for (int h = 0; h < to.c.heads_q; ++h) {
    copy(to.q, from.q.row(at, s.offset + query, h), to.q.row(0, 0, h));
  }
  for (int key = to.sequence(0).first_key; key < to.sequence(0).num_keys; ++key) {
    const auto [page, slot] = from.place(s.cache_idx, key);
    const auto [to_page, to_slot] = to.place(0, key);
    for (int h = 0; h < to.c.heads_kv; ++h) {
      copy(to.k, from.k.row(page, slot, h), to.k.row(to_page, to_slot, h));
      copy(to.v, from.v.row(page, slot, h), to.v.row(to_page, to_slot, h));
    }
  }
  to.sinks = from.sinks;
  for (int h = 0; h < to.c.heads_kv && to.c.descales; ++h) {
    to.q_descale[h] = from.head_descale(from.q_descale, b, h);
    to.k_descale[h] = from.head_descale(from.k_descale, b, h);
    to.v_descale[h] = from.head_descale(from.v_descale, b, h);
  }
}

// Runs some tokens of a problem, which has its results, alone. run(problem): launches; returns an
// error message, or "". Returns one, or "".
template <class Run>
std::string compare_alone(DecodeProblem& p, Run&& run) {
  const bool comparable = p.c.right == 0 || (p.c.left < 0 && p.c.right < 0);
  if (p.c.spans == 0 || !comparable || p.c.lost_page) return "";
  std::mt19937 random(99);
  for (int turn = 0; turn < 4; ++turn) {
    const int b = static_cast<int>(random() % p.c.batch);
    const DecodeSequence s = p.sequence(b);
    if (s.num_queries <= 0 || s.cache_idx < 0) continue;
    const int query = static_cast<int>(random() % s.num_queries);
    const DecodeCase c = case_alone(p, b, query, random);
    DecodeProblem alone(c);
    copy_token(alone, p, b, query);
    std::string wrong = run(alone);
    for (int h = 0; h < c.heads_q; ++h) {
      const float lse = p.lse[p.lse_index(b, s, query, h)];
      const uint16_t* row = p.out.row(p.c.cu_q.empty() ? b : 0, s.offset + query, h);
      const bool same = !std::memcmp(row, alone.out.row(0, 0, h), p.v.dim * 2) &&
                        !std::memcmp(&lse, &alone.lse[h], sizeof(lse));
      if (!same) wrong += " other bits than alone in head " + std::to_string(h) + ";";
    }
    if (!wrong.empty()) return wrong + " query " + std::to_string(query);
  }
  return "";
}
