// Cached calls of forward_check: chunks of prompts on a paged or dense cache. The problems and the
// fp64 reference are those of decode_check.
#pragma once

#include <cstdio>
#include <string>

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
