#include "host/kernel_registry.h"

#include <span>

#include "host/errors.h"

namespace flashattn3 {
namespace {

std::span<const ForwardEntry> forward_entries() {
  return {kForwardEntries, static_cast<size_t>(kNumForwardEntries)};
}
std::span<const BackwardEntry> backward_entries() {
  return {kBackwardEntries, static_cast<size_t>(kNumBackwardEntries)};
}

template <class Kernel>
const Kernel& kernel_of(std::span<const TableEntry<Kernel>> entries, int64_t row) {
  if (row < 0 || row >= static_cast<int64_t>(entries.size())) {
    fail("kernel row " + std::to_string(row), "is not in the table");
  }
  const TableEntry<Kernel>& entry = entries[row];
  if (entry.kernel == nullptr) fail(entry.name, "is not in this build (FLASHATTN3_KERNELS)");
  return *entry.kernel;
}

// Calls function(info) for every compiled kernel of the table.
template <class Function>
void for_each_compiled(Function function) {
  for (const ForwardEntry& entry : forward_entries()) {
    if (entry.kernel != nullptr) function(entry.kernel->info);
  }
  for (const BackwardEntry& entry : backward_entries()) {
    if (entry.kernel != nullptr) function(entry.kernel->info);
  }
}

// Leaves the facts of the GPU at -1 where there is none, or none that has code for this kernel.
void ask_device(const KernelInfo& kernel, KernelFacts& facts) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel.kernel) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  facts.num_registers = attributes.numRegs;
  facts.local_bytes = static_cast<int>(attributes.localSizeBytes);
  facts.max_threads = attributes.maxThreadsPerBlock;
  check_cuda(cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  kernel.shared_memory_bytes),
             kernel.name);
  check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&facts.blocks_per_sm, kernel.kernel,
                                                    kernel.num_threads, kernel.shared_memory_bytes),
      kernel.name);
}

}  // namespace

const ForwardKernel& forward_kernel(int64_t row) { return kernel_of(forward_entries(), row); }
const BackwardKernel& backward_kernel(int64_t row) { return kernel_of(backward_entries(), row); }

const char* table_hash() { return kTableHash; }

std::string driver_fault() {
  int driver = 0;
  check_cuda(cudaDriverGetVersion(&driver), "asking for the version of the driver");
  // A driver runs what was built with its own major version of CUDA or an older one.
  if (driver == 0 || driver / 1000 >= CUDART_VERSION / 1000) return "";
  const auto dotted = [](int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  return "built with CUDA " + dotted(CUDART_VERSION) + ", and this driver runs CUDA " +
         dotted(driver) + " at most";
}

std::vector<std::string> compiled_rows() {
  std::vector<std::string> names;
  for_each_compiled([&](const KernelInfo& kernel) { names.push_back(kernel.name); });
  return names;
}

std::vector<KernelFacts> kernel_facts() {
  std::vector<KernelFacts> compiled;
  for_each_compiled([&](const KernelInfo& kernel) {
    KernelFacts facts{kernel.name, kernel.num_threads, kernel.shared_memory_bytes};
    ask_device(kernel, facts);
    compiled.push_back(facts);
  });
  return compiled;
}

}  // namespace flashattn3
