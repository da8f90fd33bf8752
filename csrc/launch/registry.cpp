#include "launch/registry.h"

#include <span>

#include "launch/errors.h"

namespace flashattn3 {
namespace {

std::span<const ForwardEntry> forward_entries() {
  return {kForwardEntries, static_cast<size_t>(kNumForwardEntries)};
}
std::span<const BackwardEntry> backward_entries() {
  return {kBackwardEntries, static_cast<size_t>(kNumBackwardEntries)};
}
std::span<const DecodeEntry> decode_entries() {
  return {kDecodeEntries, static_cast<size_t>(kNumDecodeEntries)};
}

template <class Kernel>
const Kernel& kernel_of(std::span<const TableEntry<Kernel>> entries, int64_t config) {
  const int64_t count = static_cast<int64_t>(entries.size());
  expect(config >= 0 && config < count, "kernel", "config", "below " + std::to_string(count),
         config);
  const TableEntry<Kernel>& entry = entries[config];
  expect(entry.kernel != nullptr, "kernel", "config", "in this build (FLASHATTN3_KERNELS)",
         entry.name);
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
  for (const DecodeEntry& entry : decode_entries()) {
    if (entry.kernel != nullptr) function(entry.kernel->info);
  }
}

// Fills the last four fields of info. They stay -1 without a GPU that this kernel has code for.
void ask_device(const KernelInstance& kernel, KernelInfo& info) {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel.kernel) != cudaSuccess) {
    cudaGetLastError();
    return;
  }
  info.num_registers = attributes.numRegs;
  info.local_bytes = static_cast<int>(attributes.localSizeBytes);
  info.max_threads = attributes.maxThreadsPerBlock;
  // A launch that needs more may have raised the limit, once for all its further launches.
  if (attributes.maxDynamicSharedSizeBytes < kernel.shared_memory_bytes) {
    check_cuda(cudaFuncSetAttribute(kernel.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    kernel.shared_memory_bytes),
               kernel.name);
  }
  check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&info.blocks_per_sm, kernel.kernel,
                                                    kernel.num_threads, kernel.shared_memory_bytes),
      kernel.name);
}

std::string dotted(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

const ForwardKernel& forward_kernel(int64_t config) { return kernel_of(forward_entries(), config); }
const BackwardKernel& backward_kernel(int64_t config) {
  return kernel_of(backward_entries(), config);
}
const DecodeKernel& decode_kernel(int64_t config) { return kernel_of(decode_entries(), config); }

const char* configs_hash() { return kConfigsHash; }

std::string cuda_version() { return dotted(CUDART_VERSION); }

std::string driver_error() {
  int driver = 0;
  check_cuda(cudaDriverGetVersion(&driver), "asking for the version of the driver");
  // A driver runs code built with its own or an older major version of CUDA.
  if (driver == 0 || driver / 1000 >= CUDART_VERSION / 1000) return "";
  return "built with CUDA " + dotted(CUDART_VERSION) + ", and this driver runs CUDA " +
         dotted(driver) + " at most";
}

std::vector<std::string> compiled_configs() {
  std::vector<std::string> names;
  for_each_compiled([&](const KernelInstance& kernel) { names.push_back(kernel.name); });
  return names;
}

std::vector<KernelInfo> kernel_info() {
  std::vector<KernelInfo> compiled;
  for_each_compiled([&](const KernelInstance& kernel) {
    KernelInfo info{kernel.name, kernel.num_threads, kernel.shared_memory_bytes};
    ask_device(kernel, info);
    compiled.push_back(info);
  });
  return compiled;
}

}  // namespace flashattn3
