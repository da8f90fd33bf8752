// The layout of a WGMMA accumulator in the registers of a warpgroup: thread t holds, in register i,
// the element of
//   row    thread_row(t) + register_row(i)
//   column thread_column(t) + register_column(i)
// of 64 rows x N columns, i < N / 2. (PTX ISA, "Register fragments and shared memory layouts" of
// wgmma.mma_async.m64nNk16. The result of mma.sync.m16n8 has the same layout in a warp.) Four
// neighbouring lanes, a quad, hold a row. A thread has elements of two rows.
#pragma once

#include <cstdint>

namespace flashattn3 {

constexpr int kRowsOfWarp = 16;  // rows of each warp among the 64 of its warpgroup
constexpr int kRowStride = 8;    // from the first to the second row of a thread

// Row and column of a thread's register 0. thread: index in the warpgroup or in consecutive
// warpgroups, whose rows follow each other; with a lane index, the row is counted from the warp's
// first row. They compute in the type of the index: a conversion changes the machine code of the
// kernels.
template <class Index>
constexpr Index thread_row(Index thread) {
  return thread / 32 * kRowsOfWarp + thread % 32 / 4;
}
template <class Index>
constexpr Index thread_column(Index thread) {
  return thread % 4 * 2;
}

// Index of the row, of its thread's two, that register i belongs to.
constexpr int row_of(int i) { return i / 2 % 2; }

// Distances of register i from register 0 of the same thread.
constexpr int register_row(int i) { return kRowStride * row_of(i); }
constexpr int register_column(int i) { return i / 4 * 8 + i % 2; }

// The value of a score's register. Those of int8 are integers and stand for the denormal float of
// the same bits (gemm_int8.cuh).
__device__ __forceinline__ float get(float score) { return score; }
__device__ __forceinline__ float get(uint32_t score) { return __uint_as_float(score); }
__device__ __forceinline__ void set(float& score, float value) { score = value; }
__device__ __forceinline__ void set(uint32_t& score, float value) {
  score = __float_as_uint(value);
}

}  // namespace flashattn3
