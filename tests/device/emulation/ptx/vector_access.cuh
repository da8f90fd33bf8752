// Emulation of csrc/ptx/vector_access.cuh. A GPU fails at an address that is not a multiple.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace flashattn3 {

inline void check_address(const void* at, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(at) % bytes == 0) return;
  std::printf("an address is not a multiple of %zu\n", bytes);
  std::exit(1);
}

template <class Vector>
Vector load_vector(const void* at) {
  check_address(at, sizeof(Vector));
  Vector vector;
  std::memcpy(&vector, at, sizeof(Vector));
  return vector;
}

template <class Vector>
void store_vector(void* at, const Vector& vector) {
  check_address(at, sizeof(Vector));
  std::memcpy(at, &vector, sizeof(Vector));
}

}  // namespace flashattn3
