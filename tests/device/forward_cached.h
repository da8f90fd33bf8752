// Cached calls of forward_check: chunks of prompts on a paged or dense cache. The problems and the
// fp64 reference are those of decode_check.
#pragma once

#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cached_runs.cuh"
#include "forward_cached_cases.h"
#include "forward_launches.h"
#include "harness.cuh"

// Runs the case three times, which must be bitwise equal: tiles from a counter, in fixed order, and
// on 3 SMs, so that each CTA has many tiles. Returns false on failure.
static bool run_cached_case(const DecodeCase& c, int index, int num_sms, int* counter) {
  const int config = flashattn3::cached_config(c.fp16, std::max(c.head_dim, c.head_dim_v), c.tree);
  const char* turns[] = {"counted", "fixed order", "3 SMs"};
  CachedRuns runs(c);
  bool good = true;
  Worst worst;
  for (int turn = 0; turn < 3; ++turn) {
    const auto launch = [&](flashattn3::DecodeParams& params, DeviceMemory& memory) {
      params.num_sms = turn == 2 ? 3 : num_sms;
      params.pdl = turn == 0;
      params.counters =
          turn == 0 ? reinterpret_cast<flashattn3::decode::Counters*>(counter) : nullptr;
      params.workspace = const_cast<int*>(
          memory(std::vector<int>(flashattn3::varlen_schedule_bytes(c.batch) / 4, -1)));
      kCachedLaunch[config](params, nullptr);
    };
    std::string wrong = runs.run(index, flashattn3::kCheckConfigNames[config], turns[turn], launch);
    wrong += check_counter(counter) + runs.first.compare(runs.problem);
    const Worst w = compare(runs.problem, runs.rows);
    if (w.ratio > worst.ratio) worst = w;
    if (!wrong.empty() || w.ratio > 1) good = report(g_now, wrong, w);
  }
  if (good) std::printf("PASS  %.81s worst %.3f of the bound\n", g_now, worst.ratio);
  std::fflush(stdout);
  return good;
}

// ------------------------------------------------------------------------------------------ timing

// Prints TFLOP/s of the dense forward and, in the same rounds, of cached calls on the same scores.
static void time_chunk(const DecodeCase& cell, int num_sms, int* counter) {
  using flashattn3::DecodeParams;
  using flashattn3::ForwardParams;
  constexpr int kRounds = 9;
  const int d = cell.head_dim;
  const int64_t row = int64_t{cell.heads_kv} * d, q_row = int64_t{cell.heads_q} * d;
  const int64_t cache_elements = cell.batch * int64_t{cell.capacity} * row;
  const int64_t q_elements = cell.batch * int64_t{cell.seqlen_q} * q_row;
  uint16_t *k, *v, *q, *out;
  check(cudaMalloc(&k, cache_elements * 2));
  check(cudaMalloc(&v, cache_elements * 2));
  check(cudaMalloc(&q, q_elements * 2));
  check(cudaMalloc(&out, q_elements * 2));
  fill_normal<<<1056, 256>>>(reinterpret_cast<__nv_bfloat16*>(k), cache_elements, 1);
  fill_normal<<<1056, 256>>>(reinterpret_cast<__nv_bfloat16*>(v), cache_elements, 2);
  fill_normal<<<1056, 256>>>(reinterpret_cast<__nv_bfloat16*>(q), q_elements, 3);

  ForwardParams dense{};
  dense.q = q, dense.k = k, dense.v = v, dense.out = out;
  dense.q_stride = dense.out_stride = {cell.seqlen_q * q_row, q_row, d};
  dense.k_stride = dense.v_stride = {cell.capacity * row, row, d};
  dense.batch = cell.batch, dense.seqlen_q = cell.seqlen_q, dense.seqlen_k = cell.capacity;
  dense.num_heads_q = cell.heads_q, dense.num_heads_kv = cell.heads_kv;
  dense.head_dim = dense.head_dim_v = d;
  dense.softmax_scale = 1.f / std::sqrt(static_cast<float>(d));
  dense.window_left = -1, dense.window_right = 0;
  dense.num_sms = num_sms, dense.tile_counter = counter, dense.pdl = true;
  int of_dense = 0;
  const auto is_dense = [&](const flashattn3::forward::Config& r) {
    return r.dtype == flashattn3::kBf16 && r.head_dim == d && r.masked && !r.cached &&
           (d != 64 || r.block_n == 128);
  };
  while (!is_dense(flashattn3::kCheckConfigs[of_dense])) ++of_dense;

  constexpr int pages[] = {-1, 0, 1, 8, 16, 64, 128};  // -1: the dense forward
  DeviceMemory memory;
  std::vector<DecodeParams> params;
  for (const int page : pages) {
    DecodeCase paged = cell;
    paged.page_size = std::max(0, page);
    params.push_back(timed_params(paged, q, out, num_sms, memory));
    params.back().k.data = k, params.back().v.data = v;
    params.back().pdl = true;
    params.back().counters = reinterpret_cast<flashattn3::decode::Counters*>(counter);
  }
  const int of_cached = flashattn3::cached_config(false, d);
  const double keys = cell.capacity - 0.5 * (cell.seqlen_q - 1);  // of a query, on average
  const double flop = 4.0 * cell.batch * cell.seqlen_q * keys * q_row;
  const int repeats = std::max(2, static_cast<int>(2e-3 / (flop / 5e14)));
  const auto label = [&](int i) { return cell.name + ", page " + std::to_string(pages[i]); };
  const auto launch = [&](int i) {
    if (pages[i] < 0) {
      kLaunch[of_dense](dense, nullptr);
    } else {
      kCachedLaunch[of_cached](params[i], nullptr);
    }
  };
  const std::vector<float> ms = median_times(std::size(pages), kRounds, repeats, label, launch);
  std::printf("%-44s", cell.name.c_str());
  for (const float each : ms) std::printf("  %5.0f (%.3f)", flop / each * 1e-9, ms[0] / each);
  std::printf("\n");
  std::fflush(stdout);
  cudaFree(k), cudaFree(v), cudaFree(q), cudaFree(out);
}

static void time_cached(int num_sms, int* counter) {
  std::printf(
      "TFLOP/s and part of the dense forward's: dense forward, dense cache, pages of 1, 8, "
      "16, 64, 128\n");
  constexpr const char* kCells = R"(
2048 of 16k, 32/8 heads of 128 | q 2048, capacity 16384, heads 32 8, causal
4 x 2048 of 8k, 32/8 heads of 128 | batch 4, q 2048, capacity 8192, heads 32 8, causal
8 x 256 of 4k, 32/8 heads of 128 | batch 8, q 256, capacity 4096, heads 32 8, causal
1 x 4096 of 4k, 32/8 heads of 128 | q 4096, capacity 4096, heads 32 8, causal
4 x 2048 of 8k, 64/8 heads of 64 | batch 4, q 2048, capacity 8192, heads 64 8, d 64, causal
4 x 2048 of 8k, 16/2 heads of 256 | batch 4, q 2048, capacity 8192, heads 16 2, d 256, causal
)";
  for (const DecodeCase& cell : read_cases<DecodeCase>(kCells)) time_chunk(cell, num_sms, counter);
}
