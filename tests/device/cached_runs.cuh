// Launches of a cached call's problem on the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "decode_problem.h"
#include "harness.cuh"

struct CachedRuns {
  DecodeProblem problem;
  std::vector<RowReference> rows = reference_rows(problem);
  FirstResults first;
  float* lse;

  explicit CachedRuns(const DecodeCase& c) : problem(c) {
    for (Tensor* t : {&problem.q, &problem.k, &problem.v, &problem.out}) t->upload();
    check(cudaMalloc(&lse, problem.lse.size() * 4));
  }
  ~CachedRuns() { cudaFree(lse); }
  CachedRuns(const CachedRuns&) = delete;

  // launch(params, memory): sets what is left of the parameters and launches. Returns an error
  // message, or "".
  template <class Launch>
  std::string run(int index, const char* config, const char* turn, Launch launch) {
    DeviceMemory memory;
    flashattn3::ByteDecodeParams params = make_params(problem, memory, lse);
    check(cudaMemset(lse, 0xff, problem.lse.size() * 4));
    std::fill(problem.out.host.begin(), problem.out.host.end(), kNaN);
    problem.out.upload();
    g_case = index;
    std::snprintf(g_now, sizeof(g_now), "%3d %-36s %-40s %-11s", index, problem.c.name.c_str(),
                  config, turn);
    alarm(30);
    std::string wrong;
    try {
      launch(params, memory);
    } catch (const std::exception& error) {
      wrong = error.what();
    }
    check(cudaDeviceSynchronize());
    alarm(0);
    problem.out.download();
    check(cudaMemcpy(problem.lse.data(), lse, problem.lse.size() * 4, cudaMemcpyDeviceToHost));
    return wrong + check_coverage(problem);
  }
};

// The parameters of calls that are timed, without K and V: every sequence has as many keys as the
// cache holds of it; pages are in a random order.
inline flashattn3::DecodeParams timed_params(const DecodeCase& c, uint16_t* q, uint16_t* out,
                                             int num_sms, DeviceMemory& memory) {
  const int page = c.page_size ? c.page_size : c.capacity, max_pages = c.capacity / page;
  std::vector<int> table(c.page_size ? c.batch * max_pages : 0);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(5));
  const int64_t row = int64_t{c.heads_kv} * c.head_dim, q_row = int64_t{c.heads_q} * c.head_dim;
  const flashattn3::Strides q_stride{c.seqlen_q * q_row, q_row, c.head_dim};
  return {.q = q,
          .out = out,
          .q_stride = q_stride,
          .out_stride = q_stride,
          .k = {nullptr, {page * row, row, c.head_dim}},
          .v = {nullptr, {page * row, row, c.head_dim}},
          .page_table = memory(table),
          .cache_seqlens = memory(std::vector<int>(c.batch, c.capacity)),
          .page_table_stride = max_pages,
          .batch = c.batch,
          .seqlen_q = c.seqlen_q,
          .num_heads_q = c.heads_q,
          .num_heads_kv = c.heads_kv,
          .head_dim = c.head_dim,
          .head_dim_v = c.head_dim,
          .num_caches = c.batch,
          .num_pages = c.batch * max_pages,
          .page_size = c.page_size,
          .capacity = c.capacity,
          .softmax_scale = 1.f / std::sqrt(float(c.head_dim)),
          .window_left = c.left,
          .window_right = c.right,
          .num_sms = num_sms};
}
