// What the unit tests share: tests and their comparisons, arrays on the GPU, launches, and tiles in
// shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../harness.cuh"
#include "ptx/element.h"
#include "ptx/mbarrier.cuh"
#include "tile/fragment.h"

namespace unit {

using flashattn3::ElementType;

// ----------------------------------------------------------------------------------------- tests

// What a test has compared: the number of values, and the one with the largest error.
class Result {
 public:
  // Accepts |wanted - found| <= bound, equal infinities, and NaN where NaN is wanted. name, i, j:
  // of the value, for the report.
  void compare(double wanted, double found, double bound, const std::string& name, int i = 0,
               int j = 0) {
    ++num_compared_;
    const bool same = wanted == found || (std::isnan(wanted) && std::isnan(found));
    const double error = std::abs(wanted - found);
    double ratio = same ? 0. : error / bound;
    if (std::isnan(ratio)) ratio = std::numeric_limits<double>::infinity();
    if (num_compared_ > 1 && ratio <= worst_ratio_) return;
    worst_ratio_ = ratio;
    char text[200];
    std::snprintf(text, sizeof(text), "%s[%d, %d] wanted %.9g found %.9g", name.c_str(), i, j,
                  wanted, found);
    worst_ = text;
  }
  void equal(double wanted, double found, const std::string& name, int i = 0, int j = 0) {
    compare(wanted, found, 0., name, i, j);
  }

  // A test that compared nothing has failed.
  bool passed() const { return num_compared_ > 0 && worst_ratio_ <= 1.; }
  int64_t num_compared() const { return num_compared_; }
  const std::string& worst() const { return worst_; }

 private:
  int64_t num_compared_ = 0;
  double worst_ratio_ = 0.;
  std::string worst_ = "nothing was compared";
};

enum class Where { kHost, kGpu };

struct Test {
  const char* name;
  Where where;
  void (*run)(Result&);
};

inline std::vector<Test>& all_tests() {
  static std::vector<Test> tests;
  return tests;
}

// Each file defines one of these, which adds its tests to all_tests().
struct Tests {
  Tests(std::initializer_list<Test> tests) {
    all_tests().insert(all_tests().end(), tests.begin(), tests.end());
  }
};

// ------------------------------------------------------------------------------------------- GPU

// An array in GPU memory and its copy on the host. Without values its bytes are 0xff, NaN in every
// floating-point type.
template <class Value>
class Array {
 public:
  explicit Array(size_t count) : host_(count) {
    check(cudaMalloc(&device_, count * sizeof(Value)));
    check(cudaMemset(device_, 0xff, count * sizeof(Value)));
  }
  explicit Array(const std::vector<Value>& values) : Array(values.size()) {
    host_ = values;
    check(cudaMemcpy(device_, host_.data(), host_.size() * sizeof(Value), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(device_); }
  Array(const Array&) = delete;

  Value* device() { return device_; }
  const std::vector<Value>& download() {
    check(cudaMemcpy(host_.data(), device_, host_.size() * sizeof(Value), cudaMemcpyDeviceToHost));
    return host_;
  }

 private:
  std::vector<Value> host_;
  Value* device_ = nullptr;
};

// Runs a kernel and waits for its end. shared_bytes: of dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), int num_ctas, int num_threads, int shared_bytes,
            const Arguments&... arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  kernel<<<num_ctas, num_threads, shared_bytes>>>(arguments...);
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
}

// Runs a kernel whose last parameter is an array of `count` results, initially 0xff. Returns them.
template <class Value, class... Parameters, class... Arguments>
std::vector<Value> results_of(size_t count, void (*kernel)(Parameters...), int num_ctas,
                              int num_threads, int shared_bytes, const Arguments&... arguments) {
  Array<Value> found(count);
  launch(kernel, num_ctas, num_threads, shared_bytes, arguments..., found.device());
  return found.download();
}

// The dynamic shared memory, at a multiple of 1024 as tiles need it.
__device__ inline uint8_t* shared_memory() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return memory;
}

// ----------------------------------------------------------------------------------------- tiles

// Bytes of a tile in the layout of tile/gemm.cuh, which is written out here a second time.
constexpr int tile_bytes(int rows, int row_bytes) { return (row_bytes + 127) / 128 * rows * 128; }
constexpr int tile_offset(int rows, int row, int byte) {
  return byte / 128 * rows * 128 + row * 128 + ((byte % 128 / 16) ^ (row % 8)) * 16 + byte % 16;
}

// Copies a dense matrix into a tile. All threads of the CTA call it; WGMMA may read the tile after
// the next __syncthreads.
__device__ inline void fill_tile(uint8_t* tile, const uint8_t* matrix, int rows, int row_bytes) {
  for (int i = threadIdx.x; i < rows * row_bytes; i += blockDim.x) {
    tile[tile_offset(rows, i / row_bytes, i % row_bytes)] = matrix[i];
  }
  flashattn3::fence_async_proxy();
}

constexpr int kTileOffset = 1024;  // of a loaded tile; the barrier is before it

// Runs load(tile, full) in thread 0 over poisoned bytes, waits, and stores the bytes.
template <int kBytes, class Load>
__device__ void store_loaded(uint8_t* found, Load load) {
  auto& full = *reinterpret_cast<flashattn3::Barrier*>(shared_memory());
  uint8_t* tile = shared_memory() + kTileOffset;
  for (int i = threadIdx.x; i < kBytes; i += blockDim.x) tile[i] = 0xff;
  flashattn3::fence_async_proxy();
  if (threadIdx.x == 0) {
    full.init(1);
    flashattn3::fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) load(tile, full);
  full.wait(0);
  for (int i = threadIdx.x; i < kBytes; i += blockDim.x) found[i] = tile[i];
}

// Index of the calling thread's register i in a dense matrix.
template <int kColumns>
__device__ int fragment_index(int i) {
  const int row = flashattn3::thread_row(threadIdx.x) + flashattn3::register_row(i);
  return row * kColumns + flashattn3::thread_column(threadIdx.x) + flashattn3::register_column(i);
}
// Copies a warpgroup's accumulators to a dense matrix, of 64 rows from row 64 * warpgroup on, or
// back.
template <int kColumns, class Value>
__device__ void store_fragment(const Value (&d)[kColumns / 2], Value* matrix) {
  for (int i = 0; i < kColumns / 2; ++i) matrix[fragment_index<kColumns>(i)] = d[i];
}
template <int kColumns>
__device__ void load_fragment(float (&d)[kColumns / 2], const float* matrix) {
  for (int i = 0; i < kColumns / 2; ++i) d[i] = matrix[fragment_index<kColumns>(i)];
}

// Any bytes that differ from their neighbours.
inline std::vector<uint8_t> some_bytes(size_t count) {
  std::mt19937 random(11);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& x : bytes) x = static_cast<uint8_t>(random());
  return bytes;
}

