// The compiled kernels, in the order of FORWARD_CONFIGS, BACKWARD_CONFIGS and CACHED_CONFIGS in
// flashattn3/backends/hopper/kernel_configs.py. The build generates the constants below and one
// unit per kernel config.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "launch/decode_params.h"
#include "launch/params.h"
#include "ptx/element.h"

// The library hides every other symbol.
#define FLASHATTN3_EXPORT __attribute__((visibility("default")))

namespace flashattn3 {

// dtype, head_dim: of the kernel config. kernel: the entry, for cudaFuncGetAttributes.
struct KernelInstance {
  const char* name;
  ElementType dtype;
  int head_dim;
  const void* kernel;
  int num_threads;
  int shared_memory_bytes;
};

// size: what a launch of the problem takes. Throws if the kernel does not take the problem.
// launch: enqueues the kernels; throws if a launch fails. The first argument is info.name.
template <class Params>
struct Kernel {
  KernelInstance info;
  LaunchSize (*size)(const char*, const AttentionProblem&);
  void (*launch)(const char*, const Params&, cudaStream_t);
};
using ForwardKernel = Kernel<ForwardParams>;
using BackwardKernel = Kernel<BackwardParams>;

// A kernel of cached calls: a decode kernel or a cached forward kernel. clears_rows: with
// cu_seqlens_q its launch sets rows of no sequence to out 0 and lse -inf; else launch_fill_rows
// must.
struct DecodeKernel {
  KernelInstance info;
  LaunchSize (*size)(const char*, const DecodeParams&);
  void (*launch)(const char*, const DecodeParams&, cudaStream_t);
  bool clears_rows;
};

// A kernel config and its kernel; null if FLASHATTN3_KERNELS excluded it from the build.
template <class Kernel>
struct TableEntry {
  const char* name;
  const Kernel* kernel;
};
using ForwardEntry = TableEntry<ForwardKernel>;
using BackwardEntry = TableEntry<BackwardKernel>;
using DecodeEntry = TableEntry<DecodeKernel>;

extern const char* const kConfigsHash;
extern const int kNumForwardEntries;
extern const ForwardEntry kForwardEntries[];
extern const int kNumBackwardEntries;
extern const BackwardEntry kBackwardEntries[];
extern const int kNumDecodeEntries;
extern const DecodeEntry kDecodeEntries[];

// config: index into FORWARD_CONFIGS, BACKWARD_CONFIGS or CACHED_CONFIGS. Throws for an index
// outside the table and for a kernel config that is not in this build, naming it.
const ForwardKernel& forward_kernel(int64_t config);
const BackwardKernel& backward_kernel(int64_t config);
const DecodeKernel& decode_kernel(int64_t config);

// Properties of one compiled kernel. The last four are -1 without a GPU that can run it.
// local_bytes: spills and arrays in local memory, per thread.
struct KernelInfo {
  std::string name;
  int num_threads;
  int shared_memory_bytes;
  int num_registers = -1;
  int local_bytes = -1;
  int max_threads = -1;
  int blocks_per_sm = -1;
};

// Hash of the kernel configs from which the library was built.
const char* configs_hash();
// Version of the CUDA runtime inside the library, such as "13.0".
std::string cuda_version();
// Error message if this CUDA driver cannot run the library; empty if it can or if there is none.
std::string driver_error();
std::vector<std::string> compiled_configs();
// Queries the current device, and so creates a CUDA context if there is none.
FLASHATTN3_EXPORT std::vector<KernelInfo> kernel_info();

}  // namespace flashattn3
