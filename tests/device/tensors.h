// 16-bit tensors of a case, and the rows of its sequences, on the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "launch/params.h"

constexpr uint16_t kNaN = 0x7fe5;  // in both element types; no kernel stores this one (0x7fff)
constexpr int64_t kGuard = 4096;   // NaN elements before and after each tensor

inline float to_float(uint16_t bits, bool fp16) {
  if (fp16) return __half2float(__ushort_as_half(bits));
  return __bfloat162float(__ushort_as_bfloat16(bits));
}
inline uint16_t to_bits(float x, bool fp16) {
  return fp16 ? __half_as_ushort(__float2half_rn(x)) : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

inline double dot(const uint16_t* a, const uint16_t* b, int count, bool fp16) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += double{to_float(a[i], fp16)} * to_float(b[i], fp16);
  return sum;
}

// (batch, seq, heads, dim), initially NaN. The first upload allocates it on the device.
struct Tensor {
  int batch, seq, heads, dim;
  flashattn3::Strides stride;
  std::vector<uint16_t> host;
  uint16_t* device = nullptr;

  Tensor(int b, int s, int h, int d, bool head_major, int padding)
      : batch(b), seq(s), heads(h), dim(d) {
    const int64_t pitch = (d + padding + 7) / 8 * 8;
    stride.batch = pitch * h * s;
    stride.seq = head_major ? pitch : pitch * h;
    stride.head = head_major ? pitch * s : pitch;
    host.assign(stride.batch * b + 2 * kGuard, kNaN);
  }
  ~Tensor() { cudaFree(device); }
  Tensor(const Tensor&) = delete;

  uint16_t* row(int b, int s, int h) {
    return host.data() + kGuard + b * stride.batch + s * stride.seq + h * stride.head;
  }
  const uint16_t* row(int b, int s, int h) const { return const_cast<Tensor*>(this)->row(b, s, h); }
  uint16_t* data() { return device + kGuard; }
  void upload() {
    if (device == nullptr) cudaMalloc(&device, host.size() * 2);
    cudaMemcpy(device, host.data(), host.size() * 2, cudaMemcpyHostToDevice);
  }
  void download() { cudaMemcpy(host.data(), device, host.size() * 2, cudaMemcpyDeviceToHost); }
};

// Where a kernel on the host finds tensors and tables.
struct HostMemory {
  uint16_t* operator()(Tensor& tensor) const { return tensor.host.data() + kGuard; }
  template <class Value>
  const Value* operator()(const std::vector<Value>& values) const {
    return values.empty() ? nullptr : values.data();
  }
};

struct Rows {
  int batch_coord;  // batch index in the tensor: 0 with cu
  int offset;       // first row
  int length;
};

// Independent implementation of the kernel's rule for cu_seqlens and seqused.
inline Rows find_rows(const std::vector<int>& cu, const std::vector<int>& used, int longest,
                      int total, int b) {
  Rows rows{b, 0, longest};
  if (!cu.empty()) {
    const int begin = std::clamp(cu[b], 0, total), end = std::clamp(cu[b + 1], begin, total);
    rows = {0, begin, std::min(end - begin, longest)};
  }
  if (!used.empty()) rows.length = std::clamp(used[b], 0, rows.length);
  return rows;
}

// Calls work(i) for i below count, on all CPUs.
template <class Work>
void in_parallel(int64_t count, Work work) {
  std::atomic<int64_t> next{0};
  const auto loop = [&] {
    for (int64_t i; (i = next++) < count;) work(i);
  };
  std::vector<std::thread> others;
  const int64_t cpus = std::max(1u, std::thread::hardware_concurrency());
  for (int64_t i = 1; i < std::min(cpus, count); ++i) others.emplace_back(loop);
  loop();
  for (std::thread& other : others) other.join();
}
