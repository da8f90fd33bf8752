// The operator that returns the resources of the compiled kernels, for doctor and the tests.
#include <tuple>
#include <vector>

#include "launch/registry.h"
#include "torch_binding/boxed.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {
namespace {

// (kernels, 6), int64, on the CPU: the fields of each KernelInfo after its name, in the order of
// flashattn3_compiled_configs().
std::tuple<Tensor> kernel_info_op() {
  const std::vector<KernelInfo> kernels = kernel_info();
  constexpr int64_t kFields = 6;
  const Shape shape{2, {static_cast<int64_t>(kernels.size()), kFields}};
  const Tensor result = new_tensor(shape, aoti_torch_dtype_int64(), kCpu);
  int64_t* next = static_cast<int64_t*>(result.data_ptr());
  for (const KernelInfo& kernel : kernels) {
    for (const int field : {kernel.num_threads, kernel.shared_memory_bytes, kernel.num_registers,
                            kernel.local_bytes, kernel.max_threads, kernel.blocks_per_sm}) {
      *next++ = field;
    }
  }
  return {result};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(flashattn3_hopper, library) {
  library.def("kernel_info() -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(flashattn3_hopper, CompositeExplicitAutograd, library) {
  library.impl("kernel_info", boxed<kernel_info_op>);
}

}  // namespace flashattn3
