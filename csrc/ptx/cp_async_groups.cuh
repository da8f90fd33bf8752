// Groups of asynchronous copies (cp.async), for which the thread that issued them waits in order.
#pragma once

#include <cstdint>

namespace flashattn3 {

// Copies 4 bytes to shared memory, or writes 0 there if !exists; `from` is then not read.
__device__ __forceinline__ void copy_word_async(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 4 : 0)
               : "memory");
}

// The same of 16 bytes, past L1. Both addresses are multiples of 16 bytes.
__device__ __forceinline__ void copy_vec_async(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}

// Makes a group of the copies that this thread has issued since the last one.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kCount groups of this thread are in flight. It then reads what it copied.
template <int kCount>
__device__ __forceinline__ void wait_for_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kCount) : "memory");
}

}  // namespace flashattn3
