// What the operators need of torch's stable interface: new tensors, strides, the current stream.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>

#include "host/errors.h"
#include "host/params.h"

// Declared by torch only to those who compile against its CUDA build. Weak: it is not there under
// the CPU build, where the library must load all the same.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace flashattn3 {

using torch::stable::Tensor;

inline void check_torch(AOTITorchError status, const char* what) {
  if (status != AOTI_TORCH_SUCCESS) fail(what, "torch reported an error");
}

// Makes a device current for this library's own CUDA runtime, and the one before it afterwards.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "asking for the current device");
    if (before_ == device) return;
    check_cuda(cudaSetDevice(device), "changing the current device");
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

inline cudaStream_t current_stream(int device) {
  if (aoti_torch_get_current_cuda_stream == nullptr) fail("this torch", "is built without CUDA");
  void* stream = nullptr;
  check_torch(aoti_torch_get_current_cuda_stream(device, &stream), "asking for the current stream");
  return static_cast<cudaStream_t>(stream);
}

inline int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  check_torch(aoti_torch_get_dtype(tensor.get(), &dtype), "asking for a dtype");
  return dtype;
}

// A contiguous tensor on the device of another one, its memory as it was found.
template <size_t kRank>
Tensor new_tensor(const Tensor& like, const std::array<int64_t, kRank>& sizes, int32_t dtype) {
  std::array<int64_t, kRank> strides;
  int64_t stride = 1;
  for (size_t axis = kRank; axis-- > 0;) {
    strides[axis] = stride;
    stride *= sizes[axis];
  }
  AtenTensorHandle handle = nullptr;
  check_torch(
      aoti_torch_empty_strided(kRank, sizes.data(), strides.data(), dtype,
                               aoti_torch_device_type_cuda(), like.get_device_index(), &handle),
      "allocating a result");
  return Tensor(handle);
}

// Strides of (batch, rows, heads, ·), or of (rows, heads, ·) where varlen.
inline Strides row_strides(const Tensor& tensor, bool varlen) {
  const auto strides = tensor.strides();
  if (varlen) return {.batch = 0, .seq = strides[0], .head = strides[1]};
  return {.batch = strides[0], .seq = strides[1], .head = strides[2]};
}

inline const int32_t* indices(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const int32_t*>(tensor->data_ptr()) : nullptr;
}

// One dtype and device, head dims that fit together, rows of v as many as of k.
inline void check_inputs(const Tensor& q, const Tensor& k, const Tensor& v, int64_t rows_axis) {
  const int64_t heads_axis = rows_axis + 1, dim_axis = rows_axis + 2;
  const bool fits =
      q.dim() == dim_axis + 1 && k.dim() == q.dim() && v.dim() == q.dim() &&
      dtype_of(k) == dtype_of(q) && dtype_of(v) == dtype_of(q) &&
      k.get_device_index() == q.get_device_index() &&
      v.get_device_index() == q.get_device_index() && k.size(dim_axis) == q.size(dim_axis) &&
      v.size(rows_axis) == k.size(rows_axis) && v.size(heads_axis) == k.size(heads_axis);
  if (!fits) fail("flashattn3_hopper::forward", "q, k and v do not fit together");
}

}  // namespace flashattn3
