// Launches of a cached call's problem on the device.
#pragma once

#include <algorithm>
#include <cstdio>
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
