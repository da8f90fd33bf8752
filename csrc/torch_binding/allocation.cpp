#include <dlfcn.h>

#include <new>
#include <vector>

#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

// An at::Tensor, by its size and by how a function returns it: in memory, as it has a destructor.
struct TorchTensor {
  void* implementation;
  ~TorchTensor() {}
};
// at::_ops::contiguous::call(const at::Tensor&, c10::MemoryFormat).
using Contiguous = TorchTensor(const void* tensor, int8_t memory_format);
constexpr char kContiguous[] = "_ZN2at4_ops10contiguous4callERKNS_6TensorEN3c1012MemoryFormatE";

Tensor new_element(int32_t dtype, int32_t device_type, int device) {
  const int64_t one = 1;
  AtenTensorHandle handle = nullptr;
  check_torch(aoti_torch_empty_strided(1, &one, &one, dtype, device_type, device, &handle),
              "allocating a result");
  return Tensor(handle);
}

}  // namespace

// The C interface turns torch's exceptions into a code. So the memory is asked for once more, of a
// function that throws: the copy of an expanded tensor.
void throw_of_allocation(std::span<const int64_t> sizes, int32_t dtype, int32_t device_type,
                         int device) {
  if (const auto copy = reinterpret_cast<Contiguous*>(dlsym(RTLD_DEFAULT, kContiguous))) {
    const Tensor element = new_element(dtype, device_type, device);
    const Tensor expanded = view_of(element, sizes, std::vector<int64_t>(sizes.size(), 0));
    void* const memory = ::operator new(sizeof(TorchTensor));
    try {
      new (memory) TorchTensor(copy(expanded.get(), 0));
    } catch (...) {
      ::operator delete(memory);
      throw;
    }
    const Tensor released(static_cast<AtenTensorHandle>(memory));  // another thread has freed some
  }
  fail("allocating a result", "torch reported an error");
}

}  // namespace flashattn3
