// Shared by forward_check and backward_check: watchdog, CUDA errors, random tensors, timing.
#pragma once

#include <cuda_runtime.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "launch/params.h"
#include "tensors.h"

static char g_now[256];  // the current run, for the watchdog
static int g_case;

static void on_alarm(int) {
  char text[400];
  const int n =
      std::snprintf(text, sizeof(text), "HANG  %s; go on with --from %d\n", g_now, g_case + 1);
  if (write(1, text, n) < 0) _exit(5);
  _exit(3);
}

static void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::printf("CUDA  %s: %s; go on with --from %d\n", g_now, cudaGetErrorString(status),
              g_case + 1);
  std::fflush(stdout);
  _exit(4);
}

// Returns an error message, or "".
[[maybe_unused]] static std::string check_counter(const int* tile_counter) {
  int counts[2];
  check(cudaMemcpy(counts, tile_counter, 8, cudaMemcpyDeviceToHost));
  return counts[0] == 0 && counts[1] == 0 ? "" : " the tile counter was not put back;";
}

template <class Value>
static Value* device_copy(const std::vector<Value>& values) {
  const size_t bytes = values.size() * sizeof(Value);
  if (bytes == 0) return nullptr;
  Value* device;
  check(cudaMalloc(&device, bytes));
  check(cudaMemcpy(device, values.data(), bytes, cudaMemcpyHostToDevice));
  return device;
}

// The 8-bit values that represent 1.
constexpr float kE4m3PerOne = 100.f, kInt8PerOne = 28.f;

template <class Element>
__device__ Element random_element(float normal) {
  if constexpr (std::is_same_v<Element, int8_t>) {
    return static_cast<int8_t>(rintf(fminf(fmaxf(kInt8PerOne * normal, -127.f), 127.f)));
  } else if constexpr (sizeof(Element) == 1) {
    return Element(kE4m3PerOne * normal);
  } else {
    return Element(normal);
  }
}
template <class Element>
__global__ void fill_normal(Element* data, int64_t count, uint32_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    const float u = (static_cast<uint32_t>(x) + 1.f) * 2.3283064e-10f;
    const float w = static_cast<uint32_t>(x >> 32) * 2.3283064e-10f;
    const float normal = sqrtf(-2.f * __logf(fminf(u, 0.9999999f))) * __cosf(6.2831853f * w);
    data[i] = random_element<Element>(normal);
  }
}

// Milliseconds per launch.
template <class Launch>
float time_launch(Launch launch, int repeats) {
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  check(cudaEventRecord(begin));
  for (int i = 0; i < repeats; ++i) launch();
  check(cudaEventRecord(end));
  check(cudaEventSynchronize(end));
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin, end));
  cudaEventDestroy(begin), cudaEventDestroy(end);
  return ms / repeats;
}

// Milliseconds of each of `count` launches: the median of rounds, each of which has all of them.
template <class Name, class Launch>
std::vector<float> median_times(int count, int num_rounds, int repeats, Name name, Launch launch) {
  std::vector<std::vector<float>> ms(count);
  for (int round = 0; round < num_rounds; ++round) {
    for (int i = 0; i < count; ++i) {
      std::snprintf(g_now, sizeof(g_now), "timing %s", name(i).c_str());
      alarm(60);
      usleep(3000);  // idle, as beside slower providers: not always at the power limit
      const auto one = [&] { launch(i); };
      if (round == 0) time_launch(one, 2);
      ms[i].push_back(time_launch(one, repeats));
      alarm(0);
    }
  }
  std::vector<float> medians;
  for (std::vector<float>& all : ms) {
    std::sort(all.begin(), all.end());
    medians.push_back(all[num_rounds / 2]);
  }
  return medians;
}

// A line of the benchmark grid, for the lengths 512, 1024, ..., 16384.
constexpr int kLengths = 6;
struct GridLine {
  double rate[kLengths] = {}, spent[kLengths] = {};  // TFLOP/s, microseconds

  void set(int length, float ms, double flop) {
    spent[length] = ms * 1e3, rate[length] = flop / ms * 1e-9;
  }
  void print(const std::string& name) const {
    std::printf("%-52s", name.c_str());
    for (const double x : rate) std::printf("%5.0f", x);
    std::printf("  |");
    for (const double x : spent) std::printf("%7.0f", x);
    std::printf("\n");
    std::fflush(stdout);
  }
};

// Device copies of a problem's tables, freed with it, and its tensors.
struct DeviceMemory {
  std::vector<void*> all;
  ~DeviceMemory() {
    for (void* each : all) cudaFree(each);
  }
  template <class Value>
  const Value* operator()(const std::vector<Value>& values) {
    all.push_back(device_copy(values));
    return static_cast<const Value*>(all.back());
  }
  uint16_t* operator()(Tensor& tensor) const { return tensor.data(); }
};

// A problem of the benchmark grid: 16384 tokens, heads * head dim 2048 or just below. data: q, k, v
// and out.
inline flashattn3::ForwardParams grid_params(uint16_t* const* data, float* lse, int head_dim,
                                             int seqlen, bool causal) {
  flashattn3::ForwardParams params{};
  params.q = data[0], params.k = data[1], params.v = data[2], params.out = data[3];
  params.lse = lse;
  const int heads = 2048 / head_dim;
  const flashattn3::Strides stride{int64_t{seqlen} * heads * head_dim, heads * head_dim, head_dim};
  params.q_stride = params.k_stride = params.v_stride = params.out_stride = stride;
  params.lse_stride = {int64_t{seqlen} * heads, 1, seqlen};
  params.batch = 16384 / seqlen, params.seqlen_q = params.seqlen_k = seqlen;
  params.num_heads_q = params.num_heads_kv = heads;
  params.head_dim = params.head_dim_v = head_dim;
  params.softmax_scale = 1.f / std::sqrt(static_cast<float>(head_dim));
  params.window_left = -1, params.window_right = causal ? 0 : -1;
  return params;
}