// The 16-bit element of a row and column of a warp's 16 rows; never the poison 0xffff.
__host__ __device__ constexpr uint16_t element(int row, int column) {
  return static_cast<uint16_t>(row * 256 + column);
}

// The pair of elements in accumulator registers 2 * i and 2 * i + 1.
__device__ inline uint32_t element_pair(int i, int first_column) {
  const int lane = threadIdx.x % 32;
  const int row = flashattn3::thread_row(lane) + flashattn3::register_row(2 * i);
  const int column =
      first_column + flashattn3::thread_column(lane) + flashattn3::register_column(2 * i);
  return element(row, column) | static_cast<uint32_t>(element(row, column + 1)) << 16;
}

constexpr int kMargin = 128;  // bytes after a filled tile

// Poisons a tile and the bytes after it with 0xff, fills it, and stores them.
template <int kBytes, class Fill>
__device__ void store_filled(uint8_t* found, Fill fill) {
  uint8_t* tile = shared_memory();
  for (int i = threadIdx.x; i < kBytes + kMargin; i += blockDim.x) tile[i] = 0xff;
  __syncthreads();
  fill(tile);
  __syncthreads();
  for (int i = threadIdx.x; i < kBytes + kMargin; i += blockDim.x) found[i] = tile[i];
}

// Compares the bytes that store_filled has stored: 0 where the fill belongs, 0xff where it does not
// and after the tile. offset(i, j): of byte j of line i; is_filled(i): whether the line is.
template <class Offset, class IsFilled>
void compare_filled(Result& result, const std::string& name, const std::vector<uint8_t>& found,
                    int num_lines, int line_bytes, Offset offset, IsFilled is_filled) {
  for (int i = 0; i < num_lines; ++i) {
    for (int j = 0; j < line_bytes; ++j) {
      result.equal(is_filled(i) ? 0 : 0xff, found[offset(i, j)], name, i, j);
    }
  }
  for (size_t i = num_lines * line_bytes; i < found.size(); ++i) {
    result.equal(0xff, found[i], name + ", after the tile", static_cast<int>(i));
  }
}

// A dense matrix of small integers, which every element type and every GEMM represents exactly.
struct Matrix {
  int rows, columns;
  std::vector<int> values;

  // Values from -largest to largest.
  Matrix(int rows, int columns, int largest, uint32_t seed)
      : rows(rows), columns(columns), values(rows * columns) {
    std::mt19937 random(seed);
    for (int& x : values) x = static_cast<int>(random() % (2 * largest + 1)) - largest;
  }
  int at(int row, int column) const { return values[row * columns + column]; }

  // The matrix in memory, as elements of a type.
  std::vector<uint8_t> bytes(ElementType type) const {
    std::vector<uint8_t> all;
    for (const int x : values) {
      if (type == ElementType::kInt8) all.push_back(static_cast<uint8_t>(x));
      if (type == ElementType::kE4m3) all.push_back(__nv_fp8_e4m3(static_cast<float>(x)).__x);
      if (is_quantized(type)) continue;
      const uint16_t word = type == ElementType::kFloat16
                                ? __half_as_ushort(__float2half_rn(static_cast<float>(x)))
                                : __bfloat16_as_ushort(__float2bfloat16_rn(static_cast<float>(x)));
      all.push_back(static_cast<uint8_t>(word));
      all.push_back(static_cast<uint8_t>(word >> 8));
    }
    return all;
  }
};

}  // namespace unit
