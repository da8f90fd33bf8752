// Loads and stores of vectors of 8 and 16 bytes.
#pragma once

namespace flashattn3 {

// at: a multiple of the vector's size. The load is an ordinary one: what a kernel before wrote is
// seen after griddepcontrol_wait().
template <class Vector>
__device__ __forceinline__ Vector load_vector(const void* at) {
  return *static_cast<const Vector*>(at);
}

template <class Vector>
__device__ __forceinline__ void store_vector(void* at, const Vector& vector) {
  *static_cast<Vector*>(at) = vector;
}

}  // namespace flashattn3
