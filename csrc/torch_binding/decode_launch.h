// Launches of cached calls: their memory, caches of 8 bits for kernels of 16, and the two kernels
// of a batch with short and long sequences.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "launch/byte_decode_params.h"
#include "launch/errors.h"
#include "launch/registry.h"
#include "launch/side_stream.h"
#include "launch/stream_counters.h"
#include "launch/widen_cache.h"
#include "torch_binding/attention_call.h"
#include "torch_binding/launch_record.h"
#include "torch_binding/tensors.h"

namespace flashattn3 {

// Whether the kernel reads the problem's cache widened to 16 bits.
inline bool is_widened(const CachedProblem& problem, const DecodeKernel& kernel) {
  return problem.byte_cache && !reads_bytes(kernel.info.name);
}

inline LaunchSize size_of(const CachedProblem& problem, const DecodeKernel& kernel,
                          DecodeParams params) {
  if (is_widened(problem, kernel)) params.k_descale = params.v_descale = nullptr;
  return kernel.size(kernel.info.name, params);
}

// Memory that a launch needs besides its tensors and counters. It lives until the launch is
// enqueued.
struct LaunchMemory {
  std::optional<Tensor> workspace, widened;

  // Allocates what the kernel needs, in the order of torch's current stream, and sets it in params.
  LaunchMemory(const CachedProblem& problem, const DecodeKernel& kernel, DecodeParams& params,
               int device)
      : workspace(new_workspace(size_of(problem, kernel, params).workspace_bytes, device)) {
    if (is_widened(problem, kernel)) widened = new_workspace(widened_bytes(params), device);
    if (workspace) params.workspace = workspace->data_ptr();
  }
};

// Counters of a launch on a stream, until it is enqueued.
struct LaunchCounters {
  std::optional<Tensor> own;
  StreamCounters of_stream;

  // Sets them in params.
  LaunchCounters(DecodeParams& params, int device, cudaStream_t stream)
      : of_stream(device, stream) {
    params.counters = of_stream.get();
    if (params.counters != nullptr) return;
    constexpr int64_t kBytes = sizeof(decode::Counters);
    own = new_tensor({1, {kBytes}}, aoti_torch_dtype_uint8(), device);
    params.counters = static_cast<decode::Counters*>(own->data_ptr());
    check_cuda(cudaMemsetAsync(params.counters, 0, kBytes, stream), "clearing counters");
  }
};

// Launches the kernel, behind the one that widens the cache if it reads 16 bits. memory: what
// LaunchMemory allocated for these parameters.
inline void launch(const CachedProblem& problem, const DecodeKernel& kernel,
                   const ByteDecodeParams& params, const LaunchMemory& memory,
                   cudaStream_t stream) {
  if (is_widened(problem, kernel)) {
    void* const widened = memory.widened ? memory.widened->data_ptr() : nullptr;
    launch_widened(kernel, params, widened, stream);
  } else {
    kernel.launch(kernel.info.name, params, stream);
  }
}

// Launches a decode kernel for the short sequences of a varlen batch and, beside it, a forward
// kernel for the long ones. The decode kernel comes first and has five eighths of the SMs, which
// draw nine tenths of the bandwidth (H100); CTAs of the forward kernel take these SMs when it ends.
// A call that leaves SMs free runs one kernel after the other.
inline void launch_mixed(const CachedLaunch& prepared, ByteDecodeParams params, int device,
                         cudaStream_t stream) {
  const CachedProblem& problem = prepared.problem;
  const DecodeKernel& for_long = decode_kernel(prepared.config);
  const DecodeKernel& for_short = decode_kernel(problem.short_config);
  ByteDecodeParams of_short = params;
  params.min_queries = problem.short_queries + 1;
  of_short.max_queries = problem.short_queries;
  of_short.pdl = false;
  const bool beside = !params.leaves_sms;
  if (beside) {
    of_short.num_sms = std::max(1, params.num_sms * 5 / 8);
    of_short.leaves_sms = true;
  }
  // Memory of both kernels is allocated, filled where torch is deterministic, and reused by later
  // calls in the order of `stream`. So the side stream forks behind the allocations, and is joined
  // before the memory is released, also after an exception.
  const LaunchMemory memory_of_long(problem, for_long, params, device);
  const LaunchMemory memory_of_short(problem, for_short, of_short, device);
  std::optional<SideStream> side;
  if (beside) side.emplace(device, stream);
  const cudaStream_t stream_of_short = beside ? side->get() : stream;
  // Looked up behind the fork, which makes the side stream a part of a capture: that has its own.
  const LaunchCounters of_stream(params, device, stream);
  const LaunchCounters of_side(of_short, device, stream_of_short);
  launch(problem, for_short, of_short, memory_of_short, stream_of_short);
  launch(problem, for_long, params, memory_of_long, stream);
  if (beside) side->join();
}

}  // namespace flashattn3
