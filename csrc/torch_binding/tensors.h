// Helpers over torch's stable ABI: strides, pointers, the current stream.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "launch/errors.h"
#include "launch/params.h"

// torch declares them only in its CUDA build. Weak, because the CPU build does not define them and
// the library must load there too.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cuda_view_dtype(AtenTensorHandle self,
                                                                           int32_t dtype,
                                                                           AtenTensorHandle* ret0);

namespace flashattn3 {

using torch::stable::Tensor;

inline void check_torch(AOTITorchError status, const char* what) {
  if (status != AOTI_TORCH_SUCCESS) fail(what, "torch reported an error");
}

// Sizes of up to five axes, without memory from the heap.
struct Shape {
  int rank;
  int64_t size[5];

  std::span<const int64_t> sizes() const { return {size, static_cast<size_t>(rank)}; }
  int64_t count() const {
    int64_t product = 1;
    for (int64_t axis : sizes()) product *= axis;
    return product;
  }
  // Of a dense tensor.
  std::array<int64_t, 5> strides() const {
    std::array<int64_t, 5> found;
    int64_t stride = 1;
    for (int i = rank; i-- > 0; stride *= size[i]) found[i] = stride;
    return found;
  }
};

// Makes a device current in this library's own CUDA runtime; the destructor restores the previous
// one.
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
  int32_t dtype;
  check_torch(aoti_torch_get_dtype(tensor.get(), &dtype), "asking for a dtype");
  return dtype;
}

// Throws "function: name must be ..., got ..." unless the tensor is on the GPU `device`. wanted:
// names that GPU in the message. name: such as "k.device".
inline void expect_on_gpu(const char* function, const char* name, const Tensor& tensor, int device,
                          const char* wanted) {
  expect(tensor.is_cuda(), function, name, "a GPU", "another device");
  expect(tensor.get_device_index() == device, function, name, wanted, "another GPU");
}

// Throws "function: name must be ..., got ..." if several elements of a tensor that is written have
// one address.
inline void expect_written(const char* function, const char* name, const Tensor& tensor) {
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) {
    expect(tensor.size(axis) <= 1 || tensor.stride(axis) != 0, function, name,
           "without a stride of 0", "an expanded tensor");
  }
}

// Returns a number of tokens, heads, pages or sequences. Throws for one over 2^30: positions of
// cached and new tokens and of queries, with window and tile, stay below 2^31.
inline int to_int(const char* function, const char* name, int64_t number) {
  expect(number >= 0 && number <= int64_t{1} << 30, function, name, "between 0 and 2^30", number);
  return static_cast<int>(number);
}

// The axes of a tensor's rows and heads. Before them is the batch, behind them are the columns.
struct Axes {
  int rows, heads;
};
// (batch, rows, heads, ·), (batch, heads, rows, ·) and, with varlen, (rows, heads, ·).
inline constexpr Axes kBshd{1, 2}, kBhsd{2, 1}, kVarlen{0, 1};

inline Strides row_strides(const Tensor& tensor, const Axes& axes) {
  return {.batch = axes.rows > 0 ? tensor.stride(0) : 0,
          .seq = tensor.stride(axes.rows),
          .head = tensor.stride(axes.heads)};
}
inline Strides row_strides(const Tensor& tensor, bool varlen) {
  return row_strides(tensor, varlen ? kVarlen : kBshd);
}

// Whether a tensor begins at a multiple of 16 bytes.
inline bool is_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

// Whether TMA reads a tensor: addresses and strides are multiples of 16 bytes, the last stride
// is 1. aligned: its elements in 16 bytes; by default of 16 bits.
inline bool fits_tma(const Tensor& tensor, int64_t aligned = 8) {
  const int64_t last = tensor.dim() - 1;
  bool fits = is_aligned(tensor) && tensor.stride(last) == 1;
  for (int64_t axis = 0; fits && axis < last; ++axis) {
    const int64_t stride = tensor.stride(axis);
    fits = tensor.size(axis) <= 1 || (stride != 0 && stride % aligned == 0);
  }
  return fits;
}

// A view of a tensor from an element of its memory on.
inline Tensor view_of(const Tensor& tensor, std::span<const int64_t> sizes,
                      std::span<const int64_t> strides, int64_t first = 0) {
  int64_t offset;
  check_torch(aoti_torch_get_storage_offset(tensor.get(), &offset), "asking for an offset");
  AtenTensorHandle view = nullptr;
  check_torch(aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()),
                                             sizes.data(), strides.data(), offset + first, &view),
              "a view of a tensor");
  return Tensor(view);
}

// The same, dense.
inline Tensor view_of(const Tensor& tensor, const Shape& shape, int64_t first = 0) {
  const auto strides = shape.strides();
  return view_of(tensor, shape.sizes(), {strides.data(), shape.sizes().size()}, first);
}

// A view of a dense tensor on a GPU, with one axis, as elements of another dtype.
inline Tensor view_as(const Tensor& tensor, int32_t dtype) {
  if (aoti_torch_cuda_view_dtype == nullptr) fail("this torch", "is built without CUDA");
  AtenTensorHandle view = nullptr;
  check_torch(aoti_torch_cuda_view_dtype(tensor.get(), dtype, &view), "a view of another dtype");
  return Tensor(view);
}

// For new_tensor, in the place of a GPU's index.
constexpr int kCpu = -1;

// Throws torch's own exception, such as torch.OutOfMemoryError, after an allocation that failed.
[[noreturn]] void throw_of_allocation(std::span<const int64_t> sizes, int32_t dtype,
                                      int32_t device_type, int device);

// Allocates an uninitialised tensor on a GPU, or with kCpu on the CPU.
inline Tensor new_strided(std::span<const int64_t> sizes, std::span<const int64_t> strides,
                          int32_t dtype, int device) {
  const int32_t type =
      device == kCpu ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  const int index = device == kCpu ? 0 : device;
  AtenTensorHandle handle = nullptr;
  const AOTITorchError status =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                               dtype, type, index, &handle);
  if (status != AOTI_TORCH_SUCCESS) throw_of_allocation(sizes, dtype, type, index);
  return Tensor(handle);
}

// The same, dense.
inline Tensor new_tensor(const Shape& shape, int32_t dtype, int device) {
  const auto strides = shape.strides();
  return new_strided(shape.sizes(), {strides.data(), shape.sizes().size()}, dtype, device);
}

inline const int32_t* indices(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const int32_t*>(tensor->data_ptr()) : nullptr;
}

}  // namespace flashattn3
